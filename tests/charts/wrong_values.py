"""Values that a person gets wrong, and what the message must name."""

from typing import Any

# (values, what the message names)
WRONG_VALUES: list[tuple[dict[str, Any], list[str]]] = [
    ({"replicaz": 2}, ["replicaz"]),
    ({"replicas": 3}, ["replicas", "3", "2"]),
    ({"replicas": "two"}, ["replicas", "integer"]),
    ({"watchNamespaces": "team-a"}, ["watchNamespaces", "array"]),
    ({"watchNamespaces": ["Team A"]}, ["watchNamespaces", "Team A"]),
    ({"watchNamespaces": ["team-a", "team-a"]}, ["watchNamespaces"]),
    ({"images": {"operator": {"digest": "sha256:abc"}}}, ["digest", "sha256:abc"]),
    (
        {"images": {"engine": {"repository": "ghcr.io/kvern/engine:latest"}}},
        ["repository", "ghcr.io/kvern/engine:latest"],
    ),
    ({"images": {"pullPolicy": "Sometimes"}}, ["pullPolicy", "IfNotPresent"]),
    ({"image": {"repository": "x"}}, ["image"]),
    ({"logging": {"level": "verbose"}}, ["level", "debug"]),
    ({"resources": {"limits": {"memory": "lots"}}}, ["memory"]),
    ({"resources": {"limits": {"ram": "1Gi"}}}, ["ram"]),
    ({"resyncSeconds": 5}, ["resyncSeconds", "5", "30"]),
    ({"tolerations": [{"key": "gpu", "operator": "Exist"}]}, ["operator", "Exists"]),
    ({"tolerations": [{"name": "gpu"}]}, ["name"]),
    ({"affinity": {"nodeAffinity": {"required": []}}}, ["required"]),
    ({"networkPolicy": {"metricsFrom": [{"podSelectr": {}}]}}, ["podSelectr"]),
    ({"networkPolicy": {"apiServerPorts": [0]}}, ["apiServerPorts"]),
    ({"extraEnv": [{"name": "HTTPS_PROXY", "value": 1}]}, ["extraEnv", "string"]),
    ({"extraEnv": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a"}}}]}, ["key"]),
    ({"podMonitor": {"interval": "soon"}}, ["interval", "soon"]),
]

# Refused by the templates, since no schema can say it.
CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    (
        {"podLabels": {"app.kubernetes.io/name": "other"}},
        "podLabels: the label app.kubernetes.io/name is set by the chart; choose another",
    ),
    (
        {"commonLabels": {"helm.sh/chart": "mine"}},
        "commonLabels: the label helm.sh/chart is set by the chart; choose another",
    ),
    (
        {"extraEnv": [{"name": "KVERN_LOG_LEVEL", "value": "debug"}]},
        "extraEnv[0].name: KVERN_LOG_LEVEL is set by the value logging.level; use that",
    ),
    (
        {"extraEnv": [{"name": "KVERN_NAMESPACE", "value": "x"}]},
        "extraEnv[0].name: KVERN_NAMESPACE comes from the pod itself; leave it out",
    ),
    (
        {"extraEnv": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]},
        "extraEnv[1].name: A is there twice; keep one",
    ),
    (
        {"serviceAccount": {"create": False}},
        "serviceAccount.name: name the ServiceAccount to use, since serviceAccount.create is false",
    ),
]
