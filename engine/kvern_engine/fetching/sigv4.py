"""AWS Signature Version 4 of a request without a body, as S3 wants it. Pure: standard library, no clock.

docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html; tests hold it against the examples given there.
"""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

NO_BODY = hashlib.sha256(b"").hexdigest()
_UNRESERVED = "-_.~"


@dataclass(frozen=True)
class Keys:
    """`token` "": the keys are not temporary."""

    access: str
    secret: str
    token: str = ""


def encoded_path(path: str) -> str:
    """A path of a URL as it is sent and signed."""
    return quote(path, safe="/" + _UNRESERVED)


def encoded_query(values: Mapping[str, str]) -> str:
    """A query as it is sent and signed: sorted, everything but letters, digits and -_.~ encoded."""
    pairs = sorted((quote(k, safe=_UNRESERVED), quote(v, safe=_UNRESERVED)) for k, v in values.items())
    return "&".join(f"{k}={v}" for k, v in pairs)


def signed(
    method: str, url: str, headers: Mapping[str, str], keys: Keys, region: str, stamp: str, service: str = "s3"
) -> dict[str, str]:
    """`headers` with those that sign the request. `url` has its path and query encoded as above; `stamp` is the time in
    UTC, as 20130524T000000Z."""
    parts, scope = urlsplit(url), f"{stamp[:8]}/{region}/{service}/aws4_request"
    sent = {**headers, "host": parts.netloc, "x-amz-content-sha256": NO_BODY, "x-amz-date": stamp}
    if keys.token:
        sent["x-amz-security-token"] = keys.token
    canonical = {name.lower(): " ".join(value.split()) for name, value in sent.items()}
    names = ";".join(sorted(canonical))
    lines = [f"{name}:{canonical[name]}" for name in sorted(canonical)]
    request = "\n".join([method, parts.path or "/", parts.query, *lines, "", names, NO_BODY])
    to_sign = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(request.encode()).hexdigest()])
    key = f"AWS4{keys.secret}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, to_sign.encode(), hashlib.sha256).hexdigest()
    credential = f"Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    return {**sent, "authorization": f"AWS4-HMAC-SHA256 {credential}"}
