"""Pods that share the ranks: who has which, how they meet on several loopback addresses, and how one is lost."""

import time
from collections.abc import Iterator

import failures
import httpx
import psutil
import pytest
import zmq
from pods import TINY, Pod, free_port

from kvern_engine import LLM, SamplingParams, __version__, nodes
from kvern_engine.config import EngineConfig
from kvern_engine.nodes import (
    AddressError,
    Beat,
    Endpoints,
    Join,
    Leader,
    RankDied,
    Refused,
    Stop,
    Welcome,
    decode_to_follower,
    encode,
    shared_settings,
)
from kvern_engine.parallel.interfaces import interface_of
from kvern_engine.parallel.layout import Layout

ADDRESS = "127.0.0.2"


def config(**fields: object) -> EngineConfig:
    given = {"model": "m", "device": "sim", "tensor_parallel_size": 2, "nnodes": 2, "master_addr": ADDRESS}
    return EngineConfig(**{**given, "master_port": free_port(ADDRESS), **fields})  # type: ignore[arg-type]


def test_ranks_are_shared_in_order() -> None:
    layout = Layout(data=2, tensor=2, pipeline=2)
    assert [list(nodes.ranks_of_node(layout, 4, n)) for n in range(4)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [nodes.node_of(layout, 2, rank) for rank in range(8)] == [0] * 4 + [1] * 4
    assert [nodes.spans_nodes(layout, 2, engine) for engine in (0, 1)] == [False, False]
    assert [nodes.spans_nodes(layout, 4, engine) for engine in (0, 1)] == [True, True]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"node_rank": 2}, "node_rank must be within 0..1 (nnodes 2), got 2"),
        ({"master_addr": None}, "nnodes=2 needs master_addr"),
        ({"nnodes": 3}, "nnodes must divide the 2 ranks"),
        ({"distributed_executor_backend": "uni"}, "is for engines of one device"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match="1 validation error") as caught:
        config(**fields)
    assert words in str(caught.value)


class Follower:
    """The other side of the master port, by hand."""

    def __init__(self, context: zmq.Context, of: EngineConfig, name: bytes = b"one") -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.ROUTING_ID, name)
        self.socket.connect(f"tcp://{of.master_addr}:{of.master_port}")

    def say(self, message: object) -> None:
        self.socket.send(encode(message))

    def hear(self, leader: Leader) -> list[object]:
        heard: list[object] = []
        deadline = time.monotonic() + 30
        while not heard and time.monotonic() < deadline:
            leader.read()
            while self.socket.poll(20):
                heard.append(decode_to_follower(self.socket.recv()))
        return heard


@pytest.fixture
def context() -> Iterator[zmq.Context]:
    made: zmq.Context = zmq.Context()
    yield made
    made.destroy(linger=0)


def join(of: EngineConfig, node: int = 1, **changed: str) -> Join:
    return Join(node, "127.0.0.3", 4000, __version__, {**shared_settings(of), **changed})


def test_pods_meet_and_part(context: zmq.Context) -> None:
    of = config(tensor_parallel_size=4)
    leader, follower = Leader(context, of), Follower(context, of)
    assert leader.missing() == [1]
    text = leader.missing_text()
    assert "node 1 (ranks 2 and 3) of 2 did not join within 0 s" in text and "--node-rank 1" in text
    follower.say(join(of))
    assert set(follower.hear(leader)) == {Beat(0)}
    assert leader.missing() == [] and leader.place(1) == "node 1 (127.0.0.3)"
    meeting = leader.welcome()
    assert set(meeting) == {0} and meeting[0].startswith("tcp://127.0.0.2:")
    assert Welcome(meeting) in follower.hear(leader)
    follower.say(join(of))  # the answer was lost: it hears it again
    assert Welcome(meeting) in follower.hear(leader)
    assert leader.endpoints() is None
    follower.say(Endpoints(1, {"worker-2.in": "tcp://127.0.0.3:5"}))
    follower.say(RankDied(1, 2, "exited with status 1"))
    died: list[tuple[int, str]] = []
    deadline = time.monotonic() + 30
    while not died and time.monotonic() < deadline:
        died = leader.read().died
        time.sleep(0.01)
    assert died == [(2, "worker 2 on node 1 (127.0.0.3) exited with status 1")]
    assert leader.endpoints() == {"worker-2.in": "tcp://127.0.0.3:5"}
    leader.close()
    assert Stop() in [decode_to_follower(follower.socket.recv()) for _ in range(9) if follower.socket.poll(300)]


def test_an_engine_of_other_pods_meets_at_its_first_rank(context: zmq.Context) -> None:
    of = config(tensor_parallel_size=2, data_parallel_size=2, nnodes=4)
    leader = Leader(context, of)
    for node in (1, 2, 3):
        follower = Follower(context, of, str(node).encode())
        follower.say(Join(node, f"127.0.0.{node + 2}", 4000 + node, __version__, shared_settings(of)))
        assert follower.hear(leader)
    meeting = leader.welcome()
    assert meeting[0].startswith("tcp://127.0.0.2:") and meeting[1] == "tcp://127.0.0.4:4002"
    leader.close()


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"max_model_len": "7"}, "started differently: --max-model-len is 7 there and None here"),
        ({"version": "9"}, "node 1 is Kvern 9, the leader"),
        ({"node": "7"}, "--node-rank must be within 1..1, got 7"),
    ],
)
def test_a_pod_that_does_not_fit_is_told_why(context: zmq.Context, changed: dict[str, str], words: str) -> None:
    of = config()
    leader, follower = Leader(context, of), Follower(context, of)
    version, node = changed.pop("version", __version__), int(changed.pop("node", "1"))
    follower.say(Join(node, "127.0.0.3", 4000, version, {**shared_settings(of), **changed}))
    (answer,) = follower.hear(leader)
    assert isinstance(answer, Refused) and words in answer.reason
    leader.close()


def test_the_second_pod_of_one_rank_is_refused_and_the_first_goes_on(context: zmq.Context) -> None:
    of = config()
    leader, first, second = Leader(context, of), Follower(context, of), Follower(context, of, b"two")
    first.say(join(of))
    assert set(first.hear(leader)) == {Beat(0)}
    second.say(Join(1, "127.0.0.4", 4000, __version__, shared_settings(of)))
    (answer,) = second.hear(leader)
    assert isinstance(answer, Refused)
    assert answer.reason == "node 1 has joined already, from 127.0.0.3: each pod needs its own --node-rank"
    second.socket.send(b"\xc1 not ours")  # whoever it is: the leader goes on
    first.say(Beat(1))
    time.sleep(0.05)
    assert leader.read().lost == [] and leader.missing() == []
    leader.close()


def test_a_silent_pod_is_lost_once(context: zmq.Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SILENT_SECONDS", 1.5)
    of = config()
    leader, follower = Leader(context, of), Follower(context, of)
    follower.say(join(of))
    assert follower.hear(leader)
    time.sleep(1.6)
    ((node, why),) = leader.read().lost
    assert node == 1 and why.startswith("node 1 (127.0.0.3), with rank 1, was not heard of for ")
    assert leader.read().lost == []
    leader.close()


def test_where_the_leader_cannot_listen_it_says_so(context: zmq.Context) -> None:
    of = config()
    leader = Leader(context, of)
    with pytest.raises(AddressError, match=r"port \d+ on 127.0.0.2 is already in use: .*--master-port"):
        Leader(context, of)
    leader.close()
    with pytest.raises(AddressError, match="is no address of this machine: node 0 is to be started where it is"):
        Leader(context, config(master_addr="192.0.2.1", master_port=4001))
    with pytest.raises(AddressError, match=r"--master-addr no\.such\.name\.invalid: no such name"):
        Leader(context, config(master_addr="no.such.name.invalid", master_port=4001))


def test_two_pods_serve_and_the_loss_of_one_ends_its_engine_alone() -> None:
    outcome = failures.kill_pod("sim")
    assert outcome.seconds < 15 and "node 1 (127.0.0.3)" in outcome.client
    assert (outcome.health, outcome.ready) == ("200", "200 (engines: 0 ready, 1 dead)")
    assert outcome.others.startswith("2 streams of engine 0 go on; a new request got 200")


def test_a_follower_ends_with_its_leader() -> None:
    """SIGTERM of both at once, as when a group of pods is deleted: the leader drains, the follower waits for it."""
    leader, follower = failures._two_pods("sim")
    listening = [c for process in follower.children() for c in process.net_connections("tcp") if c.status == "LISTEN"]
    assert listening and {c.laddr.ip for c in listening} == {"127.0.0.3"}, "never on all interfaces"
    assert leader.complete()[0] == 200
    follower.signal(15)
    assert leader.complete()[0] == 200, "it stays until the leader stops"
    assert leader.stop() == 0 and follower.wait() == 0
    assert leader.left_over() == follower.left_over() == []


def test_an_engine_over_two_pods_computes_and_listens_on_their_addresses_alone() -> None:
    """Real ranks, over gloo, whose rendezvous is at the leading pod."""
    port = str(free_port(ADDRESS))
    flags = ["-tp", "2", "--nnodes", "2", "--master-addr", ADDRESS, "--master-port", port]
    debug = {"KVERN_DEBUG_RANKS": "1"}
    leader = Pod(*flags, device="cpu", env=debug)
    probes = free_port()
    own = ["--node-rank", "1", "--node-addr", "127.0.0.3", "--port", str(probes)]
    follower = Pod(*flags, *own, device="cpu", env=debug)
    try:
        leader.wait_ready()
        check_probes(f"http://127.0.0.1:{probes}")
        with LLM(str(TINY), device="cpu", num_gpu_blocks_override=64, max_num_seqs=2) as llm:
            params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
            expected = llm.generate([[5, 6, 7]], params, use_tqdm=False)[0].outputs[0].text
        status, answer = leader.complete(8)
        assert (status, answer["choices"][0]["text"]) == (200, expected)
        for pod in (leader, follower):
            for process in [psutil.Process(pod.process.pid), *pod.children()]:
                listening = [c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
                assert all(address.startswith("127.") for address in listening), listening
    finally:
        assert leader.stop() == 0 and follower.wait() == 0


def check_probes(url: str) -> None:
    """A pod that runs ranks only passes the probes of the leading one, and sends requests there."""
    assert [httpx.get(url + path).status_code for path in ("/health", "/ready?x=1", "/metrics")] == [200, 200, 200]
    refused = httpx.post(f"{url}/v1/completions", json={})
    assert refused.status_code == 421
    assert refused.json()["error"]["message"].endswith(f"for {ADDRESS}, which takes the requests.")


def test_the_leader_listens_at_the_address_it_was_told(context: zmq.Context) -> None:
    """Its name may not be known yet: a StatefulSet's pod starts before its record is published."""
    leader = Leader(context, config(node_addr=ADDRESS, master_addr="smol-r0-0.not.yet.known"))
    assert leader.address == ADDRESS
    leader.close()


@pytest.mark.parametrize(
    ("address", "interface"),
    [
        ("10.0.0.7", "eth0"),
        ("127.0.0.3", "lo"),
        ("fd00::7", "eth1"),
        ("10.0.0.8", None),
    ],
)
def test_gloo_is_told_the_interface_of_the_pods_address(address: str, interface: str | None) -> None:
    networks = {
        "lo": [("127.0.0.1", "255.0.0.0"), ("00:00:00:00:00:00", None)],
        "eth0": [("10.0.0.7", "255.255.255.0"), ("fe80::1%eth0", "ffff:ffff:ffff:ffff::")],
        "eth1": [("fd00::7", "ffff:ffff:ffff:ffff::")],
    }
    assert interface_of(address, networks) == interface


def test_a_follower_without_a_leader_says_so() -> None:
    port = str(free_port(ADDRESS))
    flags = ["-tp", "2", "--nnodes", "2", "--node-rank", "1", "--master-addr", ADDRESS, "--master-port", port]
    pod = Pod(*flags, "--distributed-timeout-seconds", "2")
    assert pod.wait(60) == 1
    assert f"node 0 at {ADDRESS} ({ADDRESS}) port {port} did not answer within 2 s" in pod.lines[-1]
