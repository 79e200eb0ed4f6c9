"""Who dies or hangs while the layout changes: each rank, in each phase, in real processes.

    python benchmarks/switch_failures.py [--device sim|cuda] [--ranks 0 1 ...] [--phases ...] [--write docs/failures.md]

Two engines of two ranks become four of one (on two GPUs: two of one become one of two) with four streams running. Once
GET /admin/layout says that the switch is in the phase, a rank gets SIGKILL or SIGSTOP. A phase that is too short to be
hit is held up by a core that is stopped for a moment. What was seen alike for several ranks is one row of the table.
On the simulated device steps and transfers take as long as the profile says: here long enough to be hit.
"""

import argparse
import contextlib
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from failures import _probe
from pods import ROOT, Client, Pod, wait_for

PHASES = ("Preparing", "Freezing", "Resharding", "MovingKV", "Adopting")
STRIKES = {"kill -9": signal.SIGKILL, "SIGSTOP": signal.SIGSTOP}
TOLD_SECONDS = 60.0
SLOW_MACHINE = 600.0  # seconds: one with much else to do is slow, not wrong
BEGIN, END = "<!-- switch -->", "<!-- /switch -->"
SLOW = {
    "step_seconds": 0.25,  # a step in flight: Freezing waits for it
    "group_seconds": 1.0,
    "kv_seconds": 1.0,
    "weight_bytes": 1_000_000,
    "replicated_seconds": 0.0,
}


@dataclass
class Seen:
    """What came of one strike."""

    rank: int
    phase: str
    strike: str
    outcome: str = ""
    clients: str = ""
    health: str = ""
    log: str = ""
    after: str = ""
    seconds: float = 0.0  # from the strike until the switch was over
    left_over: list[str] = field(default_factory=list)

    def words(self) -> tuple[str, ...]:
        """Without what differs from rank to rank and from run to run."""
        texts = (self.phase, self.strike, self.outcome, self.clients, self.health, self.log, self.after)
        return tuple(_alike(text) for text in texts)


def _alike(text: str) -> str:
    text = re.sub(r"\(engine \d+, stage \d+, tensor rank \d+\)", "(engine E, stage 0, tensor rank T)", text)
    text = re.sub(r"worker \d+", "worker R", text)
    text = re.sub(r"engine core \d+", "engine core E", text)
    text = re.sub(r"pid \d+", "pid P", text)
    return re.sub(r"engine=\d+", "engine=E", text)


class SwitchingPod:
    """A pod with an admin port and four streams."""

    def __init__(self, device: str, folder: Path) -> None:
        token = folder / "token"
        token.write_text("secret")
        token.chmod(0o600)
        flags = ["--admin-port", "0", "--admin-token-file", str(token), "--drain-timeout-seconds", "1"]
        env: dict[str, str] = {}
        if device == "sim":
            shipped = ROOT / "engine/kvern_engine/worker/sim_profiles/h200-llama3-8b.json"
            profile = folder / "slow.json"
            profile.write_text(json.dumps(json.loads(shipped.read_text()) | SLOW))
            flags += ["-dp", "2", "-tp", "2", "--sim-profile", str(profile)]
            self.target, self.ranks = 1, 4
        else:
            flags += ["-dp", "2", "--num-gpu-blocks-override", "2000"]
            env = {"KVERN_GPU_LAYOUT_SWITCH": "1", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
            self.target, self.ranks = 2, 2
        self.pod = Pod(*flags, device=device, env=env).wait_ready(SLOW_MACHINE)
        words = [word for line in self.pod.lines for word in line.split() if word.startswith("admin_url=")]
        self.admin = words[0].partition("=")[2]
        self.clients = [Client(self.pod, [100 + i] * 40, 200 if device == "sim" else 450) for i in range(4)]
        wait_for(lambda: all(c.is_streaming for c in self.clients), SLOW_MACHINE, "four streams")

    def layout(self) -> dict[str, Any]:
        """What GET /admin/layout says."""
        return dict(self.pod.get("/admin/layout", "secret", self.admin)[1])

    def ask(self, generation: int = 1) -> tuple[int, Any]:
        """Ask for the other size."""
        return self.pod.post("/admin/layout", {"tensor": self.target, "generation": generation}, "secret", self.admin)

    def wait_for_phase(self, phase: str) -> None:
        """Raises TimeoutError where the switch does not come to it."""
        wait_for(lambda: self.layout()["phase"] == phase, SLOW_MACHINE, f"the phase {phase}")


def strike(device: str, phase: str, how: str, rank: int) -> Seen:
    """One pod, one switch, one rank that is hit in one phase."""
    with tempfile.TemporaryDirectory() as folder:
        made = SwitchingPod(device, Path(folder))
        seen = Seen(rank, phase, how)
        try:
            _strike(made, seen)
        finally:
            pod = made.pod
            for process in pod.children():
                with contextlib.suppress(Exception):
                    process.send_signal(signal.SIGCONT)
            with contextlib.suppress(Exception):
                pod.stop()
                wait_for(lambda: not pod.left_over(), 30)
            seen.left_over = pod.left_over()
            shutil.rmtree(pod.tmp, ignore_errors=True)
    return seen


def _strike(made: SwitchingPod, seen: Seen) -> None:
    pod, victim = made.pod, made.pod.children(f"worker-{seen.rank}")[0]
    # The core that is not the victim's holds up Adopting, which takes milliseconds: nobody else waits for it.
    held = pod.children("core-0")[0] if seen.phase == "Adopting" else None
    status, body = made.ask()
    if status != 202:
        raise RuntimeError(f"POST /admin/layout: {status} {body}")
    if held is not None:
        made.wait_for_phase("MovingKV")
        held.send_signal(signal.SIGSTOP)
    made.wait_for_phase(seen.phase)
    victim.send_signal(STRIKES[seen.strike])
    began = time.monotonic()
    if held is not None:
        time.sleep(0.2)
        held.send_signal(signal.SIGCONT)
    wait_for(lambda: made.layout()["phase"] == "Stable", SLOW_MACHINE, "the switch is over")
    seen.seconds = time.monotonic() - began
    _look(made, seen)


def _look(made: SwitchingPod, seen: Seen) -> None:
    pod, clients = made.pod, made.clients
    record = made.layout()["last"][0]
    seen.outcome = record["outcome"] + (f": {record['reason']}" if record["reason"] else "")
    wait_for(lambda: all(c.ended_at for c in clients), SLOW_MACHINE, "streams end, or are told")
    lost = [c for c in clients if c.error]
    told = sorted({_alike(str(c.error)) for c in lost})
    whole = sum(c.done and not c.error for c in clients)
    seen.clients = f"{whole} of 4 streams complete" + "".join(f"; the others: {t}" for t in told)
    wait_for(lambda: "dead" in _probe(pod, "/ready"), TOLD_SECONDS, "an engine is dead")
    seen.health = f"{_probe(pod, '/health')} / {_probe(pod, '/ready').partition(' ')[0]}"
    lines = [line.strip().partition("msg=")[2] for line in pod.lines if "layout: " in line or "engine died" in line]
    seen.log = "; ".join(dict.fromkeys(_brief(line) for line in lines if "switching" not in line))
    answer, _ = pod.complete()
    again, body = made.ask(2)
    why = body["error"]["message"].partition(": ")[2] if again == 400 else ""
    engines = made.layout()["engines"]
    seen.after = f"{engines} engines; a new request got {answer}; a new switch {again}" + (f" ({why})" if why else "")


def _brief(line: str) -> str:
    """A log line's words, without its figures."""
    return re.sub(r" (source|target|pause_seconds|kept|requests_lost|engines_left|layout)=(\"[^\"]*\"|\S+)", "", line)


def table(found: Sequence[Seen], device: str) -> str:
    """Rows of Markdown; ranks that saw the same are one row."""
    rows: dict[tuple[str, ...], list[Seen]] = {}
    for seen in found:
        rows.setdefault(seen.words(), []).append(seen)
    pods = "dp 2 x tp 2 -> dp 4 x tp 1" if device == "sim" else "dp 2 x tp 1 -> dp 1 x tp 2"
    parts = [
        f"{BEGIN}\n\n## While the layout changes\n\n"
        f"Written by `python benchmarks/switch_failures.py --device {device} --write docs/failures.md` "
        f'({time.strftime("%Y-%m-%d")}): {pods}, four streams, one rank is hit in one phase. "After" is the time from '
        "the strike until the switch was over.\n\n"
        "| phase | strike | ranks | after | the switch | clients | `/health` / `/ready` | log | then |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
    ]
    for words, all_seen in rows.items():
        phase, how, outcome, clients, health, log, after = (word.replace("|", "\\|") for word in words)
        ranks = ", ".join(str(s.rank) for s in all_seen)
        worst = max(s.seconds for s in all_seen)
        parts.append(
            f"| {phase} | {how} | {ranks} | {worst:.1f} s | {outcome} | {clients} | {health} | `{log}` | {after} |\n"
        )
    left = sorted({left for seen in found for left in seen.left_over})
    parts.append(f"\nLeft over afterwards, in all {len(found)} runs: {', '.join(left) or 'nothing'}.\n\n{END}\n")
    return "".join(parts)


def write(path: Path, text: str) -> None:
    """Into the file, in place of what stood between the marks, else at its end."""
    before = path.read_text()
    if BEGIN in before:
        text = before[: before.index(BEGIN)] + text + before[before.index(END) + len(END) :].lstrip("\n")
    else:
        text = before.rstrip("\n") + "\n\n" + text
    path.write_text(text)


def _lines(path: Path | None) -> list[str]:
    return path.read_text().splitlines() if path is not None and path.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["sim", "cuda"], default="sim")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--strikes", nargs="+", choices=list(STRIKES), default=list(STRIKES))
    parser.add_argument("--ranks", nargs="+", type=int)
    parser.add_argument("--keep", type=Path, help="file of JSON lines: what is in it is not done again")
    parser.add_argument("--write", type=Path, help="file for the table")
    args = parser.parse_args()
    found = [Seen(**json.loads(line)) for line in _lines(args.keep)]
    done = {(seen.phase, seen.strike, seen.rank) for seen in found}
    for phase, how in product(args.phases, args.strikes):
        for rank in args.ranks or range(4 if args.device == "sim" else 2):
            if (phase, how, rank) in done:
                continue
            found.append(strike(args.device, phase, how, rank))
            print(found[-1], file=sys.stderr, flush=True)
            if args.keep:
                with args.keep.open("a") as file:
                    file.write(json.dumps(asdict(found[-1])) + "\n")
    found.sort(key=lambda seen: (PHASES.index(seen.phase), list(STRIKES).index(seen.strike), seen.rank))
    text = table(found, args.device)
    print(text)
    if args.write:
        write(args.write, text)
    return 1 if any(seen.left_over for seen in found) else 0


if __name__ == "__main__":
    sys.exit(main())
