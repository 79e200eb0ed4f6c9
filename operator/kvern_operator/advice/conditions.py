"""Reasons of conditions, and of Events that the operator posts."""

from kvern_operator.advice.form import Advice

CONDITIONS: dict[str, Advice] = {
    "AllReplicasReady": Advice("fine", "Ready True", "As many replicas answer as are wanted, through the router."),
    "Answering": Advice("fine", "Available True", "At least one replica answers."),
    "Complete": Advice("fine", "Progressing False", "Nothing is on its way: everything is as the spec says."),
    "Loaded": Advice("fine", "ModelCached True", "A replica has loaded the model before."),
    "MetricsRead": Advice("fine", "MetricsAvailable True", "Every ready replica gives its metrics."),
    "External": Advice(
        "fine", "ScalingActive True", "An HPA, KEDA or `kubectl scale` writes spec.replicas, and nobody else does."
    ),
    "Off": Advice("fine", "ScalingActive False", "autoscaling.mode is Off: the number of replicas is spec.replicas."),
    "WithinBounds": Advice("fine", "ScalingLimited False", "Nothing keeps the number of replicas from what is wanted."),
    "AsWanted": Advice("fine", "ParallelismStable True", "Every ready replica runs at the wanted tensor size."),
    "AsExpected": Advice("fine", "Degraded False", "No pod is in trouble."),
    "Suspended": Advice(
        "fine",
        "Ready False, Available False",
        "spec.suspend is true: no engine and no router runs, everything else is kept.",
        "set spec.suspend to false to start",
        ('start it again: `{k} patch infs {name} --type=merge -p \'{{"spec":{{"suspend":false}}}}\'`',),
    ),
    "ScaledToZero": Advice(
        "fine",
        "Ready True or False, Available False",
        "No replica is wanted. The router holds what comes in for holdTimeoutSeconds, then answers 503.",
        "send a request (autoscaling.mode Internal), or set spec.replicas (other modes) to start",
        ("in other modes than Internal, start a replica: `{k} scale infs/{name} --replicas=1`",),
    ),
    "Scheduling": Advice("passing", "Ready False, Progressing True", "The scheduler looks for nodes for the pods."),
    "Creating": Advice(
        "passing",
        "Ready False, Progressing True",
        "Nodes have been found; images are pulled, volumes mounted, containers made.",
        "",
        ("what the kubelet is at: `{k} describe pod {pod}`",),
    ),
    "Loading": Advice(
        "passing",
        "Ready False",
        "Replicas load their model. The startup probe gives them time by the size of the model.",
        "",
        ("watch it: `kvern status {name} -w`", "what it does: `kvern logs {name} -f`"),
    ),
    "NoReplicaReady": Advice(
        "passing",
        "Available False, MetricsAvailable Unknown, ParallelismStable Unknown",
        "No replica answers (yet); the condition Ready says why.",
        "",
        ("`kvern explain {name}`",),
    ),
    "NotLoadedYet": Advice("passing", "ModelCached Unknown", "No replica has loaded this model yet."),
    "Cached": Advice("fine", "ModelCached True", "The model is in its claim, and each file is what its source says."),
    "Downloading": Advice(
        "passing",
        "ModelCached False, Ready False",
        "A Job fetches the model into its claim; the message says how far it is. Replicas start when all of it is "
        "there, and those of an older spec serve until then.",
        "",
        ("its log: `{k} logs -l kvern.dev/service={name},app.kubernetes.io/component=fetch`",),
    ),
    "DownloadPending": Advice(
        "passing",
        "ModelCached False",
        "The Job that fetches the model has not begun: its pod waits for a node or the claim, or another download uses "
        "the claim.",
        "",
        ("`{k} describe pod -l kvern.dev/service={name},app.kubernetes.io/component=fetch`",),
    ),
    "Starting": Advice("passing", "Progressing True", "Replicas or routers are being started."),
    "RollingOut": Advice(
        "passing",
        "Ready False, Progressing True",
        "Replicas of an older spec are being replaced, one step at a time: start, wait until ready, drain, delete.",
        "",
        ("watch it: `kvern status {name} -w`",),
    ),
    "RolloutPaused": Advice(
        "passing",
        "Progressing False",
        "spec.rollout.paused is true, so replicas of the older spec stay.",
        "set spec.rollout.paused to false to go on",
        ('go on: `{k} patch infs {name} --type=merge -p \'{{"spec":{{"rollout":{{"paused":false}}}}}}\'`',),
    ),
    "Draining": Advice(
        "passing",
        "Progressing True",
        "A replica that is to go finishes its requests; it is deleted when none is left, or after drainTimeoutSeconds.",
    ),
    "Changing": Advice("passing", "ParallelismStable False", "Replicas at the old tensor size are being replaced."),
    "RouterNotReady": Advice(
        "trouble",
        "Ready False, Available False",
        "Replicas answer, but no router pod is ready, and clients talk to routers.",
        "see the router's pods and logs",
        ("`kvern logs {name} --component router`", "`{k} describe deployment {name}-router`"),
    ),
    "NoMetrics": Advice(
        "trouble",
        "MetricsAvailable False",
        "A ready replica did not answer when the operator asked for its load. Decisions that need it are held.",
        "see whether a NetworkPolicy keeps the operator from the admin port of the engines",
        (
            "a NetworkPolicy may keep the operator out: `{k} get networkpolicy`",
            "an engine under great load may be slow to answer: `kvern logs {name} --component engine`",
        ),
    ),
    "NotSupportedHere": Advice(
        "trouble",
        "FieldsIgnored True, ScalingActive False",
        "Fields of the spec are valid but have no effect in this version (or, with `kvern up`, on this machine). The "
        "message names each with what happens instead.",
        "leave the named fields out, or take the message as what to expect",
        ("leave the named fields out, or take the message as what to expect",),
    ),
    "ComputesOnCPU": Advice(
        "trouble",
        "Degraded True",
        "The pod has a GPU by Kubernetes' account, but the engine found no CUDA device in it and computes on the CPU: "
        "the GPU is a fake one, or the node lacks the driver or the container runtime for it.",
        "see that the node has its GPU driver and container toolkit, or set spec.resources.runtimeClassName",
        (
            "what the engine saw: `kvern logs {name} --component engine`",
            "many clusters need spec.resources.runtimeClassName: nvidia",
            "to compute on CPUs on purpose: spec.resources.gpusPerPod: 0",
        ),
    ),
    "InvalidSpec": Advice(
        "trouble",
        "Ready False, Degraded True",
        "The spec is not valid for this operator: it was stored under an older schema, or the CRD is newer than the "
        "operator. Nothing is changed: what ran before goes on.",
        "correct the named fields",
        ("the message names field, value and what is right; or bring both charts to the same version",),
    ),
    "OverridesRefused": Advice(
        "trouble",
        "Progressing False, Degraded True",
        "The API server refused the pod template that spec.overrides leads to, in a dry run. No pod was touched: what "
        "ran before goes on.",
        "correct spec.overrides",
        ("the message is the API server's own; correct spec.overrides and apply again",),
    ),
    "ApplyFailed": Advice(
        "trouble",
        "Progressing False, Degraded True",
        "The API server refused an object that the operator wanted to write. It is tried again.",
        "read the API server's words: a policy, a quota or missing rights of the operator",
        (
            "the message is the API server's own: an admission policy, a quota or missing rights of the operator",
            "the operator's rights come with the chart: bring it to the operator's version",
        ),
    ),
}

SERVICE: dict[str, Advice] = {
    "InternalError": Advice(
        "trouble",
        "Degraded True",
        "A pass of the operator over this service failed in a way that it did not foresee. It is tried again, after "
        "longer and longer pauses; what runs goes on.",
        "look at the operator's log",
        (
            "the operator's log has the whole of it: `kubectl -n kvern-system logs deployment/kvern-operator`",
            "it is a fault of Kvern: please report it with that log and `{k} get infs {name} -o yaml`",
        ),
    ),
    "NotReconciled": Advice(
        "trouble",
        "`kvern explain`",
        "The operator has not taken the service up, or not its latest change: it does not run, or watches other "
        "namespaces.",
        "see whether the operator runs",
        (
            "`kubectl -n kvern-system get pods` shows whether the operator runs; it comes with the chart kvern",
            "`kubectl -n kvern-system logs deployment/kvern-operator` says what it is at",
        ),
    ),
    "Deleting": Advice(
        "passing",
        "`kvern explain`",
        "The service has been deleted; Kubernetes collects what belongs to it once its pods have drained.",
    ),
}

EVENTS: dict[str, Advice] = {
    "StartingReplica": Advice("passing", "an event", "A replica is being made; the message names its revision."),
    "DrainingReplica": Advice(
        "passing", "an event", "A replica is to go: it gets no new requests and finishes those that it has."
    ),
    "TakingBack": Advice("passing", "an event", "A replica that was to go is needed after all and serves again."),
    "StoppingReplica": Advice("passing", "an event", "A drained replica, with nothing in flight, is being deleted."),
    "ReplacingReplica": Advice(
        "passing",
        "an event",
        "A pod of a replica is ending without the operator's doing (a node drain, an eviction, a deletion, a lost "
        "node): another replica is started while it finishes what it has.",
    ),
    "DrainTimedOut": Advice(
        "trouble",
        "an event",
        "A replica that was to go still had requests in flight after rollout.drainTimeoutSeconds. They were cut off: a "
        "stream ends with an error of code shutting_down.",
        "raise spec.rollout.drainTimeoutSeconds above the longest answer",
        ("answers that take longer than spec.rollout.drainTimeoutSeconds are cut: raise it above the longest one",),
    ),
    "Reconciled": Advice("fine", "an event", "The operator has changed something; the message says what."),
    "Ready": Advice("fine", "an event", "The service has become ready."),
    "Recovered": Advice("fine", "an event", "What was wrong is over; the message names it."),
    "Unavailable": Advice(
        "trouble",
        "an event",
        "The service answered before and does not any more; the message says why.",
        "see the condition Available",
        ("`kvern explain {name}`",),
    ),
}
