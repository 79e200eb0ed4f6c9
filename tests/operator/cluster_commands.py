"""For tests of kvern's commands that look at a cluster: an API server that has one service, and the command line."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import yaml
from fake_api import PODS, SERVICES, FakeApi, serving
from recorded import condition, pod, replica, router_pods, routers, running, service

from kvern_cli.main import main

ALL_SERVICES = "/apis/kvern.dev/v1alpha1/inferenceservices"
EVENTS = "/api/v1/namespaces/team-a/events"
SETS, DEPLOYMENTS = "/apis/apps/v1/namespaces/team-a/statefulsets", "/apis/apps/v1/namespaces/team-a/deployments"
READY = (condition("Ready", "True", "AllReplicasReady"), condition("Available", "True", "Answering"))


@contextlib.contextmanager
def small_cluster(config: Path) -> Iterator[FakeApi]:
    """A cluster that the kubeconfig written to `config` leads to, with the service smol in namespace team-a."""
    api = FakeApi()
    api.put_list(SERVICES, [service(*READY, readyReplicas=1)])
    api.objects[ALL_SERVICES] = api.objects[SERVICES]
    api.put_list(PODS, [pod("smol-r0-0", running()), *router_pods()])
    api.put_list(SETS, [replica("smol-r0")])
    api.put_list(DEPLOYMENTS, [routers()])
    api.put_list(EVENTS, [])
    with serving(api) as server:
        kubeconfig(config, server)
        yield api


def kubeconfig(path: Path, server: str) -> Path:
    document = {
        "current-context": "kind",
        "contexts": [{"name": "kind", "context": {"cluster": "c", "user": "ada", "namespace": "team-a"}}],
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "ada", "user": {"token": "t"}}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(argv)
    found = capsys.readouterr()
    return code, found.out, found.err
