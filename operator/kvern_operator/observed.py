"""What reconcile sees: children as they were applied, pods as they are. Plain values, filled by an observer.

The operator's observer reads the API server's objects, `kvern up`'s its own processes.
"""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvern_operator.api.status import InferenceServiceStatus

Object = dict[str, Any]  # a Kubernetes object


@dataclass(frozen=True)
class Pod:
    """One pod of an engine or a router.

    `owner` is the name of its StatefulSet or Deployment. `reason` is empty while nothing is wrong; else it is the
    kubelet's or scheduler's word for the trouble (CrashLoopBackOff, OOMKilled, Unschedulable); `message` explains it.
    """

    name: str
    uid: str
    owner: str
    component: str  # engine | router
    created: datetime
    running: bool = False  # its container runs now
    ready: bool = False
    served: bool = False  # has been ready since its container last started: it may hold requests
    terminating: bool = False
    draining: bool = False  # says itself that it drains
    address: str = ""  # host:port of the OpenAI API
    admin_address: str = ""
    in_flight: int | None = None  # requests running and waiting; None: not known
    feasible: tuple[tuple[int, int], ...] = ()  # (tensor size, tokens of KV cache) as the pod reports them
    restarts: int = 0
    reason: str = ""
    message: str = ""
    exit_code: int | None = None
    last_log: str = ""


@dataclass(frozen=True)
class Observed:
    """Everything that exists for one service.

    `children` are as they were applied, without what the API server sets (managedFields, resourceVersion, status).
    `spare_replicas`: how many more replicas would fit; None: not known.
    """

    children: tuple[Object, ...] = ()
    pods: tuple[Pod, ...] = ()
    status: InferenceServiceStatus | None = None
    spare_replicas: int | None = None
