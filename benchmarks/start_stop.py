"""Start a pod and stop it, many times: is anything left over? Processes, listening ports, shared memory, socket
folders, descriptors of this process.

    python benchmarks/start_stop.py [--cycles 50] [--device sim] [-tp 2] [-dp 1] [-pp 1]

Each cycle starts `kvern serve`, waits for /ready, answers one request and ends it: with SIGTERM, every fifth time with
kill -9 of the supervisor (then its socket folder may stay until the next start, which removes it). Prints one JSON
line.
"""

import argparse
import gc
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
from pods import Pod, wait_for


def listening(pids: set[int]) -> list[int]:
    """Ports at which processes of `pids` still listen."""
    return [c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in pids]


def cycle(tmp: str, flags: list[str], device: str, kill: bool) -> list[str]:
    """One start and stop; what was left over."""
    shared = {path.name for path in Path("/dev/shm").iterdir()}
    pod = Pod(*flags, device=device, tmp=tmp).wait_ready()
    status, answer = pod.complete()
    if status != 200:
        raise RuntimeError(f"{status} {answer}")
    pids = {pod.process.pid, *(p.pid for p in pod.children())}
    if kill:
        pod.signal(signal.SIGKILL)
        pod.wait()
    elif (ended := pod.stop()) != 0:
        raise RuntimeError(f"exit status {ended}:\n{pod.log}")

    def left() -> list[str]:
        found = [name for name in pod.left_over() if not (kill and "/kvern-" in name)]
        found += [f"port {port}" for port in listening(pids)]
        names = {path.name for path in Path("/dev/shm").iterdir()} - shared
        # Others use this machine as well: what is ours carries a process id or the name.
        return found + [f"/dev/shm/{n}" for n in names if "kvern" in n or any(str(pid) in n for pid in pids)]

    try:
        wait_for(lambda: not left(), 30)
    except TimeoutError:
        return left()
    finally:
        if pod.process.stderr is not None:
            pod.process.stderr.close()
    return []


def run(cycles: int, device: str, flags: list[str], progress: bool = False) -> dict[str, object]:
    """All cycles: how many left something, what, how long they took, and by how much the open descriptors of this
    process grew (counted from the end of the first cycle; 0 if there are fewer: what others in this process have
    dropped may be collected meanwhile)."""
    tmp = tempfile.mkdtemp(prefix="start-stop-")
    found: list[str] = []
    seconds, descriptors = [], []
    try:
        for number in range(cycles):
            began = time.monotonic()
            left = cycle(tmp, flags, device, kill=number % 5 == 3)
            seconds.append(time.monotonic() - began)
            gc.collect()  # garbage of ours that still holds descriptors is not a leak
            descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
            found += [f"cycle {number}: {name}" for name in left]
            if progress:
                print(f"cycle {number}: {seconds[-1]:.1f} s {left or ''}", file=sys.stderr, flush=True)
        last = Pod(*flags, device=device, tmp=tmp).wait_ready()  # cleans up after a killed one
        last.stop()
        found += [f"after the last: {name}" for name in last.left_over()]
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return {
        "cycles": cycles,
        "left_over": found,
        "descriptors_grown": max(0, descriptors[-1] - descriptors[0]),
        "seconds_a_cycle": round(sum(seconds) / len(seconds), 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=50)
    parser.add_argument("--device", choices=["sim", "cpu"], default="sim")
    for short, default in (("-tp", "2"), ("-dp", "1"), ("-pp", "1")):
        parser.add_argument(short, default=default)
    args = parser.parse_args()
    flags = ["-tp", args.tp, "-dp", args.dp, "-pp", args.pp]
    result = run(args.cycles, args.device, flags, progress=True)
    print(json.dumps({"kind": "start_stop", "device": args.device, "layout": " ".join(flags), **result}))
    return 1 if result["left_over"] or result["descriptors_grown"] else 0


if __name__ == "__main__":
    sys.exit(main())
