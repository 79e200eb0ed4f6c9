"""What goes when a cache folder is full: the least recently used, never what somebody uses."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import FakeHub, noise
from hypothesis import given
from hypothesis import strategies as st

from kvern_engine.fetching import uses
from kvern_engine.fetching.obtain import Ways, held, obtain
from kvern_engine.fetching.store import Snapshot, Store
from kvern_engine.fetching.uses import Kept, Use, evict, in_use, kept, now_of, to_evict

Message = Callable[[Callable[[], object]], str]

keeps = st.lists(
    st.builds(
        lambda number, size, used, busy: Kept(Snapshot(Path(f"/{number}"), "hf://a/b", size, 0.0), used, busy),
        st.integers(0, 99),
        st.integers(1, 1000),
        st.integers(0, 50).map(float),
        st.booleans(),
    ),
    max_size=12,
)


@given(keeps, st.integers(-100, 5000))
def test_as_few_as_will_do_and_none_in_use(known: list[Kept], lacking: int) -> None:
    chosen = to_evict(known, lacking)
    assert not any(each.in_use for each in chosen)
    sizes = [each.snapshot.size for each in chosen]
    free = sum(each.snapshot.size for each in known if not each.in_use)
    assert sum(sizes) >= min(lacking, free)
    assert not sizes or sum(sizes[:-1]) < lacking  # the last one was needed
    latest = max((each.last_used for each in chosen), default=0.0)
    assert all(each.last_used >= latest for each in known if not each.in_use and each not in chosen)


@pytest.fixture
def three(hub: FakeHub) -> FakeHub:
    """Models of 100 kB each."""
    for number in range(4):
        hub.add(f"org/m{number}", {"config.json": b"{}", "model.safetensors": noise(100_000, number)})
    return hub


def room_for(monkeypatch: pytest.MonkeyPatch, models: int) -> None:
    monkeypatch.setenv("KVERN_CACHE_LIMIT", str(models * 100_000 + 60_000))


def present(cache: Path) -> set[str]:
    return {s.uri for s in Store(cache).snapshots()}


def test_the_least_recently_used_goes(three: FakeHub, cache: Path, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    room_for(monkeypatch, 2)
    for number in (0, 1):
        obtain(f"hf://org/m{number}", ways=ways)
        time.sleep(0.02)
    with held("hf://org/m0", ways=ways):
        pass  # used again, later than m1 was fetched
    obtain("hf://org/m2", ways=ways)
    assert present(cache) == {"hf://org/m0", "hf://org/m2"}


def test_what_is_in_use_stays(
    three: FakeHub, cache: Path, ways: Ways, monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    room_for(monkeypatch, 2)
    with held("hf://org/m0", ways=ways) as first:
        obtain("hf://org/m1", ways=ways)
        obtain("hf://org/m2", ways=ways)
        assert present(cache) == {"hf://org/m0", "hf://org/m2"} and first.path.is_dir()
        with held("hf://org/m2", ways=ways):
            text = message(lambda: obtain("hf://org/m3", ways=ways))
        assert "hf://org/m3: no room: 100 kB are needed and " in text and "; models in use hold 200 kB" in text
        assert present(cache) == {"hf://org/m0", "hf://org/m2"}  # and nothing was deleted in vain
    obtain("hf://org/m3", ways=ways)
    assert "hf://org/m3" in present(cache)


def test_a_download_that_nobody_goes_on_with_goes_first(
    three: FakeHub, cache: Path, ways: Ways, monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    obtain("hf://org/m0", ways=ways)
    three.faults.cut["model.safetensors"] = [90_000, 0, 0, 0, 0]
    message(lambda: obtain("hf://org/m1", ways=ways))
    assert len(Store(cache).partials()) == 1
    three.faults.cut.clear()
    room_for(monkeypatch, 2)
    obtain("hf://org/m2", ways=ways)
    assert present(cache) == {"hf://org/m0", "hf://org/m2"} and not Store(cache).partials()


def test_an_engine_that_has_died_uses_nothing(three: FakeHub, cache: Path, ways: Ways) -> None:
    store, path = Store(cache), obtain("hf://org/m0", ways=ways).path
    use = Use(store, path, touch=0.05)
    assert in_use(store, path, now_of(store))
    use._stop.set()  # killed: nobody takes the mark away
    old = time.time() - uses.DEAD - 1
    time.sleep(0.1)
    os.utime(use._path, (old, old))
    assert not in_use(store, path, now_of(store))
    other = Use(store, path, touch=0.05)
    os.utime(other._path, (old, old))
    time.sleep(0.2)
    assert in_use(store, path, now_of(store))  # touched again
    other.end()
    assert not in_use(store, path, now_of(store))


def test_whoever_starts_while_it_is_set_aside_keeps_it(
    three: FakeHub, cache: Path, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, path = Store(cache), obtain("hf://org/m0", ways=ways).path
    (found,) = kept(store)
    aside = Store.set_aside
    marks = []

    def starts_now(self: Store, folder: Path) -> Path:
        marks.append(Use(store, path))
        return aside(self, folder)

    monkeypatch.setattr(Store, "set_aside", starts_now)
    assert evict(store, [found]) == [] and store.complete(path)
    marks[0].end()


def test_an_evicted_model_is_fetched_again_by_who_needs_it(three: FakeHub, cache: Path, ways: Ways) -> None:
    with held("hf://org/m0", ways=ways):
        pass
    assert [s.uri for s in evict(Store(cache), kept(Store(cache)))] == ["hf://org/m0"]
    with held("hf://org/m0", ways=ways) as files:
        assert (files.path / "model.safetensors").read_bytes() == noise(100_000, 0)


def test_a_folder_that_cannot_be_written_is_used_without_a_mark(
    three: FakeHub, cache: Path, ways: Ways, monkeypatch: pytest.MonkeyPatch
) -> None:
    obtain("hf://org/m0", ways=ways)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with held("hf://org/m0", ways=ways) as files:
        assert files.path.is_dir()
