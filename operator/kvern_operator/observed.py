"""What reconcile sees: children as they were applied, pods as they are. Plain values, filled by an observer.

The operator's observer reads the API server's objects, `kvern up`'s its own processes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Literal

from kvern_operator.api.status import InferenceServiceStatus

Object = dict[str, Any]  # a Kubernetes object


MODEL_SHAPE = ("layers", "heads", "kvHeads", "headDim", "maxModelLen")  # fields of api/status.ModelShape


@dataclass(frozen=True)
class Fetch:
    """How far a download is, as its pod says. `total` 0: not known yet; `text`: what it waits for; `shape`: of the
    model that is there, by name."""

    done: int
    total: int
    text: str = ""
    shape: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class Pod:
    """One pod of an engine, a router or a download.

    `owner` is the name of its StatefulSet, Deployment or Job. `reason` is empty while nothing is wrong; else it is the
    kubelet's or scheduler's word for the trouble (CrashLoopBackOff, OOMKilled, Unschedulable); `message` explains it.
    """

    name: str
    uid: str
    owner: str
    component: str  # engine | router | fetch
    created: datetime
    revision: str = ""  # of the spec that it was made from; "": not known
    running: bool = False  # its container runs now
    ready: bool = False
    served: bool = False  # has been ready since its container last started: it may hold requests
    terminating: bool = False
    ends: datetime | None = None  # terminating: when its grace is over; None: not known
    draining: bool = False  # says itself that it drains
    address: str = ""  # host:port of the OpenAI API
    admin_address: str = ""
    in_flight: int | None = None  # requests running and waiting; None: not known
    feasible: tuple[tuple[int, int], ...] = ()  # (tensor size, tokens of KV cache) as the pod reports them
    tensor: int | None = None  # the tensor size that it says it has; None: not known, or it is not to be told another
    switching: bool = False  # it says that a switch to another size is under way
    refused: tuple[tuple[int, str], ...] = ()  # (tensor size, why): what it would not switch to
    switch_failed: tuple[int, str] | None = None  # (tensor size, why) of its last switch, where it was taken back
    switch_failed_ago: float = 0.0  # seconds since then
    fetch: Fetch | None = None  # of a download's pod: how far it is; None: not known
    sends_to: frozenset[str] | None = None  # of a router: names of the engine pods that it may send to; None: not known
    device: str = ""  # what it computes on, as it reports it: "cpu", "cuda:0 NVIDIA H200"; "": not known
    restarts: int = 0
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    last_log: str = ""
    # What it waits for before it can load: "scheduling" | "creating" (volumes, image); "" once its container runs.
    stage: Literal["", "scheduling", "creating"] = ""
    # When it was given a node, its container last started, it last became ready; None: not yet, or not known.
    scheduled: datetime | None = None
    started: datetime | None = None
    ready_since: datetime | None = None
    unready_since: datetime | None = None  # when it ceased to be ready; None: it has not been, or that is not known


@dataclass(frozen=True)
class Notice:
    """A Warning Event of one of the service's objects, the newest of its reason. `uid` is that of the object, "" where
    it is not known: names are used again."""

    kind: str  # StatefulSet | ReplicaSet | Deployment | Pod | PersistentVolumeClaim
    name: str
    reason: str  # FailedCreate, FailedMount, ...
    message: str
    uid: str = ""


@dataclass(frozen=True)
class Refusal:
    """The API server does not take an object that a plan holds. `revision` is its label kvern.dev/revision, "" where
    it has none; `message` is the API server's."""

    kind: str
    revision: str
    message: str
    name: str = ""


@dataclass(frozen=True)
class Observed:
    """Everything that exists for one service.

    `children` are live objects; what the API server adds to them (defaults, managedFields, status) does no harm.
    `spare_replicas`: how many more replicas would fit; None: not known. `admin_secret`: the admin Secret is known to
    exist though it is not among the children, since nobody may read it. `leaving_for`: how long replicas have been
    marked to go, by name, where the observer has a better clock than the time in the mark.
    """

    children: tuple[Object, ...] = ()
    pods: tuple[Pod, ...] = ()
    status: InferenceServiceStatus | None = None
    spare_replicas: int | None = None
    admin_secret: bool = False
    notices: tuple[Notice, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    leaving_for: Mapping[str, timedelta] = field(default_factory=dict)
