"""s3://bucket/folder: S3, or a server that speaks its protocol (AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL). Effects only.

Three requests of its API over httpx: the list of a folder, HEAD and GET of an object. Keys come from the variables that
every tool of AWS reads, or from a web identity (a ServiceAccount bound to a role); without any the bucket is asked
unsigned, as a public one is. botocore would bring more ways, and cannot be installed beside today's kubernetes client.
"""

import base64
import binascii
import os
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from kvern_engine.fetching.errors import PassingError, SourceError
from kvern_engine.fetching.files import Digest, Listing, Place, RemoteFile, choose, version_of
from kvern_engine.fetching.hub import TIMEOUT, start_of, words_of
from kvern_engine.fetching.sigv4 import Keys, encoded_path, encoded_query, signed
from kvern_engine.fetching.source import Stream
from kvern_engine.fetching.store import endpoint_of

_DENIED = {
    "AccessDenied",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_OLD = {"ExpiredToken", "TokenRefreshRequired"}
_PASSING = {"InvalidRange", "RequestTimeout", "SlowDown", "Throttling"}
_ELSEWHERE = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"}
_BARE = {301: "PermanentRedirect", 403: "AccessDenied", 404: "NoSuchKey", 412: "PreconditionFailed"}  # HEAD has no body
_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; in a manifest model.secretRef"
_PAGES = 1000


class Bucket:
    """One folder of a bucket."""

    def __init__(self, uri: str, place: Place, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._uri, self._place, self._endpoint = uri, place, endpoint_of(uri).rstrip("/")
        self._region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        if self._endpoint and not self._endpoint.startswith(("http://", "https://")):
            raise SourceError("Failed", uri, f"AWS_ENDPOINT_URL_S3={self._endpoint} is no URL; write https://host:port")
        try:
            self._client = httpx.Client(headers={"Accept-Encoding": "identity", "User-Agent": "kvern"}, timeout=TIMEOUT)
        except (ValueError, OSError) as error:  # a proxy or certificate file of the environment
            raise SourceError("Failed", uri, f"the environment's proxy or certificates: {error}") from None
        self._environ = environ
        self._known: Keys | None = None

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    # ------------------------------------------------------------ what there is

    def listing(self, revision: str | None) -> Listing:
        """The objects under the folder that a model needs; a bucket has no revisions."""
        prefix = f"{self._place.folder}/" if self._place.folder else ""
        found = {f.name: f for f in self._list(prefix)}
        if not found:
            text = f"the bucket has no objects under {prefix}" if prefix else "the bucket is empty"
            raise SourceError("NotFound", self._uri, text)
        try:
            names = choose(found, self._place.file)
        except ValueError as error:
            raise SourceError("NotFound", self._uri, str(error)) from None
        files = tuple(self._with_digest(found[name], prefix) for name in names)
        return Listing(self._uri, version_of(files), files)

    def _list(self, prefix: str) -> Iterator[RemoteFile]:
        more: dict[str, str] = {}
        for _ in range(_PAGES):
            answer = self._ask("GET", "", {"list-type": "2", "prefix": prefix, **more})
            try:
                page = ElementTree.fromstring(answer.content)
                entries = [
                    {_plain(e.tag): e.text or "" for e in entry} for entry in page if _plain(entry.tag) == "Contents"
                ]
                rest = {_plain(e.tag): e.text or "" for e in page}
                for entry in entries:
                    name = entry["Key"].removeprefix(prefix)
                    yield RemoteFile(name, int(entry["Size"]), etag=entry.get("ETag", "").strip('"'))
            except (ElementTree.ParseError, KeyError, ValueError):
                text = f"{answer.url.host} gave no list of objects; is it an S3 server? (AWS_ENDPOINT_URL_S3)"
                raise SourceError("Failed", self._uri, text) from None
            if rest.get("IsTruncated") != "true":
                return
            more = {"continuation-token": rest.get("NextContinuationToken", "")}
        raise SourceError("Failed", self._uri, f"the folder holds more than {_PAGES} thousand objects")

    def _with_digest(self, file: RemoteFile, prefix: str) -> RemoteFile:
        """With the SHA-256 that it was uploaded with, if it was. An ETag is none: it is an MD5 of some objects only."""
        answer = self._ask("HEAD", prefix + file.name, headers={"x-amz-checksum-mode": "ENABLED"})
        whole = answer.headers.get("x-amz-checksum-type", "FULL_OBJECT") == "FULL_OBJECT"
        digest = _sha256(answer.headers.get("x-amz-checksum-sha256", "")) if whole else None
        size, etag = answer.headers.get("Content-Length", ""), answer.headers.get("ETag", "").strip('"')
        return RemoteFile(file.name, int(size) if size.isdigit() else file.size, digest, etag or file.etag)

    # ------------------------------------------------------------ the bytes

    @contextmanager
    def open(self, file: RemoteFile, offset: int) -> Iterator[Stream]:
        """The bytes of an object that is still what was listed."""
        key = f"{self._place.folder}/{file.name}" if self._place.folder else file.name
        headers = {"If-Match": f'"{file.etag}"'} if file.etag else {}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        answer = self._send("GET", key, {}, headers, stream=True)
        try:
            if answer.status_code not in (200, 206):
                answer.read()
                raise self._refused(answer)
            yield Stream(start_of(answer), answer.iter_bytes())
        except httpx.HTTPError as error:
            raise PassingError(words_of(error, str(answer.url))) from None
        finally:
            answer.close()

    # ------------------------------------------------------------ HTTP

    def _ask(
        self, method: str, key: str, query: Mapping[str, str] | None = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """An answer that is one. A bucket of another region says which: it is asked there."""
        for _ in range(2):
            answer = self._send(method, key, query or {}, headers or {})
            region = answer.headers.get("x-amz-bucket-region", self._region)
            if answer.status_code < 300 or region == self._region or self._endpoint:
                break
            self._region = region
        if answer.status_code >= 300:
            raise self._refused(answer)
        return answer

    def _send(
        self, method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str], *, stream: bool = False
    ) -> httpx.Response:
        url = self._url(key, query)
        keys = self._keys()
        if keys is not None:
            stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
            headers = signed(method, url, headers, keys, self._region, stamp)
        try:
            return self._client.send(self._client.build_request(method, url, headers=headers), stream=stream)
        except httpx.HTTPError as error:
            raise PassingError(words_of(error, url)) from None
        except (httpx.InvalidURL, ValueError) as error:
            raise SourceError("Failed", self._uri, f"{url}: {error} (AWS_ENDPOINT_URL_S3)") from None

    def _url(self, key: str, query: Mapping[str, str]) -> str:
        bucket = self._place.root
        if self._endpoint:  # such servers have one name, and their buckets are paths under it
            base = f"{self._endpoint}/{bucket}/"
        elif "." in bucket:  # which no certificate of *.s3... covers
            base = f"https://s3.{self._region}.{_domain(self._region)}/{bucket}/"
        else:
            base = f"https://{bucket}.s3.{self._region}.{_domain(self._region)}/"
        return base + encoded_path(key) + (f"?{encoded_query(query)}" if query else "")

    def _keys(self) -> Keys | None:
        environ = self._environ
        access, secret = environ.get("AWS_ACCESS_KEY_ID", ""), environ.get("AWS_SECRET_ACCESS_KEY", "")
        if access and secret:
            return Keys(access, secret, environ.get("AWS_SESSION_TOKEN", ""))
        if self._known is None and environ.get("AWS_WEB_IDENTITY_TOKEN_FILE") and environ.get("AWS_ROLE_ARN"):
            self._known = self._by_identity()
        return self._known

    def _by_identity(self) -> Keys:
        """Temporary keys for the token that the cluster has given to the pod: for an hour, as a rule."""
        default = f"https://sts.{self._region}.{_domain(self._region)}"
        query = {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": self._environ["AWS_ROLE_ARN"],
            "RoleSessionName": "kvern-fetch",
            "WebIdentityToken": Path(self._environ["AWS_WEB_IDENTITY_TOKEN_FILE"]).read_text().strip(),
        }
        url = self._environ.get("AWS_ENDPOINT_URL_STS") or default
        try:
            answer = self._client.post(url, data=query)
            found = {_plain(e.tag): e.text or "" for e in ElementTree.fromstring(answer.content).iter()}
        except httpx.HTTPError as error:
            raise PassingError(words_of(error, url)) from None
        except ElementTree.ParseError:
            raise PassingError(f"{urlsplit(url).netloc}: HTTP {answer.status_code}") from None
        if "AccessKeyId" not in found:
            text = f"the web identity has no access to role {query['RoleArn']}: {found.get('Message', '').rstrip('.')}"
            raise SourceError("AccessDenied", self._uri, text)
        return Keys(found["AccessKeyId"], found["SecretAccessKey"], found["SessionToken"])

    def _refused(self, answer: httpx.Response) -> Exception:
        """What an error of S3 means and what to do about it."""
        said, status = _error(answer.content), answer.status_code
        code = said.get("Code") or _BARE.get(status, f"HTTP {status}")
        message = said.get("Message", "").rstrip(".")
        where = f"bucket {self._place.root}"
        if status >= 500 or status == 429 or code in _PASSING or status == 416:
            return PassingError(f"{where}: {code} {message}".rstrip(), restart=status == 416)
        if code in _OLD and self._known is not None:
            self._known = None  # a large model takes longer than keys last: others for the next request
            return PassingError(f"{where}: {code} {message}".rstrip(), 0.0)
        if code == "PreconditionFailed":
            return SourceError("Failed", self._uri, "it was changed while it was fetched; the next try lists it anew")
        if code == "NoSuchBucket":
            at = f" at {self._endpoint}" if self._endpoint else ""
            return SourceError("NotFound", self._uri, f"there is no {where}{at}")
        if code == "NoSuchKey":
            return SourceError("NotFound", self._uri, "an object is gone that was listed before")
        if code in _ELSEWHERE:
            text = f"{where} is in another region: {message or code}; set AWS_REGION"
            return SourceError("Failed", self._uri, text)
        if code in _DENIED or status in (401, 403):
            mine = self._keys() is not None
            rest = f"these keys may not read {where}" if mine else f"{where} asks for keys ({_KEYS})"
            return SourceError("AccessDenied", self._uri, f"{rest}: {code}{': ' + message if message else ''}")
        return SourceError("Failed", self._uri, f"{where}: {code} {message}".rstrip())


def _domain(region: str) -> str:
    return "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"


def _plain(tag: str) -> str:
    """Without its namespace: servers differ in it."""
    return tag.rpartition("}")[2]


def _error(body: bytes) -> dict[str, str]:
    try:
        return {_plain(e.tag): e.text or "" for e in ElementTree.fromstring(body)}
    except ElementTree.ParseError:
        return {}


def _sha256(text: str) -> Digest | None:
    """S3 writes it in base64."""
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return Digest("sha256", raw.hex()) if len(raw) == 32 else None
