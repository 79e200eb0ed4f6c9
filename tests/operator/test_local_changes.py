"""Local mode with a fake engine and the real router: what an edit of the file changes while it runs."""

import asyncio
import contextlib

import pytest
from local_up import MANIFEST

from kvern_cli.ask import AskError
from kvern_operator.api.load import load_file


async def test_limits_are_kept_and_change_without_a_restart(make_up):
    up = make_up("  router: {limits: {requestsPerMinute: 1}}\n").start()
    await up.ready()
    (router,) = up.pods("router")
    assert await up.say("one") == "fake-model: one 0 1"
    with pytest.raises(AskError, match=r"1 requests a minute \(router.limits.requestsPerMinute\)"):
        await up.say("two")
    up.edit("  router: {limits: {requestsPerMinute: 60000}}\n")
    answer = ""
    async with asyncio.timeout(60):
        while not answer:
            with contextlib.suppress(AskError):
                answer = await up.say("three")
    assert answer == "fake-model: three 0 1"
    assert [p["pid"] for p in up.pods("router")] == [router["pid"]]


async def test_scaling_by_editing_the_file_drains_before_it_stops(make_up):
    up = make_up("  replicas: 2\n").start()
    await up.ready()
    up.control(chunks=40, pause=0.05)
    streams = [asyncio.create_task(up.say(f"s{i}")) for i in range(4)]
    await up.until(lambda: sum(p["inFlight"] or 0 for p in up.pods()) == 4)
    up.edit("  replicas: 1\n")
    await up.until(lambda: len(up.pods()) == 1 and up.condition("Ready")["status"] == "True")
    assert [t.done() for t in streams].count(True) >= 1
    for i, text in enumerate(await asyncio.gather(*streams)):
        assert text == f"fake-model: s{i} " + " ".join(map(str, range(40)))
    assert any(n.startswith("draining replica fake-r") and n.endswith(": 1 replica is wanted") for n in up.view.said)
    decision = up.document["service"]["status"]["autoscaling"]["lastDecision"]
    assert (decision["from"], decision["to"], decision["reason"]) == (2, 1, "spec.replicas is 1")


async def test_a_changed_template_is_rolled_out_without_a_failed_request(make_up):
    up = make_up().start()
    await up.ready()
    before, failures, answers, done = up.pods()[0]["name"], [], 0, asyncio.Event()

    async def load() -> None:
        nonlocal answers
        while not done.is_set():
            try:
                assert (await up.say("x")).startswith("fake-model: x")
                answers += 1
            except (AskError, AssertionError) as error:
                failures.append(repr(error))

    loads = [asyncio.create_task(load()) for _ in range(3)]
    up.edit("  engine: {maxModelLen: 256}\n")
    await up.until(lambda: [p["name"] for p in up.pods()] not in ([before], [before, "fake-r1-0"]))
    await up.ready()
    done.set()
    await asyncio.gather(*loads)
    assert failures == [] and answers > 2
    assert [p["name"] for p in up.pods()] == ["fake-r1-0"]


async def test_an_invalid_edit_is_reported_once_and_the_old_spec_goes_on(make_up):
    up = make_up().start()
    await up.ready()
    up.edit("  replica: 3\n")
    await up.until(lambda: len(up.view.said) > 1)
    await asyncio.sleep(0.6)
    complaints = [line for line in up.view.said if line.startswith("the change is ignored")]
    why = f"{up.file}:8: spec.replica: unknown field; did you mean replicas?"
    assert complaints == [f"the change is ignored, what ran before goes on:\n{why}"]
    assert await up.say("still?") == "fake-model: still? 0 1"
    up.file.write_text(MANIFEST.replace("fake-model", "other"))
    await up.until(
        lambda: any("spec.model.name: 'other' (was 'fake-model'): the name clients use is" in n for n in up.view.said)
    )
    up.file.write_text(MANIFEST.replace("name: fake,", "name: fake2,"))
    await up.until(
        lambda: any("metadata.name: 'fake2' (was 'fake') would be another service" in n for n in up.view.said)
    )
    up.file.unlink()
    await up.until(lambda: any("No such file" in n for n in up.view.said))
    assert await up.say("still?") == "fake-model: still? 0 1"


async def test_suspend_and_back(make_up):
    up = make_up().start()
    await up.ready()
    up.edit("  suspend: true\n")
    await up.until(lambda: up.document["pods"] == [])
    assert up.condition("Ready")["reason"] == "Suspended"
    up.edit("")
    await up.ready()
    assert await up.say("back?") == "fake-model: back? 0 1"


TWO = "  resources: {gpusPerPod: 4}\n  parallelism: {tensor: {size: %d}}\n"


async def test_a_tensor_size_that_changes_in_the_file_changes_in_the_pod_that_runs(make_up):
    up = make_up()
    manifest = MANIFEST.replace("  resources: {gpusPerPod: 0}\n", "")
    up.file.write_text(manifest + TWO % 4)
    up.runner._service = up.runner._adopt(load_file(up.file), 1)
    up.control(switch=0.5)
    up.start()
    await up.ready()
    pid = up.pods()[0]["pid"]
    up.file.write_text(manifest + TWO % 2)
    await up.until(lambda: any("from tensor size 4 to 2 while it serves" in line for line in up.view.said))
    await up.until(lambda: up.condition("ParallelismStable")["message"] == "tensor size 4, wanted 2")
    await up.until(lambda: up.condition("ParallelismStable")["message"] == "tensor size 2 on every ready replica")
    assert up.pods()[0]["pid"] == pid and up.pods()[0]["restarts"] == 0
    layout = (up.state.path / "volumes" / "configmap-fake-r0-layout" / "KVERN_TENSOR_PARALLEL_SIZE").read_text()
    assert layout == "2", "what a restart would begin with"
    up.control(refuse="this pod has a pipeline")
    up.file.write_text(manifest + TWO % 1)
    await up.until(lambda: any(p["replica"] == "fake-r1" for p in up.pods()))
    await up.until(lambda: len(up.pods()) == 1 and up.condition("Ready")["status"] == "True")
    why = "it cannot change to tensor size 1 while it serves: this pod has a pipeline"
    assert f"draining replica fake-r0 (0 in flight): {why}" in up.view.said
