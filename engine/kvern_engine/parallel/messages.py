"""What is said during a switch of the layout: between the supervisor, which leads it, and workers, cores and API
servers. Plain messages (msgspec); the order in which they come is in `switching.py` and docs/adr.

    servers: Hold -> (Fence to every core, nothing after it) ... Left from every core -> Drained ... LayoutChanged
    cores:   Fence from every server -> Left to every server, Handed ... TakeOver -> CoreReady ... Go
    workers: Reform -> Switched ... MoveKv -> Switched ... Finish -> Switched
"""

import msgspec

from kvern_engine.core.handed import Handover, Share
from kvern_engine.core.plan import WorkerReady
from kvern_engine.ipc import CoreReady

GIVEN_UP = ".failed"  # behind the name of a rendezvous: a file that says so, since who waits there reads no messages


class Reform(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """To every worker: build what this rank holds in the layout `data` x `tensor`, beside what it has, and get the
    weights from those that have them. All ranks of the pod meet at `rendezvous`. `timeout` in seconds. `kept`: there is
    no room for two arenas; of the old one, the blocks of each old engine that are to outlive it."""

    switch: int
    data: int
    tensor: int
    rendezvous: str
    timeout: float
    kept: list[list[int]] | None = None


class MoveKv(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """To every worker: bring K and V of these blocks where they belong and serve the new layout from now on. `moves`:
    old engine, new engine, (old block, new block) of each block."""

    switch: int
    moves: list[tuple[int, int, list[tuple[int, int]]]]


class Finish(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """To every worker: free what the old layout had (`keep`), or go back to it and free the new one's."""

    switch: int
    keep: bool


class Switched(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """A worker has done what `step` says (reform, kv, finish), or could not: `error` says why, and it serves the old
    layout. `ready` after reform: what it has then; `seconds` by what took them. `lost_kv` after finish: it went back,
    and there was no room to keep K and V of the old layout."""

    switch: int
    rank: int
    step: str
    seconds: dict[str, float] = {}
    ready: WorkerReady | None = None
    error: str | None = None
    lost_kv: bool = False


class Fence(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """From an API server to a core: nothing more comes until the layout has changed. With the last server's the core
    settles what is in flight and hands over. From the supervisor in the place of one that has ended, and on the way
    back, where nobody has to be waited for."""

    switch: int
    server: int


class Left(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """From a core to every API server, behind all outputs of what it hands over: the next ones come from others."""

    switch: int
    engine: int


class Drained(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """From an API server to the supervisor: it has the outputs of all cores that have left. Without this, the first
    outputs of a request's new core might overtake the last ones of its old core."""

    switch: int
    server: int


class Handed(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """From a core that has stopped, to the supervisor."""

    switch: int
    handover: Handover
    ready: WorkerReady  # of its workers, should it come back to them


class Standing(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """From a core that was started for a layout to come: it waits for `TakeOver`."""

    switch: int
    engine: int


class TakeOver(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """To a core: go on with `share` over the workers `peers` (rank, pid, place) of a layout of `data` engines of
    `tensor` ranks. It answers `TookOver`, and turns to the workers at `Go`."""

    switch: int
    data: int
    tensor: int
    peers: list[tuple[int, int | None, str]]
    ready: WorkerReady  # what they have reported, together
    share: Share


class TookOver(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """From a core to the supervisor: it has its share of the layout of engines of `tensor` ranks. Both layouts of a
    switch may be handed out, the old one on the way back, and an answer about one must not pass for the other's."""

    switch: int
    tensor: int
    ready: CoreReady


class Go(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """To a core that has taken over: the workers are its own, compute."""

    switch: int


class ChangeLayout(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """From the API server with the admin port: somebody wants this size. `ask` comes back in `LayoutAnswer`."""

    server: int
    ask: int
    tensor: int
    generation: int


class LayoutAnswer(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """To that API server. `status`: 200 or 202 where the switch is under way or over, 400 and 409 with `error`."""

    ask: int
    status: int
    code: str = ""
    error: str = ""


class SwitchRecord(msgspec.Struct, frozen=True):
    """A switch that is over. `outcome`: Switched or RolledBack, then with `reason`. Seconds by phase; `pause` is how
    long nothing was computed."""

    source: int
    target: int
    generation: int
    outcome: str
    reason: str = ""
    seconds: dict[str, float] = {}
    pause: float = 0.0
    kept: int = 0  # running choices that went on with their K and V
    recomputed: int = 0  # running choices that computed theirs again
    ended: float = 0.0  # seconds since 1970


class LayoutState(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """To every API server, whenever it changes: what `GET /admin/layout` says."""

    data: int
    tensor: int
    target: int
    generation: int
    phase: str
    progress: float
    last: list[SwitchRecord] = []
    totals: dict[str, int] = {}  # outcome -> switches since start


class Hold(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """To every API server: keep what is for the cores from now on, and send each of the `data` engines a Fence."""

    switch: int
    data: int


class LayoutChanged(msgspec.Struct, array_like=True, frozen=True, tag=True):
    """To every API server: the pod has these engines now (of `data`, of `tensor` ranks each, those that live), and
    requests in flight are where `engine_of` says, else where they were. What was kept is sent on."""

    switch: int
    data: int
    tensor: int
    engines: list[CoreReady]
    engine_of: dict[str, int]


SwitchToWorker = Reform | MoveKv | Finish
SwitchToCore = Fence | TakeOver | Go
SwitchToSupervisor = Switched | Handed | Drained | Standing | TookOver | ChangeLayout
SwitchToServer = LayoutAnswer | LayoutState | Hold | Left | LayoutChanged
