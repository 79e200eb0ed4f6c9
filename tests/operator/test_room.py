"""Room on the nodes, as the scheduler reckons it; and the reader that asks for it."""

import pytest
from effects import path
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.aio.client.configuration import Configuration

from kvern_operator.kube import KubeClient
from kvern_operator.nodes import NodeReader
from kvern_operator.room import Room, read_claim, read_node, requests_of, spare_replicas

GPU = "nvidia.com/gpu"


def node(name: str = "n", gpus: int = 8, cpu: str = "64", memory: str = "512Gi", ready: str = "True", **spec) -> dict:
    return {
        "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, "nvidia.com/gpu.product": "H200"}},
        "spec": spec,
        "status": {
            "allocatable": {GPU: str(gpus), "cpu": cpu, "memory": memory, "pods": "110"},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def pod(gpus: int = 1, on: str = "n", uid: str = "u", **status) -> dict:
    return {"metadata": {"name": uid, "uid": uid}, "spec": {"nodeName": on, **wanted(gpus)}, "status": status}


def wanted(gpus: int = 1, cpu: str | None = None, **spec) -> dict:
    resources = {"limits": {GPU: gpus}, **({"requests": {"cpu": cpu}} if cpu else {})}
    return {"containers": [{"name": "engine", "resources": resources}], **spec}


def room(nodes: list[dict], pods: list[dict]) -> Room:
    read = [n for n in map(read_node, nodes) if n is not None]
    return Room(tuple(read), tuple(c for c in map(read_claim, pods) if c is not None))


def test_what_is_allocatable_less_what_is_requested():
    full = room([node("a"), node("b")], [pod(8, "a", "x"), pod(4, "b", "y")])
    assert spare_replicas(full, wanted(1), 1) == 4
    assert spare_replicas(full, wanted(4), 1) == 1
    assert spare_replicas(full, wanted(2), 2) == 1  # two pods a replica
    assert spare_replicas(full, wanted(8), 1) == 0


def test_gpus_of_two_nodes_make_no_pod():
    assert spare_replicas(room([node("a", 4), node("b", 4)], []), wanted(8), 1) == 0


def test_the_scarcest_resource_counts():
    assert spare_replicas(room([node(cpu="10")], []), wanted(1, cpu="4"), 1) == 2
    assert spare_replicas(room([node(cpu="3900m")], []), wanted(1, cpu="4"), 1) == 0


def test_a_pod_that_ends_holds_what_it_has_until_it_is_gone_and_one_that_has_ended_holds_nothing():
    ending = pod(8)
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert spare_replicas(room([node()], [ending]), wanted(1), 1) == 0
    assert spare_replicas(room([node()], [pod(8, phase="Succeeded")]), wanted(1), 1) == 8


def test_nodes_that_take_no_pod_do_not_count():
    taint = [{"key": GPU, "effect": "NoSchedule"}]
    nodes = [node("a", ready="Unknown"), node("b", unschedulable=True), node("c", taints=taint)]
    assert spare_replicas(room(nodes, []), wanted(1), 1) == 0
    tolerant = wanted(1, tolerations=[{"key": GPU, "operator": "Exists"}])
    assert spare_replicas(room(nodes, []), tolerant, 1) == 8
    other = wanted(1, tolerations=[{"key": GPU, "value": "x"}])
    assert spare_replicas(room(nodes, []), other, 1) == 0
    prefer = [{"key": "x", "effect": "PreferNoSchedule"}]
    assert spare_replicas(room([node(taints=prefer)], []), wanted(1), 1) == 8


def test_the_node_selector_counts():
    chosen = wanted(1, nodeSelector={"nvidia.com/gpu.product": "B200"})
    assert spare_replicas(room([node()], []), chosen, 1) == 0
    chosen = wanted(1, nodeSelector={"nvidia.com/gpu.product": "H200"})
    assert spare_replicas(room([node()], []), chosen, 1) == 8


def test_who_waits_for_a_node_comes_first_unless_no_node_will_do():
    assert spare_replicas(room([node(gpus=4)], [pod(2, on="")]), wanted(1), 1) == 2
    assert spare_replicas(room([node(gpus=4)], [pod(64, on="")]), wanted(1), 1) == 4
    assert spare_replicas(room([node(gpus=4)], [pod(0, on="")]), wanted(1), 1) == 4
    assert spare_replicas(room([node(gpus=4)], []), wanted(1), 1, unseen=3) == 1


def test_where_nothing_is_asked_for_there_is_nothing_to_run_out_of():
    assert spare_replicas(room([], []), {"containers": [{"name": "engine"}]}, 1) is None


def test_requests_of_a_pod_are_those_of_all_containers_or_of_its_greediest_init_container():
    def container(cpu: str, **more) -> dict:
        return {"resources": {"requests": {"cpu": cpu}}, **more}

    spec = {"containers": [container("1"), container("500m")], "initContainers": [container("4")]}
    assert requests_of(spec)["cpu"] == 4
    spec["initContainers"] = [container("1", restartPolicy="Always")]
    assert requests_of({**spec, "overhead": {"cpu": "250m"}})["cpu"] == 2.75


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3)), max_size=8),
    st.integers(1, 4),
)
def test_so_many_fit_as_can_be_placed_one_after_the_other(sizes, claims, each):
    """A pod a time onto the first node with room, as a scheduler does it, and not one more."""
    nodes = [node(f"n{i}", gpus) for i, gpus in enumerate(sizes)]
    held, free = [], list(sizes)
    for i, (gpus, where) in enumerate(claims):
        if where < len(free) and free[where] >= gpus:
            free[where] -= gpus
            held.append(pod(gpus, f"n{where}", f"u{i}"))
    spare, placed = spare_replicas(room(nodes, held), wanted(each), 1), 0
    while any(f >= each for f in free):
        i = next(i for i, f in enumerate(free) if f >= each)
        free[i] -= each
        placed += 1
    assert spare == placed


@pytest.fixture
async def reader(api):
    client, now = KubeClient(Configuration(host=api.url)), [0.0]
    reader = NodeReader(client, lambda: now[0])
    reader.now = now
    yield reader
    await client.close()


async def test_the_reader_looks_once_in_two_seconds_and_at_what_is_there_then(api, reader):
    api.put("/api/v1/nodes/n", {"kind": "Node", **node("n")})
    api.put(path("Pod", "x"), {"kind": "Pod", **pod(3)})
    found = await reader.room()
    assert spare_replicas(found, wanted(1), 1) == 5
    asked = len(api.requests)
    assert await reader.room() is found and len(api.requests) == asked
    api.remove(path("Pod", "x"))
    reader.now[0] = 2.1
    assert spare_replicas(await reader.room(), wanted(1), 1) == 8


async def test_a_look_that_has_pods_which_have_ended_is_too_old(api, reader):
    """Else a rollout would not see the place that its own last pod has left, and swap where it could surge."""
    api.put("/api/v1/nodes/n", {"kind": "Node", **node("n")})
    ended = {"kind": "Pod", **pod(3)}
    api.put(path("Pod", "x"), ended)
    found = await reader.room()
    (uid,) = found.pods
    assert await reader.room(frozenset({"another"})) is found
    api.remove(path("Pod", "x"))
    later = await reader.room(frozenset({uid}))
    assert (spare_replicas(found, wanted(1), 1), spare_replicas(later, wanted(1), 1)) == (5, 8)
    assert await reader.room(frozenset({uid})) is later


async def test_without_the_right_to_read_nodes_the_room_is_not_known(api, reader):
    api.refuse = lambda m, p, b: (403, 'nodes is forbidden: User "x" cannot list resource "nodes"')
    assert await reader.room() is None and await reader.room() is None
    assert len(api.requests) == 1  # and not asked for all the time
    reader.now[0] = 601
    await reader.room()
    assert len(api.requests) == 2


async def test_an_api_server_that_does_not_answer_is_asked_again_soon(api, reader):
    api.down = True
    assert await reader.room() is None
    api.down = False
    reader.now[0] = 2.1
    assert await reader.room() is not None
