"""Why pods do not start or do not stay, and why they cannot be made: in the words of kubelet, scheduler and engine."""

from kvern_operator.advice.form import APPLY, IMAGE, LOGS, Advice

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
