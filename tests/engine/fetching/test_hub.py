"""hf:// against a hub on loopback: what is fetched, what is asked again, and what each refusal is told."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import FILES, WANTED, FakeHub

from kvern_engine.fetching import download, obtain
from kvern_engine.fetching.errors import SourceError
from kvern_engine.fetching.meter import Figures, Meter
from kvern_engine.fetching.obtain import Ways
from kvern_engine.fetching.store import MANIFEST, Store
from kvern_engine.loading.resolve import ModelNotFoundError, resolve_model

URI = "hf://org/name"
LARGEST = "model-00001-of-00002.safetensors"
Message = Callable[[Callable[[], object]], str]


def content(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != MANIFEST}


def test_a_model_is_fetched_once_and_found_ever_after(hub: FakeHub, cache: Path, ways: Ways) -> None:
    seen: list[Figures] = []
    files = obtain.obtain(URI, meter=Meter(seen.append), ways=ways)
    assert (files.name, files.kind) == ("org/name", "folder")
    assert content(files.path) == {name: FILES[name] for name in WANTED}
    assert files.path.name == "c0ffee" and not Store(cache).partials()
    size = sum(len(FILES[name]) for name in WANTED)
    assert (seen[-1].phase, seen[-1].total) == ("Ready", seen[-1].done)
    assert [f.done for f in seen if f.phase == "Downloading" and f.total] == sorted(
        f.done for f in seen if f.phase == "Downloading" and f.total
    )
    assert {f.total for f in seen if f.phase == "Downloading" and f.done} == {size}

    asked = len(hub.log)
    assert obtain.obtain(URI, ways=ways) == resolve_model(URI) == files
    assert len(hub.log) == asked  # nobody is asked: it would work offline


def test_a_cached_model_needs_no_network(hub: FakeHub, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    path = obtain.obtain(URI, ways=ways).path
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert obtain.obtain(URI, ways=ways).path == path
    with pytest.raises(ModelNotFoundError, match="HF_HUB_OFFLINE forbids to fetch it"):
        obtain.obtain("hf://org/other", ways=ways)


def test_a_branch_stays_what_it_was_until_it_is_updated(hub: FakeHub, ways: Ways) -> None:
    first = obtain.obtain(URI, ways=ways).path
    repository = hub.repositories["org/name"]
    repository.commits["beef"] = {**FILES, "config.json": b'{"model_type": "qwen2"}'}
    repository.refs.update(main="beef", v2="beef")
    assert obtain.obtain(URI, ways=ways).path == first
    updated = obtain.obtain(URI, update=True, ways=ways).path
    assert updated.name == "beef" and obtain.obtain(URI, ways=ways).path == updated
    assert obtain.obtain(URI, "c0ffee", ways=ways).path == first
    asked = len(hub.fetched())
    assert obtain.obtain(URI, "v2", ways=ways).path == updated
    assert len(hub.fetched()) == asked  # the same commit under another name


def test_a_gguf_file_of_a_repository(hub: FakeHub, ways: Ways) -> None:
    hub.add("org/quants", {"m.Q4.gguf": b"GGUF4", "m.Q8.gguf": b"GGUF8", "config.json": b"{}"})
    files = obtain.obtain("hf://org/quants/m.Q8.gguf", ways=ways)
    assert (files.name, files.kind, files.path.read_bytes()) == ("m.Q8", "gguf", b"GGUF8")
    assert obtain.obtain("hf://org/quants/m.Q4.gguf", ways=ways).path.read_bytes() == b"GGUF4"


def test_a_mirror_that_lists_names_only(hub: FakeHub, ways: Ways) -> None:
    hub.faults.bare = True
    files = obtain.obtain(URI, ways=ways)
    assert content(files.path) == {name: FILES[name] for name in WANTED}
    manifest = {f["name"]: f for f in json.loads((files.path / MANIFEST).read_text())["files"]}
    assert "sha256" in manifest[LARGEST] and "git-sha1" in manifest["config.json"]


def test_the_token_goes_to_the_hub_alone(hub: FakeHub, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens.add("secret")
    hub.repositories["org/name"].private = True
    monkeypatch.setenv("HF_TOKEN", "secret")
    obtain.obtain(URI, ways=ways)
    given = {("store" if "/store/" in path else "hub"): token for _, path, _, token in hub.log}
    assert given == {"hub": True, "store": False}


def test_a_token_of_the_hubs_own_tools(hub: FakeHub, ways: Ways, tmp_path: Path) -> None:
    hub.tokens.add("secret")
    hub.repositories["org/name"].private = True
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "token").write_text("secret\n")
    assert obtain.obtain(URI, ways=ways).path.is_dir()


def test_what_hf_download_has_fetched_is_used(hub: FakeHub, tmp_path: Path, ways: Ways) -> None:
    snapshot = tmp_path / "hf" / "hub" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    assert obtain.obtain(URI, ways=ways).path == snapshot and not hub.log


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("token", ["", "secret"])
def test_no_such_model(hub: FakeHub, ways: Ways, message: Message, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    hub.tokens.add("secret")
    monkeypatch.setenv("HF_TOKEN", token)
    host = hub.url.removeprefix("http://")
    text = message(lambda: obtain.obtain("hf://org/nome", ways=ways))
    if token:
        assert text == f"hf://org/nome: not found: {host} has no such model, or the token's account may not see it"
    else:
        assert text == (
            f"hf://org/nome: not found: {host} has no such model, or it is private and needs a token (HF_TOKEN; in a "
            "manifest model.secretRef)"
        )


def test_no_such_revision(hub: FakeHub, ways: Ways, message: Message) -> None:
    hub.repositories["org/name"].refs["v1"] = "c0ffee"
    text = message(lambda: obtain.obtain(URI, "v2", ways=ways))
    assert text == "hf://org/name: not found: there is no revision 'v2'; there are main, v1"


@pytest.mark.parametrize("token", ["", "secret"])
def test_a_gated_model(hub: FakeHub, ways: Ways, message: Message, monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    hub.tokens.add("secret")
    monkeypatch.setenv("HF_TOKEN", token)
    hub.repositories["org/name"].gated = True
    text = message(lambda: obtain.obtain(URI, ways=ways))
    page = f"hf://org/name: access denied: the model is gated; ask for access at {hub.url}/org/name"
    assert text == page + (
        " with the account that the token is of"
        if token
        else " and give a token of that account (HF_TOKEN; in a manifest model.secretRef)"
    )
    hub.allowed.add("secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert obtain.obtain(URI, ways=ways).path.is_dir()  # access was given: the next try succeeds


def test_a_token_that_is_none(hub: FakeHub, ways: Ways, message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "typo")
    text = message(lambda: obtain.obtain(URI, ways=ways))
    assert "access denied: 127.0.0.1:" in text and "does not know the token; make a new one (HF_TOKEN; in a" in text


def test_a_repository_without_weights(hub: FakeHub, ways: Ways, message: Message) -> None:
    hub.add("org/old", {"pytorch_model.bin": b"x", "config.json": b"{}"})
    text = message(lambda: obtain.obtain("hf://org/old", ways=ways))
    assert text == (
        "hf://org/old: not found: there are neither .safetensors nor .gguf files; there is pytorch_model.bin, which "
        "may hold code; convert it to safetensors"
    )


def test_a_server_that_is_no_hub(hub: FakeHub, ways: Ways, message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern_engine.fetching.hub.Hub._request", lambda *_: _page())
    assert "gave no list of files; is it a hub? (HF_ENDPOINT)" in message(lambda: obtain.obtain(URI, ways=ways))


def _page() -> object:
    import httpx

    return httpx.Response(200, text="<html>", request=httpx.Request("GET", "http://x"))


def test_nobody_there(ways: Ways, message: Message, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    text = message(lambda: obtain.obtain(URI, ways=ways))
    assert text.startswith("hf://org/name: download failed: 127.0.0.1:9 cannot be reached (")


# ---------------------------------------------------------------- what passes


def test_broken_off_and_resumed(hub: FakeHub, ways: Ways) -> None:
    hub.faults.cut[LARGEST] = [100_000, 150_000]
    files = obtain.obtain(URI, ways=ways)
    assert (files.path / LARGEST).read_bytes() == FILES[LARGEST]
    assert hub.fetched(LARGEST) == [(LARGEST, ""), (LARGEST, "bytes=100000-"), (LARGEST, "bytes=250000-")]


def test_a_server_that_cannot_resume(hub: FakeHub, ways: Ways) -> None:
    hub.faults.cut[LARGEST], hub.faults.no_range = [100_000], True
    assert (obtain.obtain(URI, ways=ways).path / LARGEST).read_bytes() == FILES[LARGEST]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_in_trouble_is_asked_again(hub: FakeHub, ways: Ways, status: int) -> None:
    hub.faults.retry_after = "0"
    hub.faults.status = {"/api/models/": [status], f"/{LARGEST}": [status, status]}
    seen: list[str] = []
    assert obtain.obtain(URI, meter=Meter(lambda f: seen.append(f.text)), ways=ways).path.is_dir()
    assert any(f"HTTP {status} from 127.0.0.1; trying again" in text for text in seen)


def test_a_server_that_stays_in_trouble(hub: FakeHub, ways: Ways, message: Message) -> None:
    hub.faults.status = {f"/{LARGEST}": [503] * 50}
    text = message(lambda: obtain.obtain(URI, ways=ways))
    assert text == f"hf://org/name: download failed: {LARGEST}: HTTP 503 from 127.0.0.1"


def test_an_address_that_the_store_has_signed_for_a_while_only(hub: FakeHub, ways: Ways) -> None:
    hub.faults.status = {"/store/": [403]}
    assert obtain.obtain(URI, ways=ways).path.is_dir()


def test_bytes_that_are_wrong_once_are_fetched_again(hub: FakeHub, ways: Ways) -> None:
    hub.faults.corrupt[LARGEST] = 1
    assert (obtain.obtain(URI, ways=ways).path / LARGEST).read_bytes() == FILES[LARGEST]


def test_bytes_that_stay_wrong_are_never_served(hub: FakeHub, cache: Path, ways: Ways, message: Message) -> None:
    hub.faults.corrupt = {LARGEST: 9}
    text = message(lambda: obtain.obtain(URI, ways=ways))
    assert text == (
        f"hf://org/name: download failed: {LARGEST} does not have the digest that the source gives for it, "
        "twice in a row"
    )
    assert Store(cache).find(URI, None) is None
    with pytest.raises(ModelNotFoundError, match=r"is not on this machine.*`kvern fetch hf://org/name` brings it here"):
        resolve_model(URI)


# ---------------------------------------------------------------- damage and room


def test_a_damaged_model_is_mended_and_only_what_is_damaged_fetched(hub: FakeHub, cache: Path, ways: Ways) -> None:
    folder = obtain.obtain(URI, ways=ways).path
    before = len(hub.fetched())
    (folder / LARGEST).write_bytes(b"short")
    assert Store(cache).find(URI, None) is None
    assert content(obtain.obtain(URI, ways=ways).path) == {name: FILES[name] for name in WANTED}
    assert [name for name, _ in hub.fetched()[before:]] == [LARGEST] or len(hub.fetched()) == before + 1


def test_a_partial_file_is_never_found(hub: FakeHub, cache: Path, ways: Ways, message: Message) -> None:
    hub.faults.cut[LARGEST] = [0] * 9
    text = message(lambda: obtain.obtain(URI, ways=ways))
    assert f"{LARGEST}: " in text and "download failed" in text
    assert Store(cache).find(URI, None) is None and Store(cache).snapshots() == []
    (partial,) = Store(cache).partials()
    assert not (partial / MANIFEST).exists()
    hub.faults.cut.clear()
    done = {p.name for p in partial.iterdir() if not p.name.endswith(".part")}
    asked = len(hub.fetched())
    obtain.obtain(URI, ways=ways)
    assert not done & {name for name, _ in hub.fetched()[asked:]}  # finished files are not fetched again


def test_no_room_says_what_is_needed_and_free(
    hub: FakeHub, ways: Ways, monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    monkeypatch.setenv("KVERN_CACHE_LIMIT", "100000")
    text = message(lambda: obtain.obtain(URI, ways=ways))
    size = sum(len(FILES[name]) for name in WANTED)
    assert text.startswith(f"hf://org/name: no room: {size / 1000:.0f} kB are needed and ")
    assert f" are free in {os.environ['KVERN_CACHE_DIR']}" in text and f"({size} and " in text
    assert hub.fetched() == []  # known before the first byte
    monkeypatch.setenv("KVERN_CACHE_LIMIT", "1GB")
    assert message(lambda: obtain.obtain(URI, ways=ways)) == 'KVERN_CACHE_LIMIT="1GB" must be a number of bytes'


def test_a_disk_that_fills_up_meanwhile(hub: FakeHub, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download._Job, "_write", full)
    with pytest.raises(SourceError) as caught:
        obtain.obtain(URI, ways=ways)
    assert caught.value.reason == "NoRoom" and " are needed and " in str(caught.value)


def test_a_folder_that_cannot_be_written(
    hub: FakeHub, ways: Ways, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVERN_CACHE_DIR", str(tmp_path / "file"))
    text = message(lambda: obtain.obtain(URI, ways=ways))
    assert "cannot be written: Not a directory; KVERN_CACHE_DIR names the folder" in text
