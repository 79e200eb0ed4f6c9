"""Who may reach a service's pods: a NetworkPolicy for the engines, one for the router. Pure.

Only what comes in is restricted: what pods reach (DNS, model sources, each other's ranks) differs from cluster to
cluster. The kubelet's probes need no rule. The policies say nothing where the network plugin does not enforce any.
"""

from kvern_operator.api.types import InferenceService
from kvern_operator.desired import meta
from kvern_operator.desired.engine import ADMIN_PORT, HTTP_PORT, headless_name
from kvern_operator.desired.router import router_name
from kvern_operator.observed import Object
from kvern_operator.settings import Settings

NAMESPACE_NAME = "kubernetes.io/metadata.name"  # the API server puts it on every namespace
OPERATOR_PODS = {"app.kubernetes.io/name": "kvern", "app.kubernetes.io/component": "operator"}
# Whoever scrapes: Prometheus under the label that its charts and its operator give it, or a pod labelled for it.
SCRAPERS = ({"app.kubernetes.io/name": "prometheus"}, {"kvern.dev/metrics-reader": "true"})


def _ports(*numbers: int) -> list[Object]:
    return [{"protocol": "TCP", "port": number} for number in numbers]


def _anywhere(labels: dict[str, str]) -> Object:
    """Pods with these labels, whatever their namespace."""
    return {"namespaceSelector": {}, "podSelector": {"matchLabels": labels}}


def _policy(
    service: InferenceService, name: str, component: str, chosen: dict[str, str], rules: list[Object]
) -> Object:
    spec = {"podSelector": {"matchLabels": chosen}, "policyTypes": ["Ingress"], "ingress": rules}
    return meta.child(service, "NetworkPolicy", name, component, spec=spec)


def _operator(settings: Settings) -> Object:
    """The operator's pods, in the namespace that it runs in: where it watches all namespaces, or this one alone."""
    return {
        "namespaceSelector": {"matchLabels": {NAMESPACE_NAME: settings.namespace}},
        "podSelector": {"matchLabels": OPERATOR_PODS},
    }


def engine_policy(service: InferenceService, settings: Settings) -> Object:
    """Engines take requests from the router alone, and orders (drain, layout) from the operator alone. Where there is
    no router, requests come from wherever clients are."""
    rules: list[Object] = []
    if service.spec.router.mode == "Embedded":
        routers = {"podSelector": {"matchLabels": meta.selector(service, meta.ROUTER)}}
        rules.append({"from": [routers, *(_anywhere(labels) for labels in SCRAPERS)], "ports": _ports(HTTP_PORT)})
    else:
        rules.append({"ports": _ports(HTTP_PORT)})
    if settings.namespace:
        rules.append({"from": [_operator(settings)], "ports": _ports(HTTP_PORT, ADMIN_PORT)})
    return _policy(service, headless_name(service), meta.ENGINE, meta.selector(service, meta.ENGINE), rules)


def router_policy(service: InferenceService) -> Object:
    """Anybody who can reach the router's pods may use its port; who may ask is the business of API keys."""
    chosen = meta.selector(service, meta.ROUTER)
    return _policy(service, router_name(service), meta.ROUTER, chosen, [{"ports": _ports(HTTP_PORT)}])


def fetch_policy(service: InferenceService, settings: Settings) -> Object:
    """Nobody but the operator has anything to ask of a download."""
    name = f"{service.metadata.name}-{meta.FETCH}"
    rules = [{"from": [_operator(settings)], "ports": _ports(ADMIN_PORT)}] if settings.namespace else []
    return _policy(service, name, meta.FETCH, meta.selector(service, meta.FETCH), rules)


def replica_policy(service: InferenceService, name: str) -> Object:
    """The pods that make up one replica reach each other on every port: ranks choose theirs when they start."""
    own = {meta.REPLICA_LABEL: name}
    return _policy(service, name, meta.ENGINE, own, [{"from": [{"podSelector": {"matchLabels": own}}]}])
