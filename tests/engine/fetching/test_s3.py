"""s3:// against a server on loopback that checks signatures: what is fetched, which keys, what each refusal is told."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_hub import FILES, WANTED, noise
from fake_s3 import FakeS3

from kvern_engine.fetching.errors import PassingError, SourceError
from kvern_engine.fetching.files import parse_place
from kvern_engine.fetching.obtain import Ways, obtain
from kvern_engine.fetching.s3 import Bucket
from kvern_engine.fetching.sigv4 import Keys, encoded_query, signed
from kvern_engine.fetching.store import MANIFEST, PART, Store
from kvern_engine.loading.resolve import resolve_model

URI = "s3://models/llama"
LARGEST = "model-00001-of-00002.safetensors"
Message = Callable[[Callable[[], object]], str]


@pytest.fixture
def s3(alone: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    """A bucket with a model in a folder."""
    made = FakeS3()
    for name, content in FILES.items():
        made.put(f"llama/{name}", content)
    made.put("llama/deeper/other.safetensors", b"x")
    made.put("llama/", b"")
    made.put("llama-2/model.safetensors", b"x")
    with made.running():
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", made.url)
        keys(monkeypatch, "any", "any")
        yield made


def keys(monkeypatch: pytest.MonkeyPatch, key: str, secret: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)


def no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")


# ---------------------------------------------------------------- signatures: the examples of AWS's documentation

EXAMPLE = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")


@pytest.mark.parametrize(
    ("path", "headers", "signature"),
    [
        ("test.txt", {"Range": "bytes=0-9"}, "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"),
        ("?lifecycle=", {}, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        (
            "?" + encoded_query({"prefix": "J", "max-keys": "2"}),
            {},
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_signatures(path: str, headers: dict[str, str], signature: str) -> None:
    url = f"https://examplebucket.s3.amazonaws.com/{path}"
    found = signed("GET", url, headers, EXAMPLE, "us-east-1", "20130524T000000Z")
    assert found["authorization"].endswith(f"Signature={signature}")


# ---------------------------------------------------------------- what is fetched


def test_a_model_is_fetched_and_found(s3: FakeS3, cache: Path, ways: Ways) -> None:
    files = obtain(URI, ways=ways)
    assert (files.name, files.kind) == ("llama", "folder")
    assert {p.name: p.read_bytes() for p in files.path.iterdir() if p.name != MANIFEST} == {
        name: FILES[name] for name in WANTED
    }
    assert obtain(URI, ways=ways) == resolve_model(URI) == files


def test_another_server_has_another_model_of_that_name(s3: FakeS3, ways: Ways, monkeypatch: pytest.MonkeyPatch) -> None:
    here = obtain(URI, ways=ways).path
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3.url.replace("127.0.0.1", "localhost"))
    assert obtain(URI, ways=ways).path.parent != here.parent


def test_a_file_of_a_bucket(s3: FakeS3, ways: Ways) -> None:
    for name in ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other.gguf"):
        s3.put(f"quants/{name}", name.encode())
    files = obtain("s3://models/quants/m-00001-of-00002.gguf", ways=ways)
    assert (files.name, files.kind, files.path.name) == ("m", "gguf", "m-00001-of-00002.gguf")
    assert {p.name for p in files.path.parent.glob("*.gguf")} == {"m-00001-of-00002.gguf", "m-00002-of-00002.gguf"}


def test_new_content_is_taken_when_it_is_asked_for(s3: FakeS3, ways: Ways) -> None:
    first = obtain(URI, ways=ways).path
    s3.put(f"llama/{LARGEST}", noise(300_000, 9))
    assert obtain(URI, ways=ways).path == first
    second = obtain(URI, update=True, ways=ways).path
    assert second != first and (second / LARGEST).read_bytes() == noise(300_000, 9)


def test_a_part_is_gone_on_with(s3: FakeS3, cache: Path, ways: Ways) -> None:
    partial = Store(cache).partial(Bucket(URI, parse_place(URI)).listing(None))
    partial.mkdir(parents=True)
    (partial / (LARGEST + PART)).write_bytes(FILES[LARGEST][:100_000])
    assert (obtain(URI, ways=ways).path / LARGEST).read_bytes() == FILES[LARGEST]
    assert ("GET", f"llama/{LARGEST}", "bytes=100000-") in s3.log


def test_long_lists_come_in_pages(s3: FakeS3, ways: Ways) -> None:
    s3.page = 2
    assert obtain(URI, ways=ways).path.is_dir()


def test_names_that_have_to_be_encoded(s3: FakeS3, ways: Ways) -> None:
    for name in ("config.json", "model a+b=c.safetensors"):
        s3.put(f"my models/é & ü/{name}", b"{}")
    s3.keys["any"] = ("any", True)
    with pytest.raises(SourceError, match=r"neither \.safetensors nor \.gguf files"):  # a blank is in no name we take
        obtain("s3://models/my models/é & ü", ways=ways)
    s3.put("my models/é & ü/model+b=c.safetensors", b"x")
    assert (obtain("s3://models/my models/é & ü", ways=ways).path / "model+b=c.safetensors").read_bytes() == b"x"


def test_a_digest_where_the_bucket_has_one(s3: FakeS3, ways: Ways) -> None:
    s3.put(f"llama/{LARGEST}", FILES[LARGEST], sha256=True)
    manifest = json.loads((obtain(URI, ways=ways).path / MANIFEST).read_text())
    digests = {file["name"]: "sha256" in file for file in manifest["files"]}
    assert digests[LARGEST] and not digests["config.json"]
    assert all(file["etag"] for file in manifest["files"])


def test_an_object_that_changes_meanwhile(s3: FakeS3) -> None:
    bucket = Bucket(URI, parse_place(URI))
    listing = bucket.listing(None)
    s3.put(f"llama/{LARGEST}", b"another")
    (file,) = (file for file in listing.files if file.name == LARGEST)
    with pytest.raises(SourceError, match="it was changed while it was fetched"), bucket.open(file, 0):
        pass
    del s3.buckets["models"][f"llama/{LARGEST}"]
    with pytest.raises(SourceError, match="an object is gone that was listed before"), bucket.open(file, 0):
        pass


# ---------------------------------------------------------------- refusals


def test_no_such_bucket_and_an_empty_folder(s3: FakeS3, ways: Ways, message: Message) -> None:
    text = message(lambda: obtain("s3://nowhere/llama", ways=ways))
    assert text == f"s3://nowhere/llama: not found: there is no bucket nowhere at {s3.url}"
    text = message(lambda: obtain("s3://models/lama", ways=ways))
    assert text == "s3://models/lama: not found: the bucket has no objects under lama/"
    s3.put("old/pytorch_model.bin", b"x")
    text = message(lambda: obtain("s3://models/old", ways=ways))
    assert "s3://models/old: not found: there are neither .safetensors nor .gguf files; there is pytorch_model" in text


def test_keys_that_may_read(s3: FakeS3, ways: Ways) -> None:
    s3.keys["any"] = ("any", True)
    assert obtain(URI, ways=ways).path.is_dir()


def test_keys_that_may_not_read(s3: FakeS3, ways: Ways, message: Message) -> None:
    s3.keys["any"] = ("any", False)
    text = message(lambda: obtain(URI, ways=ways))
    assert text == (
        "s3://models/llama: access denied: these keys may not read bucket models: AccessDenied: Access Denied"
    )


def test_a_mistyped_secret_and_unknown_keys(
    s3: FakeS3, ways: Ways, monkeypatch: pytest.MonkeyPatch, message: Message
) -> None:
    s3.keys["reader"] = ("right", True)
    keys(monkeypatch, "reader", "typo")
    text = message(lambda: obtain(URI, ways=ways))
    assert "access denied: these keys may not read bucket models: SignatureDoesNotMatch" in text
    keys(monkeypatch, "AKIANOBODY", "x")
    text = message(lambda: obtain(URI, ways=ways))
    assert "access denied: these keys may not read bucket models: InvalidAccessKeyId" in text


def test_without_keys(s3: FakeS3, ways: Ways, monkeypatch: pytest.MonkeyPatch, message: Message) -> None:
    no_keys(monkeypatch)
    s3.keys["reader"] = ("right", True)
    assert message(lambda: obtain(URI, ways=ways)) == (
        "s3://models/llama: access denied: bucket models asks for keys (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; "
        "in a manifest model.secretRef): AccessDenied: Access Denied"
    )
    s3.keys.clear()
    assert obtain(URI, ways=ways).path.is_dir()  # a public bucket is read without any


def test_a_web_identity(
    s3: FakeS3, ways: Ways, monkeypatch: pytest.MonkeyPatch, message: Message, tmp_path: Path
) -> None:
    no_keys(monkeypatch)
    s3.keys["temporary"] = ("secret", True)
    (tmp_path / "identity").write_text("jwt\n")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "identity"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/reader")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", s3.url)
    text = message(lambda: obtain(URI, ways=ways))
    assert text == (
        "s3://models/llama: access denied: the web identity has no access to role arn:aws:iam::1:role/reader: "
        "Not authorized to perform sts:AssumeRoleWithWebIdentity"
    )
    s3.identities["jwt"] = ("temporary", "secret")
    assert obtain(URI, ways=ways).path.is_dir()


def test_a_download_outlasts_the_keys_of_a_web_identity(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    no_keys(monkeypatch)
    (tmp_path / "identity").write_text("jwt")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "identity"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/reader")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", s3.url)
    s3.keys["first"], s3.identities["jwt"] = ("secret", True), ("first", "secret")
    bucket = Bucket(URI, parse_place(URI))
    listing = bucket.listing(None)
    s3.keys, s3.identities["jwt"] = {"second": ("secret", True)}, ("second", "secret")
    s3.errors = [("ExpiredToken", 400)]
    with pytest.raises(PassingError, match="ExpiredToken"), bucket.open(listing.files[0], 0):
        pass
    with bucket.open(listing.files[0], 0) as stream:
        assert b"".join(stream.chunks) == FILES[listing.files[0].name]


def test_a_bucket_of_another_region(s3: FakeS3, ways: Ways, monkeypatch: pytest.MonkeyPatch, message: Message) -> None:
    s3.region = "eu-central-1"
    text = message(lambda: obtain(URI, ways=ways))
    assert text == (
        "s3://models/llama: download failed: bucket models is in another region: the region 'us-east-1' is wrong; "
        "expecting 'eu-central-1'; set AWS_REGION"
    )
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert obtain(URI, ways=ways).path.is_dir()


def test_aws_itself_is_asked_in_the_region_that_it_names(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.region = "eu-central-1"
    bucket = Bucket(URI, parse_place(URI))
    bucket._endpoint = ""  # AWS, at the address of the server here
    monkeypatch.setattr(Bucket, "_url", lambda self, key, query: f"{s3.url}/models/{key}?{encoded_query(query)}")
    assert bucket.listing(None).size and bucket._region == "eu-central-1"


def test_addresses_of_aws(alone: Path) -> None:
    def url(uri: str, **environ: str) -> str:
        return Bucket(uri, parse_place(uri), environ)._url("a b/c", {})

    assert url("s3://models/x") == "https://models.s3.us-east-1.amazonaws.com/a%20b/c"
    assert url("s3://my.models/x", AWS_REGION="eu-west-1") == "https://s3.eu-west-1.amazonaws.com/my.models/a%20b/c"
    assert url("s3://models/x", AWS_DEFAULT_REGION="cn-north-1").startswith(
        "https://models.s3.cn-north-1.amazonaws.com.cn/"
    )


@pytest.mark.parametrize(
    ("code", "status", "text"),
    [
        ("ExpiredToken", 400, "access denied: these keys may not read bucket models: ExpiredToken: Use eu"),
        ("Strange", 400, "download failed: bucket models: Strange Use eu"),
        ("SlowDown", 503, "download failed: bucket models: SlowDown Use eu"),
    ],
)
def test_errors_that_stay(s3: FakeS3, ways: Ways, message: Message, code: str, status: int, text: str) -> None:
    s3.errors = [(code, status)] * 9
    assert text in message(lambda: obtain(URI, ways=ways))


def test_errors_that_pass(s3: FakeS3, ways: Ways) -> None:
    s3.errors = [("SlowDown", 503), ("InternalError", 500)]
    assert obtain(URI, ways=ways).path.is_dir()
    with pytest.raises(PassingError):
        s3.errors = [("RequestTimeout", 400)]
        Bucket(URI, parse_place(URI)).listing(None)


def test_a_server_that_is_none(hub, ways: Ways, monkeypatch: pytest.MonkeyPatch, message: Message) -> None:
    monkeypatch.setattr("kvern_engine.fetching.s3.Bucket._ask", lambda *_: page())
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    text = message(lambda: obtain(URI, ways=ways))
    assert "gave no list of objects; is it an S3 server? (AWS_ENDPOINT_URL_S3)" in text


def page() -> object:
    import httpx

    return httpx.Response(200, text="<html", request=httpx.Request("GET", "http://x"))


def test_nobody_there(ways: Ways, monkeypatch: pytest.MonkeyPatch, message: Message) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    text = message(lambda: obtain(URI, ways=ways))
    assert text.startswith("s3://models/llama: download failed: 127.0.0.1:9 cannot be reached (")


def test_a_wrong_endpoint(ways: Ways, monkeypatch: pytest.MonkeyPatch, message: Message) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "minio:9000")
    text = message(lambda: obtain(URI, ways=ways))
    assert text.endswith("AWS_ENDPOINT_URL_S3=minio:9000 is no URL; write https://host:port")
