"""What happens when something fails: each failure is really brought about, and what client, probes and log said noted.

    python benchmarks/failures.py [--device sim|cpu] [--only NAME ...] [--write docs/failures.md]

Prints a table (Markdown). Each scenario starts pods of its own on free ports and ends them; one that this machine does
not allow (a small file system needs user namespaces or root) is left out and said so.
"""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pods import Client, Pod, free_port, wait_for

# Tokens of a stream that is running when the failure comes; the real model's context ends at 512.
LONG = {"sim": 1000, "cpu": 450}


@dataclass
class Outcome:
    """One row. `seconds`: from the failure until the client (or who waited) knew; `left_over`: afterwards."""

    failure: str
    client: str = "-"
    health: str = "-"
    ready: str = "-"
    log: str = ""
    seconds: float = 0.0
    status: int | None = None
    others: str = ""
    left_over: list[str] = field(default_factory=list)


class NotHere(Exception):
    """This machine does not allow the experiment."""


def _load(device: str) -> list[str]:
    """Flags of a pod that is to be busy with long streams, and not to wait for them at its end."""
    return ["--drain-timeout-seconds", "1", *(["--sim-speed", "0.1"] if device == "sim" else [])]


def _probe(pod: Pod, path: str) -> str:
    status, body = pod.get(path)
    if status == 0:
        return "no answer"
    if not isinstance(body, dict) or "engines" not in body:
        return str(status)
    engines = ", ".join(f"{e['engine']} {e['state']}" for e in body["engines"])
    return f"{status} (engines: {engines})"


def _log_line(pod: Pod, *words: str) -> str:
    lines = [line.strip() for line in pod.lines if any(word in line for word in words)]
    return lines[-1] if lines else ""


def _finish(pods: list[Pod], outcome: Outcome) -> Outcome:
    """End the pods; whatever is left of them is a finding."""
    try:
        outcome.status = pods[0].stop()
        for pod in pods[1:]:
            pod.stop()
        wait_for(lambda: not any(pod.left_over() for pod in pods), 30)
    except (TimeoutError, subprocess.TimeoutExpired):
        pass
    outcome.left_over = [left for pod in pods for left in pod.left_over()]
    for pod in pods:
        shutil.rmtree(pod.tmp, ignore_errors=True)
        outcome.log = outcome.log.replace(pod.tmp, "$TMPDIR")
    return outcome


def _who_lost(clients: list[Client]) -> list[Client]:
    """The clients whose stream has failed; all of one engine learn of it at about the same time."""
    wait_for(lambda: any(c.error and c.ended_at for c in clients), 60, "a client that is told")
    time.sleep(0.5)
    return [c for c in clients if c.error and c.ended_at]


def _two_engines(device: str, failure: str, strike: Callable[[Pod], None], words: str) -> Outcome:
    """dp 2 x tp 2 under load; `strike` hits engine 0. Its clients must learn of it, those of engine 1 must not."""
    pod = Pod("-dp", "2", "-tp", "2", *_load(device), device=device).wait_ready()
    outcome = Outcome(failure)
    try:
        clients = [Client(pod, [100 + i] * 40, LONG[device]) for i in range(4)]
        wait_for(lambda: all(c.is_streaming for c in clients), 60, "four streams")
        pod.children()
        began = time.monotonic()
        strike(pod)
        lost = _who_lost(clients)
        outcome.seconds = max(c.ended_at for c in lost) - began
        outcome.client = str(lost[0].error)
        wait_for(lambda: "dead" in _probe(pod, "/ready"), 30)
        outcome.health, outcome.ready = _probe(pod, "/health"), _probe(pod, "/ready")
        kept = [c for c in clients if c not in lost]
        answer, _ = pod.complete()
        streaming = sum(c.error is None for c in kept)
        outcome.others = f"{streaming} of {len(kept)} other streams go on; a new request got {answer}"
        wait_for(lambda: not (set(pod.children("worker-0") + pod.children("worker-1") + pod.children("core-0"))), 30)
        outcome.log = _log_line(pod, words)
    finally:
        _finish([pod], outcome)
    return outcome


def kill_rank(device: str) -> Outcome:
    return _two_engines(
        device, "kill -9 of a rank", lambda pod: pod.children("worker-1")[0].send_signal(signal.SIGKILL), "engine died"
    )


def stop_rank(device: str) -> Outcome:
    return _two_engines(
        device, "SIGSTOP of a rank", lambda pod: pod.children("worker-1")[0].send_signal(signal.SIGSTOP), "engine died"
    )


def kill_core(device: str) -> Outcome:
    return _two_engines(
        device,
        "kill -9 of an engine core",
        lambda pod: pod.children("core-0")[0].send_signal(signal.SIGKILL),
        "engine died",
    )


def kill_last(device: str) -> Outcome:
    """The only engine loses a rank: /health turns 503 and the pod ends, to be started again."""
    outcome = Outcome("kill -9 of a rank of the only engine")
    pod = Pod("-tp", "2", *_load(device), device=device).wait_ready()
    try:
        client = Client(pod, [100] * 40, LONG[device])
        wait_for(lambda: client.is_streaming, 60, "a stream")
        pod.children()
        began = time.monotonic()
        pod.children("worker-1")[0].send_signal(signal.SIGKILL)
        wait_for(lambda: client.error, 60, "a client that is told")
        outcome.seconds, outcome.client = time.monotonic() - began, str(client.error)
        outcome.health, outcome.ready = _probe(pod, "/health"), _probe(pod, "/ready")
        pod.wait()
        outcome.log = pod.lines[-1].strip()
    finally:
        _finish([pod], outcome)
    return outcome


def kill_supervisor(device: str) -> Outcome:
    outcome = Outcome("kill -9 of the supervisor")
    pod = Pod("-tp", "2", *_load(device), device=device).wait_ready()
    client = Client(pod, [100] * 40, LONG[device])
    wait_for(lambda: client.is_streaming, 60, "a stream")
    family = pod.children()
    began = time.monotonic()
    pod.signal(signal.SIGKILL)
    wait_for(lambda: client.ended_at, 60, "a client that is told")
    outcome.seconds, outcome.client = time.monotonic() - began, client.error or "the stream ends without [DONE]"
    outcome.health, outcome.ready = _probe(pod, "/health"), _probe(pod, "/ready")
    wait_for(lambda: not any(p.is_running() and p.status() != "zombie" for p in family), 30)
    # Nobody is left to remove the socket folder: the next start does.
    following = Pod(tmp=pod.tmp).wait_ready()
    outcome.log = "(none: it is gone; the next start removes its socket folder)"
    folders = len(list(Path(pod.tmp).glob("kvern-*")))
    outcome.others = f"all {len(family)} children ended; after the next start there is {folders} socket folder"
    return _finish([following, pod], outcome)


def _refused(failure: str, pod: Pod, seconds: float = 60.0) -> Outcome:
    """A start that must fail by itself, with one line that says why."""
    outcome = Outcome(failure, client="connection refused")
    began = time.monotonic()
    pod.children()
    pod.wait(seconds)
    outcome.seconds, outcome.log = time.monotonic() - began, pod.lines[-1].strip()
    outcome.health = outcome.ready = "no answer"
    return outcome


def port_taken(device: str) -> Outcome:
    first = Pod(device="sim").wait_ready()
    second = Pod("--port", first.url.rsplit(":", 1)[1], device=device)
    outcome = _refused("API port taken", second)
    status = second.process.returncode
    _finish([second, first], outcome)
    outcome.status = status
    return outcome


def master_port_taken(device: str) -> Outcome:
    port = free_port("127.0.0.2")
    layout = ["-tp", "2", "--nnodes", "2", "--master-addr", "127.0.0.2", "--master-port", str(port)]
    first, second = Pod(*layout), None
    try:
        wait_for(lambda: first.url, 60)
        second = Pod(*layout, device=device)
        outcome = _refused("master port taken", second)
        return outcome
    finally:
        _finish([second or first, first], outcome)


def node_missing(device: str) -> Outcome:
    port = str(free_port("127.0.0.2"))
    pod = Pod(
        *("-tp", "2", "--nnodes", "2", "--master-addr", "127.0.0.2", "--master-port", port),
        *("--distributed-timeout-seconds", "6"),
        device=device,
    )
    wait_for(lambda: pod.url and pod.get("/ready")[0], 60)
    health, ready = _probe(pod, "/health"), _probe(pod, "/ready")
    client = f"{pod.complete()[0]}: {pod.complete()[1]['error']['message']}"
    outcome = _refused("a pod (its ranks) never comes", pod)
    outcome.health, outcome.ready, outcome.client = f"{health} while waiting", f"{ready} while waiting", client
    return _finish([pod], outcome)


def rank_missing(device: str) -> Outcome:
    """A rank that hangs before it has joined."""
    pod = Pod("-tp", "2", "--distributed-timeout-seconds", "6", device=device)
    outcome = Outcome("a rank never joins")
    try:
        (rank,) = wait_for(lambda: pod.children("worker-1"), 60)
        rank.send_signal(signal.SIGSTOP)
        wait_for(lambda: pod.url and pod.get("/ready")[0], 60)
        health, ready = _probe(pod, "/health"), _probe(pod, "/ready")
        client = f"{pod.complete()[0]}: {pod.complete()[1]['error']['message']}"
        outcome = _refused("a rank never joins (stopped at its start)", pod, 120)
        outcome.health, outcome.ready, outcome.client = f"{health} while waiting", f"{ready} while waiting", client
    finally:
        _finish([pod], outcome)
    return outcome


def _two_pods(device: str) -> tuple[Pod, Pod]:
    """dp 2 x tp 2 over two pods: engine 0 in the leading one, engine 1 in the other."""
    port = str(free_port("127.0.0.2"))
    flags = [
        "-dp",
        "2",
        "-tp",
        "2",
        "--nnodes",
        "2",
        "--master-addr",
        "127.0.0.2",
        "--master-port",
        port,
        *_load(device),
    ]
    leader = Pod(*flags, device=device)
    follower = Pod(*flags, "--node-rank", "1", "--node-addr", "127.0.0.3", device=device)
    leader.wait_ready()
    return leader, follower


def _lose_pod(device: str, failure: str, signum: int) -> Outcome:
    leader, follower = _two_pods(device)
    outcome = Outcome(failure)
    try:
        clients = [Client(leader, [100 + i] * 40, LONG[device]) for i in range(4)]
        wait_for(lambda: all(c.is_streaming for c in clients), 60, "four streams")
        family = follower.children()
        began = time.monotonic()
        follower.signal(signum)
        if signum == signal.SIGSTOP:
            for child in family:
                child.send_signal(signum)
        lost = _who_lost(clients)
        outcome.seconds, outcome.client = max(c.ended_at for c in lost) - began, str(lost[0].error)
        wait_for(lambda: "dead" in _probe(leader, "/ready"), 30)
        outcome.health, outcome.ready = _probe(leader, "/health"), _probe(leader, "/ready")
        kept = sum(c.error is None for c in clients if c not in lost)
        outcome.others = f"{kept} streams of engine 0 go on; a new request got {leader.complete()[0]}"
        outcome.log = _log_line(leader, "engine died")
        if signum == signal.SIGKILL:
            shutil.rmtree(follower.tmp)
            Path(follower.tmp).mkdir()
            outcome.others += "; the killed supervisor's socket folder stays until the next start there"
        if signum == signal.SIGSTOP:
            for process in (*family, follower.process):
                process.send_signal(signal.SIGCONT)
    finally:
        _finish([leader, follower], outcome)
    return outcome


def kill_pod(device: str) -> Outcome:
    return _lose_pod(device, "kill -9 of a pod beside the leading one", signal.SIGKILL)


def stop_pod(device: str) -> Outcome:
    return _lose_pod(device, "a whole pod hangs (SIGSTOP)", signal.SIGSTOP)


def kill_leader(device: str) -> Outcome:
    leader, follower = _two_pods(device)
    outcome = Outcome("kill -9 of the leading pod")
    leader.children()
    follower.children()
    began = time.monotonic()
    leader.signal(signal.SIGKILL)
    status = follower.wait(20)
    outcome.seconds, outcome.client = time.monotonic() - began, "connection refused"
    outcome.health, outcome.ready = _probe(leader, "/health"), _probe(leader, "/ready")
    outcome.log = _log_line(follower, "leader is lost")
    outcome.others = f"the other pod ended with status {status}"
    shutil.rmtree(leader.tmp)  # a killed supervisor cannot remove its folder: the next start there does
    Path(leader.tmp).mkdir()
    return _finish([leader, follower], outcome)


def _on_small_disk(size: str, *flags: str, device: str) -> Pod:
    """A pod whose TMPDIR, with the sockets and the shared memory, is a file system of this size."""
    tmp = tempfile.mkdtemp(prefix="pod-")
    mount = f"mount -t tmpfs -o size={size} tmpfs {tmp}"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", mount], capture_output=True, check=False).returncode:
        shutil.rmtree(tmp, ignore_errors=True)
        raise NotHere("no user namespaces: a small file system cannot be mounted")
    return Pod(*flags, device=device, tmp=tmp, prefix=["unshare", "-Urm", "sh", "-c", f'{mount} && exec "$@"', "sh"])


def memory_full(device: str) -> Outcome:
    pod = _on_small_disk("512k", "-tp", "2", device=device)
    return _finish([pod], _refused("shared memory (the file system of TMPDIR) is full at the start", pod, 120))


def memory_fills(device: str) -> Outcome:
    """It is full only later: all that is needed was taken at the start."""
    pod = _on_small_disk("4m", "-tp", "2", *_load(device), device=device).wait_ready()
    outcome = Outcome("shared memory (the file system of TMPDIR) fills up while serving")
    try:
        client = Client(pod, [100] * 40, LONG[device])
        wait_for(lambda: client.is_streaming, 60, "a stream")
        full = Path(f"/proc/{pod.process.pid}/root{pod.tmp}/full")
        try:
            full.write_bytes(bytes(8 << 20))
            raise RuntimeError("the file system did not fill up")
        except OSError:
            pass
        seen = len(client.events)
        wait_for(lambda: len(client.events) > seen + 5, 60, "the stream goes on")
        answer, _ = pod.complete()
        outcome.client = f"streams go on; a new request got {answer}"
        outcome.health, outcome.ready = _probe(pod, "/health"), _probe(pod, "/ready")
        outcome.log = "(nothing)" if not _log_line(pod, "level=error", "Traceback") else pod.lines[-1]
    finally:
        _finish([pod], outcome)
    return outcome


SCENARIOS: dict[str, Callable[[str], Outcome]] = {
    function.__name__: function
    for function in (
        kill_rank,
        stop_rank,
        kill_core,
        kill_last,
        kill_supervisor,
        port_taken,
        master_port_taken,
        rank_missing,
        node_missing,
        kill_pod,
        stop_pod,
        kill_leader,
        memory_full,
        memory_fills,
    )
}

_HEAD = """\
# What happens when something fails

Written by `python benchmarks/failures.py --device {device} --write docs/failures.md`, which brings each failure about
in real processes and notes what was seen ({when}). Unless said otherwise there are two engines of two ranks each
(dp 2 x tp 2) with four streams running, and engine 0 is hit. "After" is the time from the failure until the client
had its error, or until the process that could not start had ended (it was told to wait 6 s for the missing).

"""


def table(outcomes: list[Outcome], device: str) -> str:
    """The findings as Markdown: one section a failure."""
    parts = [_HEAD.format(device=device, when=time.strftime("%Y-%m-%d"))]
    parts.append("| failure | after | client | `/health` | `/ready` |\n| --- | --- | --- | --- | --- |\n")
    parts += [f"| {o.failure} | {o.seconds:.1f} s | {o.client} | {o.health} | {o.ready} |\n" for o in outcomes]
    parts.append("\n| failure | log | the rest | left over |\n| --- | --- | --- | --- |\n")
    for o in outcomes:
        rest = o.others or ("" if o.status is None else f"exit status {o.status}")
        parts.append(f"| {o.failure} | `{_log_words(o.log)}` | {rest} | {', '.join(o.left_over) or 'nothing'} |\n")
    return "".join(parts)


def _log_words(line: str) -> str:
    """Without time and process, which differ from run to run."""
    _, found, words = line.partition("msg=")
    return (found + words if found else line).replace("|", "\\|")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["sim", "cpu"], default="sim")
    parser.add_argument("--only", nargs="+", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--write", type=Path, help="file for the table")
    args = parser.parse_args()
    outcomes = []
    for name in args.only:
        try:
            outcomes.append(SCENARIOS[name](args.device))
            print(f"{name}: {outcomes[-1]}", file=sys.stderr, flush=True)
        except NotHere as reason:
            print(f"{name}: left out: {reason}", file=sys.stderr, flush=True)
    text = table(outcomes, args.device)
    print(text)
    if args.write:
        args.write.write_text(text)
    return 1 if any(o.left_over for o in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
