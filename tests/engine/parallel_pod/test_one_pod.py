"""A pod of eight ranks: which engine served what, the layout in metrics and at the admin port, and the same answers."""

from pathlib import Path

import pytest
from pods import Pod, wait_for


def test_a_pod_of_two_engines_with_stages_and_tensor_ranks(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o600)
    pod = Pod("-dp", "2", "-pp", "2", "-tp", "2", "--admin-port", "0", "--admin-token-file", str(token))
    try:
        pod.wait_ready()
        assert len(pod.children("worker")) == 8 and len(pod.children("core")) == 2
        answers = [pod.complete(8, [100 + i] * 20)[1]["choices"][0]["text"] for i in range(4)]
        again = [pod.complete(8, [100 + i] * 20)[1]["choices"][0]["text"] for i in range(4)]
        assert answers == again
        _, metrics = pod.get("/metrics")
        served = {
            e: _value(metrics, f'vllm:request_success_total{{engine="{e}",finished_reason="length"') for e in "01"
        }
        assert served == {"0": 4, "1": 4}, "spread by load, and each prompt again where its prefix is"
        hits = [_value(metrics, f'vllm:prompt_tokens_cached_total{{engine="{e}"') for e in "01"]
        assert hits == [32, 32]
        assert {d: _value(metrics, f'kvern:layout{{dimension="{d}"') for d in ("dp", "tp", "pp")} == {
            "dp": 2,
            "tp": 2,
            "pp": 2,
        }
        url = wait_for(lambda: [w for line in pod.lines for w in line.split() if w.startswith("admin_url=")], 60)[0]
        status, layout = pod.get("/admin/layout", "secret", url.partition("=")[2])
        assert status == 200
        assert (layout["current"], layout["pipeline"], layout["engines"], layout["devices"]) == (2, 2, 2, 8)
        sizes = {f["size"]: f["kvTokens"] for f in layout["feasible"]}
        assert list(sizes) == [1, 2, 4] and sizes[1] < sizes[2] < sizes[4]
    finally:
        assert pod.stop() == 0
    assert pod.left_over() == []


def _value(metrics: str, start: str) -> float:
    found = [line for line in metrics.splitlines() if line.startswith(start)]
    if not found:
        pytest.fail(f"no {start} in the metrics")
    return sum(float(line.rpartition(" ")[2]) for line in found)
