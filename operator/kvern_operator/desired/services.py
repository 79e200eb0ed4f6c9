"""What stands around the pods: Services, disruption budgets, the admin token, the cache claim. Pure."""

from kvern_operator.api.types import InferenceService
from kvern_operator.desired import meta
from kvern_operator.desired.engine import ADMIN_PORT, HTTP_PORT, headless_name
from kvern_operator.desired.router import router_name
from kvern_operator.observed import Object
from kvern_operator.settings import Settings

PUBLIC_PORT = 80


def public_service(service: InferenceService) -> Object:
    """The Service that applications call: in front of the router, or of the engines where there is none."""
    component = meta.ROUTER if service.spec.router.mode == "Embedded" else meta.ENGINE
    chosen = meta.selector(service, component)
    if component == meta.ENGINE and service.spec.resources.nodes_per_replica > 1:
        chosen[meta.POD_INDEX_LABEL] = "0"  # the others run ranks only
    ports = [{"name": "http", "port": PUBLIC_PORT, "targetPort": "http", "appProtocol": "http"}]
    spec = {"type": "ClusterIP", "selector": chosen, "ports": ports}
    return meta.child(service, "Service", service.metadata.name, spec=spec)


def headless_service(service: InferenceService) -> Object:
    """DNS names for engine pods, also while they load: ranks across nodes find each other by them."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": meta.selector(service, meta.ENGINE),
        "ports": [
            {"name": "http", "port": HTTP_PORT, "targetPort": "http"},
            {"name": "admin", "port": ADMIN_PORT, "targetPort": "admin"},
        ],
    }
    return meta.child(service, "Service", headless_name(service), meta.ENGINE, spec=spec)


def url(service: InferenceService, settings: Settings) -> str:
    """The base URL that OpenAI clients take."""
    host = f"{service.metadata.name}.{service.metadata.namespace}.svc.{settings.cluster_domain}"
    return settings.url or f"http://{host}/v1"


def service_account(service: InferenceService) -> Object:
    """What pods run as: it may do nothing, and no pod gets a token of it. A cloud's identities can be bound to it."""
    return meta.child(service, "ServiceAccount", meta.account_name(service), automountServiceAccountToken=False)


def admin_secret(service: InferenceService, settings: Settings) -> Object:
    """The bearer token of the admin ports."""
    token = meta.admin_token(settings.operator_key, service)
    name = meta.admin_secret_name(service)
    return meta.child(service, "Secret", name, type="Opaque", immutable=True, stringData={"token": token})


def disruption_budgets(service: InferenceService, engines: int, routers: int) -> list[Object]:
    """At most one pod of a kind goes at a time; none where there is one only, which would block every node drain."""
    found = []
    for name, component, count in (
        (headless_name(service), meta.ENGINE, engines),
        (router_name(service), meta.ROUTER, routers),
    ):
        if count > 1:
            spec = {
                "maxUnavailable": 1,
                "selector": {"matchLabels": meta.selector(service, component)},
                # A pod that loads or crashes serves nobody: it must not keep a node from being drained.
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
            }
            found.append(meta.child(service, "PodDisruptionBudget", name, component, spec=spec))
    return found


def cache_claims(service: InferenceService) -> list[Object]:
    """The claim of cache.pvc. With reclaimPolicy Retain it has no owner and outlives the service."""
    cache = service.spec.cache
    if cache is None or cache.pvc is None:
        return []
    spec: Object = {
        "accessModes": [cache.pvc.access_mode],
        "resources": {"requests": {"storage": str(cache.pvc.size)}},
    }
    if cache.pvc.storage_class_name:
        spec["storageClassName"] = cache.pvc.storage_class_name
    claim = meta.child(service, "PersistentVolumeClaim", f"{service.metadata.name}-cache", spec=spec)
    if cache.reclaim_policy == "Retain":
        del claim["metadata"]["ownerReferences"]
    return [claim]
