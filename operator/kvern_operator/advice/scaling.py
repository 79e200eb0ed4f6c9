"""Reasons that the autoscaler and the layout planner give, in conditions and Events."""

from kvern_operator.advice.form import Advice

_EXPLAIN = "which term decided, and what it reckoned with: `kvern explain {name}`"

SCALING: dict[str, Advice] = {
    "Internal": Advice(
        "fine", "ScalingActive True", "The operator decides about replicas; the message says why so many."
    ),
    "Recommend": Advice(
        "fine", "ScalingActive False", "The operator says how many replicas would be right, and changes nothing."
    ),
    "ScaledUp": Advice("fine", "an Event", "More replicas are wanted; the note says which term asked for them."),
    "ScaledDown": Advice("fine", "an Event", "One replica less is wanted: it drains, then it goes."),
    "WokenUp": Advice("fine", "an Event", "Requests were held at the router while no replica was wanted."),
    "Recommended": Advice("fine", "an Event", "What the operator would do in mode Internal."),
    "LayoutChange": Advice(
        "passing", "an Event", "Another tensor size is wanted; pods change to it one after the other."
    ),
    "LayoutChanging": Advice("passing", "an Event", "Pods are on their way to another tensor size."),
    "LayoutVerifying": Advice(
        "passing", "an Event", "Every replica has the new tensor size; SLO attainment is watched."
    ),
    "LayoutStable": Advice("fine", "an Event", "A change of the tensor size is over."),
    "LayoutTakenBack": Advice(
        "passing",
        "an Event",
        "A tensor size failed or made latency worse: pods go back, and it is not tried again for six hours.",
        "see the note for why",
        (_EXPLAIN,),
    ),
    "Verifying": Advice(
        "passing", "ParallelismStable False", "Every replica has the new tensor size; SLO attainment is watched."
    ),
    "MissingMetrics": Advice(
        "trouble",
        "ScalingActive False, an Event",
        "A ready replica, or a router, has given no metrics for 15 s: replicas may be added, none is removed.",
        "see whether that pod answers, and whether a NetworkPolicy keeps the operator from its port 8000",
        (
            "who gives none is in the operator's log: `{k} -n kvern-system logs deploy/kvern-operator | grep metrics`",
            "a NetworkPolicy may keep the operator out: `{k} get networkpolicy`",
        ),
    ),
    "MaxReplicas": Advice(
        "trouble",
        "ScalingLimited True",
        "More replicas are wanted than autoscaling.maxReplicas allows.",
        "raise spec.autoscaling.maxReplicas",
        (_EXPLAIN, "raise spec.autoscaling.maxReplicas"),
    ),
    "GpuBudget": Advice(
        "trouble",
        "ScalingLimited True",
        "More replicas are wanted than autoscaling.gpuBudget allows.",
        "raise spec.autoscaling.gpuBudget",
        (_EXPLAIN, "raise spec.autoscaling.gpuBudget"),
    ),
    "NamespaceBudget": Advice(
        "trouble",
        "ScalingLimited True",
        "The GPUs of the namespace (ConfigMap kvern-budget) are with services of higher priority, or with as many "
        "others.",
        "raise the budget, or spec.autoscaling.priority",
        ("what the namespace has: `{k} get configmap kvern-budget -o yaml`", _EXPLAIN),
    ),
    "SlowStart": Advice(
        "trouble",
        "ScalingLimited True",
        "Pods have been loading for twice the usual start, and none that was made later is ready: no more are started.",
        "see what those pods wait for",
        ("what they say: `kvern logs {name} --component engine`",),
    ),
}
