"""How far a model is on its way into the service's claim, and what follows for replicas. Pure."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from kvern_operator.api.status import CacheStatus, InferenceServiceStatus, ModelShape
from kvern_operator.api.types import InferenceService
from kvern_operator.desired import cache as desired
from kvern_operator.desired import engine, meta, network
from kvern_operator.observed import Object, Observed, Pod
from kvern_operator.replicas import lost_image
from kvern_operator.settings import Settings

Phase = Literal["Pending", "Downloading", "Ready"]


@dataclass(frozen=True)
class CacheState:
    """`done`, `total`: bytes, None where they are not known. `message`: a sentence for people."""

    phase: Phase
    message: str
    done: int | None = None
    total: int | None = None
    shape: ModelShape | None = None

    @property
    def ready(self) -> bool:
        """The model is in the claim."""
        return self.phase == "Ready"

    def status(self, failed: bool) -> CacheStatus:
        """What status.cache says; `failed`: the download is in trouble."""
        phase = "Failed" if failed and not self.ready else self.phase
        return CacheStatus(phase=phase, bytes=self.done, total=self.total, shape=self.shape)


def cache_state(service: InferenceService, observed: Observed) -> CacheState | None:
    """None where the model is not brought into a claim."""
    if not desired.is_fetched(service.spec):
        return None
    name = desired.job_name(service)
    job = _job(observed, name)
    pods = [p for p in observed.pods if p.owner == name and not p.terminating]
    figures = next((p.fetch for p in pods if p.fetch is not None), None)
    before = _before(observed.status, service)
    what, claim = service.spec.model.uri, engine.cache_claim(service)
    if job is not None and desired.is_complete(job):
        total = figures.total if figures else before.total if before else None
        size = f" ({human_bytes(total)})" if total else ""
        shape = ModelShape.model_validate(dict(figures.shape)) if figures and figures.shape else None
        shape = shape or (before.shape if before else None)
        return CacheState("Ready", f"{what}{size} is in claim {claim}", total, total, shape)
    if figures is None or not figures.total:
        text = figures.text if figures and figures.text else ""
        words = f": {text}" if text else _waits_for(pods)
        return CacheState("Pending", f"{what} is to be fetched into claim {claim}{words}")
    percent = figures.done * 100 // figures.total
    size = f"{percent} % of {human_bytes(figures.total)}"
    again = f"; {figures.text}" if figures.text else ""
    # Whole percents, so that a status is worth writing a hundred times at most.
    done = figures.total * percent // 100
    return CacheState("Downloading", f"{size} of {what} are in claim {claim}{again}", done, figures.total)


def _job(observed: Observed, name: str) -> Object | None:
    return next((o for o in observed.children if meta.key(o) == ("Job", name)), None)


def _before(status: InferenceServiceStatus | None, service: InferenceService) -> CacheStatus | None:
    """What was known last, where it was of the same model."""
    condition = status.condition("ModelCached") if status else None
    same = condition is not None and speaks_of(condition.message, service.spec.model.uri)
    return status.cache if status is not None and same else None


def speaks_of(message: str, uri: str) -> bool:
    """Whether a condition's message is about this model, and not about one whose address begins like its."""
    return re.search(re.escape(uri) + r"(?![\w/.+=@-])", message) is not None


def _waits_for(pods: Iterable[Pod]) -> str:
    stage = next((p.stage for p in pods if p.stage), "")
    words = {"scheduling": "; its pod waits for a node", "creating": "; its pod is being created"}
    return words.get(stage, "")


def objects(service: InferenceService, observed: Observed, settings: Settings) -> list[Object]:
    """What shall exist for the download."""
    made = _jobs(service, observed, settings)
    return [*made, network.fetch_policy(service, settings)] if made else []


def _jobs(service: InferenceService, observed: Observed, settings: Settings) -> list[Object]:
    """The Job that shall exist, as it was applied where it exists: its template cannot be changed. One that can only
    fail (its controller gave up, or its image cannot be had and another would be used today) is left out, and so
    deleted, and made anew by the next pass."""
    if not desired.is_fetched(service.spec):
        return []
    wanted = desired.fetch_job(service, settings)
    live = _job(observed, wanted["metadata"]["name"])
    if live is None:
        return [] if service.spec.suspend else [wanted]
    pods = [p for p in observed.pods if p.owner == wanted["metadata"]["name"]]
    image = engine.image_of(wanted["spec"]["template"])
    if desired.has_failed(live) or (not desired.is_complete(live) and lost_image(pods, live, image)):
        return []
    return [meta.as_applied(live)]


def holds_replicas(service: InferenceService, observed: Observed) -> bool:
    """Whether replicas of the present spec would find no model yet: none is started, no old one goes for it."""
    state = cache_state(service, observed)
    return state is not None and not state.ready


def human_bytes(count: float) -> str:
    """1.5 GB, 23.4 MB: powers of ten, as the engine writes them."""
    for limit, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            digits = count / limit
            return f"{digits:.1f} {unit}" if digits < 100 else f"{digits:.0f} {unit}"
    return f"{count:.0f} B"
