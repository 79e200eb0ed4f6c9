"""Changes the layout of a pod of four ranks while streams run, again and again, and says what the clients saw.

    python benchmarks/switch.py --switches 100 --streams 16

A model with eight heads of random weights, on CPUs (gloo) or a simulated device. Prints a line of JSON for each switch
(`from`, `to`, `pause_s` as the pod measured it, phases) and one for the whole: streams, failed ones, those whose text
differs from an undisturbed run, the longest gap between two tokens of a stream around each switch, and what is held at
the end beyond the beginning: processes, file descriptors, blocks.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pods import TINY, Pod, wait_for

SIZES = (2, 4, 2, 1)  # 4x1 -> 2x2 -> 1x4 and back


def make_eight_heads(folder: Path) -> str:
    """The tiny model's tokenizer with eight heads, four KV heads and random weights. Returns the folder."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((TINY / "config.json").read_text())
    hidden, heads, kv_heads, head_dim, layers = 64, 8, 4, 16, 3
    config |= {"hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config |= {"head_dim": head_dim, "num_hidden_layers": layers, "intermediate_size": 96, "torch_dtype": "float32"}
    config |= {"tie_word_embeddings": True, "rope_scaling": None}
    folder.mkdir(parents=True, exist_ok=True)
    for file in TINY.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and "index" not in file.name:
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(4)

    def made(*shape: int) -> Any:
        return torch.randn(shape, generator=generator) * 1.5 / shape[-1] ** 0.5

    weights = {"model.embed_tokens.weight": made(config["vocab_size"], hidden), "model.norm.weight": torch.ones(hidden)}
    q, kv, inner = heads * head_dim, kv_heads * head_dim, 96
    shapes = {"self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
              "self_attn.o_proj": (hidden, q), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
              "mlp.down_proj": (hidden, inner)}  # fmt: skip
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(hidden)
        for name, shape in shapes.items():
            weights[f"{prefix}{name}.weight"] = made(*shape)
    save_file(weights, folder / "model.safetensors")
    return str(folder)


class SwitchPod:
    """A pod of four ranks with an admin port, beginning as four engines of one."""

    def __init__(self, model: str, folder: Path, *flags: str, device: str = "cpu") -> None:
        token = folder / "token"
        token.write_text("secret")
        token.chmod(0o600)
        admin = ("--admin-port", "0", "--admin-token-file", str(token))
        self.pod = Pod("-dp", "4", *admin, *flags, device=device, model=model)
        self.pod.wait_ready()
        words = [word for line in self.pod.lines for word in line.split() if word.startswith("admin_url=")]
        self.admin = words[0].partition("=")[2]
        self.generation = 0

    def layout(self) -> dict[str, Any]:
        """What GET /admin/layout says."""
        status, body = self.pod.get("/admin/layout", "secret", self.admin)
        if status != 200:
            raise RuntimeError(f"GET /admin/layout: {status} {body}")
        return dict(body)

    def ask(self, tensor: int, generation: int) -> tuple[int, Any]:
        """Status and body of a POST."""
        return self.pod.post("/admin/layout", {"tensor": tensor, "generation": generation}, "secret", self.admin)

    def switch(self, tensor: int, seconds: float = 240.0) -> dict[str, Any]:
        """Ask for a size and wait for it; the record of the last switch. Raises RuntimeError where it is refused."""
        self.generation += 1
        status, body = self.ask(tensor, self.generation)
        if status not in (200, 202):
            raise RuntimeError(f"POST /admin/layout: {status} {body}")
        wait_for(lambda: self.layout()["phase"] == "Stable", seconds, f"switched: {self.pod.log[-3000:]}")
        return dict(self.layout()["last"][0])

    def held(self) -> dict[str, int]:
        """Processes, and file descriptors of workers and API server: what a switch must not leave behind. Cores come
        and go; sockets to cores that were once are the API server's to keep."""
        workers = self.pod.children("worker")
        return {
            "processes": len(self.pod.children()),
            "worker_descriptors": sum(process.num_fds() for process in workers),
            "worker_threads": sum(process.num_threads() for process in workers),
        }

    def blocks_in_use(self) -> int:
        """Of all engines, as they say themselves."""
        lines = str(self.pod.get("/metrics")[1]).splitlines()

        def total(state: str) -> float:
            own = [line for line in lines if line.startswith("kvern:blocks{") and f'state="{state}"' in line]
            return sum(float(line.rpartition(" ")[2]) for line in own)

        return int(total("total") - total("free"))


@dataclass
class Found:
    """What clients have seen: text by stream, errors by stream, the longest gap between two tokens of each."""

    texts: dict[int, str] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    gaps: dict[int, float] = field(default_factory=dict)


class Streams:
    """Streams of one model, each in a thread."""

    def __init__(self, pod: SwitchPod, count: int, tokens: int) -> None:
        self._pod, self._tokens, self.found = pod, tokens, Found()
        self._seen = [0] * count
        self._threads = [threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _run(self, index: int) -> None:
        body = {"model": "tiny", "prompt": [50 + index] * (20 + 3 * index), "max_tokens": self._tokens, "stream": True}
        body |= {"ignore_eos": True, "temperature": 0 if index % 2 else 0.8, "seed": index}
        request = urllib.request.Request(
            self._pod.pod.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as response:
                self._read(index, response)
        except OSError as error:
            self.found.errors[index] = repr(error)

    def _read(self, index: int, response: Any) -> None:
        text, last = "", None
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                self.found.errors[index] = json.dumps(event["error"])
                break
            now = time.monotonic()
            if last is not None:
                self.found.gaps[index] = max(self.found.gaps.get(index, 0.0), now - last)
            last = now
            self._seen[index] += 1
            text += event["choices"][0]["text"] if event["choices"] else ""
        self.found.texts[index] = text

    def wait_for_tokens(self, count: int) -> None:
        """Until every stream has had so many events, or has ended."""
        wait_for(
            lambda: all(seen >= count or not t.is_alive() for seen, t in zip(self._seen, self._threads, strict=True)),
            120,
            "every stream has begun",
        )

    @property
    def alive(self) -> int:
        return sum(thread.is_alive() for thread in self._threads)

    def finish(self) -> Found:
        for thread in self._threads:
            thread.join(600)
        return self.found


def streams(pod: SwitchPod, count: int, tokens: int) -> Streams:
    """Begin `count` streams of `tokens` tokens."""
    return Streams(pod, count, tokens)


def measure(pod: SwitchPod, switches: int, count: int, tokens: int, between: float) -> dict[str, Any]:
    """All of it; the summary. Prints a line for each switch."""
    undisturbed = streams(pod, count, tokens).finish()
    for tensor in SIZES:  # what is made once is not left over
        pod.switch(tensor)
    before = pod.held()
    pauses, gaps, failed, differ, total, undone = [], [], 0, 0, 0, 0
    running = streams(pod, count, tokens)
    running.wait_for_tokens(2)
    for number in range(switches):
        if running.alive < count // 2:
            found = running.finish()
            total, failed = total + count, failed + len(found.errors)
            differ += sum(found.texts.get(i) != undisturbed.texts[i] for i in range(count))
            gaps += list(found.gaps.values())
            running = streams(pod, count, tokens)
            running.wait_for_tokens(2)
        alive = running.alive
        record = pod.switch(SIZES[number % len(SIZES)])
        undone += record["outcome"] != "Switched"
        pauses.append(record["pauseSeconds"])
        line = {"from": record["from"], "to": record["to"], "streams": alive, "pause_s": record["pauseSeconds"]}
        print(json.dumps(line | {"kept": record["kept"], "recomputed": record["recomputed"]} | record["seconds"]))
        time.sleep(between)
    found = running.finish()
    total, failed = total + count, failed + len(found.errors)
    differ += sum(found.texts.get(i) != undisturbed.texts[i] for i in range(count))
    gaps += list(found.gaps.values())
    time.sleep(1.0)
    after = pod.held()
    return {
        "switches": switches,
        "not_switched": undone,
        "streams": total,
        "failed": failed,
        "text_differs": differ,
        "pause_p50_s": round(statistics.median(pauses), 3),
        "pause_p99_s": round(sorted(pauses)[int(0.99 * (len(pauses) - 1))], 3),
        "pause_max_s": round(max(pauses), 3),
        "longest_gap_s": round(max(gaps), 3),
        "left_over": {name: after[name] - before[name] for name in before},
        "blocks_in_use": pod.blocks_in_use(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--switches", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--between", type=float, default=0.2, help="seconds between two switches")
    parser.add_argument("--device", choices=("cpu", "sim"), default="cpu")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_eight_heads(Path(folder) / "model")
        pod = SwitchPod(model, Path(folder), "--num-gpu-blocks-override", "1000", device=given.device)
        try:
            print(json.dumps(measure(pod, given.switches, given.streams, given.tokens, given.between)))
        finally:
            with contextlib.suppress(Exception):
                pod.pod.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
