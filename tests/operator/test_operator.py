"""The whole operator process against an API server in this process: kopf, Lease, queue and workers together."""

import asyncio
import contextlib
import itertools
import os
import signal
from dataclasses import replace

import aiohttp
import pytest
from effects import SERVICE_PATH, SETTINGS, path, until
from kubernetes.aio.client.configuration import Configuration

from kvern_operator import main as operator_main
from kvern_operator.config import Config
from kvern_operator.kube import KubeClient
from kvern_operator.leader import Terms
from kvern_operator.main import Operator

LEASE = "/apis/coordination.k8s.io/v1/namespaces/kvern-system/leases/kvern-operator"


@pytest.fixture
def configured(api, monkeypatch):
    async def load():
        return Configuration(host=api.url)

    def nobody(*_):
        raise KeyError("getpwuid(): uid not found: 65532")

    monkeypatch.setattr(operator_main, "load_configuration", load)
    monkeypatch.setattr("pwd.getpwuid", nobody)  # as in the container
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(operator_main, "LOOK_FOR_CRD", 0.05)
    return Config("kvern-system", SETTINGS, identity="one", health_port=0, resync=30)


@contextlib.asynccontextmanager
async def running(config, terms=None):
    operator = Operator(config)
    if terms is not None:
        operator.terms = terms
    task = asyncio.create_task(operator.run())
    try:
        yield operator, task
    finally:
        operator._stop.set()
        await asyncio.wait({task}, timeout=60)
        if not task.done():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def get(operator, where):
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{operator.port}{where}") as answer:
        return answer.status, await answer.text()


def ready(api):
    conditions = api.objects[SERVICE_PATH].get("status", {}).get("conditions", [])
    return next((c["status"] for c in conditions if c["type"] == "Ready"), None)


async def test_from_apply_to_ready_then_idle_then_stopped(api, bench, configured):
    bench.create()
    async with running(configured) as (operator, task):
        await until(lambda: "smol-router" in api.of("deployments") and ready(api) == "False")
        assert api.objects[LEASE]["spec"]["holderIdentity"] == "one"
        bench.run_pod("smol-r0-0")
        bench.run_pod("smol-router-abc")
        await until(lambda: ready(api) == "True")
        # Idle: no write but the Lease. kopf leaves no trace on the resource.
        for _ in range(60):  # what is still on its way comes to an end
            api.requests.clear()
            await asyncio.sleep(0.5)
            if not api.writes("/leases/"):
                break
        api.requests.clear()
        await asyncio.sleep(1.5)
        assert api.writes("/leases/") == []
        assert "finalizers" not in api.objects[SERVICE_PATH]["metadata"]
        assert "annotations" not in api.objects[SERVICE_PATH]["metadata"]
        # A child that somebody removes comes back, by its watch event.
        api.remove(path("Service", "smol"))
        await until(lambda: "smol" in api.of("services"))
        assert (await get(operator, "/healthz"))[0] == (await get(operator, "/readyz"))[0] == 200
        text = (await get(operator, "/metrics"))[1]
        assert "kvern_operator_leader 1.0" in text and "kvern_operator_services 1.0" in text
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await task == 0
    assert api.objects[LEASE]["spec"]["holderIdentity"] == ""  # the next one need not wait


async def test_what_was_deleted_while_the_watches_were_broken_is_found(api, bench, configured, monkeypatch):
    monkeypatch.setattr("kvern_operator.verify.SOON", 0.2)
    bench.create()
    async with running(configured):
        await until(lambda: "smol-router" in api.of("deployments"))
        await asyncio.sleep(0.3)
        where = path("Deployment", "smol-router")
        del api.objects[where]  # without an event
        api.break_watches()
        await until(lambda: where in api.objects)


async def test_watches_that_fall_silent_are_begun_again(api, bench, configured, monkeypatch):
    """Open, without a word, as behind a proxy that has lost the other end (kopf's inactivity_timeout)."""
    monkeypatch.setattr("kvern_operator.handlers.SILENT", 1.0)
    bench.create()
    async with running(configured):
        await until(lambda: "smol-router" in api.of("deployments") and "status" in api.objects[SERVICE_PATH])
        api.hush()
        bench.create({"replicas": 2}, generation=2)
        await until(lambda: "smol-r1" in api.of("statefulsets"))


async def test_an_operator_whose_watches_are_silent_is_not_alive(api, bench, configured, monkeypatch):
    """And that does not begin them again: its kubelet does. An open port says nothing."""
    monkeypatch.setattr("kvern_operator.main.DEAF", 0.3)
    bench.create()
    async with running(configured) as (operator, _):
        await until(lambda: operator._leading and operator._watches.count >= 5)
        api.hush()
        await until(lambda: operator._watches.age() > 0.3)
        status, text = await get(operator, "/healthz")
        assert status == 503 and "a watch has been silent for" in text


async def test_a_leader_whose_etcd_was_restored_exits_and_the_next_one_takes_what_there_is(api, bench, configured):
    bench.create({"replicas": 2})
    async with running(configured, Terms(12, 10, 0.3)) as (_, task):
        await until(lambda: "smol-router" in api.of("deployments") and "status" in api.objects[SERVICE_PATH])
        # The backup: one replica, no status, versions as they were then.
        for where in [p for p in api.objects if p.rpartition("/")[2] == "smol-r1"]:
            del api.objects[where]
        for where, obj in list(api.objects.items()):
            kept = {k: v for k, v in obj.items() if k != "status"}
            api.objects[where] = {**kept, "metadata": {**obj["metadata"], "resourceVersion": "5"}}
        api._versions = itertools.count(6)
        async with asyncio.timeout(60):
            assert await task == 1
    async with running(configured):
        await until(lambda: "smol-r1" in api.of("statefulsets"))
        await until(lambda: api.objects[SERVICE_PATH].get("status", {}).get("replicas") == 2)


async def test_a_standby_is_ready_and_writes_nothing(api, bench, configured):
    lease = {"holderIdentity": "other", "leaseDurationSeconds": 15, "renewTime": "x"}
    api.put(LEASE, {"kind": "Lease", "metadata": {"name": "kvern-operator"}, "spec": lease})
    bench.create()
    async with running(configured) as (operator, task):
        await until(lambda: operator._elector is not None and operator._elector.leader == "other")
        assert (await get(operator, "/readyz"))[0] == (await get(operator, "/healthz"))[0] == 200
        assert "kvern_operator_leader 0.0" in (await get(operator, "/metrics"))[1]
        assert api.writes() == []
        operator._stop.set()
        async with asyncio.timeout(60):
            assert await task == 0
    assert api.objects[LEASE]["spec"]["holderIdentity"] == "other"


async def test_whoever_loses_the_lease_exits_and_writes_no_more(api, bench, configured):
    bench.create()
    async with running(configured, Terms(12, 10, 0.3)) as (_, task):
        await until(lambda: "smol-router" in api.of("deployments"))
        lease = api.objects[LEASE]
        api.put(LEASE, {**lease, "spec": {**lease["spec"], "holderIdentity": "other", "renewTime": "x"}})
        async with asyncio.timeout(60):
            assert await task == 1
    api.requests.clear()
    api.remove(path("Service", "smol"))
    await asyncio.sleep(0.2)
    assert api.writes() == []
    assert api.objects[LEASE]["spec"]["holderIdentity"] == "other"


async def test_it_waits_for_the_crd_alive_but_not_ready(api, bench, configured):
    api.refuse = lambda m, p, b: (404, "no") if p == "/apis/kvern.dev/v1alpha1" else None
    bench.create()
    async with running(configured) as (operator, _):
        await until(lambda: operator.port and "CRD" in operator._waiting_for)
        assert (await get(operator, "/healthz"))[0] == 200
        status, text = await get(operator, "/readyz")
        assert status == 503 and "install the chart kvern-crds" in text
        api.refuse = lambda m, p, b: None
        await until(lambda: "smol-router" in api.of("deployments"))


async def test_only_the_namespaces_told_are_watched(api, bench, configured):
    bench.create()
    config = replace(configured, watch_namespaces=("team-b",))
    async with running(config) as (operator, _):
        await until(lambda: operator._leading and operator._watches.count >= 5)
        assert all("/namespaces/" in p for m, p in api.requests if p.endswith(("/pods", "/inferenceservices")))
        assert not any("customresourcedefinitions" in p or p.endswith("/namespaces") for _, p in api.requests)
        await asyncio.sleep(0.3)
        assert api.writes("/leases") == []


async def test_a_port_that_is_taken_is_said(api, configured, caplog):
    other = Operator(configured)
    port = await other.health.start(0)
    try:
        assert await Operator(replace(configured, health_port=port)).run() == 1
    finally:
        await other.health.stop()
    assert f"port {port} cannot be listened on" in caplog.text


async def test_the_client_says_what_the_api_server_said(api):
    api.refuse = lambda m, p, b: (422, 'Service "x" is invalid: spec.ports: Required value')
    client = KubeClient(Configuration(host=api.url))
    with pytest.raises(Exception, match=r"spec\.ports: Required value"):
        await client.request("GET", "/api/v1/pods")
    await client.close()


def test_the_command_takes_no_arguments(capsys, monkeypatch):
    assert operator_main.main(["--versio"]) == 2
    assert "takes no arguments (got --versio)" in capsys.readouterr().err
    assert operator_main.main(["--version"]) == 0
    for name in [n for n in os.environ if n.startswith("KVERN_")]:
        monkeypatch.delenv(name)
    assert operator_main.main([]) == 2
    said = capsys.readouterr().err
    assert "kvern-operator: KVERN_NAMESPACE is not set" in said and "KVERN_OPERATOR_KEY_FILE" in said
