"""hf://org/name: the Hugging Face hub's API, or a mirror that speaks it (HF_ENDPOINT). Effects only.

Plain HTTP and no huggingface_hub: what a download needs beyond it (resumed bytes, digests checked, figures while it
runs) is most of the work, and what is left of the API is two addresses. Those are

    GET  /api/models/ORG/NAME/revision/REV?blobs=true    the commit, and of each file its name, size and digest
    GET  /ORG/NAME/resolve/COMMIT/FILE                   its bytes, as a rule after a redirect to a store

Where a mirror leaves sizes or digests out, a HEAD of the second tells them (ETag, X-Linked-ETag, X-Linked-Size).
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, urljoin, urlsplit

import httpx

from kvern_engine.fetching.errors import PassingError, SourceError
from kvern_engine.fetching.files import Digest, Listing, Place, RemoteFile, choose
from kvern_engine.fetching.source import Stream

TIMEOUT = httpx.Timeout(60.0, connect=15.0)
MOST_REDIRECTS = 5
LONGEST_WAIT = 120.0  # seconds of a Retry-After
_HEX = re.compile(r"[0-9a-f]+")
_TOKEN = "HF_TOKEN; in a manifest model.secretRef"


class Hub:
    """One repository."""

    def __init__(self, uri: str, place: Place, endpoint: str, token: str) -> None:
        self._uri, self._place, self._token = uri, place, token
        self._endpoint = endpoint.rstrip("/")
        # Sizes and ranges are those of the files as they are, not of something compressed.
        headers = {"Accept-Encoding": "identity", "User-Agent": "kvern"}
        try:
            self._client = httpx.Client(headers=headers, timeout=TIMEOUT)
        except (ValueError, OSError) as error:  # a proxy or certificate file of the environment
            raise SourceError("Failed", uri, f"the environment's proxy or certificates: {error}") from None
        self._commit = ""

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    # ------------------------------------------------------------ the list

    def listing(self, revision: str | None) -> Listing:
        """The commit that the revision is now, and the files that the model needs of it."""
        path = f"/api/models/{self._place.root}/revision/{quote(revision or 'main', safe='')}"
        answer = self._request("GET", f"{self._endpoint}{path}?blobs=true")
        if answer.status_code != 200:
            raise self._refused(answer, revision)
        try:
            info = answer.json()
            commit = str(info["sha"])
            siblings = {str(s["rfilename"]): s for s in info["siblings"]}
            if not commit.isalnum():
                raise ValueError(commit)
        except (ValueError, KeyError, TypeError):
            text = f"{self._endpoint} gave no list of files; is it a hub? (HF_ENDPOINT)"
            raise SourceError("Failed", self._uri, text) from None
        try:
            names = choose(siblings, self._place.file)
        except ValueError as error:
            raise SourceError("NotFound", self._uri, str(error)) from None
        self._commit = commit
        return Listing(self._uri, commit, tuple(self._file(name, siblings[name]) for name in names))

    def _file(self, name: str, sibling: dict[str, Any]) -> RemoteFile:
        found = sibling.get("lfs")
        lfs: dict[str, Any] = found if isinstance(found, dict) else {}
        size, digest = sibling.get("size", lfs.get("size")), _digest(str(lfs.get("sha256") or ""))
        digest = digest or (None if lfs else _digest(str(sibling.get("blobId") or "")))
        if isinstance(size, int) and digest is not None:
            return RemoteFile(name, size, digest)
        answer = self._head(name)
        linked = answer.headers.get("X-Linked-Size") or answer.headers.get("Content-Length") or ""
        if not linked.isdigit():
            raise SourceError("Failed", self._uri, f"{self._endpoint} does not say how large {name} is")
        etag = (answer.headers.get("X-Linked-ETag") or answer.headers.get("ETag") or "").removeprefix("W/").strip('"')
        return RemoteFile(name, int(linked), digest or _digest(etag), etag)

    def _head(self, name: str) -> httpx.Response:
        """Of a file; the redirect to a store has the figures already, one to a repository's new name has not."""
        url = self._url(name)
        for _ in range(MOST_REDIRECTS):
            answer = self._request("HEAD", url)
            where = answer.headers.get("Location")
            if not answer.is_redirect or not where or "X-Linked-Size" in answer.headers:
                break
            url = urljoin(url, where)
        if answer.status_code >= 400:
            raise self._refused(answer, None)
        return answer

    # ------------------------------------------------------------ the bytes

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[Stream]:
        """The bytes of one file of the commit."""
        headers = {"Range": f"bytes={offset}-"} if offset else {}
        url = self._url(file.name)
        try:
            for _ in range(MOST_REDIRECTS):
                request = self._client.build_request("GET", url, headers={**headers, **self._authorization(url)})
                answer = self._client.send(request, stream=True)
                where = answer.headers.get("Location")
                if not answer.is_redirect or not where:
                    break
                answer.close()
                url = urljoin(url, where)
            try:
                if answer.status_code not in (200, 206):
                    answer.read()
                    raise self._refused(answer, None)
                yield Stream(start_of(answer), answer.iter_bytes())
            finally:
                answer.close()
        except httpx.HTTPError as error:
            raise PassingError(words_of(error, url)) from None

    # ------------------------------------------------------------ HTTP

    def _url(self, name: str) -> str:
        return f"{self._endpoint}/{self._place.root}/resolve/{self._commit}/{quote(name)}"

    def _authorization(self, url: str) -> dict[str, str]:
        """The token goes to the hub and to nobody that it sends us to."""
        same = urlsplit(url)[:2] == urlsplit(self._endpoint)[:2]
        return {"Authorization": f"Bearer {self._token}"} if self._token and same else {}

    def _request(self, method: str, url: str) -> httpx.Response:
        try:
            for _ in range(MOST_REDIRECTS):
                answer = self._client.request(method, url, headers=self._authorization(url))
                where = answer.headers.get("Location")
                if method == "HEAD" or not answer.is_redirect or not where:
                    break
                url = urljoin(url, where)
            return answer
        except httpx.HTTPError as error:
            raise PassingError(words_of(error, url)) from None
        except httpx.InvalidURL as error:
            raise SourceError("Failed", self._uri, f"{url}: {error} (HF_ENDPOINT)") from None

    def _refused(self, answer: httpx.Response, revision: str | None) -> Exception:
        """What an error of the hub means and what to do about it."""
        status, code = answer.status_code, answer.headers.get("X-Error-Code", "")
        said = answer.headers.get("X-Error-Message", "")
        away = answer.url.host != (urlsplit(self._endpoint).hostname or "")
        # A store that the hub sends us to signs addresses for a while: the hub gives a new one.
        if status == 429 or status >= 500 or status in (408, 416) or (away and status in (401, 403)):
            after = answer.headers.get("Retry-After", "")
            wait = min(float(after), LONGEST_WAIT) if after.isdigit() else None
            return PassingError(f"HTTP {status} from {answer.url.host}", wait, restart=status == 416)
        if code == "GatedRepo":
            return SourceError("AccessDenied", self._uri, self._gated())
        if code == "RevisionNotFound":
            return SourceError("NotFound", self._uri, f"there is no revision {revision or 'main'!r}{self._revisions()}")
        if code == "EntryNotFound":
            return SourceError("NotFound", self._uri, f"{answer.url.path} is not there any more")
        if status == 401 and self._token and "credentials" in said:
            text = f"{self._host} does not know the token; make a new one ({_TOKEN})"
            return SourceError("AccessDenied", self._uri, text)
        if code == "RepoNotFound" or status in (401, 404):
            return self._no_repository()
        if status == 403:
            text = f"{self._host} forbids it{': ' + said if said else ''}; the token needs the right to read this model"
            return SourceError("AccessDenied", self._uri, text)
        return SourceError("Failed", self._uri, f"HTTP {status} from {self._host}{': ' + said if said else ''}")

    @property
    def _host(self) -> str:
        return urlsplit(self._endpoint).netloc or self._endpoint

    def _no_repository(self) -> SourceError:
        if self._token:
            text = f"{self._host} has no such model, or the token's account may not see it"
        else:
            text = f"{self._host} has no such model, or it is private and needs a token ({_TOKEN})"
        return SourceError("NotFound", self._uri, text)

    def _gated(self) -> str:
        page = f"{self._endpoint}/{self._place.root}"
        if self._token:
            return f"the model is gated; ask for access at {page} with the account that the token is of"
        return f"the model is gated; ask for access at {page} and give a token of that account ({_TOKEN})"

    def _revisions(self) -> str:
        """Those that there are, where the hub tells them."""
        try:
            answer = self._request("GET", f"{self._endpoint}/api/models/{self._place.root}/refs")
            found = answer.json() if answer.status_code == 200 else {}
            names = [str(ref["name"]) for kind in ("branches", "tags") for ref in found.get(kind) or ()]
        except (PassingError, ValueError, KeyError, TypeError, AttributeError):
            return ""
        return f"; there are {', '.join(names[:6])}" if names else ""


def _digest(text: str) -> Digest | None:
    """By its length: a file in large-file storage has a SHA-256, one in git itself the SHA-1 of its blob."""
    if not _HEX.fullmatch(text):
        return None
    if len(text) == 64:
        return Digest("sha256", text)
    return Digest("git-sha1", text) if len(text) == 40 else None


def start_of(answer: httpx.Response) -> int:
    """Where the bytes begin. Raises PassingError where the server does not say."""
    if answer.status_code == 200:
        return 0
    match = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    if match is None:
        raise PassingError(f"{answer.url.host} answers 206 without Content-Range")
    return int(match[1])


def words_of(error: httpx.HTTPError, url: str) -> str:
    host = urlsplit(url).netloc
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return f"{host} cannot be reached ({str(error) or 'no answer in time'})"
    return f"{host}: {str(error) or type(error).__name__}"
