"""A Hugging Face hub on loopback: the API that a download needs, a store of large files behind a redirect, and faults.

Written from the hub's public behaviour (what huggingface_hub expects of it): X-Error-Code of refusals, ETag and
X-Linked-* of files, redirects of large files to another host, Range there.
"""

import hashlib
import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

LARGE = 1 << 16  # bytes from which a file is in large-file storage

CONFIG = b'{"model_type": "llama"}'


def noise(size: int, seed: int = 1) -> bytes:
    """Bytes that no compression makes smaller, the same each time."""
    return random.Random(seed).randbytes(size)


FILES = {
    "config.json": CONFIG,
    "tokenizer.json": b"{}",
    "model-00001-of-00002.safetensors": noise(300_000, 1),
    "model-00002-of-00002.safetensors": noise(200_000, 2),
    "README.md": b"# about it",
    "modeling_x.py": b"raise SystemExit('never run')",
    "pytorch_model.bin": noise(400_000, 3),
}
WANTED = [name for name in FILES if name not in ("README.md", "modeling_x.py", "pytorch_model.bin")]


@dataclass
class Repository:
    """`commits`: commit -> name -> content. `refs`: branch or tag -> commit."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    private: bool = False
    gated: bool = False


@dataclass
class Faults:
    """What goes wrong. `cut`: file -> bytes after which its next answers break off, one entry an answer. `status`: path
    part -> statuses of the next answers. `bare`: the list tells neither sizes nor digests. `no_range`: Range is
    ignored. `corrupt`: files whose bytes are wrong, so many times. `pause`: seconds before each 64 KiB."""

    cut: dict[str, list[int]] = field(default_factory=dict)
    status: dict[str, list[int]] = field(default_factory=dict)
    retry_after: str = ""
    bare: bool = False
    no_range: bool = False
    corrupt: dict[str, int] = field(default_factory=dict)
    pause: float = 0.0


class FakeHub:
    """`tokens` may read what is private, `allowed` of them what is gated. `log`: (method, path, Range, token given)."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.tokens: set[str] = set()
        self.allowed: set[str] = set()
        self.faults = Faults()
        self.log: list[tuple[str, str, str, bool]] = []
        self.lock = threading.Lock()
        self.url = self.store_url = ""

    def add(self, name: str, files: dict[str, bytes], commit: str = "c0ffee", **more: bool) -> Repository:
        """A repository with one commit, which main points to."""
        made = self.repositories[name] = Repository({commit: files}, {"main": commit}, **more)
        return made

    def fetched(self, name: str = "") -> list[tuple[str, str]]:
        """(file, Range) of the contents that were asked for, in order."""
        with self.lock:
            gets = [(path, asked) for method, path, asked, _ in self.log if method == "GET"]
        bytes_of = [(p, r) for p, r in gets if "/store/" in p or ("/resolve/" in p and self._small(p))]
        return [(p.rpartition("/")[2], r) for p, r in bytes_of if name in ("", p.rpartition("/")[2])]

    def _small(self, path: str) -> bool:
        owner, name, _, commit, file = path.strip("/").split("/", 4)
        return len(self.repositories[f"{owner}/{name}"].commits[commit].get(file, b"")) < LARGE

    def handler(self, store: bool) -> type[BaseHTTPRequestHandler]:
        """What answers for the hub, or for its store of large files."""
        return type("Handler", (HubHandler,), {"hub": self, "store": store})

    @contextmanager
    def running(self) -> Iterator["FakeHub"]:
        """Two servers on loopback: the hub and its store."""
        servers = [ThreadingHTTPServer(("127.0.0.1", 0), self.handler(store)) for store in (False, True)]
        self.url, self.store_url = (f"http://127.0.0.1:{s.server_address[1]}" for s in servers)
        self.store_url = self.store_url.replace("127.0.0.1", "localhost")  # another host, so that a token must not go
        for server in servers:
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02}).start()
        try:
            yield self
        finally:
            for server in servers:
                server.shutdown()
                server.server_close()


def git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sibling(name: str, content: bytes, bare: bool) -> dict:
    """As the hub lists a file with ?blobs=true."""
    if bare:
        return {"rfilename": name}
    entry: dict = {"rfilename": name, "size": len(content), "blobId": git_sha1(content)}
    if len(content) >= LARGE:
        entry["blobId"] = git_sha1(b"pointer")
        entry["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 134}
    return entry


class Answering(BaseHTTPRequestHandler):
    """Answers GET and HEAD alike, with `_serve`, and logs nothing."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def _serve(self) -> None:
        raise NotImplementedError

    def send_head(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """All of an answer but its `body`."""
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()


class HubHandler(Answering):
    """Of the hub, or of its store of large files."""

    hub: FakeHub
    store: bool

    def _serve(self) -> None:
        path = unquote(urlsplit(self.path).path)
        given = self.headers.get("Authorization", "")
        with self.hub.lock:
            self.hub.log.append((self.command, path, self.headers.get("Range", ""), bool(given)))
            for part, statuses in self.hub.faults.status.items():
                if part in path and statuses:
                    status = statuses.pop(0)
                    headers = {"Retry-After": self.hub.faults.retry_after} if self.hub.faults.retry_after else {}
                    return self._answer(status, b"", headers)
        if self.store:
            assert not given, "a token was sent to the store"
            digest = path.split("/")[2]
            for repository in self.hub.repositories.values():
                for files in repository.commits.values():
                    for name, content in files.items():
                        if hashlib.sha256(content).hexdigest() == digest:
                            return self._content(name, content)
            return self._answer(404, b"")
        if path.startswith("/api/models/"):
            return self._api(path, given.removeprefix("Bearer "))
        return self._resolve(path, given.removeprefix("Bearer "))

    # -------------------------------------------------------- the API

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._answer(status, b"{}", headers | ({"X-Error-Message": message} if message else {}))

    def _repository(self, name: str, token: str, *, content: bool) -> Repository | None:
        """The repository, if it may be seen; else the refusal has been sent."""
        if token and token not in self.hub.tokens:
            self._refuse(401, "", "Invalid credentials in Authorization header")
            return None
        found = self.hub.repositories.get(name)
        if found is None or (found.private and not token):
            self._refuse(404 if token else 401, "RepoNotFound", "Repository not found")
            return None
        if found.gated and content and token not in self.hub.allowed:
            self._refuse(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted.")
            return None
        return found

    def _api(self, path: str, token: str) -> None:
        owner, name, *rest = path.removeprefix("/api/models/").split("/", 3)
        repository = self._repository(f"{owner}/{name}", token, content=False)
        if repository is None:
            return
        if rest == ["refs"]:
            branches = [{"name": ref, "targetCommit": commit} for ref, commit in repository.refs.items()]
            return self._json({"branches": branches, "tags": []})
        commit = repository.refs.get(rest[1], rest[1])
        if commit not in repository.commits:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {rest[1]}")
        files = repository.commits[commit]
        siblings = [sibling(n, c, self.hub.faults.bare) for n, c in files.items()]
        self._json({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings})

    def _resolve(self, path: str, token: str) -> None:
        owner, name, word, commit, file = path.strip("/").split("/", 4)
        assert word == "resolve"
        repository = self._repository(f"{owner}/{name}", token, content=True)
        if repository is None:
            return
        content = repository.commits.get(commit, {}).get(file)
        if content is None:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        if len(content) < LARGE:
            return self._content(file, content, {"ETag": f'"{git_sha1(content)}"', "X-Repo-Commit": commit})
        digest = hashlib.sha256(content).hexdigest()
        linked = {
            "X-Linked-ETag": f'"{digest}"',
            "X-Linked-Size": str(len(content)),
            "X-Repo-Commit": commit,
            "Location": f"{self.hub.store_url}/store/{digest}/{file}",
        }
        self._answer(302, b"", linked)

    # -------------------------------------------------------- bytes

    def _content(self, name: str, content: bytes, headers: dict[str, str] | None = None) -> None:
        headers, status, start = dict(headers or {}), 200, 0
        asked = self.headers.get("Range", "")
        if asked and not self.hub.faults.no_range:
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                return self._answer(416, b"", {"Content-Range": f"bytes */{len(content)}"})
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        with self.hub.lock:
            cuts = self.hub.faults.cut.get(name) or []
            cut = cuts.pop(0) if cuts else None
            if self.hub.faults.corrupt.get(name):
                self.hub.faults.corrupt[name] -= 1
                content = content[:-1] + bytes([content[-1] ^ 1])
        self._answer(status, content[start:], headers, cut)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_head(status, body, headers)
        if self.command == "HEAD":
            return
        body = body if cut is None else body[:cut]
        try:
            for at in range(0, len(body), 1 << 16):
                if self.hub.faults.pause:
                    time.sleep(self.hub.faults.pause)
                self.wfile.write(body[at : at + (1 << 16)])
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        if cut is not None:
            self.close_connection = True
