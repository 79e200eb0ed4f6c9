"""A pod with two GPUs that only the scheduler believes in: two ranks on the CPU, an answer, and a word about it.

As the operator starts it: device auto, the layout from the environment, a container that sees no CUDA device.
"""

from collections.abc import Callable
from pathlib import Path

import httpx
from e2e_harness import Serve, wait_for


def test_two_ranks_answer_on_the_cpu_and_the_admin_port_says_so(serve: Callable[..., Serve], tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    layout = {"KVERN_TENSOR_PARALLEL_SIZE": "2", "KVERN_PIPELINE_PARALLEL_SIZE": "1", "KVERN_DATA_PARALLEL_SIZE": "1"}
    flags = ("--admin-port", "0", "--admin-token-file", str(token), "--kv-cache-memory-bytes", str(8 << 20))
    running = serve("--device", "auto", *flags, env={**layout, "CUDA_VISIBLE_DEVICES": ""})
    answer = running.complete("In the beginning God", max_tokens=4, temperature=0)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 4
    assert len(running.children("worker")) == 2
    admin = wait_for(lambda: _field(running.text(), "admin_url"))
    told = httpx.get(f"{admin}/admin/layout", headers={"Authorization": "Bearer secret"}).json()
    assert (told["device"], told["current"], told["devices"]) == ("cpu", 2, 2)
    assert running.text().count("torch finds no CUDA device here; computing on the CPU") == 1
    assert "level=warning" in next(line for line in running.log if "no CUDA device" in line)


def _field(log: str, name: str) -> str:
    return next((word.partition("=")[2] for word in log.split() if word.startswith(f"{name}=")), "")
