"""What happens around requests: keys, limits, disconnects, dead engines, drain, shutdown, several processes."""

import asyncio
import json
import os
import socket
import time

import httpx
import pytest
from fake_supervisor import FakeSupervisor
from server_harness import TOKEN, Setup, events_of, saying, wait_until

from kvern_engine.server import main
from kvern_engine.server.auth import read_token_file
from kvern_engine.server.lifecycle import pod_state
from kvern_engine.tokenizer import Tokenizer

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
ADMIN = {"Authorization": f"Bearer {TOKEN}"}


def endless(setup: Setup, tokenizer: Tokenizer, **config):
    """A server whose core goes on until the context is full, slowly."""
    core = setup.core(step_seconds=0.01)
    core.reply = saying(tokenizer, "In the beginning God created the heaven and the earth.")
    server = setup.server(**config)
    server.wait_for(200)
    return server, core


def ask(sock: socket.socket, body: object) -> None:
    """Sent without a look whether the connection is still open: the worst that a race can be."""
    data = json.dumps(body).encode()
    fields = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    sock.sendall(f"POST {CHAT} HTTP/1.1\r\n{fields}\r\n\r\n".encode() + data)


def head_of(sock: socket.socket) -> bytes:
    """What has come when the head is whole."""
    told = b""
    while b"\r\n\r\n" not in told:
        data = sock.recv(65536)
        assert data, "the connection was closed"
        told += data
    return told


class TestKeys:
    def test_keys(self, setup: Setup, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KVERN_API_KEYS", "from-env, other")
        server, _ = endless(setup, tokenizer, api_key=["k1"])
        body = {**BODY, "max_tokens": 1}
        for key in ("k1", "from-env", "other"):
            assert httpx.post(server.url + CHAT, json=body, headers={"Authorization": f"Bearer {key}"}).is_success
        for headers in ({}, {"Authorization": "Bearer k2"}, {"Authorization": "Basic k1"}, {"Authorization": "k1"}):
            for path in (CHAT, "/v1/models", "/tokenize", "/v1/nothing"):
                response = httpx.post(server.url + path, json=body, headers=headers)
                assert response.status_code == 401 and response.json()["error"]["code"] == "invalid_api_key"
                assert "Authorization: Bearer" in response.json()["error"]["message"]
                assert response.headers["www-authenticate"] == "Bearer"
        for path in ("/health", "/ready", "/metrics", "/version", "/ping", "/openapi.json"):
            assert httpx.get(server.url + path).status_code == 200

    def test_body_limit(self, setup: Setup, tokenizer: Tokenizer) -> None:
        server, _ = endless(setup, tokenizer, max_body_bytes=2048)
        body = json.dumps({"prompt": "x" * 3000}).encode()
        for content in (body, iter([body[:1500], body[1500:]])):  # announced, and in chunks
            headers = {"Content-Type": "application/json"}
            response = httpx.post(server.url + "/v1/completions", content=content, headers=headers)
            assert response.status_code == 413
            assert response.json()["error"]["message"] == "The body is larger than 2048 bytes (max_body_bytes)."


class TestLimit:
    def test_429_when_full(self, setup: Setup, tokenizer: Tokenizer) -> None:
        server, core = endless(setup, tokenizer, max_waiting_requests=2)
        with httpx.Client(base_url=server.url) as http:
            with (
                http.stream("POST", CHAT, json={**BODY, "stream": True}),
                http.stream("POST", CHAT, json={**BODY, "stream": True}),
            ):
                wait_until(lambda: len(core.requests) == 2)
                response = http.post(CHAT, json=BODY)
                assert response.status_code == 429 and response.headers["retry-after"] == "1"
                error = response.json()["error"]
                assert error["type"] == "rate_limit_error" and "2 requests in flight" in error["message"]
                assert http.get("/health").status_code == 200
            wait_until(lambda: http.get("/ready").json()["in_flight"] == 0)
            assert http.post(CHAT, json={**BODY, "max_tokens": 1}).status_code == 200
            metrics = http.get("/metrics").text
        assert 'vllm:admission_rejections_total{model_name="tiny",reason="queue_full"} 1.0' in metrics


class TestDisconnect:
    @pytest.mark.parametrize("stream", [True, False])
    def test_abort_within_a_second(self, setup: Setup, tokenizer: Tokenizer, stream: bool) -> None:
        server, core = endless(setup, tokenizer)
        with httpx.Client(base_url=server.url, timeout=20) as http:
            if stream:
                with http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
                    next(response.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    http.post(CHAT, json=BODY, timeout=0.3)
            left = time.monotonic()
            request_id = core.requests[0].request_id
            wait_until(lambda: request_id in core.aborts)
            assert core.aborts[request_id] - left < 15
            wait_until(lambda: http.get("/ready").json()["in_flight"] == 0)
            metrics = http.get("/metrics").text
        assert 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1.0' in metrics
        assert core.num_running == 0

    def test_all_prompts_of_a_request(self, setup: Setup, tokenizer: Tokenizer) -> None:
        server, core = endless(setup, tokenizer)
        body = {"prompt": ["a", "b", "c"], "n": 2, "stream": True, "ignore_eos": True, "max_tokens": 500}
        with httpx.stream("POST", server.url + "/v1/completions", json=body) as response:
            next(response.iter_lines())
        wait_until(lambda: len(core.aborts) == 3)

    def test_client_that_does_not_read(self, setup: Setup, tokenizer: Tokenizer) -> None:
        """It is not waited for by others, and its end is noticed."""
        server, core = endless(setup, tokenizer)
        core.step_seconds = 0
        body = {**BODY, "stream": True, "n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 400}
        with httpx.stream("POST", server.url + CHAT, json=body, timeout=20):
            wait_until(lambda: core.requests)
            assert httpx.post(server.url + CHAT, json={**BODY, "max_tokens": 2}, timeout=20).status_code == 200
        wait_until(lambda: httpx.get(server.url + "/ready").json()["in_flight"] == 0)


class TestDeadEngine:
    def test_last_engine(self, setup: Setup, tokenizer: Tokenizer) -> None:
        server, core = endless(setup, tokenizer)
        with httpx.Client(base_url=server.url, timeout=20) as http:
            with http.stream("POST", CHAT, json={**BODY, "stream": True}) as response:
                lines = response.iter_lines()
                next(lines)
                died = time.monotonic()
                core.die("the worker was killed")
                data = [line for line in lines if line]
                assert time.monotonic() - died < 15
            assert data[-1] == "data: [DONE]"
            error = json.loads(data[-2].removeprefix("data: "))["error"]
            assert error["code"] == "engine_dead" and "the worker was killed" in error["message"]
            assert http.get("/health").status_code == http.get("/ready").status_code == 503
            assert http.get("/ready").json()["status"] == "dead"
            response = http.post(CHAT, json=BODY)
            assert response.status_code == 503 and response.headers["retry-after"]
            metrics = http.get("/metrics").text
        assert 'vllm:request_success_total{engine="0",finished_reason="error",model_name="tiny"} 1.0' in metrics
        assert 'kvern:engine_up{engine="0",model_name="tiny"} 0.0' in metrics
        server.terminate()
        server.thread.join(60)
        assert not server.thread.is_alive(), "nothing is left to wait for"

    def test_before_the_first_token_it_is_a_503(self, setup: Setup, tokenizer: Tokenizer) -> None:
        import threading

        server, core = endless(setup, tokenizer)
        core.running.clear()
        answers: list[httpx.Response] = []
        ask = threading.Thread(
            target=lambda: answers.append(httpx.post(server.url + CHAT, json={**BODY, "stream": True}, timeout=20))
        )
        ask.start()
        wait_until(lambda: core.requests)
        core.die()
        ask.join(60)
        assert answers[0].status_code == 503 and answers[0].headers["retry-after"] == "1"

    def test_others_go_on(self, setup: Setup, tokenizer: Tokenizer) -> None:
        cores = [setup.core(engine=e, step_seconds=0.005) for e in range(2)]
        for core in cores:
            core.reply = saying(tokenizer, "Amen.")
        server = setup.server(engines=2)
        server.wait_for(200)
        for _ in range(4):
            assert httpx.post(server.url + CHAT, json={**BODY, "max_tokens": 2}).status_code == 200
        assert all(core.requests for core in cores), "both get work"
        cores[0].die(last=False)
        wait_until(lambda: httpx.get(server.url + "/ready").json()["engines"][0]["state"] == "dead")
        assert httpx.get(server.url + "/ready").json()["status"] == "ready"
        assert httpx.get(server.url + "/health").status_code == 200
        before = len(cores[0].requests)
        for _ in range(3):
            assert httpx.post(server.url + CHAT, json={**BODY, "max_tokens": 2}).status_code == 200
        assert len(cores[0].requests) == before


class TestLoading:
    def test_until_the_core_is_ready(self, setup: Setup, tokenizer: Tokenizer) -> None:
        core = setup.core(ready_at_start=False)
        core.reply = saying(tokenizer, "Amen.")
        server = setup.server()
        ready = httpx.get(server.url + "/ready")
        assert ready.status_code == 503 and ready.json()["status"] == "loading"
        assert httpx.get(server.url + "/health").status_code == 200
        assert httpx.get(server.url + "/v1/models").json()["data"][0]["max_model_len"] is None
        response = httpx.post(server.url + CHAT, json=BODY)
        assert response.status_code == 503 and response.headers["retry-after"]
        assert response.json()["error"]["message"] == "The model is still loading. Please retry."
        assert 'reason="loading"} 1.0' in httpx.get(server.url + "/metrics").text
        core.become_ready()
        server.wait_for(200)
        assert httpx.post(server.url + CHAT, json={**BODY, "max_tokens": 2}).status_code == 200


class TestDrain:
    def test_admin_drain_is_reversible(self, setup: Setup, tokenizer: Tokenizer) -> None:
        server, _ = endless(setup, tokenizer)
        admin = httpx.Client(base_url=server.admin_url, headers=ADMIN)
        with httpx.Client(base_url=server.url, timeout=20) as http, admin:
            with http.stream("POST", CHAT, json={**BODY, "stream": True, "max_tokens": 50}) as response:
                lines = response.iter_lines()
                next(lines)
                assert admin.post("/admin/drain").json() == {"draining": True, "terminating": False, "in_flight": 1}
                refused = http.post(CHAT, json=BODY)
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
                assert int(refused.headers["retry-after"]) > 0 and refused.headers["connection"] == "close"
                assert http.get("/ready").json()["status"] == "draining"
                assert http.get("/health").status_code == 200
                assert 'kvern:draining{model_name="tiny"} 1.0' in http.get("/metrics").text
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
            assert admin.get("/admin/drain").json()["draining"] is True
            assert admin.delete("/admin/drain").json()["draining"] is False
            assert http.get("/ready").status_code == 200
            assert http.post(CHAT, json={**BODY, "max_tokens": 1}).status_code == 200

    def test_the_pod_is_ready_when_all_its_servers_are(self, setup: Setup, tokenizer: Tokenizer) -> None:
        """The kernel chooses which of them gets a connection."""
        setup.core(servers=2)
        first = setup.server(index=0, api_server_count=2)
        first.wait_for(200, "/health")
        assert httpx.get(first.url + "/ready").json()["status"] == "loading"
        second = setup.server(index=1, api_server_count=2, load=False)
        wait_until(lambda: second.state.client.capacity)
        assert [httpx.get(s.url + "/ready").status_code for s in (first, second)] == [503, 503]
        assert httpx.post(first.url + CHAT, json=BODY).json()["error"]["code"] == "loading"
        second.load_now()
        first.wait_for(200)
        second.wait_for(200)

    def test_all_servers_of_the_pod_drain(self, setup: Setup, tokenizer: Tokenizer) -> None:
        setup.core(servers=2)
        servers = [setup.server(index=i, api_server_count=2) for i in range(2)]
        for server in servers:
            server.wait_for(200)
        httpx.post(servers[0].admin_url + "/admin/drain", headers=ADMIN)
        assert [httpx.get(s.url + "/ready").status_code for s in servers] == [503, 503]
        httpx.delete(servers[1].admin_url + "/admin/drain", headers=ADMIN)
        assert [httpx.get(s.url + "/ready").status_code for s in servers] == [200, 200]

    def test_sigterm_finishes_what_runs(self, setup: Setup, tokenizer: Tokenizer) -> None:
        server, _ = endless(setup, tokenizer)
        with httpx.Client(base_url=server.url, timeout=20) as http:
            with http.stream("POST", CHAT, json={**BODY, "stream": True, "max_tokens": 60}) as response:
                lines = response.iter_lines()
                next(lines)
                server.terminate()
                wait_until(lambda: http.get("/ready").status_code == 503)
                refused = http.post(CHAT, json=BODY)
                assert refused.status_code == 503 and refused.headers["retry-after"]
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]" and '"finish_reason":"length"' in rest[-2]
        server.thread.join(60)
        assert not server.thread.is_alive()

    def test_grace_period_still_accepts(self, setup: Setup, tokenizer: Tokenizer) -> None:
        server, _ = endless(setup, tokenizer, shutdown_grace_seconds=10)
        server.terminate()
        wait_until(lambda: httpx.get(server.url + "/ready").status_code == 503)
        assert httpx.post(server.url + CHAT, json={**BODY, "max_tokens": 1}).status_code == 200

    def test_without_a_router_a_kept_connection_serves_until_its_client_has_forgotten_it(
        self, setup: Setup, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The stream began before the signal: it could not say that its connection would not be kept."""
        monkeypatch.setattr(main, "_IDLE_SECONDS", 1.5)
        server, _ = endless(setup, tokenizer, shutdown_grace_seconds=0.1)
        with socket.create_connection(("127.0.0.1", server.sockets[0].getsockname()[1]), 20) as kept:
            ask(kept, {**BODY, "stream": True, "max_tokens": 60})
            told = head_of(kept)
            server.terminate()
            assert b"connection: close" not in told.lower()
            while b"0\r\n\r\n" not in told:
                told = told[-8:] + kept.recv(65536)
            time.sleep(0.6)  # nothing is in flight, and the grace period is over
            ask(kept, {**BODY, "max_tokens": 1})
            told = head_of(kept)
            assert told.startswith(b"HTTP/1.1 200") and b"connection: close" in told.lower()
        server.thread.join(10)
        assert not server.thread.is_alive(), "it does not wait when nobody is there"

    def test_without_a_router_a_drain_refuses_nobody(self, setup: Setup, tokenizer: Tokenizer) -> None:
        """Nobody would send it to another replica. What is told is that connections will not be kept."""
        server, _ = endless(setup, tokenizer, shutdown_grace_seconds=0.1)
        with httpx.Client(base_url=server.url, timeout=20) as http:
            assert "connection" not in http.post(CHAT, json={**BODY, "max_tokens": 1}).headers
            httpx.post(server.admin_url + "/admin/drain", headers=ADMIN)
            assert http.get("/ready").status_code == 503
            time.sleep(0.3)  # the grace period is SIGTERM's
            answer = http.post(CHAT, json={**BODY, "max_tokens": 1})
            assert answer.status_code == 200 and answer.headers["connection"] == "close"
            httpx.delete(server.admin_url + "/admin/drain", headers=ADMIN)
            assert "connection" not in http.post(CHAT, json={**BODY, "max_tokens": 1}).headers

    def test_without_a_router_it_stays_while_a_node_sends_clients(
        self, setup: Setup, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One that has not forgotten the pod: each comes on a new connection, and between two there is none."""
        server, _ = endless(setup, tokenizer, shutdown_grace_seconds=0.5)
        server.terminate()
        for _ in range(10):
            answer = httpx.post(server.url + CHAT, json={**BODY, "max_tokens": 1})
            assert answer.status_code == 200
            time.sleep(0.25)
        server.thread.join(10)
        assert not server.thread.is_alive(), "nobody comes any more"

    def test_whom_the_system_has_let_in_is_answered(self, setup: Setup, tokenizer: Tokenizer) -> None:
        """Closing a listener resets those who wait to be taken."""
        server, _ = endless(setup, tokenizer)
        waiting = []

        async def end() -> None:
            for _ in range(20):  # the loop does not turn meanwhile
                each = socket.create_connection(("127.0.0.1", server.sockets[0].getsockname()[1]), 20)
                each.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                waiting.append(each)
            await server.http[0].take_no_more()

        asyncio.run_coroutine_threadsafe(end(), server.loop).result(20)
        for each in waiting:
            with each:
                assert each.recv(99).startswith(b"HTTP/1.1 200")

    def test_time_limit_cuts_streams_with_an_error(self, setup: Setup, tokenizer: Tokenizer) -> None:
        server, core = endless(setup, tokenizer, drain_timeout_seconds=0.2)
        core.step_seconds = 0.05
        with httpx.stream("POST", server.url + CHAT, json={**BODY, "stream": True}, timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            server.terminate()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"code":"shutting_down"' in rest[-2]
        server.thread.join(60)
        assert not server.thread.is_alive()
        wait_until(lambda: core.aborts)

    def test_sigterm_after_a_drain_keeps_the_one_deadline(self, setup: Setup, tokenizer: Tokenizer) -> None:
        """The operator has waited for drain_timeout_seconds already: a stream does not get them a second time."""
        server, core = endless(setup, tokenizer, drain_timeout_seconds=3600)
        core.step_seconds = 0.05
        with httpx.stream("POST", server.url + CHAT, json={**BODY, "stream": True}, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            httpx.post(server.admin_url + "/admin/drain", headers=ADMIN)
            flag = server.state.lifecycle.drain_flag
            os.utime(flag._path, (time.time() - 3599, time.time() - 3599))  # it began an hour ago
            httpx.post(server.admin_url + "/admin/drain", headers=ADMIN)
            assert flag.age() > 3590, "asking again is no new drain"
            server.terminate()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"code":"shutting_down"' in rest[-2]
        server.thread.join(60)
        assert not server.thread.is_alive()


class TestAdmin:
    def test_token(self, setup: Setup, tokenizer: Tokenizer) -> None:
        server, _ = endless(setup, tokenizer)
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            for path in ("/admin/drain", "/admin/layout", "/nothing"):
                assert httpx.get(server.admin_url + path, headers=headers).status_code == 401
        assert httpx.get(server.admin_url + "/nothing", headers=ADMIN).status_code == 404
        wrong = httpx.put(server.admin_url + "/admin/drain", headers=ADMIN)
        assert wrong.status_code == 405 and wrong.headers["allow"] == "DELETE, GET, HEAD, POST"
        assert httpx.post(server.url + "/admin/drain", headers=ADMIN).status_code == 404, "never on the public port"

    def test_layout(self, setup: Setup, tokenizer: Tokenizer) -> None:
        server, _ = endless(setup, tokenizer)
        with FakeSupervisor(setup.folder), httpx.Client(base_url=server.admin_url, headers=ADMIN) as admin:
            layout = admin.get("/admin/layout").json()
            assert layout["feasible"] == [{"size": 1, "kvTokens": 1024 * 16}]
            assert layout["device"] == "cuda NVIDIA H200"
            assert (layout["current"], layout["target"], layout["phase"]) == (1, 1, "Stable")
            refused = admin.post("/admin/layout", json={"tensor": 2, "generation": 1})
            assert refused.status_code == 400
            assert refused.json()["error"]["message"] == (
                "tensor must be 1, the present size, got 2: on cuda:0 NVIDIA H200 that is for pods that were "
                "started with KVERN_GPU_LAYOUT_SWITCH=1."
            )
            assert admin.post("/admin/layout", json={"tensor": 1, "generation": 5}).json()["generation"] == 5
            old = admin.post("/admin/layout", json={"tensor": 1, "generation": 4})
            assert old.status_code == 409 and "generation 4 is older than 5" in old.json()["error"]["message"]
            wrong = admin.post("/admin/layout", json={"tensor": 1, "generatoin": 4})
            assert "did you mean 'generation'?" in wrong.json()["error"]["message"]

    def test_token_file(self, setup: Setup) -> None:
        path = setup.folder / "token"
        with pytest.raises(ValueError, match=r"admin_token_file .* cannot be read: No such file.*put a bearer token"):
            read_token_file(str(path))
        path.write_text(" \n")
        with pytest.raises(ValueError, match="is empty"):
            read_token_file(str(path))
        path.write_text("t0ken\n")
        assert read_token_file(str(path)) == "t0ken"


@pytest.mark.parametrize(
    ("engines", "draining", "was_ready", "loaded", "state"),
    [
        (["loading"], False, False, True, "loading"),
        (["ready"], False, False, False, "loading"),
        (["ready", "loading"], False, False, True, "loading"),
        (["ready", "loading"], False, True, True, "ready"),
        (["ready", "dead"], False, False, True, "ready"),
        (["ready"], True, True, True, "draining"),
        (["dead", "stalled"], True, True, True, "dead"),
        (["dead", "loading"], False, True, True, "loading"),
    ],
)
def test_pod_state(engines: list[str], draining: bool, was_ready: bool, loaded: bool, state: str) -> None:
    assert pod_state(engines, draining=draining, was_ready=was_ready, loaded=loaded) == state


def test_many_streams_at_once_lose_nothing(setup: Setup, tokenizer: Tokenizer) -> None:
    import asyncio

    server, core = endless(setup, tokenizer)
    core.step_seconds = 0.001

    async def one(http: httpx.AsyncClient) -> int:
        response = await http.post(
            CHAT, json={**BODY, "stream": True, "max_tokens": 40, "stream_options": {"include_usage": True}}
        )
        return events_of(response)[-1]["usage"]["completion_tokens"]

    async def run() -> list[int]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
            return await asyncio.gather(*(one(http) for _ in range(100)))

    assert asyncio.run(run()) == [40] * 100
    assert not core.aborts
