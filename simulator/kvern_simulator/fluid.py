"""One engine, coarse: between two events (a request comes, a prompt is computed, an answer ends) steps are alike, so
that many of them are taken at once. What a step takes is the sim profile's own formula; who is admitted, how prompts
share steps with decodes, and who is preempted follow the real scheduler's rules in the mean. `real.py` holds the real
one; tests hold the two together.
"""

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from kvern_engine.core.limits import GPU_ITL_FACTOR
from kvern_engine.core.plan import StepPlan
from kvern_engine.parallel.layout import Layout
from kvern_engine.worker.memory import available_on_gpu
from kvern_engine.worker.sim_profile import SimProfile

ITL_BOUNDS = (0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, math.inf)
TTFT_BOUNDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0, math.inf)
LENGTH_BOUNDS = (100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, math.inf)
_LOOKAHEAD = 32.0  # tokens that each running request must still be able to grow by, before another is let in
_UTILIZATION = 0.92
_NO_CROWD, _RUSH = 8, 3  # as in the scheduler and its governor: a crowd at the door makes chunks larger


@dataclass(slots=True)
class Request:
    """One request and what became of it; seconds."""

    arrival: float
    inputs: int
    outputs: int
    first: float = math.inf
    end: float = math.inf
    done: float = 0.0  # output tokens before it was preempted last


def kv_capacity(profile: SimProfile, layout: Layout) -> int:
    """Tokens of KV cache of one engine, as the simulated worker sizes it."""
    room = available_on_gpu(profile.memory_bytes, profile.rank_weight_bytes(layout), _UTILIZATION)
    return room // profile.rank_kv_bytes_per_token(layout)


def step_cost(profile: SimProfile, layout: Layout) -> tuple[float, float, float]:
    """Seconds of a step: for itself, for each token computed, for each token of context. The profile's formula is
    linear, so that three of its values say all of it."""

    def at(tokens: int, context: int) -> float:
        return profile.seconds(StepPlan(0, [], [], [], [], [0], [context], [tokens], [True]), layout)

    whole = at(0, 0)
    context = (at(0, 1_000_000) - whole) / 1e6
    return whole, (at(1_000_000, 0) - whole) / 1e6, context


class Counters:
    """What an engine counts since it began, in the shape of signals.Scrape."""

    def __init__(self) -> None:
        self.finished = self.preemptions = 0
        self.step_tokens = 0.0
        self.inputs = self.outputs = self.prefill = self.itl_seconds = self.itl_count = 0.0
        self.itl = [0.0] * len(ITL_BOUNDS)
        self.ttft = [0.0] * len(TTFT_BOUNDS)
        self.input_lengths = [0.0] * len(LENGTH_BOUNDS)
        self.output_lengths = [0.0] * len(LENGTH_BOUNDS)

    def tokens(self, seconds: float, count: float) -> None:
        """`count` tokens came, each so long after the one before."""
        self.itl_seconds += seconds * count
        self.itl_count += count
        self.itl[bisect_left(ITL_BOUNDS, seconds)] += count

    def began(self, request: Request, prefill: float) -> None:
        """The first token of a request."""
        self.prefill += prefill
        self.ttft[bisect_left(TTFT_BOUNDS, request.first - request.arrival)] += 1

    def ended(self, request: Request) -> None:
        """The last token of a request."""
        self.finished += 1
        self.inputs += request.inputs
        self.outputs += request.outputs
        self.input_lengths[bisect_left(LENGTH_BOUNDS, request.inputs)] += 1
        self.output_lengths[bisect_left(LENGTH_BOUNDS, request.outputs)] += 1


class FluidEngine:
    """One engine of `layout` (a single engine's). `advance` brings it to a time; requests come with `add`, in order."""

    def __init__(self, profile: SimProfile, layout: Layout, now: float, max_num_seqs: int = 1024) -> None:
        self.profile, self.layout, self.now = profile, layout, now
        self.kv_tokens = kv_capacity(profile, layout)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, 8192
        self.counters = Counters()
        self._cost = step_cost(profile, layout)
        self._waiting: deque[Request] = deque()
        self._prefills: deque[list[float]] = deque()  # [tokens left, admitted at]
        self._prefill_requests: deque[Request] = deque()
        self._decodes: list[
            tuple[float, int, float, Request]
        ] = []  # (clock at its end, order, clock at begin, request)
        self._clock = 0.0  # decode steps since start
        self._base = 0.0  # sum of contexts less clock x decodes
        self._prefill_tokens = 0.0  # KV that prompts on their way have taken
        self._order = 0

    # -- what routers and scrapes see ---------------------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._decodes) + len(self._prefills)

    @property
    def in_flight(self) -> int:
        return self.waiting + self.running

    @property
    def used_tokens(self) -> float:
        return self._context() + self._prefill_tokens

    def add(self, request: Request) -> None:
        """It waits from its arrival on."""
        self._waiting.append(request)

    def take_all(self) -> list[Request]:
        """Everything that is in it, taken away with what has been generated: the engine is re-formed."""
        taken = [*self._waiting, *self._prefill_requests]
        for _, _, began, request in self._decodes:
            request.done += self._clock - began
            taken.append(request)
        self._waiting.clear()
        self._prefills.clear()
        self._prefill_requests.clear()
        self._decodes.clear()
        self._base = self._prefill_tokens = 0.0
        return taken

    # -- time ---------------------------------------------------------------------------------------------------------

    def _context(self) -> float:
        return self._base + self._clock * len(self._decodes)

    def advance(self, until: float) -> None:
        """Bring the engine to `until`."""
        while self.now < until:
            self._admit()
            if not self._decodes and not self._prefills:
                arrival = self._waiting[0].arrival if self._waiting else math.inf
                self.now = min(max(arrival, self.now), until)
                if arrival >= until:
                    self.now = until
                    return
                continue
            self._segment(until)

    def _admit(self) -> None:
        waiting = self._waiting
        if not waiting or len(self._prefills) >= 2 or waiting[0].arrival > self.now:
            return
        used = self.used_tokens
        while waiting and waiting[0].arrival <= self.now and len(self._prefills) < 2:
            request, running = waiting[0], self.running
            need = request.inputs + request.done
            if running >= self.max_num_seqs:
                return
            if running and used + need + _LOOKAHEAD * (running + 1) > self.kv_tokens:
                return
            waiting.popleft()
            self._prefills.append([need, self.now])
            self._prefill_requests.append(request)
            self._prefill_tokens += need
            used += need

    def _chunk(self, decodes: int, context: float) -> tuple[float, float]:
        """(prompt tokens of a step, its seconds): beside decodes a step may take GPU_ITL_FACTOR times their time."""
        prefills, (whole, token, of_context) = self._prefills, self._cost
        of_context *= context
        alone = whole + token * decodes + of_context
        if not prefills:
            return 0.0, alone
        chunk = prefills[0][0] + prefills[1][0] if len(prefills) == 2 else prefills[0][0]  # _admit lets two in
        most = float(self.max_num_batched_tokens - decodes)
        if decodes:
            each = whole + token * (decodes + 1000.0) + of_context - alone
            rows = self.max_num_seqs
            crowd = max(min(len(self._waiting), rows - decodes - len(prefills)) - _NO_CROWD, 0) / rows
            factor = GPU_ITL_FACTOR * (1 + _RUSH * crowd)
            most = min(most, max((factor - 1) * alone / max(each, 1e-9) * 1000.0, 16.0))
        chunk = min(chunk, most)
        return chunk, whole + token * (decodes + chunk) + of_context

    def _segment(self, until: float) -> None:
        """As many like steps as pass before the next event. The innermost loop of a simulation: comparisons instead of
        min and max, which take longer than all of the arithmetic."""
        now, clock, runs, waiting = self.now, self._clock, self._decodes, self._waiting
        decodes = len(runs)
        context = self._base + clock * decodes
        chunk, seconds = self._chunk(decodes, context)
        left = until - now
        if waiting and now < waiting[0].arrival < until:
            left = waiting[0].arrival - now
        steps = left / seconds
        if self._prefills and self._prefills[0][0] < steps * chunk:
            steps = self._prefills[0][0] / chunk
        if decodes:
            if runs[0][0] - clock < steps:
                steps = runs[0][0] - clock
            if steps > 64.0:
                steps = 64.0
        if steps < 1e-6:
            steps = 1e-6
        if decodes:
            room = self.kv_tokens - context - self._prefill_tokens
            if decodes * steps > room:
                steps = max(room / decodes, 1e-6)
                if room <= decodes * 1e-3:
                    self._preempt()
                    return
            self.counters.tokens(seconds, decodes * steps)
            self._clock = clock = clock + steps
        self.now = now + steps * seconds
        self.counters.step_tokens += (decodes + chunk) * steps
        if chunk:
            self._prefill(chunk * steps)
        while runs and runs[0][0] <= clock + 1e-6:
            self._end()

    def _prefill(self, tokens: float) -> None:
        while self._prefills and tokens > 0:
            head = self._prefills[0]
            taken = min(head[0], tokens)
            head[0] -= taken
            tokens -= taken
            if head[0] <= 1e-6:
                self._prefills.popleft()
                self._begin(self._prefill_requests.popleft(), head[1])

    def _begin(self, request: Request, admitted: float) -> None:
        held = request.inputs + request.done
        self._prefill_tokens -= held
        if math.isinf(request.first):
            request.first = self.now
            self.counters.began(request, self.now - admitted)
        self._order += 1
        end = self._clock + max(request.outputs - request.done - 1, 0)
        heappush(self._decodes, (end, self._order, self._clock, request))
        self._base += held - self._clock

    def _leave(self, began: float, request: Request) -> None:
        """What it held is free."""
        self._base -= request.inputs + request.done - began

    def _end(self) -> None:
        _, _, began, request = heappop(self._decodes)
        self._leave(began, request)
        request.end = self.now
        self.counters.ended(request)

    def _preempt(self) -> None:
        """The one that loses least: it is computed again once there is room."""
        place = min(range(len(self._decodes)), key=lambda i: self._work(i))
        _, _, began, request = self._decodes[place]
        self._leave(began, request)
        self._decodes[place] = self._decodes[-1]
        self._decodes.pop()
        self._decodes.sort()
        request.done += self._clock - began
        self._waiting.appendleft(request)
        self.counters.preemptions += 1

    def _work(self, place: int) -> float:
        _, _, began, request = self._decodes[place]
        return request.inputs + request.done + self._clock - began
