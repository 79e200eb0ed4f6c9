"""What each reason means and what to do about it, in one place: conditions carry the short form, `kvern explain` says
the steps, docs/troubleshooting.md prints all of it. Pure, standard library only.

Reasons are those of conditions.py and reconcile.py and the kubelet's, scheduler's and controllers' own words. Steps
hold commands in backticks; {name}, {pod} and {node} stand in them, and {k} for kubectl with context and namespace.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Advice:
    """`where`: the conditions that carry the reason, or whose word it is. `short`: what to do, in one sentence without
    a full stop. `steps`: the same with commands, the likeliest first."""

    kind: Literal["fine", "passing", "trouble"]
    where: str
    meaning: str
    short: str = ""
    steps: tuple[str, ...] = ()


def advice(reason: str) -> str:
    """What to do about a reason, in one sentence without a full stop; "" where there is nothing to do or to say."""
    known = REASONS.get(reason)
    return known.short if known is not None else ""


LOGS = "`kvern logs {name} --previous` shows the whole of what it said before it ended"
APPLY = "change the manifest and apply it again; replicas that answer stay until the new ones do"
IMAGE = (
    "compare the name in the message with spec.engine.image (where that is not set, with the chart's images.engine)",
    "a private registry needs a pull secret: the chart's value images.pullSecrets",
    "the registry's own words: `{k} describe pod {pod}`",
)

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
        "set spec.replicas to start",
        ("start a replica: `{k} scale infs/{name} --replicas=1`",),
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

CRASHES: dict[str, Advice] = {
    "CrashLoopBackOff": Advice(
        "trouble",
        "the kubelet",
        "The container ended by itself several times; it is started again after a growing pause of up to 5 minutes.",
        "the last line of its log names the cause",
        ("the last line of its log names the cause; " + APPLY, LOGS),
    ),
    "Error": Advice(
        "trouble",
        "the kubelet",
        "The container ended with an exit code other than 0 and is started again.",
        "the last line of its log names the cause",
        ("the last line of its log names the cause; " + APPLY, LOGS),
    ),
    "OOMKilled": Advice(
        "trouble",
        "the kubelet",
        "The kernel ended the container because it wanted more memory than its limit, which is spec.resources.memory "
        "(or than the node has, where no limit is given).",
        "raise spec.resources.memory",
        (
            "give it more: spec.resources.memory must hold the weights, on CPU pods the KV cache, and 1 to 2 GiB for "
            "the processes",
            "or want less: lower kv-cache-memory-bytes in spec.engine.args (CPU pods) or spec.engine.maxModelLen",
        ),
    ),
    "ModelAccessDenied": Advice(
        "trouble",
        "the last line of the download",
        "The model's source wants credentials, or does not let these ones read it.",
        "put right the Secret of spec.model.secretRef, or ask for access; the next try sees it",
        (
            "the last line says what is missing: a token, the right of a token, or access to a gated model",
            "`{k} create secret generic hub --from-literal=HF_TOKEN=...`, and name it in spec.model.secretRef",
            "a Secret that is changed is seen by the next try, within five minutes",
        ),
    ),
    "CacheFull": Advice(
        "trouble",
        "the last line of the download",
        "The claim has no room for the model, also without the models in it that nobody uses.",
        "give the claim more room, or stop a service whose model is in it",
        (
            "a claim of the operator: raise spec.cache.pvc.size, where its storage class allows that; another one: "
            "`{k} edit pvc`",
            "models that are in use are never deleted: stop a service that uses the claim",
        ),
    ),
    "DownloadFailed": Advice(
        "trouble",
        "the last line of the download",
        "The network or the model's source failed again and again. What has come is kept, and the next try goes on "
        "from there.",
        "see whether the cluster reaches the source",
        (
            "the last line names the host; pods may need a proxy: set HTTPS_PROXY in spec.overrides.cachePodTemplate",
            "a NetworkPolicy for egress must let pods with the label app.kubernetes.io/component=fetch out",
        ),
    ),
    "ImageVolumesNotSupported": Advice(
        "trouble",
        "Degraded True, Ready False",
        "An oci:// model is mounted as an image volume. These need Kubernetes 1.33 or later with the feature gate "
        "ImageVolume on API server and kubelets, and containerd 2.1 or CRI-O 1.31 on the nodes.",
        "use another kind of address, such as pvc://, or a newer cluster",
        (
            "what the nodes run: `{k} get nodes -o wide`",
            "until then: copy the model into a claim and use pvc://, or serve it from hf:// or s3://",
        ),
    ),
    "ModelNotFound": Advice(
        "trouble",
        "the engine's last line, or that of the download",
        "The model is not where spec.model.uri says.",
        "correct spec.model.uri",
        ("correct spec.model.uri: the last line says what was looked for, and where; " + APPLY, LOGS),
    ),
    "ModelDoesNotFit": Advice(
        "trouble",
        "the engine's last line",
        "The weights, or the KV cache for one request of maxModelLen tokens, do not fit the device's memory.",
        "lower spec.engine.maxModelLen, quantize, or give a replica more GPUs",
        (
            "the last line says what is needed and what there is: lower spec.engine.maxModelLen, set "
            "spec.engine.quantization: fp8, or raise gpusPerPod",
            LOGS,
        ),
    ),
    "OutOfMemory": Advice(
        "trouble",
        "the engine's last line",
        "An allocation of memory failed: another process may hold a part of the GPU, or the limit is close.",
        "lower spec.engine.gpuMemoryUtilization or spec.engine.maxNumSeqs",
        (
            "lower spec.engine.gpuMemoryUtilization, spec.engine.maxNumSeqs or spec.engine.maxModelLen",
            "see who else uses the GPU: `{k} exec {pod} -- nvidia-smi`",
        ),
    ),
    "BadArguments": Advice(
        "trouble",
        "the engine's last line",
        "The engine does not take its arguments: an entry of spec.engine.args, or an engine image of another version.",
        "correct spec.engine.args",
        ("the last line names the flag and what is right; correct spec.engine.args, or use the operator's own image",),
    ),
    "NotReadyInTime": Advice(
        "trouble",
        "`kvern explain`",
        "The kubelet restarted the container because the startup probe did not pass in time: loading takes too long.",
        "keep the model in a claim, nearer to the pods",
        (
            "see how far it came: `kvern logs {name} --previous`",
            "a slow disk or download: keep the model in a claim (spec.cache, or a pvc:// model)",
        ),
    ),
    "Unresponsive": Advice(
        "trouble",
        "`kvern explain`",
        "The kubelet restarted the container because it did not answer its liveness probe.",
        "see the end of its log",
        (LOGS, "a node without free CPUs starves the server: set spec.resources.cpu"),
    ),
}

PODS: dict[str, Advice] = {
    "Unschedulable": Advice(
        "trouble",
        "the scheduler",
        "No node can take the pod. The message counts the nodes by what each lacks.",
        "ask for less in spec.resources, or add nodes",
        (
            "what the nodes have left: `{k} describe nodes | grep -A 9 'Allocated resources'`",
            "ask for less in spec.resources, loosen nodeSelector, gpuType and tolerations, or add nodes",
        ),
    ),
    "SchedulingGated": Advice(
        "passing",
        "the scheduler",
        "The pod has scheduling gates, which another controller (a queue such as Kueue) has to remove.",
        "",
        ("`{k} get pod {pod} -o jsonpath='{{.spec.schedulingGates}}'` names them",),
    ),
    "ErrImagePull": Advice(
        "trouble",
        "the kubelet",
        "The image could not be pulled: wrong name or tag, no access, or no network to the registry.",
        "correct spec.engine.image, or give a pull secret",
        IMAGE,
    ),
    "ImagePullBackOff": Advice(
        "trouble",
        "the kubelet",
        "Pulling the image failed before; the kubelet tries again after a pause.",
        "correct spec.engine.image, or give a pull secret",
        IMAGE,
    ),
    "ErrImageNeverPull": Advice(
        "trouble",
        "the kubelet",
        "The image is not on the node and imagePullPolicy is Never, so nobody fetches it.",
        "load the image onto the nodes, or set the pull policy to IfNotPresent",
        ("load the image onto the nodes, or set the chart's images.pullPolicy to IfNotPresent",),
    ),
    "ImageInspectError": Advice(
        "trouble",
        "the kubelet",
        "The image is on the node, but the container runtime cannot read it.",
        "see the node's disk and container runtime",
        ("remove the image from the node, so that it is pulled again: `{k} describe pod {pod}` names the node",),
    ),
    "InvalidImageName": Advice(
        "trouble",
        "the kubelet",
        "The name of the image is not a valid reference.",
        "write registry/name:tag in spec.engine.image",
        ("write registry/name:tag in spec.engine.image, in lower case and without https://",),
    ),
    "CreateContainerConfigError": Advice(
        "trouble",
        "the kubelet",
        "A Secret or ConfigMap that the container refers to is not there, or lacks a key.",
        "create the Secret that the message names",
        ("create what the message names: spec.model.secretRef and router.apiKeysSecretRef refer to Secrets of yours",),
    ),
    "CreateContainerError": Advice(
        "trouble",
        "the kubelet",
        "The container runtime could not create the container; its own words are in the message.",
        "read the container runtime's words",
        ("`{k} describe pod {pod}`; a runtimeClassName that the node lacks is a usual cause",),
    ),
    "RunContainerError": Advice(
        "trouble",
        "the kubelet",
        "The container runtime could not start the container; its own words are in the message.",
        "read the container runtime's words",
        ("`{k} describe pod {pod}`; a command in spec.overrides that the image lacks is a usual cause",),
    ),
    "StartError": Advice(
        "trouble",
        "the container runtime",
        "The container's program could not be started: it is not in the image, or may not be run.",
        "use an engine image of Kvern",
        ("spec.engine.image must be an engine image of Kvern: it has the command `kvern`",),
    ),
    "ContainerCannotRun": Advice(
        "trouble",
        "the container runtime",
        "The container's program could not be started: it is not in the image, or may not be run.",
        "use an engine image of Kvern",
        ("spec.engine.image must be an engine image of Kvern: it has the command `kvern`",),
    ),
    "Evicted": Advice(
        "trouble",
        "the kubelet",
        "The node ran short of memory or disk and put the pod out; another one takes its place.",
        "set spec.resources.memory to what it needs",
        ("set spec.resources.memory to what it needs, so that the scheduler reserves it", "`{k} describe node {node}`"),
    ),
    "FailedMount": Advice(
        "trouble",
        "the kubelet, as an event",
        "A volume cannot be mounted: a claim, Secret or ConfigMap is missing, or the storage does not answer.",
        "see that the claim or Secret in the message is there",
        ("`{k} get pvc`; a pvc:// model and cache.claimName need a claim that is there and bound",),
    ),
    "FailedAttachVolume": Advice(
        "trouble",
        "the attach controller, as an event",
        "A volume cannot be attached to the node: often a ReadWriteOnce disk that another node still holds.",
        "use a claim with accessMode ReadWriteMany or ReadOnlyMany",
        ("replicas on several nodes need a claim with accessMode ReadWriteMany or ReadOnlyMany",),
    ),
    "ClaimNotBound": Advice(
        "trouble",
        "the scheduler or the provisioner, as an event",
        "A claim that the pod uses has no volume: its storage class does not exist or cannot provide it.",
        "see the claim's events",
        ("`{k} describe pvc`; spec.cache.pvc takes storageClassName and accessMode",),
    ),
    "FailedCreatePodSandBox": Advice(
        "trouble",
        "the kubelet, as an event",
        "The node could not set up the pod's network or sandbox.",
        "see the network plugin of the node",
        ("`{k} describe node {node}`; the network plugin of that node is a usual cause",),
    ),
    "StuckTerminating": Advice(
        "trouble",
        "`kvern explain`",
        "A pod has been told to end and is still there after its grace period: its node does not answer, or a "
        "finalizer of somebody else holds it.",
        "see whether its node is alive",
        ("`{k} describe node {node}`", "once the node is known to be gone: `{k} delete pod {pod} --force`"),
    ),
}

WORKLOADS: dict[str, Advice] = {
    "QuotaExceeded": Advice(
        "trouble",
        "the API server, as an event FailedCreate",
        "The namespace's ResourceQuota does not allow another pod like this.",
        "ask for less in spec.resources or spec.replicas, or raise the quota",
        (
            "what is used: `{k} describe resourcequota`",
            "ask for less (spec.resources, spec.replicas) or raise the quota",
        ),
    ),
    "PodSecurityViolation": Advice(
        "trouble",
        "the API server, as an event FailedCreate",
        "The namespace enforces a Pod Security level that the pod does not meet. Kvern's own pods meet `restricted`.",
        "take out of spec.overrides what the message names",
        ("spec.overrides adds what the message names: take it out",),
    ),
    "FailedCreate": Advice(
        "trouble",
        "the API server, as an event",
        "The API server refused to create a pod; its own words are in the message.",
        "read the API server's words",
        ("`{k} get events --field-selector reason=FailedCreate`",),
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

REASONS: Mapping[str, Advice] = {**EVENTS, **CONDITIONS, **CRASHES, **PODS, **WORKLOADS, **SERVICE}
