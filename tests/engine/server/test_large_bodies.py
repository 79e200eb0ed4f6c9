"""Bodies of megabytes: what is too much is refused before anything looks at each of its values, in few words."""

import json
import threading
import time
from typing import Any

import httpx
import pytest
import tokenizers
from server_harness import Setup
from tokenizers import pre_tokenizers

from kvern_engine.server.errors import ApiError
from kvern_engine.server.prompts import PromptReader
from kvern_engine.server.protocol import (
    MAX_IDS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    parse_body,
    shown,
)
from kvern_engine.tokenizer import Tokenizer


def refusal(model: Any, body: bytes) -> ApiError:
    with pytest.raises(ApiError) as error:
        parse_body(model, body)
    assert error.value.status == 400 and len(error.value.message) <= 1000
    return error.value


MANY = 200_000


@pytest.mark.parametrize(
    ("model", "field", "value", "words"),
    [
        (CompletionRequest, "stop", ["a"] * MANY, "stop must have at most 16 items (max_stop), got 200000."),
        (CompletionRequest, "stop_token_ids", ["x"] * MANY, "stop_token_ids must have at most 256 items, got 200000."),
        (
            CompletionRequest,
            "logit_bias",
            dict.fromkeys(map(str, range(MANY)), "x"),
            "items (max_logit_bias), got 200000.",
        ),
        (CompletionRequest, "stream_options", dict.fromkeys(map(str, range(MANY))), "at most 256 items, got 200000."),
        (ChatRequest, "chat_template_kwargs", dict.fromkeys(map(str, range(MANY))), "at most 256 items"),
        (ChatRequest, "messages", [1] * MANY, "messages must have at most 65536 items (max_messages), got 200000."),
        (DetokenizeRequest, "tokens", ["x"] * MANY, 'tokens[0] must be an integer, got "x" (a string).'),
        (DetokenizeRequest, "tokens", [1] * (MAX_IDS + 1), "tokens must have at most 1048576 items, got 1048577."),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_too_many_items(model: Any, field: str, value: Any, words: str) -> None:
    body = {"prompt": "x"} if model is CompletionRequest else {"messages": [{"role": "user", "content": "x"}]}
    if model is DetokenizeRequest:
        body = {}
    error = refusal(model, json.dumps({**body, field: value}).encode())
    assert words in error.message and str(error.param).startswith(field)


def test_too_many_fields_and_long_names() -> None:
    error = refusal(CompletionRequest, json.dumps({"prompt": "x"} | dict.fromkeys(map(str, range(MANY)))).encode())
    assert error.message == "The body must have at most 256 fields, got 200001."
    error = refusal(CompletionRequest, json.dumps({"prompt": "x", "f" * 1_000_000: 1}).encode())
    assert error.message.startswith("Unknown field 'fff") and error.message.endswith("user.")
    assert error.param is not None and len(error.param) == 200


def test_values_in_messages_are_cut_short() -> None:
    assert shown({"a": [1, "é"]}) == '{"a": [1, "é"]}'
    assert shown("x" * 10_000_000) == '"' + "x" * 76 + "..."
    before = time.perf_counter()
    assert shown([[1] * 100] * 1_000_000).endswith("...")
    assert time.perf_counter() - before < 1.0, "all of it was written down to show the beginning"


def test_choices_of_one_request_have_a_limit(live: Setup, http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={"prompt": ["a"] * 200, "n": 21})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"] == ("200 prompts with n=21 are 4200 choices; at most 4096 can be asked for in one request.")
    assert error["param"] == "n" and not live.cores[0].requests


def test_text_beyond_what_is_tokenized(live: Setup, http: httpx.Client) -> None:
    long = "a" * (2 << 20) + "a"
    error = http.post("/tokenize", json={"prompt": long}).json()["error"]
    assert error["message"] == "prompt must be at most 2097152 bytes of text, got 2097153."
    assert (error["code"], error["param"]) == ("string_above_max_length", "prompt")
    chat = {"messages": [{"role": "user", "content": long}]}
    assert http.post("/tokenize", json=chat).json()["error"]["message"].startswith("messages must be at most 2097152")
    assert http.post("/tokenize", json={"prompt": "beginning " * 5000}).json()["count"] > 5000


async def test_tokens_that_the_model_has_no_row_for_are_refused(tokenizer: Tokenizer) -> None:
    """Some models' tokenizers have more tokens than their embedding has rows; one in a prompt would end the worker."""
    reader = PromptReader(tokenizer, vocab_size=500)
    try:
        assert await reader.encode(" the", special=False, capacity=99) == [259]
        (lord,) = tokenizer.encode(" Lord", add_special_tokens=False)
        for chat, field in ((False, "prompt"), (True, "messages")):
            with pytest.raises(ApiError, match=rf"{field}: token id {lord} is outside the vocabulary \(0..499\)"):
                await reader.encode("And the Lord", special=False, capacity=99, chat=chat)
        reader.check_ids([499, tokenizer.vocab_size - 1], "tokens", to_read=True)
        with pytest.raises(ApiError):
            reader.check_ids([500], "prompt")
    finally:
        reader.close()


@pytest.mark.parametrize("chat", [False, True])
async def test_a_text_that_the_tokenizer_gives_up_on_is_refused(chat: bool) -> None:
    """The library panics where a regular expression runs away, and has no token for some characters: a client's text
    must not end as a broken connection."""
    runs_away = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    runs_away.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a*)*b|"), behavior="isolated")
    unknown = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "?"))
    for backend, text, words in ((runs_away, "a" * 300, "retry-limit"), (unknown, "b", "Missing [UNK]")):
        reader = PromptReader(Tokenizer(backend, special_tokens={}, eos_token_ids=()), 10)
        for size in (1, 3000):
            with pytest.raises(ApiError) as caught:
                await reader.encode(text + " " * size, special=True, capacity=10_000, chat=chat)
            assert caught.value.message.startswith("the tokenizer cannot read this text: ")
            assert words in caught.value.message and caught.value.param == ("messages" if chat else "prompt")
        reader.close()


def test_a_long_text_is_tokenized_beside_other_threads(tokenizer: Tokenizer) -> None:
    """The library holds Python's lock in most of its calls: streams would stand still meanwhile."""
    text = "In the beginning God created the heaven and the earth. " * 6000
    gaps: list[float] = []
    ended = threading.Event()

    def tick() -> None:
        last = time.perf_counter()
        while not ended.is_set():
            time.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    time.sleep(0.05)
    before = time.perf_counter()
    ids = tokenizer.encode(text)
    seconds = time.perf_counter() - before
    ended.set()
    ticking.join()
    assert max(gaps) < seconds / 2, (max(gaps), seconds)
    assert ids == tokenizer.backend.encode(text).ids
