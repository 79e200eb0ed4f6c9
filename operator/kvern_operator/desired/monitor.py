"""The PodMonitor that makes the Prometheus operator scrape engines and routers. Pure.

It is made only where the cluster knows the kind (Settings.pod_monitors): elsewhere the API server would refuse it.
"""

from kvern_operator.api.types import InferenceService
from kvern_operator.desired import meta
from kvern_operator.observed import Object

INTERVAL = "15s"


def pod_monitor(service: InferenceService) -> Object:
    """One for all pods of the service; their component and replica become labels of what is scraped."""
    spec = {
        "selector": {"matchLabels": {meta.SERVICE_LABEL: service.metadata.name}},
        "podMetricsEndpoints": [{"port": "http", "path": "/metrics", "interval": INTERVAL}],
        "podTargetLabels": [meta.SERVICE_LABEL, meta.COMPONENT_LABEL, meta.REPLICA_LABEL],
    }
    return meta.child(service, "PodMonitor", service.metadata.name, spec=spec)
