"""How the router learns of replicas while lists are late, stale or wrong: DNS names and the replicas' own words decide.

Replicas have addresses of 127.0.0.0/8 and one port, as pods have addresses of their own and one port.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvern_router import lookup

DOMAIN = "svc-engines.team.svc.cluster.local"


class Names:
    """The cluster's DNS."""

    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}
        self.asked: list[str] = []
        self.silent = threading.Event()
        self.silent.set()

    def resolve(self, host: str) -> str:
        self.asked.append(host)
        assert self.silent.wait(30)
        if host not in self.addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self.addresses[host]


@pytest.fixture
def dns(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr(lookup, "resolve", names.resolve)
    monkeypatch.setattr(lookup, "INTERVAL", 0.05)
    yield names
    names.silent.set()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def hosts(port: int, *names: str) -> dict[str, Any]:
    return {"hosts": [{"name": name, "host": f"{name}.{DOMAIN}", "port": port} for name in names]}


def listed(*replicas: Any) -> list[dict[str, Any]]:
    return [{"name": r.name, "url": r.url, "uid": f"uid-{r.host}"} for r in replicas]


async def test_a_replica_that_loads_gets_its_first_request_when_it_says_so_itself(bench: Any, dns: Names) -> None:
    """Nobody writes the list meanwhile: kubelet, API server and operator are on their way, or away."""
    port = free_port()
    bench.more = hosts(port, "r0-0")
    bench.list_replicas([])
    await bench.start(hold_timeout=30.0)
    asked = [asyncio.ensure_future(bench.ask()) for _ in range(20)]
    await bench.until(lambda: bench.metric("kvern_router_held_requests") == 20)
    pod = await bench.replica("r0-0", host="127.0.0.2", port=port)
    pod.ready = 503
    dns.addresses[f"r0-0.{DOMAIN}"] = "127.0.0.2"
    await bench.until(lambda: pod.probes > 2)
    assert not pod.seen, "an address is no readiness"
    pod.ready = 200
    began = time.monotonic()
    assert {a.status for a in await asyncio.gather(*asked)} == {200}
    assert time.monotonic() - began < 2.0
    assert len(pod.seen) == 20


async def test_what_was_found_keeps_its_streams_when_the_list_catches_up(bench: Any, dns: Names, fake: Any) -> None:
    port = free_port()
    pod = await bench.replica("r0-0", fake.sse(count=40, gap=0.02), host="127.0.0.2", port=port)
    dns.addresses[f"r0-0.{DOMAIN}"] = "127.0.0.2"
    bench.more = hosts(port, "r0-0")
    bench.list_replicas([])
    await bench.start()
    asked = asyncio.ensure_future(bench.ask())
    await bench.until(lambda: pod.seen)
    (before,) = bench.router.fleet.replicas
    bench.list_replicas(listed(pod))
    await bench.until(lambda: bench.router.fleet.describe()[0]["uid"] == "uid-127.0.0.2")
    assert bench.router.fleet.replicas == (before,) and before.inflight == 1, "the same replica, with its load"
    assert (await asked).body.count(b"data:") == 40


async def test_a_replaced_pod_is_found_while_nobody_writes_the_list(bench: Any, dns: Names) -> None:
    """The operator is away, or has missed the DELETE: the list names an address where nobody is any more."""
    port = free_port()
    old = await bench.replica("r0-0", host="127.0.0.2", port=port)
    other = await bench.replica("r1-0", host="127.0.0.3", port=port)
    bench.more = hosts(port, "r0-0", "r1-0")
    dns.addresses[f"r0-0.{DOMAIN}"] = "127.0.0.2"
    bench.list_replicas(listed(old, other))
    await bench.start()
    await asyncio.sleep(0.2)
    assert not dns.asked, "whoever answers where he is listed is not looked up"
    old.kill()
    other.kill()
    asked = [asyncio.ensure_future(bench.ask(body=b'{"prompt": "%d"}' % i)) for i in range(20)]
    await bench.until(lambda: bench.metric("kvern_router_held_requests") == 20)
    new = await bench.replica("r0-0", host="127.0.0.4", port=port)
    dns.addresses[f"r0-0.{DOMAIN}"] = "127.0.0.4"
    assert {a.status for a in await asyncio.gather(*asked)} == {200}
    assert len(new.seen) == 20
    states = {r["address"]: r["available"] for r in bench.router.fleet.describe()}
    assert states == {f"127.0.0.2:{port}": False, f"127.0.0.3:{port}": False, f"127.0.0.4:{port}": True}
    bench.list_replicas(listed(new))
    await bench.until(lambda: len(bench.router.fleet.replicas) == 1)
    assert (await bench.ask()).status == 200


async def test_two_routers_agree_on_replicas_that_one_of_them_has_found(bench: Any, dns: Names, tmp_path: Path) -> None:
    port = free_port()
    pods = [await bench.replica(f"r{i}-0", host=f"127.0.0.{i + 2}", port=port) for i in range(4)]
    for pod in pods:
        dns.addresses[f"{pod.name}.{DOMAIN}"] = pod.host
    bench.list_replicas(listed(*pods))
    await bench.start()
    (tmp_path / "other").mkdir()
    other = type(bench)(tmp_path / "other")
    other.more = hosts(port, *(pod.name for pod in pods))
    other.list_replicas([])
    try:
        await other.start()
        await bench.until(lambda: sum(r["available"] for r in other.router.fleet.describe()) == 4)
        for i in range(16):
            body = b'{"prompt": "conversation %d"}' % i
            assert (await bench.ask(body=body)).json() == (await other.ask(body=body)).json()
    finally:
        await other.close()


async def test_an_address_that_went_to_another_pod_gets_nothing(bench: Any) -> None:
    """A missed DELETE again: this time somebody is at the old address, is ready and serves another model."""
    stranger = await bench.replica("other-service-r0-0")
    stranger.says_name = "other-service-r0-0"
    bench.list_replicas([{"name": "r0-0", "url": stranger.url, "uid": "u"}])
    await bench.start(hold_timeout=0.3)
    answer = await bench.ask()
    assert answer.status == 503 and not stranger.seen
    assert "r0-0 is gone (another pod answers at its address)" in answer.json()["error"]["message"]


async def test_nor_does_one_that_does_not_say_who_it_is_where_the_pod_did(bench: Any) -> None:
    pod = await bench.replica("r0-0")
    pod.says_name = "r0-0"
    await bench.start(hold_timeout=0.3)
    assert (await bench.ask()).status == 200
    pod.says_name = None
    await bench.until(lambda: bench.probe_of(pod).startswith("gone"))
    assert (await bench.ask()).status == 503
    assert len(pod.seen) == 1


async def test_a_stale_list_costs_a_router_that_starts_no_request(bench: Any) -> None:
    """Nobody answers at two of three listed addresses, one does not even refuse: no request waits for them."""
    alive, dead, hung = [await bench.replica(name) for name in ("alive", "dead", "hung")]
    dead.kill()
    hung.ready, hung.handler = None, None
    await bench.start()
    for i in range(20):
        began = time.monotonic()
        answer = await bench.ask(body=b'{"prompt": "%d"}' % i)
        assert answer.json()["replica"] == "alive"
        assert time.monotonic() - began < 1.0
    assert bench.metric("kvern_router_retries_total") == 0
    assert len(alive.seen) == 20 and not hung.seen


async def test_a_terminating_pod_gets_nothing_though_its_name_still_leads_there(bench: Any, dns: Names) -> None:
    port = free_port()
    going = await bench.replica("r0-0", host="127.0.0.2", port=port)
    staying = await bench.replica("r1-0", host="127.0.0.3", port=port)
    dns.addresses = {f"{p.name}.{DOMAIN}": p.host for p in (going, staying)}
    bench.more = hosts(port, "r0-0", "r1-0")
    bench.list_replicas([])
    await bench.start()
    await bench.until(lambda: sum(r["available"] for r in bench.router.fleet.describe()) == 2)
    going.ready = 503  # SIGTERM
    await bench.until(lambda: bench.probe_of(going) == "not ready")
    seen = len(going.seen)
    for i in range(20):
        assert (await bench.ask(body=b'{"prompt": "%d"}' % i)).json()["replica"] == "r1-0"
    assert len(going.seen) == seen


async def test_a_draining_replica_is_not_found_again_by_its_name(bench: Any, dns: Names) -> None:
    port = free_port()
    pod = await bench.replica("r0-0", host="127.0.0.2", port=port)
    dns.addresses[f"r0-0.{DOMAIN}"] = "127.0.0.2"
    bench.more = hosts(port, "r0-0")
    bench.list_replicas([{**listed(pod)[0], "state": "draining"}])
    await bench.start(hold_timeout=0.4)
    assert (await bench.ask()).status == 503
    assert not pod.seen and not dns.asked


async def test_a_dns_that_does_not_answer_delays_nobody(bench: Any, dns: Names) -> None:
    dns.silent.clear()
    port = free_port()
    alive = await bench.replica("r0-0", host="127.0.0.2", port=port)
    bench.more = hosts(port, "r0-0", *(f"r{i}-0" for i in range(1, 30)))
    bench.list_replicas(listed(alive))
    await bench.start()
    await bench.until(lambda: len(dns.asked) == lookup.MAX_AT_ONCE)
    for _ in range(10):
        assert (await bench.ask()).status == 200
    assert len(dns.asked) == lookup.MAX_AT_ONCE, "no more threads wait than that"
    dns.silent.set()
    await bench.until(lambda: len(set(dns.asked)) == 29, 20)


async def test_nothing_is_looked_up_after_its_name_has_left(bench: Any, dns: Names) -> None:
    port = free_port()
    bench.more = hosts(port, "r0-0")
    bench.list_replicas([])
    await bench.start(hold_timeout=0.3)
    await bench.until(lambda: dns.asked)
    answer = await bench.ask()
    assert "(r0-0 has no address yet)" in answer.json()["error"]["message"]
    bench.more = {}
    bench.list_replicas([])
    await bench.until(lambda: not bench.router.fleet.to_look_up())
    await asyncio.sleep(0.1)
    asked = len(dns.asked)
    await asyncio.sleep(0.3)
    assert len(dns.asked) == asked


def test_a_resolver_that_hangs_keeps_no_router_from_ending(tmp_path: Path) -> None:
    """The resolver's C code cannot be interrupted, and Python waits for threads of its pools."""
    file = tmp_path / "replicas.json"
    file.write_text(json.dumps({"model": "m", "replicas": [], **hosts(1, "r0-0")}))
    code = (
        "import time, sys\n"
        "from kvern_router import lookup, main\n"
        "def hang(host):\n"
        "    print('asked', flush=True)\n"
        "    time.sleep(600)\n"
        "lookup.resolve = hang\n"
        f"sys.exit(main.main(['--listen', '127.0.0.1:0', '--replicas-file', {str(file)!r}]))\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "asked\n"
        while "listening" not in process.stderr.readline():
            assert process.poll() is None
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
        assert time.monotonic() - began < 10
    finally:
        process.kill()
        process.communicate()


def test_names_are_resolved_as_they_are() -> None:
    assert lookup.resolve("localhost") in ("127.0.0.1", "::1")
    with pytest.raises(OSError):
        lookup.resolve("no-such-host.invalid")
