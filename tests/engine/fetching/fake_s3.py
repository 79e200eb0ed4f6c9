"""An S3 server on loopback: lists, HEAD and GET of objects, signatures checked as AWS checks them, and its errors.

It knows nothing of the client: what a signature must be is computed here from the request as it came.
"""

import base64
import hashlib
import hmac
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from fake_hub import Answering

NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"
STATUS = {"NoSuchBucket": 404, "NoSuchKey": 404, "PreconditionFailed": 412, "SlowDown": 503, "PermanentRedirect": 301}


@dataclass
class Stored:
    content: bytes
    sha256: bool = False

    @property
    def etag(self) -> str:
        return hashlib.md5(self.content, usedforsecurity=False).hexdigest()


@dataclass
class FakeS3:
    """`keys`: access -> (secret, may read); none: everybody may. `errors`: codes of the next answers. `region`: what is
    signed for another one is told this one."""

    buckets: dict[str, dict[str, Stored]] = field(default_factory=dict)
    keys: dict[str, tuple[str, bool]] = field(default_factory=dict)
    errors: list[tuple[str, int]] = field(default_factory=list)
    region: str = "us-east-1"
    page: int = 1000
    log: list[tuple[str, str, str]] = field(default_factory=list)
    identities: dict[str, tuple[str, str]] = field(default_factory=dict)  # web identity token -> keys
    url: str = ""

    def put(self, key: str, content: bytes, *, bucket: str = "models", sha256: bool = False) -> None:
        self.buckets.setdefault(bucket, {})[key] = Stored(content, sha256)

    @contextmanager
    def running(self) -> Iterator["FakeS3"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (S3Handler,), {"s3": self}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02}).start()
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()


def signature(handler: BaseHTTPRequestHandler, secret: str, fields: dict[str, str]) -> str:
    """What the signature of a received request must be."""
    parts, names = urlsplit(handler.path), fields["SignedHeaders"].split(";")
    headers = "".join(f"{name}:{' '.join(handler.headers[name].split())}\n" for name in names)
    pairs = sorted(parts.query.split("&")) if parts.query else []
    hashed = handler.headers["x-amz-content-sha256"]
    canonical = "\n".join([handler.command, parts.path, "&".join(pairs), headers, ";".join(names), hashed])
    _, day, region, service, _ = fields["Credential"].split("/")
    scope = f"{day}/{region}/{service}/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{handler.headers['x-amz-date']}\n{scope}\n{digest}"
    key = b"AWS4" + secret.encode()
    for part in (day, region, service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    return hmac.digest(key, text.encode(), "sha256").hex()


class S3Handler(Answering):
    """Of the objects and of the token service."""

    s3: FakeS3

    def do_POST(self) -> None:
        """The token service."""
        body = self.rfile.read(int(self.headers["Content-Length"])).decode()
        token = parse_qs(body)["WebIdentityToken"][0]
        if token not in self.s3.identities:
            return self._refuse("AccessDenied", 403, "Not authorized to perform sts:AssumeRoleWithWebIdentity")
        access, secret = self.s3.identities[token]
        keys = f"<AccessKeyId>{access}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey>"
        found = f"<Credentials>{keys}<SessionToken>session</SessionToken></Credentials>"
        self._answer(200, f"<A><AssumeRoleWithWebIdentityResult>{found}</AssumeRoleWithWebIdentityResult></A>".encode())

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        self.s3.log.append((self.command, key, self.headers.get("Range", "")))
        if self.s3.errors:
            code, status = self.s3.errors.pop(0)
            return self._refuse(code, status, "Use eu.")
        wrong = self._allowed()
        if wrong:
            return self._refuse(*wrong)
        if bucket not in self.s3.buckets:
            return self._refuse("NoSuchBucket", 404, "The specified bucket does not exist")
        if not key:
            return self._list(bucket, {k: v[0] for k, v in parse_qs(parts.query, keep_blank_values=True).items()})
        return self._object(self.s3.buckets[bucket].get(key))

    def _allowed(self) -> tuple[str, int, str] | None:
        given = self.headers.get("Authorization", "")
        if given:
            fields = dict(p.strip().split("=", 1) for p in given.removeprefix("AWS4-HMAC-SHA256 ").split(","))
            access, _, region, *_ = fields["Credential"].split("/")
            if region != self.s3.region:
                return (
                    "AuthorizationHeaderMalformed",
                    400,
                    f"the region '{region}' is wrong; expecting '{self.s3.region}'",
                )
        if not self.s3.keys:
            return None
        if not given:
            return "AccessDenied", 403, "Access Denied"
        if access not in self.s3.keys:
            return "InvalidAccessKeyId", 403, "The AWS Access Key Id you provided does not exist in our records."
        secret, may_read = self.s3.keys[access]
        if signature(self, secret, fields) != fields["Signature"]:
            return "SignatureDoesNotMatch", 403, "The request signature we calculated does not match."
        return None if may_read else ("AccessDenied", 403, "Access Denied")

    def _list(self, bucket: str, query: dict[str, str]) -> None:
        assert query["list-type"] == "2"
        keys = sorted(k for k in self.s3.buckets[bucket] if k.startswith(query["prefix"]))
        start = int(query.get("continuation-token", "0"))
        page, rest = keys[start : start + self.s3.page], len(keys) > start + self.s3.page
        entries = "".join(
            f"<Contents><Key>{escape(k)}</Key><ETag>&quot;{o.etag}&quot;</ETag><Size>{len(o.content)}</Size></Contents>"
            for k, o in ((k, self.s3.buckets[bucket][k]) for k in page)
        )
        more = f"<NextContinuationToken>{start + self.s3.page}</NextContinuationToken>" if rest else ""
        body = f"<IsTruncated>{str(rest).lower()}</IsTruncated>{more}{entries}"
        self._answer(200, f'<ListBucketResult xmlns="{NAMESPACE}">{body}</ListBucketResult>'.encode())

    def _object(self, found: Stored | None) -> None:
        if found is None:
            return self._refuse("NoSuchKey", 404, "The specified key does not exist.")
        wanted = self.headers.get("If-Match", f'"{found.etag}"')
        if wanted != f'"{found.etag}"':
            return self._refuse("PreconditionFailed", 412, "At least one of the pre-conditions did not hold")
        headers, status, content = {"ETag": f'"{found.etag}"'}, 200, found.content
        if found.sha256 and self.headers.get("x-amz-checksum-mode") == "ENABLED":
            headers["x-amz-checksum-sha256"] = base64.b64encode(hashlib.sha256(content).digest()).decode()
            headers["x-amz-checksum-type"] = "FULL_OBJECT"
        if asked := self.headers.get("Range"):
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[start:]
        return self._answer(status, content, headers)

    def _refuse(self, code: str, status: int, message: str) -> None:
        body = f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>".encode()
        headers = {"x-amz-bucket-region": self.s3.region} if code in ("AuthorizationHeaderMalformed",) else {}
        self._answer(status, body, headers)

    def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_head(status, body, headers)
        if self.command != "HEAD":
            self.wfile.write(body)
