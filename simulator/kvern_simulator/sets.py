"""The sets of traces: the usual one, one service with thousands of requests a second, a thousand services, layouts.
Fixed by their names, which are the seeds. Half of each set is held out while targets are tuned."""

import math
import random
from collections.abc import Callable

from kvern_simulator.fluid import Request
from kvern_simulator.traces import Lengths, Rate, Service, Trace, Trouble, requests_of

CHAT, RAG, LONG, WRITE = (1600.0, 400.0), (4500.0, 250.0), (6500.0, 150.0), (600.0, 900.0)


def _wave(low: float, high: float, period: float) -> Rate:
    return lambda t: low + (high - low) * 0.5 * (1 - math.cos(2 * math.pi * t / period))


def _bursts(base: float, high: float, begins: tuple[float, ...], length: float) -> Rate:
    return lambda t: high if any(b <= t < b + length for b in begins) else base


def usual(hours: float = 1.0) -> list[Trace]:
    """The usual set: one of each kind to train with, one of each kind held out. Those called large take half of the
    time and have several times the load: how much is to spare depends on how many replicas share the fluctuations."""
    end = hours * 3600.0
    half = end / 2

    def made(
        name: str,
        rate: Rate,
        most: float,
        lengths: Callable[[float], Lengths] | Lengths,
        training: bool,
        start: float = 60.0,
        trouble: tuple[Trouble, ...] = (),
        seconds: float = end,
        maximum: int = 8,
    ) -> Trace:
        length = lengths if callable(lengths) else (lambda _: lengths)
        requests = tuple(requests_of(name, seconds, rate, most, length))
        return Trace(name, seconds, requests, start, trouble, training, maximum)

    return [
        made("diurnal-chat", _wave(1, 22, end), 22, CHAT, True),
        made("diurnal-rag", _wave(0.5, 11, end / 2), 11, RAG, False),
        made("bursts-rag", _bursts(1.5, 11, (0.2 * end, 0.5 * end, 0.8 * end), 420), 11, RAG, True),
        made("bursts-chat", _bursts(4, 22, (0.25 * end, 0.6 * end), 600), 22, CHAT, False),
        made("shift-to-long", lambda t: 6, 6, lambda t: CHAT if t < end / 2 else LONG, False),
        made("shift-to-writing", lambda t: 6, 6, lambda t: RAG if t < end / 2 else WRITE, True),
        made("slow-starts", _wave(1, 10, end), 10, RAG, False, start=240.0),
        made("slow-starts-chat", _wave(1, 18, end / 2), 18, CHAT, True, start=240.0),
        made("no-room", _wave(1, 11, end), 11, RAG, False, trouble=(Trouble(0.2 * end, 0.45 * end, gpus=2),)),
        made("lost-metrics", _wave(1, 18, end), 18, CHAT, False, trouble=(Trouble(0.4 * end, 0.6 * end, lost=1.0),)),
        made("some-metrics-lost", _wave(1, 10, end / 2), 10, RAG, True, trouble=(Trouble(1200, 2400, lost=0.5),)),
        made("steady", lambda t: 5, 5, RAG, True),
        made("large-chat", _wave(8, 90, half), 90, CHAT, True, seconds=half, maximum=24),
        made("large-bursts-rag", _bursts(10, 45, (0.15 * end, 0.35 * end), 300), 45, RAG, False, 60.0, (), half, 24),
        made("large-writing", _wave(10, 80, half), 80, WRITE, False, seconds=half, maximum=24),
        made("large-shift", lambda t: 40, 40, lambda t: RAG if t < half / 2 else CHAT, True, 60.0, (), half, 24),
    ]


def large(hours: float = 0.2) -> list[Trace]:
    """One service with up to 1,000, 3,000 and 10,000 requests a second: a day's wave, bursts, a shift of lengths. Each
    simulated request and pod stands for `scale` of them."""
    end = hours * 3600.0

    def made(
        name: str,
        rate: Rate,
        lengths: Lengths | Callable[[float], Lengths],
        training: bool,
        scale: int,
        most: int,
        replicas: int,
    ) -> Trace:
        length = lengths if callable(lengths) else (lambda _: lengths)
        requests = tuple(requests_of(name, end, rate, 0.0, length, scale))
        return Trace(name, end, requests, 60.0, (), training, most, replicas, scale)

    begins = (0.25 * end, 0.6 * end)
    return [
        made("1000-chat", _wave(150, 1_000, end), CHAT, True, 10, 400, 30),
        made("1000-bursts-rag", _bursts(250, 600, begins, 0.2 * end), RAG, False, 10, 400, 60),
        made("3000-writing", _wave(500, 3_000, end), WRITE, True, 20, 800, 50),
        made("3000-shift", lambda _: 1_500, lambda t: CHAT if t < end / 2 else RAG, False, 20, 800, 190),
        made("10000-chat", _wave(1_500, 10_000, end), CHAT, False, 40, 3_000, 260),
        made("10000-bursts-writing", _bursts(4_000, 10_000, begins, 0.2 * end), WRITE, True, 40, 3_000, 400),
    ]


def fleet(services: int = 1_000, hours: float = 0.2) -> list[Trace]:
    """Many services, most of them small: rates fall as in Zipf's law, from 60 requests a second down to one in 20 s,
    each with a wave of its own phase and one of four kinds of requests. Every other one is held out."""
    end, found = hours * 3600.0, []
    for i in range(services):
        high = max(60.0 / (1 + i) ** 0.75, 0.05)
        requests = tuple(_member(f"fleet-{i}", end, high))
        begin = max(math.ceil(high / 8), 1)
        found.append(Trace(f"fleet-{i:04}", end, requests, 60.0, (), i % 2 == 0, 24, begin))
    return found


def _member(seed: str, seconds: float, high: float) -> list[Request]:
    rng = random.Random(f"what {seed} is like")
    phase, lengths = rng.uniform(0.0, seconds), rng.choice((CHAT, RAG, LONG, WRITE))
    wave = _wave(high * rng.uniform(0.2, 0.8), high, seconds * rng.choice((0.5, 1.0, 2.0)))
    return requests_of(seed, seconds, lambda t: wave(t + phase), high, lambda _: lengths)


SMALL_CARDS = 24_000_000_000  # bytes: weights leave room for 46,000 tokens on one, for 214,000 on two


def layouts(hours: float = 2.0) -> list[Trace]:
    """Replicas of two or four devices whose tensor size is the planner's to choose."""
    end = hours * 3600.0

    def made(
        name: str,
        rate: Rate,
        most: float,
        lengths: Lengths | Callable[[float], Lengths],
        training: bool,
        service: Service,
        maximum: int,
    ) -> Trace:
        length = lengths if callable(lengths) else (lambda _: lengths)
        requests = tuple(requests_of(name, end, rate, most, length))
        return Trace(name, end, requests, 60.0, (), training, maximum, 2, 1, service)

    pair, four = (1, 2), (1, 2, 4)
    return [
        made("strict-itl", lambda _: 8, 8, CHAT, True, Service(2, 1, pair, itl_slo=0.0058), 4),
        made("small-cards", _wave(8, 64, end), 64, WRITE, False, Service(4, 1, four, 0.025, SMALL_CARDS), 2),
        made("small-cards-steady", lambda _: 55, 55, WRITE, True, Service(4, 1, four, 0.025, SMALL_CARDS), 2),
        made("too-large", _wave(4, 34, end), 34, RAG, False, Service(4, 4, four), 2),  # 30 at size 4, more at size 1
        made(
            "there-and-back",
            _bursts(6, 40, tuple(k * end / 4 for k in (1, 3)), end / 4),
            40,
            CHAT,
            False,
            Service(2, 1, pair, itl_slo=0.0058),
            6,
        ),
        made("day", _wave(1, 30, end), 30, CHAT, True, Service(2, 2, pair), 4),
    ]
