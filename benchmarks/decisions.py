"""CPU time of one decision cycle over many services: `python benchmarks/decisions.py`.

Every service has been scraped for two minutes before (its windows are full), runs under load, and decides both replicas
and layout. Counted is what the operator's loop does with a round of answers: signals.add of every pod, then traffic and
cycle.decide of every service. Reading Prometheus'
text is not in it: that is the scraper's, in a thread of its own.
"""

import argparse
import json
import random
import time

from kvern_operator.autoscale import cycle
from kvern_operator.autoscale.layout import Look, Sizes, State
from kvern_operator.autoscale.signals import Scrape, Signals
from kvern_operator.autoscale.terms import Limits, Memory, Replica, Step, View

LIMITS = Limits(minimum=1, maximum=20, gpus=2, gpu_budget=40, itl_slo=0.025, ttft_slo=2.0)
BOUNDS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, float("inf"))
LENGTHS = (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, float("inf"))


class Service:
    """One service of `replicas` pods under a load of its own."""

    def __init__(self, number: int, replicas: int) -> None:
        rng = random.Random(number)
        self.rate, self.signals, self.memory = rng.uniform(1, 8), Signals(), Memory.new(0.0)
        self.state, self.uids = State(1), [f"{number}-{i}" for i in range(replicas)]
        self.done = dict.fromkeys(self.uids, 0.0)

    def scrapes(self, now: float) -> list[Scrape]:
        """What its pods say."""
        found = []
        for uid in self.uids:
            self.done[uid] += self.rate * 5.0
            n = self.done[uid]
            shares = [min((i + 1) / 6, 1.0) for i in range(len(BOUNDS))]
            found.append(
                Scrape(
                    uid,
                    now,
                    kv_tokens=900_000.0,
                    used_tokens=self.rate * 20_000,
                    running=self.rate * 5,
                    waiting=0.0,
                    step_tokens=n * 2000,
                    finished=n,
                    input_tokens=n * 1600,
                    output_tokens=n * 400,
                    prefill_seconds=n * 0.1,
                    itl_seconds=n * 400 * 0.01,
                    itl_count=n * 400,
                    itl=tuple((b, n * 400 * s) for b, s in zip(BOUNDS, shares, strict=True)),
                    ttft=tuple((b, n * s) for b, s in zip(BOUNDS, shares, strict=True)),
                    inputs=tuple((float(b), n * min(i / 4, 1.0)) for i, b in enumerate(LENGTHS)),
                    outputs=tuple((float(b), n * min(i / 2, 1.0)) for i, b in enumerate(LENGTHS)),
                    step=Step(256, 8192, 2),
                )
            )
        return found

    def cycle(self, now: float, scrapes: list[Scrape]) -> str:
        """What the loop does once a cycle."""
        signals = self.signals
        signals.keep(self.uids)
        for scrape in scrapes:
            signals.add(scrape)
        replicas = tuple(Replica(uid, True, 900.0, load=signals.load(uid, now)) for uid in self.uids)
        view = View(
            now,
            len(self.uids),
            replicas,
            traffic=signals.traffic(now),
            line=signals.fit.line(),
            step=signals.step(now),
        )
        attainment = signals.attainment(LIMITS.itl_slo, LIMITS.ttft_slo, now)
        look = Look(now, 1, 2, ((1, 900_000), (2, 1_000_000)), 1, attainment, signals.preempted(now))
        made = cycle.decide(LIMITS, view, self.memory, Sizes("Auto"), look, self.state)
        self.memory, self.state = made.memory, made.state
        return made.replicas.reason


def main() -> None:
    """Print one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--services", type=int, default=1000)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=5, help="measured, after the windows are full")
    args = parser.parse_args()
    services = [Service(i, args.replicas) for i in range(args.services)]
    spent = []
    for step in range(24 + args.cycles):
        now = 5.0 * step
        answers = [s.scrapes(now) for s in services]
        begin = time.process_time()
        for service, scrapes in zip(services, answers, strict=True):
            service.cycle(now, scrapes)
        if step >= 24:
            spent.append(time.process_time() - begin)
    spent.sort()
    figures = {"services": args.services, "replicas": args.replicas, "cycles": args.cycles}
    figures |= {"cpu_seconds_median": round(spent[len(spent) // 2], 3), "cpu_seconds_most": round(spent[-1], 3)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
