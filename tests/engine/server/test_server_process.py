"""`server_main` in a process of its own, as the supervisor starts it: inherited sockets, SIGTERM, exit status."""

import os
import signal
import socket
import subprocess
import sys
import time

import httpx
from server_harness import MODEL, TEMPLATE, Setup, saying, wait_until

from kvern_engine.config import EngineConfig
from kvern_engine.tokenizer import Tokenizer

CODE = """
import sys
from kvern_engine.server.main import server_main
server_main(sys.stdin.buffer.read(), 0, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), 1)
"""


def start(folder, **config) -> tuple[subprocess.Popen, str, str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    fds = [s.fileno() for s in sockets]
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(folder), *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    process.stdin.write(EngineConfig(**config).model_dump_json().encode())
    process.stdin.close()
    urls = [f"http://127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return process, *urls


def test_serves_drains_and_exits(setup: Setup, tokenizer: Tokenizer) -> None:
    core = setup.core(step_seconds=0.01)
    core.reply = saying(tokenizer, "In the beginning God created the heaven and the earth.")
    token = setup.folder / "token"
    token.write_text("secret\n")
    process, url, admin = start(
        setup.folder, model=str(MODEL), chat_template=TEMPLATE, admin_port=0, admin_token_file=str(token)
    )
    try:
        wait_until(lambda: up(url) == 200, 60)
        assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == "tiny-kjv"
        layout = httpx.get(admin + "/admin/layout", headers={"Authorization": "Bearer secret"})
        assert layout.json()["current"] == 1
        body = {"model": str(MODEL), "messages": [{"role": "user", "content": "x"}], "stream": True, "ignore_eos": True}
        with httpx.stream(
            "POST", url + "/v1/chat/completions", json={**body, "max_tokens": 80}, timeout=60
        ) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def up(url: str) -> int:
    try:
        return httpx.get(url + "/ready").status_code
    except httpx.TransportError:
        return 0


def test_second_signal_is_quick(setup: Setup, tokenizer: Tokenizer) -> None:
    core = setup.core(step_seconds=0.05)
    core.reply = saying(tokenizer, "In the beginning")
    process, url, _ = start(setup.folder, model=str(MODEL), chat_template=TEMPLATE, admin_token_file=token_of(setup))
    try:
        wait_until(lambda: up(url) == 200, 60)
        body = {"prompt": "x", "stream": True, "ignore_eos": True, "max_tokens": 500}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            wait_until(lambda: up(url) == 503)
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and "shutting_down" in rest[-2]
        assert process.wait(60) == 0 and time.monotonic() - began < 15  # the answer would take 25
    finally:
        process.kill()
        process.wait()


def token_of(setup: Setup) -> str:
    (setup.folder / "token").write_text("secret")
    return str(setup.folder / "token")


def test_model_that_does_not_exist(setup: Setup) -> None:
    process, _, _ = start(setup.folder, model="/no/such/model", admin_token_file=token_of(setup))
    errors = process.stderr.read()
    assert process.wait(60) == 1 and b"/no/such/model" in errors and b"Traceback" not in errors


def test_token_file_that_does_not_exist(setup: Setup) -> None:
    process, _, _ = start(setup.folder, model=str(MODEL), admin_token_file="/no/such/file")
    errors = process.stderr.read()
    assert process.wait(60) == 1 and b"admin_token_file" in errors and b"Traceback" not in errors
