"""vLLM's further sampling fields over HTTP: what reaches the engine, what comes back, what is refused and how."""

from typing import Any

import httpx
import pytest
from server_harness import Setup, events_of

from kvern_engine.tokenizer import Tokenizer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT = "In the beginning God created the heaven and the earth."


def post(http: httpx.Client, path: str, **fields: Any) -> httpx.Response:
    given = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "And God"}
    return http.post(path, json={"model": "tiny", **given, **fields})


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_fields_reach_the_engine(live: Setup, http: httpx.Client, tokenizer: Tokenizer, path: str) -> None:
    fields = {"allowed_token_ids": [7, 5, 7], "bad_words": ["God", " said"], "spaces_between_special_tokens": False}
    assert post(http, path, **fields, temperature=1e-7).status_code == 200
    params = live.cores[0].requests[-1].params
    assert params.allowed_token_ids == (7, 5) and params.temperature == 0
    spellings = ["God", " God", "said", " said"]
    assert params.bad_words_token_ids == tuple(
        tuple(tokenizer.encode(text, add_special_tokens=False)) for text in spellings
    )
    assert not params.spaces_between_special_tokens


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_prompt_logprobs(live: Setup, http: httpx.Client, path: str) -> None:
    answer = post(http, path, prompt_logprobs=2, max_tokens=3).json()
    prompt = live.cores[0].requests[-1].prompt_token_ids
    found = answer["prompt_logprobs"] if path == CHAT else answer["choices"][0]["prompt_logprobs"]
    assert found[0] is None and len(found) == len(prompt) > 1
    for token, entry in zip(prompt[1:], found[1:], strict=True):
        assert entry[str(token)]["logprob"] == -0.25 and entry[str(token)]["rank"] == 1
        assert isinstance(entry[str(token)]["decoded_token"], str)


def test_prompt_logprobs_beside_echo(live: Setup, http: httpx.Client) -> None:
    """Each reports as many alternatives as it was asked for; the engine computes the larger number, once."""
    (choice,) = post(http, COMPLETIONS, prompt_logprobs=2, echo=True, logprobs=1, max_tokens=2).json()["choices"]
    assert live.cores[0].requests[-1].params.prompt_logprobs == 2
    assert len(choice["prompt_logprobs"]) == 2 and choice["logprobs"]["tokens"][:2] == ["And", " God"]
    assert choice["logprobs"]["token_logprobs"][0] is None


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_truncated_prompts(live: Setup, http: httpx.Client, tokenizer: Tokenizer, path: str) -> None:
    def seen(**fields: Any) -> list[int]:
        response = post(http, path, **fields)
        assert response.status_code == 200, response.text
        return live.cores[0].requests[-1].prompt_token_ids

    whole = seen()
    assert seen(truncate_prompt_tokens=1) == whole[-1:] and seen(truncate_prompt_tokens=-1) == whole
    assert seen(truncate_prompt_tokens=1, truncation_side="right") == whole[:1]
    words = "And God said. " * 400
    long = {"messages": [{"role": "user", "content": words}]} if path == CHAT else {"prompt": words}
    assert post(http, path, **long).status_code == 400
    assert len(seen(**long, truncate_prompt_tokens=-1, max_tokens=12)) == 500
    if path == COMPLETIONS:
        ids = [5] * 600
        assert seen(prompt=ids, truncate_prompt_tokens=100, max_tokens=4) == ids[:100]
        (choice,) = post(http, path, truncate_prompt_tokens=1, echo=True, max_tokens=0).json()["choices"]
        assert choice["text"] == " God"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_token_ids(live: Setup, http: httpx.Client, tokenizer: Tokenizer, path: str, stream: bool) -> None:
    response = post(http, path, return_token_ids=True, n=2, stream=stream)
    prompt = live.cores[0].requests[-1].prompt_token_ids
    tokens: list[list[int]] = [[], []]
    prompts = []
    for event in events_of(response) if stream else [response.json()]:
        prompts += [event["prompt_token_ids"]] if "prompt_token_ids" in event else []
        for choice in event["choices"]:
            tokens[choice["index"]] += choice.get("token_ids", [])
            prompts += [choice["prompt_token_ids"]] if "prompt_token_ids" in choice else []
    assert tokens == [[*tokenizer.encode(TEXT, add_special_tokens=False), 0]] * 2
    assert prompts and all(found == prompt for found in prompts)


def test_tokens_as_their_ids(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    first = tokenizer.encode(TEXT, add_special_tokens=False)[0]
    asked = {"return_tokens_as_token_ids": True, "max_tokens": 1}
    (choice,) = post(http, COMPLETIONS, logprobs=1, **asked).json()["choices"]
    assert choice["logprobs"]["tokens"] == [f"token_id:{first}"]
    (choice,) = post(http, CHAT, logprobs=True, **asked).json()["choices"]
    assert choice["logprobs"]["content"][0]["token"] == f"token_id:{first}"


REFUSED = [
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs are not available when stream is true."),
    ({"prompt_logprobs": 21}, "prompt_logprobs must be less than or equal to 20, got 21."),
    ({"prompt_logprobs": -1}, "prompt_logprobs must be greater than or equal to 0, got -1."),
    ({"allowed_token_ids": []}, "allowed_token_ids must have at least 1 items, got 0."),
    ({"allowed_token_ids": [3, 2048]}, "allowed_token_ids: token id 2048 is outside the vocabulary (0..2047)."),
    ({"bad_words": ["x"] * 257}, "bad_words must have at most 256 items, got 257."),
    ({"bad_words": ["so " * 70]}, "bad_words must be at most 64 tokens each, got "),
    ({"allowed_token_ids": [1] * 16385}, "allowed_token_ids must have at most 16384 items, got 16385."),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens must be -1 or at least 1, got 0."),
    ({"truncation_side": "left"}, "truncation_side needs truncate_prompt_tokens."),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be at most max_tokens (4), got 5."),
    ({"logits_processors": ["x"]}, "Running a caller's code on logits is not served yet by"),
    ({"length_penalty": 0.5}, "Beam search is not served yet by"),
    ({"thinking_token_budget": 5}, "Limiting what is spent on reasoning is not served yet by"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED, ids=lambda value: str(value)[:30])
def test_refused(live: Setup, http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    for path in (CHAT, COMPLETIONS):
        response = post(http, path, **fields)
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["message"].startswith(words) and error["param"] in fields
    assert not live.cores[0].requests


def test_how_many_prompt_logprobs_has_a_limit(live: Setup, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvern_engine.server.sampling.MAX_PROMPT_LOGPROBS", 1000)
    prompts = [[5] * 100, [6] * 100]
    error = post(http, COMPLETIONS, prompt=prompts, prompt_logprobs=5).json()["error"]
    assert error["message"].startswith(
        "Logprobs of 200 prompt tokens with 5 alternatives each are 1200 numbers; at most"
    )
    assert post(http, COMPLETIONS, prompt=prompts, prompt_logprobs=4).status_code == 200
