"""What the other tests stand on: nodes, DNS, metrics, fake GPUs. Fails where the cluster, not Kvern, is ill."""

import json

from kit import Client, eventually, kubectl


def test_two_nodes_with_fake_gpus() -> None:
    nodes = json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    assert len(nodes) == 2
    for node in nodes:
        assert int(node["status"]["allocatable"]["nvidia.com/gpu"]) >= 2
        assert not node["spec"].get("taints"), node["spec"]


def test_a_pod_resolves_and_reaches_the_api_server(client: Client) -> None:
    program = "import socket; socket.create_connection(('kubernetes.default.svc.cluster.local', 443), 5)"
    client.exec("python3", "-c", program)


def test_metrics_server_answers() -> None:
    def both() -> bool:
        return len(kubectl("top", "nodes", "--no-headers").splitlines()) == 2

    eventually("kubectl top nodes", both, 120, every=2)
