"""The client of all ranks of an engine, against ranks played by the test over real sockets."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from kvern_engine.core.loop import WorkerDiedError
from kvern_engine.core.plan import Reset, StepPlan, StepResult, ToWorker, WorkerFailed, WorkerReady
from kvern_engine.transport import WORKER_TCP, bind, connect, encode, read_endpoint, worker_in, worker_out
from kvern_engine.worker_client import GroupWorkerClient, Peer, WorkerMissingError, disagreement, merge_ready

READY = WorkerReady(0, 100, 16, 512, 1000, 2000, "cpu", "float32", {"weights": 1.0, "profile": 0.5}, 8, 256)
PLAN = StepPlan(0, [], [], [], [], [3], [0], [1], [True])
decode = msgspec.msgpack.Decoder(ToWorker).decode


def result(step: int, token: int) -> StepResult:
    return StepResult(step, [3], [[token]], 0.01)


class Rank:
    """A worker's two sockets, and a process that stands for its own."""

    def __init__(self, context: zmq.Context, folder: Path, rank: int) -> None:
        self.rank = rank
        self.plans = bind(context, zmq.PULL, str(folder), worker_in(rank))
        self.out = bind(context, zmq.PUSH, str(folder), worker_out(rank))
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])

    def say(self, message: object) -> None:
        self.out.send(encode(message))

    def hear(self) -> bytes:
        assert self.plans.poll(30_000)
        return self.plans.recv()


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., tuple[GroupWorkerClient, list[Rank]]]]:
    context: zmq.Context = zmq.Context()
    ranks: list[Rank] = []
    clients: list[GroupWorkerClient] = []

    def start(count: int, compared: tuple[int, ...] = (), answering: int = 0, join: float = 30.0):
        ranks.extend(Rank(context, tmp_path, rank) for rank in range(count))
        peers = [Peer(rank.rank, rank.process.pid) for rank in ranks]
        clients.append(GroupWorkerClient(context, str(tmp_path), 0, peers, answering, compared, join))
        return clients[0], ranks

    yield start
    for rank in ranks:
        rank.process.send_signal(signal.SIGCONT)
        rank.process.kill()
        rank.process.wait(10)
    for client in clients:
        client.close()
    context.destroy(linger=0)


def test_every_rank_gets_the_same_bytes_and_one_answers(make) -> None:
    client, ranks = make(3, answering=2)
    for number, rank in enumerate(ranks):
        rank.say(msgspec.structs.replace(READY, rank=number, num_blocks=100 - number))
    assert client.wait_ready().num_blocks == 98
    client.submit(PLAN)
    sent = []
    for rank in ranks:
        assert decode(rank.hear()) == Reset(0)
        sent.append(rank.hear())
    assert len(set(sent)) == 1 and decode(sent[0]) == PLAN
    ranks[0].say(msgspec.structs.replace(READY, rank=0))  # hello again after the Reset: skipped
    ranks[2].say(msgspec.structs.replace(READY, rank=2))
    assert client.collect(0.05) is None
    ranks[2].say(result(0, 7))
    assert client.collect(30.0) == result(0, 7)


def test_a_rank_that_was_stopped_before_a_switchs_core_could_reach_it_is_given_up(tmp_path: Path) -> None:
    """It answers no connection, as one does that has not started yet; but others have met it."""
    context: zmq.Context = zmq.Context()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        process.send_signal(signal.SIGSTOP)
        client = GroupWorkerClient(context, str(tmp_path), 0, [Peer(3, process.pid)], answering=3, met=True)
        with pytest.raises(WorkerDiedError, match=r"its process \(pid \d+\) is stopped \(SIGSTOP\)") as raised:
            client.wait_ready()
        assert raised.value.rank == 3
        client.close()
        process.kill()
    context.destroy(linger=0)


def test_a_new_request_need_not_wait_for_a_result(make, tmp_path: Path) -> None:
    client, ranks = make(1)
    context: zmq.Context = zmq.Context()
    inbox = bind(context, zmq.PULL, str(tmp_path), "inbox")
    client.wake_on(inbox)
    peer = connect(context, zmq.PUSH, str(tmp_path), "inbox")
    peer.send(b"a request")
    assert client.collect(30.0) is None
    assert inbox.recv() == b"a request"
    ranks[0].say(result(0, 7))
    peer.send(b"another")
    assert client.collect(30.0) in (None, result(0, 7))
    inbox.recv()
    context.destroy(linger=0)


def test_ranks_that_disagree_end_the_engine(make) -> None:
    client, ranks = make(2, compared=(0, 1))
    for token in (7, 8):
        ranks[0].say(result(token, 7))
        ranks[1].say(result(token, token))
    assert client.collect(30.0) == result(7, 7)
    with pytest.raises(WorkerDiedError, match=r"disagree at step 8: row 3 got \[7\] at rank 0 and \[8\] at rank 1"):
        client.collect(30.0)


def test_disagreement_in_rows() -> None:
    other = StepResult(4, [2], [[7]], 0.01)
    assert disagreement(4, {0: result(4, 7), 5: result(4, 7)}) is None
    assert disagreement(4, {0: result(4, 7), 5: other}) == "ranks 0 and 5 computed different rows at step 4"


def test_a_killed_rank_is_blamed_not_the_one_that_lost_it(make) -> None:
    client, ranks = make(2)
    ranks[0].say(WorkerFailed(0, "step", "RuntimeError: [gloo/transport/tcp/pair.cc] Connection closed by peer"))
    ranks[1].process.kill()
    with pytest.raises(WorkerDiedError, match=r"^worker 1 died: its process \(pid \d+\) is gone$"):
        client.collect(30.0)


def test_the_rank_with_a_reason_of_its_own_is_blamed(make) -> None:
    client, ranks = make(3)
    ranks[0].say(WorkerFailed(0, "step", "RuntimeError: NCCL communicator was aborted"))
    ranks[2].say(WorkerFailed(2, "step", "OutOfMemoryError: tried to allocate 2 GiB"))
    with pytest.raises(WorkerDiedError, match="worker 2 died: OutOfMemoryError"):
        client.collect(30.0)


def test_a_failure_of_second_hand_is_told_where_nobody_else_is_to_blame(make) -> None:
    client, ranks = make(2)
    ranks[1].say(WorkerFailed(1, "step", "RuntimeError: Connection reset by peer"))
    with pytest.raises(WorkerDiedError, match="worker 1 died: RuntimeError: Connection reset by peer"):
        client.collect(30.0)


def test_a_rank_that_cannot_load_is_quoted(make) -> None:
    client, ranks = make(2)
    ranks[0].say(READY)
    ranks[1].say(WorkerFailed(1, "load", "max_model_len must be at most 512"))
    with pytest.raises(ValueError, match=r"^max_model_len must be at most 512$"):
        client.wait_ready()


def test_a_rank_that_gets_ready_while_the_others_are_looked_after_is_not_missed(make, monkeypatch) -> None:
    """Ranks that do not answer are read in `check` as well: what they say there, the only time, counts."""
    client, ranks = make(3, answering=2)
    check, looked = GroupWorkerClient.check, []

    def says_it_now(self: GroupWorkerClient) -> None:
        if not looked:
            ranks[0].say(READY)
            assert self._links[0].results.poll(10_000)  # it is here, after the ranks were read and before `check`
            for number in (1, 2):
                ranks[number].say(msgspec.structs.replace(READY, rank=number))
        looked.append(True)
        assert len(looked) < 300, "wait_ready has missed that rank 0 is ready"
        check(self)

    monkeypatch.setattr(GroupWorkerClient, "check", says_it_now)
    assert client.wait_ready().kv_bytes == 3 * READY.kv_bytes


def test_missing_workers_are_named(make, tmp_path: Path) -> None:
    context: zmq.Context = zmq.Context()
    _, ranks = make(1)
    ranks[0].say(READY)
    peers = [Peer(0, ranks[0].process.pid), Peer(1, os.getpid()), Peer(2, os.getpid())]
    lonely = GroupWorkerClient(context, str(tmp_path), 0, peers, join_seconds=0.4)
    with pytest.raises(WorkerMissingError, match=r"^workers 1, 2 of 3 did not join: nothing was heard for 0 s$"):
        lonely.wait_ready()
    lonely.close()
    context.destroy(linger=0)


def test_merging_takes_the_least_of_limits_and_the_sum_of_bytes() -> None:
    other = WorkerReady(1, 90, 16, 500, 900, 1800, "cpu", "float32", {"weights": 2.0, "graphs": 1.0}, 9, 128)
    merged = merge_ready([READY, other])
    assert (merged.num_blocks, merged.max_model_len, merged.max_num_seqs, merged.max_num_batched_tokens) == (
        *(90, 500),
        *(8, 128),
    )
    assert (merged.kv_bytes, merged.weight_bytes) == (1900, 3800)
    assert merged.load_seconds == {"weights": 2.0, "profile": 0.5, "graphs": 1.0}


def test_a_worker_of_another_pod_is_bound_to_one_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(WORKER_TCP, "127.0.0.3")
    context: zmq.Context = zmq.Context()
    away = Rank(context, tmp_path, 4)
    try:
        endpoint = read_endpoint(str(tmp_path), "worker-4.out")
        assert endpoint is not None and endpoint.startswith("tcp://127.0.0.3:")
        client = GroupWorkerClient(context, str(tmp_path), 0, [Peer(4, None, "node 1 (127.0.0.3)")])
        away.say(msgspec.structs.replace(READY, rank=4))
        assert client.wait_ready().rank == 4
        away.out.close()
        away.plans.close()
        with pytest.raises(WorkerDiedError, match=r"worker 4 died: its connection to node 1 \(127.0.0.3\) is lost"):
            client.collect(30.0)
        client.close()
    finally:
        away.process.kill()
        away.process.wait(10)
        context.destroy(linger=0)
