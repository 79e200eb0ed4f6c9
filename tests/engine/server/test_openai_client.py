"""OpenAI's own client, without retries, against a real server: what it parses is what users see."""

from collections.abc import Iterator

import openai
import pytest
from server_harness import Setup

TEXT = "In the beginning God created the heaven and the earth."
HI = [{"role": "user", "content": "hi"}]
EVERYTHING = {
    "max_completion_tokens": 40,
    "n": 2,
    "seed": 1,
    "stop": ["Zebulun"],
    "temperature": 0.3,
    "top_p": 0.8,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.2,
    "logit_bias": {"7": -1},
    "logprobs": True,
    "top_logprobs": 2,
    "user": "me",
    "response_format": {"type": "text"},
    "reasoning_effort": "low",
    "extra_body": {
        "top_k": 9,
        "min_p": 0.01,
        "repetition_penalty": 1.01,
        "min_tokens": 1,
        "ignore_eos": False,
        "stop_token_ids": [3],
        "priority": 1,
        "cache_salt": "s",
        "chat_template_kwargs": {"style": "plain"},
    },
}


@pytest.fixture
def client(live: Setup) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.servers[0].url + "/v1", api_key="none", max_retries=0, timeout=20) as made:
        yield made


def test_chat(live: Setup, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HI, **EVERYTHING)
    assert [c.message.content for c in answer.choices] == [TEXT, TEXT]
    assert [c.finish_reason for c in answer.choices] == ["stop", "stop"]
    assert answer.choices[0].message.tool_calls is None
    assert "".join(t.token for t in answer.choices[1].logprobs.content) == TEXT
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    params = live.cores[0].requests[0].params
    assert (params.top_k, params.seed, params.stop_token_ids) == (9, 1, (3,))


def test_chat_stream(live: Setup, client: openai.OpenAI) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True, "include_obfuscation": False}}
    chunks = list(client.chat.completions.create(model="tiny", messages=HI, **EVERYTHING, **options))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0
    assert all(c.usage is None for c in chunks[:-1])
    for index in (0, 1):
        own = [c.choices[0] for c in chunks[:-1] if c.choices[0].index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in own) == TEXT
        assert [c.finish_reason for c in own if c.finish_reason] == ["stop"]


def test_answer_as_history(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model="tiny", messages=HI).choices[0].message
    history = [*HI, first, {"role": "user", "content": "go on"}]
    assert client.chat.completions.create(model="tiny", messages=history).choices[0].message.content == TEXT
    history[1] = first.model_dump()  # with every field of the client's type, most of them null
    assert client.chat.completions.create(model="tiny", messages=history).choices[0].message.content == TEXT


def test_completions(live: Setup, client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=["a", "b"], logprobs=2, echo=True, n=2, max_tokens=3)
    assert [c.text for c in answer.choices] == ["aIn the begin"] * 2 + ["bIn the begin"] * 2
    assert answer.choices[3].logprobs.token_logprobs[0] is None
    chunks = client.completions.create(model="tiny", prompt=[5, 6], stream=True)
    assert "".join(c.choices[0].text for c in chunks) == TEXT


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == ["tiny", "alias"]
    assert client.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt")


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HI, max_tokens=10_000, stream=True)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="not served yet"):
        client.embeddings.create(model="tiny", input="x")
    with pytest.raises(openai.BadRequestError, match="not served yet"):
        client.responses.create(model="tiny", input="x")


def test_error_within_a_stream(live: Setup, client: openai.OpenAI) -> None:
    live.cores[0].step_seconds = 0.02
    stream = client.chat.completions.create(
        model="tiny", messages=HI, stream=True, extra_body={"ignore_eos": True, "max_tokens": 300}
    )
    with pytest.raises(openai.APIError, match="out of order"):
        for _ in stream:
            live.cores[0].refuse = "out of order"


def test_leaving_a_stream_aborts(live: Setup, client: openai.OpenAI) -> None:
    from server_harness import wait_until

    live.cores[0].step_seconds = 0.02
    with client.chat.completions.create(
        model="tiny", messages=HI, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
    wait_until(lambda: live.cores[0].requests[0].request_id in live.cores[0].aborts, 15)
