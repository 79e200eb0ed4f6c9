"""The GPUs of namespaces: the whole number in the entry `gpus` of each one's ConfigMap `kvern-budget`, and what is held
of it by services that nothing is decided for."""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from kvern_operator.desired.meta import GPU
from kvern_operator.kube import ApiError, KubeClient
from kvern_operator.observed import Object
from kvern_operator.queue import Clock, Key
from kvern_operator.room import read_claim

log = logging.getLogger("kvern.autoscale")

CONFIG_MAP, ENTRY = "kvern-budget", "gpus"
FRESH = 30.0  # seconds that what was read is good for
AGAIN = 5.0  # seconds after which one that could not be read is tried again


def gpus_of_others(
    keys: Iterable[Key], service: Callable[[Key], Mapping[str, Any] | None], known: Collection[Key]
) -> Mapping[Key, int]:
    """GPUs that services hold which are not among the known ones, as their status says. A new leader has not been
    through all of them, and a spec that cannot be used gives back no device."""
    found = {}
    for key in keys:
        document = None if key in known else service(key)
        gpus = (((document or {}).get("status") or {}).get("capacity") or {}).get("gpus")
        if isinstance(gpus, int) and gpus > 0:
            found[key] = gpus
    return found


def gpus_of_orphans(keys: Iterable[Key], pods: Callable[[Key], Iterable[Object]]) -> Mapping[Key, int]:
    """GPUs of pods whose service has been deleted: they drain, and have them until they end."""
    found = {key: sum(_gpus(pod) for pod in pods(key)) for key in keys}
    return {key: gpus for key, gpus in found.items() if gpus > 0}


def _gpus(pod: Object) -> int:
    claim = read_claim(pod)
    return int(claim.requests.get(GPU, 0)) if claim is not None and claim.node else 0


class BudgetReader:
    """Reads them now and then. What was read last holds while the API server is away; what says no number is as good
    as unread: nothing is decided for the namespace's services that use GPUs."""

    def __init__(self, client: KubeClient, clock: Clock = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._known: dict[str, int | None] = {}
        self._wrong: dict[str, str] = {}
        self._due: dict[str, float] = {}

    async def read(self, namespaces: Collection[str]) -> Mapping[str, int | None]:
        """By namespace its budget, None where there is none; without those that cannot be told."""
        for gone in self._due.keys() - set(namespaces):
            del self._due[gone]
            self._known.pop(gone, None)
            self._wrong.pop(gone, None)
        for namespace in sorted(namespaces):
            now = self._clock()
            if now < self._due.get(namespace, now):
                continue
            try:
                self._known[namespace] = await self._one(namespace)
                self._wrong.pop(namespace, None)
                self._due[namespace] = now + FRESH
            except ApiError as error:
                log.warning("the GPU budget of namespace %s cannot be read: %s", namespace, error)
                self._due[namespace] = now + AGAIN
                if error.status == 403:
                    self._wrong[namespace] = f"ConfigMap {CONFIG_MAP} must not be read"
            except ValueError as error:
                log.warning("ConfigMap %s/%s: %s", namespace, CONFIG_MAP, error)
                self._known.pop(namespace, None)
                self._wrong[namespace] = f"ConfigMap {CONFIG_MAP}: {error}"
                self._due[namespace] = now + AGAIN
        return dict(self._known)

    def wrong(self, namespace: str) -> str:
        """Why somebody has to do something before a namespace's budget can be told; "" where nobody has to."""
        return self._wrong.get(namespace, "")

    async def _one(self, namespace: str) -> int | None:
        found = await self._client.find("ConfigMap", namespace, CONFIG_MAP)
        if found is None:
            return None
        text = str((found.get("data") or {}).get(ENTRY, "")).strip()
        if not text.isdecimal():
            raise ValueError(f'{ENTRY}: "{text}" is not a whole number of GPUs, such as "8"')
        return int(text)
