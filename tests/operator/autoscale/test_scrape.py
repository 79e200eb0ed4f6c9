"""Reading metrics of pods: what their text says, and hundreds of them at once over real connections."""

import asyncio
import contextlib
import time
from collections import Counter

import pytest

from kvern_operator.autoscale.readings import ENGINE_SERIES, read_engine, read_router
from kvern_operator.autoscale.scrape import LONGEST_ANSWER, OwnThread, Scraper, Target
from kvern_operator.autoscale.terms import Step

TEXT = """# HELP vllm:num_requests_running Requests in the running batch.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_waiting{engine="1",model_name="m"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="16",engine="0",max_num_batched_tokens="2048",max_num_seqs="64",num_gpu_blocks="100"} 1
vllm:cache_config_info{block_size="16",engine="1",max_num_batched_tokens="2048",max_num_seqs="64",num_gpu_blocks="100"} 1
vllm:num_preemptions_total{engine="0",model_name="m"} 1.0
vllm:num_preemptions_total{engine="1",model_name="m"} 2.0
kvern:step_tokens_total{engine="0",model_name="m"} 1000.0
vllm:request_prompt_tokens_bucket{engine="0",le="10.0",model_name="m"} 1.0
vllm:request_prompt_tokens_bucket{engine="0",le="+Inf",model_name="m"} 4.0
vllm:request_prompt_tokens_bucket{engine="1",le="10.0",model_name="m"} 2.0
vllm:request_prompt_tokens_bucket{engine="1",le="+Inf",model_name="m"} 2.0
vllm:request_prompt_tokens_sum{engine="0",model_name="m"} 70.0
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 700.0
vllm:request_generation_tokens_count{engine="0",model_name="m"} 6.0
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 70.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 16.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="odd \\"name\\" {with} braces"} 2.5
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 100.0
"""  # noqa: E501


def test_the_engines_of_a_pod_are_added_up():
    found = read_engine("u", 7.0, TEXT)
    assert (found.uid, found.at, found.running, found.waiting) == ("u", 7.0, 8.0, 2.0)
    assert (found.kv_tokens, found.used_tokens) == (3200.0, 0.75 * 1600)
    assert found.step == Step(64, 2048, 2)
    assert (found.preemptions, found.step_tokens, found.finished) == (3.0, 1000.0, 6.0)
    assert (found.input_tokens, found.output_tokens) == (70.0, 700.0)
    assert (found.prefix_queries, found.prefix_hits) == (70.0, 16.0)
    assert (found.itl_seconds, found.itl_count) == (2.5, 100.0)
    assert found.inputs == ((10.0, 3.0), (float("inf"), 6.0))


@pytest.mark.parametrize("line", ["num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"])
def test_half_an_answer_is_none(line):
    less = "\n".join(row for row in TEXT.splitlines() if line not in row)
    with pytest.raises(ValueError, match="no engine has said"):
        read_engine("u", 0.0, less)


@pytest.mark.parametrize("text", ["<html>not found</html>", "vllm:num_requests_running", "a{b 1", "a nonsense"])
def test_what_is_no_metrics_is_refused(text):
    with pytest.raises(ValueError):
        read_engine("u", 0.0, text)


def test_an_engine_of_vllm_says_nothing_of_its_steps():
    text = TEXT.replace('max_num_batched_tokens="2048",max_num_seqs="64",', "")
    assert read_engine("u", 0.0, text).step == Step(engines=2)


def test_a_router():
    assert read_router("kvern_router_held_requests 3.0\nkvern_router_held_input_tokens 120.0\n") == (3.0, 120.0)
    with pytest.raises(ValueError, match="how many requests it holds"):
        read_router("kvern_router_retries_total 3.0\n")


# ---------------------------------------------------------------- over real connections


class Pods:
    """One server for all addresses of 127/8: a pod is the address that was called. `odd` pods do something else."""

    def __init__(self) -> None:
        self.calls, self.connections, self.odd = Counter(), 0, {}
        self.paths = []

    async def __aenter__(self) -> "Pods":
        self.server = await asyncio.start_server(self._serve, "0.0.0.0", 0)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.close()

    def target(self, number: int, routing: bool = False) -> Target:
        address = f"127.88.{number // 250}.{number % 250 + 1}:{self.port}"
        return Target(f"uid-{number}", f"pod-{number}", address, routing)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        parts = writer.get_extra_info("sockname")[0].split(".")
        number = int(parts[2]) * 250 + int(parts[3]) - 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.calls[number] += 1
                self.paths.append(head.split(b" ", 2)[1].decode())
                odd = self.odd.get(number)
                if odd == "hang":
                    await asyncio.sleep(60)
                name = odd.removeprefix("name:") if odd and odd.startswith("name:") else f"pod-{number}"
                body = TEXT.encode()
                if odd == "router":
                    body = b"kvern_router_held_requests 2.0\n"
                if odd == "endless":
                    body = b"x 1\n" * (LONGEST_ANSWER // 4 + 10)
                status = b"500 Oops" if odd == "fails" else b"200 OK"
                writer.write(
                    b"HTTP/1.1 %s\r\nX-Kvern-Pod: %s\r\nContent-Length: %d\r\n\r\n" % (status, name.encode(), len(body))
                )
                writer.write(body)
                await writer.drain()
        writer.close()


async def test_five_hundred_pods_in_five_seconds():
    async with Pods() as pods:
        scraper, targets = Scraper(within=60.0, timeout=30.0), [pods.target(n) for n in range(500)]
        try:
            first = await scraper.round(targets)
            began, cpu = time.monotonic(), time.process_time()
            again = await scraper.round(targets)
            took, cpu = time.monotonic() - began, time.process_time() - cpu
        finally:
            await scraper.close()
        assert len(first.engines) == len(again.engines) == 500 and not again.failures
        assert again.engines["uid-7"].at > first.engines["uid-7"].at
        assert pods.connections == 500  # kept from one round to the next
        assert cpu < 5.0, (took, cpu)  # both ends of all connections; seconds of a machine that others use as well
        assert all(name.replace(":", "%3A") in pods.paths[0] or name in pods.paths[0] for name in ENGINE_SERIES)


async def test_one_bad_pod_is_missing_and_nobody_else():
    async with Pods() as pods:
        pods.odd = {1: "hang", 2: "fails", 3: "name:smol-r9-0", 4: "endless", 5: "router", 6: "router"}
        targets = [pods.target(n) for n in range(6)] + [pods.target(6, routing=True), pods.target(7, routing=True)]
        closed = Target("uid-9", "pod-9", "127.88.0.1:9")
        scraper = Scraper(timeout=0.5, within=5.0)
        try:
            found = await scraper.round([*targets, closed])
        finally:
            await scraper.close()
        assert set(found.engines) == {"uid-0"} and found.routers["uid-6"][1:] == (2.0, 0.0)
        said = found.failures
        assert set(said) == {"uid-1", "uid-2", "uid-3", "uid-4", "uid-5", "uid-7", "uid-9"}
        assert said["uid-1"] == "no answer in time" and said["uid-2"] == "HTTP 500"
        assert said["uid-3"] == "smol-r9-0 answers at its address"
        assert "bytes" in said["uid-4"] and "no engine" in said["uid-5"] and "how many requests" in said["uid-7"]


async def test_hung_pods_do_not_hold_a_round_up():
    async with Pods() as pods:
        pods.odd = dict.fromkeys(range(40), "hang")
        scraper = Scraper(timeout=30.0, within=1.0, at_once=8)
        try:
            began = time.monotonic()
            found = await scraper.round([pods.target(n) for n in range(40)])
            assert time.monotonic() - began < 20.0 and len(found.failures) == 40
            pods.odd = {}
            found = await scraper.round([pods.target(n) for n in range(100, 110)])
            assert len(found.engines) == 10
        finally:
            await scraper.close()


async def test_an_address_that_two_pods_have_is_nobodys():
    async with Pods() as pods:
        old, new, other = pods.target(1), pods.target(1), pods.target(2)
        new = Target("uid-new", "pod-1", new.address)
        scraper = Scraper()
        try:
            found = await scraper.round([old, new, other])
        finally:
            await scraper.close()
        assert set(found.engines) == {"uid-2"} and found.failures["uid-new"] == "two pods have one address"
        assert pods.calls[1] == 0


async def test_in_a_thread_of_its_own():
    async with Pods() as pods:
        thread, scraper = OwnThread("scrape"), Scraper()
        try:
            found = await thread.run(lambda: scraper.round([pods.target(1)]))
            assert set(found.engines) == {"uid-1"}
            await thread.run(scraper.close)
        finally:
            await thread.stop()
