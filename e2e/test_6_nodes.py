"""A replica that spans nodes: two pods, one rank each, found by name and number."""

from collections.abc import Callable

from kit import Client, Service, eventually, kubectl

Make = Callable[..., Service]


def test_a_replica_of_two_pods_answers_and_goes_as_one(service: Make, client: Client) -> None:
    """Tensor size 2 over two pods without GPUs; both are Ready, the router sends to the first one alone."""
    one = service(
        "spanning",
        resources={"gpusPerPod": 0, "nodesPerReplica": 2},
        parallelism={"tensor": {"size": 2}},
    )
    one.wait_ready()
    names = sorted(pod["metadata"]["name"] for pod in one.pods())
    assert names == ["spanning-r0-0", "spanning-r0-1"]
    status = one.object()["status"]
    assert (status["replicas"], status["readyReplicas"], status["parallelism"]["current"]) == (1, 1, 2), status
    answer = client.complete(one.url, "--requests", "4")
    assert (answer["answers"], answer["errors"]) == (4, 0), answer
    assert one.condition("MetricsAvailable")["status"] == "True"
    kubectl("-n", one.namespace, "scale", "infs/spanning", "--replicas=0")
    eventually("both pods gone", lambda: not one.pods(), 90)
