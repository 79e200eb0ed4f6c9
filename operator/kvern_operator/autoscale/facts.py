"""What a decision knows: the view counted once. Pure."""

from dataclasses import dataclass

from kvern_operator.autoscale.capacity import ahead, capacity, demand, shape_of
from kvern_operator.autoscale.terms import Full, Limits, Line, Load, Memory, Traffic, View

PATIENCE = 2.0  # times the average start, after which a pod that is not ready is no supply any more
_UNREACHABLE = 0.9  # of the SLO that the ITL of a few requests may take: above it no number of replicas helps
_FEW = 1.0  # requests, for that question


@dataclass(frozen=True)
class Facts:
    """The view, counted once. `silent`: ready, but without metrics."""

    loads: tuple[Load, ...]
    ready: int
    silent: int
    young: int
    loading: int  # overdue, and running: never killed while it loads
    stuck: int  # overdue, and without a node
    traffic: Traffic
    line: Line | None
    demand: float
    cap: float | None  # None: nothing is known yet
    full: tuple[Full, ...]  # as it was before this cycle
    ahead: float  # requests a second expected when a replica that starts now is ready
    jump: float  # requests a second: the largest of late that nobody could foresee
    kv_tokens: float

    @property
    def overdue(self) -> int:
        return self.loading + self.stuck

    @property
    def busy(self) -> bool:
        return any(load.running or load.waiting for load in self.loads)


def facts_of(limits: Limits, view: View, memory: Memory) -> Facts:
    """The view, counted."""
    ready = [r for r in view.replicas if r.ready]
    loads = tuple(r.load for r in ready if r.load is not None)
    pending = [r for r in view.replicas if not r.ready]
    overdue = [r for r in pending if r.since > PATIENCE * view.start_seconds]
    traffic = shape_of(view.traffic)
    kv_tokens = sum(load.kv_tokens for load in loads) / len(loads) if loads else 0.0
    return Facts(
        loads=loads,
        ready=len(ready),
        silent=len(ready) - len(loads),
        young=len(pending) - len(overdue),
        loading=sum(not r.unschedulable for r in overdue),
        stuck=sum(r.unschedulable for r in overdue),
        traffic=traffic,
        line=view.line,
        demand=demand(loads, view.held, traffic),
        cap=capacity(limits, kv_tokens, view.step, traffic, memory.full) if loads else None,
        full=memory.full,
        ahead=ahead((*memory.rates, (view.now, traffic.rate)), view.start_seconds, traffic.recent),
        jump=memory.jumps[0][1] if memory.jumps else 0.0,
        kv_tokens=kv_tokens,
    )


def reachable(limits: Limits, line: Line) -> bool:
    """Whether some number of replicas keeps the ITL's SLO."""
    return limits.itl_slo is None or line.at(_FEW) <= _UNREACHABLE * limits.itl_slo


def tokens(value: float) -> str:
    """A number of tokens as it is read most easily."""
    return f"{value:,.0f}"


def counted(number: float, one: str, many: str) -> str:
    """A number and the words that go with it: "1 replica is", "2 replicas are"."""
    return f"{number:.0f} {one if f'{number:.0f}' == '1' else many}"


def milliseconds(seconds: float) -> str:
    """Seconds, in the unit of latencies."""
    return f"{seconds * 1000:.0f} ms"
