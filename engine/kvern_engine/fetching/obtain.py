"""A model by its name: where it lies, or brought here first. What `kvern serve`, `generate`, `fetch` and the Job do.

A model that is in the cache folder is used as it is, without a question to anybody: engines start offline, and all
replicas run what the first one fetched, whatever a branch points to by now. To move on, name the new commit, or say
`kvern fetch --update`.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from kvern_engine.fetching.download import Patience, ask, fetch_files, free_bytes, no_room, present_bytes
from kvern_engine.fetching.errors import SourceError
from kvern_engine.fetching.files import Listing, human_bytes, is_remote, parse_place
from kvern_engine.fetching.lock import FolderLock, Holder, LockLostError
from kvern_engine.fetching.meter import Meter
from kvern_engine.fetching.source import source_of
from kvern_engine.fetching.store import Store
from kvern_engine.fetching.uses import Use, evict, kept, to_evict
from kvern_engine.loading.resolve import ModelFiles, ModelNotFoundError, cache_dir, resolve_model

MARGIN = 16 << 20  # bytes that are left free: manifests, the lock, what others write meanwhile
LIMIT = "KVERN_CACHE_LIMIT"
_OFFLINE = ("1", "true", "yes", "on")


@dataclass(frozen=True)
class Ways:
    """How it is done; tests are less patient."""

    patience: Patience = field(default_factory=Patience)
    beat: float = 5.0
    stale: float = 40.0
    poll: float = 1.0


def obtain(
    spec: str,
    revision: str | None = None,
    meter: Meter | None = None,
    *,
    update: bool = False,
    ways: Ways | None = None,
) -> ModelFiles:
    """Where the model lies that `spec` names, once it is there.

    Raises ModelNotFoundError for what cannot be fetched and is not here, SourceError where fetching it failed, and
    ValueError for a malformed address.
    """
    if not is_remote(spec):
        return resolve_model(spec, revision)
    parse_place(spec)
    if not update:
        with contextlib.suppress(ModelNotFoundError):
            return _found(spec, revision, meter)
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in _OFFLINE and spec.startswith("hf://"):
        raise ModelNotFoundError(f"{spec} is not in {cache_dir()}, and HF_HUB_OFFLINE forbids to fetch it")
    try:
        return _fetch(spec, revision, meter or Meter(), update, ways or Ways())
    except LockLostError as error:
        raise SourceError("Failed", spec, str(error)) from None
    except OSError as error:
        text = f"{error.filename or cache_dir()} cannot be written: {error.strerror}; KVERN_CACHE_DIR names the folder"
        raise SourceError("Failed", spec, text) from None


@contextlib.contextmanager
def held(
    spec: str, revision: str | None = None, meter: Meter | None = None, *, ways: Ways | None = None
) -> Iterator[ModelFiles]:
    """The same, and the model is not evicted until the end of the block."""
    store, use = Store(cache_dir()), None
    try:
        while True:
            files = obtain(spec, revision, meter, ways=ways)
            path = store.find(spec, revision) if is_remote(spec) else None
            if path is None or not files.path.is_relative_to(path):
                break  # not of our cache
            use = Use(store, path)
            if store.complete(path):
                break
            use.end()  # evicted between the look and the mark
        yield files
    finally:
        if use is not None:
            use.end()


def _found(spec: str, revision: str | None, meter: Meter | None) -> ModelFiles:
    files = resolve_model(spec, revision)
    if meter is not None:
        store = Store(cache_dir())
        path = store.find(spec, revision)
        size = store.size(path) if path else 0
        meter.expect(size, size)
        meter.enter("Ready", spec)
    return files


# ---------------------------------------------------------------- fetching


def _fetch(spec: str, revision: str | None, meter: Meter, update: bool, ways: Ways) -> ModelFiles:
    store = Store(cache_dir())
    lock = FolderLock(store.hidden, spec, beat=ways.beat, stale=ways.stale, poll=ways.poll)

    def waiting(holder: Holder) -> None:
        meter.enter("Waiting", spec, f"another download into the same cache: {holder.text or holder.what}")

    lock.acquire(waiting, lambda: meter.figures().sentence())
    try:
        if not update:  # whoever had the lock before may have fetched it
            with contextlib.suppress(ModelNotFoundError):
                return _found(spec, revision, meter)
        meter.enter("Listing", spec)
        source = source_of(spec)
        try:
            listing = ask(lambda: source.listing(revision), spec, meter, ways.patience)
            if not store.complete(store.place(listing)):
                _bring(store, listing, meter)
                fetch_files(source, listing, store.partial(listing), meter, lock.lost, ways.patience)
                lock.check()
                store.publish(listing)
            store.remember(listing, revision)
        finally:
            source.close()
        return _found(spec, revision, meter)
    finally:
        lock.release()


def _bring(store: Store, listing: Listing, meter: Meter) -> None:
    """Everything that must be so before the first byte is fetched: room, and the good files of a damaged model."""
    store.sweep()
    place, partial = store.place(listing), store.partial(listing)
    meter.enter("Downloading", listing.uri)
    if place.exists():
        partial.mkdir(parents=True, exist_ok=True)
        for file in listing.files:
            here, there = place / file.name, partial / file.name
            if here.is_file() and here.stat().st_size == file.size and not there.exists():
                there.parent.mkdir(parents=True, exist_ok=True)
                here.rename(there)
        store.remove(place)
    _make_room(store, listing)


def _make_room(store: Store, listing: Listing) -> None:
    """Delete what nobody uses, as little as will do. Raises SourceError where that is not enough."""
    partial = store.partial(listing)
    missing = listing.size - present_bytes(listing, partial)
    if _room(store) >= missing:
        return
    for other in store.partials():  # we have the lock: nobody goes on with them
        if other != partial:
            store.remove(other)
    if _room(store) >= missing:
        return
    known = [each for each in kept(store) if each.snapshot.path != store.place(listing)]
    chosen = to_evict(known, missing - _room(store))
    possible = sum(each.snapshot.size for each in chosen)
    if _room(store) + possible >= missing:  # otherwise nothing is deleted in vain
        evict(store, chosen)
    if _room(store) < missing:
        used = [each for each in known if each.in_use]
        size = human_bytes(sum(each.snapshot.size for each in used))
        words = f"; models in use hold {size}" if used else ""
        raise no_room(listing.uri, missing, max(0, _room(store)), store.root, words)


def _room(store: Store) -> int:
    """Bytes that may still be written: what the disk has, and what a limit leaves (disks of many claims are shared, and
    say nothing of a claim's size)."""
    room = free_bytes(store.root) - MARGIN
    limit = cache_limit(os.environ)
    return room if limit is None else min(room, limit - store.used_bytes())


def cache_limit(environ: Mapping[str, str]) -> int | None:
    """KVERN_CACHE_LIMIT in bytes; None where it is not set. Raises ValueError."""
    text = environ.get(LIMIT, "").strip()
    if not text:
        return None
    if not text.isdigit():
        raise ValueError(f'{LIMIT}="{text}" must be a number of bytes')
    return int(text)
