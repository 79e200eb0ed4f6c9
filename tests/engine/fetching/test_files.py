"""Which files of a source make a model, and what an address means. Pure."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvern_engine.fetching.files import (
    Digest,
    Place,
    RemoteFile,
    choose,
    human_bytes,
    parse_place,
    ref_name,
    slug,
    version_of,
)


def refused(names: list[str], file: str = "") -> str:
    with pytest.raises(ValueError) as caught:
        choose(names, file)
    return str(caught.value)


def test_safetensors_with_what_is_small() -> None:
    names = ["model.safetensors", "config.json", "tokenizer.model", "vocab.txt", "chat_template.jinja", "README.md"]
    more = ["modeling.py", "pytorch_model.bin", "onnx/model.onnx", "additional_chat_templates/rag.jinja", "q4.gguf"]
    assert choose([*names, *more]) == sorted([*names[:-1], "additional_chat_templates/rag.jinja"])


def test_the_same_weights_twice_are_fetched_once() -> None:
    names = ["consolidated.safetensors", "model-00001-of-00001.safetensors", "config.json"]
    assert choose(names) == ["config.json", "model-00001-of-00001.safetensors"]
    assert choose(["consolidated.safetensors", "params.json"]) == ["consolidated.safetensors", "params.json"]


def test_gguf() -> None:
    assert choose(["m.Q4.gguf", "README.md", "config.json"]) == ["m.Q4.gguf"]
    split = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert choose(split) == split
    assert choose([*split, "other.gguf"], split[0]) == split
    assert refused(["a.gguf", "b.gguf"]) == "it holds several GGUF models; add one to the address: a.gguf, b.gguf"
    assert refused(["a.gguf"], "c.gguf") == "there is no file c.gguf; there are a.gguf"


def test_what_is_no_model_says_what_is_there() -> None:
    assert refused([]) == "there are neither .safetensors nor .gguf files; it is empty"
    assert refused(["pytorch_model.bin", "x.json"]).endswith(
        "there is pytorch_model.bin, which may hold code; convert it to safetensors"
    )
    assert refused(["a.txt", "b.txt", "c.txt", "d.txt", "e.txt"]).endswith(
        "there are a.txt, b.txt, c.txt, d.txt and 1 more"
    )


@given(st.lists(st.text(alphabet="ab./\\~ \0-_é%", max_size=12).map(lambda s: s + ".safetensors"), max_size=8))
def test_no_name_leads_out_of_the_folder(names: list[str]) -> None:
    try:
        chosen = choose(names)
    except ValueError:
        return
    for name in chosen:
        assert ".." not in name and not name.startswith(("/", ".", "~")) and "\\" not in name and "\0" not in name
        assert name.count("/") <= 1


@pytest.mark.parametrize(
    ("uri", "place", "name"),
    [
        ("hf://org/name", Place("hf", "org/name", "", ""), "org/name"),
        ("hf://org/name/", Place("hf", "org/name", "", ""), "org/name"),
        ("hf://org/name/m.Q4_K_M.gguf", Place("hf", "org/name", "", "m.Q4_K_M.gguf"), "m.Q4_K_M"),
        ("hf://org/name/m-00001-of-00003.gguf", Place("hf", "org/name", "", "m-00001-of-00003.gguf"), "m"),
        ("hf://org/name.gguf", Place("hf", "org/name.gguf", "", ""), "org/name.gguf"),
        ("s3://bucket/a/llama", Place("s3", "bucket", "a/llama", ""), "llama"),
        ("s3://bucket", Place("s3", "bucket", "", ""), "bucket"),
        ("s3://bucket/a/m.gguf", Place("s3", "bucket", "a", "m.gguf"), "m"),
        ("s3://bucket/m.gguf", Place("s3", "bucket", "", "m.gguf"), "m"),
    ],
)
def test_addresses(uri: str, place: Place, name: str) -> None:
    assert parse_place(uri) == place and place.name == name


@pytest.mark.parametrize("uri", ["hf://name", "hf://a/b/c", "hf://org/name/sub/m.gguf", "hf://../x", "hf:///a/b c"])
def test_no_repository(uri: str) -> None:
    with pytest.raises(ValueError, match=r"expected hf://org/name, or hf://org/name/FILE\.gguf"):
        parse_place(uri)


@pytest.mark.parametrize("uri", ["s3://", "s3://UPPER/x", "s3://m.gguf", "s3://-a/b"])
def test_no_bucket(uri: str) -> None:
    with pytest.raises(ValueError, match=r"expected s3://bucket/folder, or s3://bucket/folder/FILE\.gguf"):
        parse_place(uri)


@given(st.text(max_size=40), st.text(max_size=40))
def test_a_folder_stands_for_one_address(a: str, b: str) -> None:
    one, other = slug(f"hf://{a}"), slug(f"hf://{b}")
    assert "/" not in one and one not in (".", "..")
    assert (one == other) == (f"hf://{a}".strip("/") == f"hf://{b}".strip("/"))


@given(st.text(min_size=1, max_size=30))
def test_a_revision_is_one_file(revision: str) -> None:
    assert "/" not in ref_name(revision) and ref_name(revision).startswith("@")
    assert ref_name(None) == ref_name("main")


def test_a_bucket_is_another_version_once_anything_differs() -> None:
    files = [RemoteFile("a", 1, etag="x"), RemoteFile("b", 2, etag="y")]
    assert version_of(files) == version_of(reversed(files)) and version_of(files).isalnum()
    for changed in (RemoteFile("b", 2, etag="z"), RemoteFile("b", 3, etag="y"), RemoteFile("c", 2, etag="y")):
        assert version_of([files[0], changed]) != version_of(files)


def test_digests() -> None:
    content = b"hello\n"
    git = Digest("git-sha1", "ce013625030ba8dba906f756967f9e9ca394464a")  # `git hash-object` of it
    made = git.new(len(content))
    made.update(content)
    assert made.hexdigest() == git.value
    sha = Digest("sha256", "").new(6)
    sha.update(content)
    assert sha.hexdigest() == hashlib.sha256(content).hexdigest()


def test_sizes_for_people() -> None:
    assert [human_bytes(n) for n in (0, 999, 1500, 23_400_000, 140 * 10**9, 2.5e12)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "23.4 MB",
        "140 GB",
        "2.5 TB",
    ]
