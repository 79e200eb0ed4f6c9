"""What reconcile needs to know beside the resource: images, names of the surroundings, how long endpoints take.

Plain values. The operator fills them from its environment, `kvern up` from its command line.
"""

from dataclasses import dataclass

from kvern_operator import __version__


@dataclass(frozen=True)
class Settings:
    """Times in seconds."""

    engine_image: str = f"ghcr.io/kvern/engine:{__version__}"
    operator_image: str = f"ghcr.io/kvern/operator:{__version__}"  # carries the router
    image_pull_policy: str = ""  # Always | IfNotPresent | Never; "": the cluster's default
    image_pull_secrets: tuple[str, ...] = ()  # names of Secrets in the namespaces of the services
    cluster_domain: str = "cluster.local"
    namespace: str = ""  # where the operator runs; "": not in a cluster
    pod_monitors: bool = False  # the cluster knows the Prometheus operator's PodMonitor
    # The admin token of a service is HMAC(operator_key, UID): the same after every restart, never read back.
    operator_key: bytes = b""
    # How long a terminating router goes on accepting, until every node has forgotten its endpoint.
    endpoints_delay: int = 5
    router_replicas: int | None = None  # instead of spec.router.replicas
    url: str = ""  # instead of the Service's DNS name
    # Fields of this spec that the executor cannot act upon: "spec.cache.pvc: why".
    ignored: tuple[str, ...] = ()
    autoscales: bool = False  # somebody decides from metrics (autoscale/loop.py) and records it in status
