"""The openai client against a real server with SmolLM2-135M-Instruct: every parameter, streaming and not."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from e2e_harness import Serve

PARIS = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
STORY = "Once upon a time, there was a little"


@pytest.fixture
def client(smol: Serve) -> Iterator[openai.OpenAI]:
    plain = httpx.Client(verify=False, timeout=60)  # reading certificates takes longer than many a test
    with openai.OpenAI(base_url=f"{smol.url}/v1", api_key="none", max_retries=0, http_client=plain) as made:
        yield made


def chat(client: openai.OpenAI, messages: Any = PARIS, **fields: Any) -> Any:
    known = {"temperature": 0, "max_tokens": 12, **fields}
    extra = {k: known.pop(k) for k in list(known) if k in EXTRA}
    return client.chat.completions.create(model="smollm2-135m", messages=messages, extra_body=extra, **known)


def complete(client: openai.OpenAI, prompt: Any = STORY, **fields: Any) -> Any:
    known = {"temperature": 0, "max_tokens": 5, **fields}
    extra = {k: known.pop(k) for k in list(known) if k in EXTRA}
    return client.completions.create(model="smollm2-135m", prompt=prompt, extra_body=extra, **known)


EXTRA = {
    "top_k",
    "min_p",
    "repetition_penalty",
    "ignore_eos",
    "min_tokens",
    "stop_token_ids",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "cache_salt",
    "priority",
}


def streamed(chunks: Any) -> tuple[list[str], list[Any], Any]:
    """Text of each choice, entries of choice 0's logprobs, usage; finish reasons come once a choice, usage last."""
    texts: dict[int, str] = {}
    entries: list[Any] = []
    ended: set[int] = set()
    usage = None
    for chunk in chunks:
        assert usage is None, "something comes after the usage"
        usage = chunk.usage
        assert (usage is None) == bool(chunk.choices)
        for choice in chunk.choices:
            assert choice.index not in ended
            part = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (part or "")
            if choice.logprobs is not None:
                entries += getattr(choice.logprobs, "content", None) or [choice.logprobs]
            if choice.finish_reason:
                ended.add(choice.index)
    assert ended == set(texts)
    return [texts[i] for i in sorted(texts)], entries, usage


def together(*calls: Callable[[], Any]) -> list[Any]:
    """The results of all calls, made at once: the model computes several tokens in the time of one."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def test_it_says_paris_and_the_second_time_from_the_cache(smol: Serve, client: openai.OpenAI) -> None:
    prompt = smol.post("/tokenize", messages=PARIS).json()
    first = chat(client)
    assert first.choices[0].message.content == ANSWER and first.choices[0].message.role == "assistant"
    assert (first.object, first.model, first.choices[0].finish_reason) == ("chat.completion", "smollm2-135m", "stop")
    usage = first.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (37, 8, 45)
    assert prompt["count"] == 37 and prompt["max_model_len"] == 1024
    second = chat(client)
    assert second.choices[0].message.content == ANSWER
    assert second.usage.prompt_tokens_details.cached_tokens == 32, "two full blocks of 16; the last token is computed"
    texts, _, usage = streamed(chat(client, **STREAM))
    assert texts == [ANSWER]
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (37, 8, 32)
    salted = chat(client, cache_salt="another tenant's")
    assert salted.choices[0].message.content == ANSWER
    assert salted.usage.prompt_tokens_details.cached_tokens == 0
    assert chat(client, cache_salt="another tenant's").usage.prompt_tokens_details.cached_tokens == 32


def test_seeds(client: openai.OpenAI) -> None:
    def sample(**fields: Any) -> list[str]:
        return [c.text for c in complete(client, **sampled, **fields).choices]

    sampled = {"temperature": 1, "top_p": 0.95, "max_tokens": 5}
    first, again, next_seed, (texts, _, usage), *free = together(
        lambda: sample(seed=7, n=3),
        lambda: sample(seed=7, n=3),
        lambda: sample(seed=8, n=2),
        lambda: streamed(complete(client, **sampled, seed=7, n=3, **STREAM)),
        sample,
        sample,
    )
    assert len(set(first)) == 3
    assert again == first
    assert next_seed == first[1:], "choice i is drawn with seed + i"
    assert texts == first and usage.completion_tokens == 15
    assert free[0] != free[1], "without a seed each request has its own"


@pytest.mark.parametrize("stream", [{}, STREAM], ids=["answer", "stream"])
def test_stop_strings_cut_exactly_and_never_leak(client: openai.OpenAI, stream: dict[str, Any]) -> None:
    def text_of(**fields: Any) -> str:
        if stream:
            return streamed(chat(client, **fields, **stream))[0][0]
        (choice,) = chat(client, **fields).choices
        assert (choice.finish_reason, choice.stop_reason) == ("stop", fields["stop"][0])
        return str(choice.message.content)

    early, first, kept = together(
        lambda: text_of(stop=[" of Fr", "Rome"]),
        lambda: text_of(stop=["T", "Rome"]),
        lambda: text_of(stop=["e is P"], include_stop_str_in_output=True),
    )
    assert (early, first, kept) == ("The capital", "", "The capital of France is P")


def test_logprobs_of_a_greedy_answer(client: openai.OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=20, max_tokens=6).choices[0]
    entries = answer.logprobs.content
    assert "".join(e.token for e in entries) == answer.message.content == ANSWER[:-1]
    for entry in entries:
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert bytes(entry.bytes).decode() == entry.token
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and len(values) == 20
        assert 0.3 < sum(math.exp(v) for v in values) <= 1.0 + 1e-6
    texts, in_stream, _ = streamed(chat(client, logprobs=True, top_logprobs=20, max_tokens=6, **STREAM))
    assert texts == [answer.message.content]
    assert [e.token for e in in_stream] == [e.token for e in entries]
    assert [e.logprob for e in in_stream] == pytest.approx([e.logprob for e in entries], abs=1e-3)
    plain = chat(client, logprobs=True, max_tokens=3).choices[0].logprobs.content
    assert [e.top_logprobs for e in plain] == [[], [], []]


def test_what_was_generated_scores_the_same_as_a_prompt(smol: Serve, client: openai.OpenAI) -> None:
    """Echo with logprobs: decoding one by one and one prefill over everything see the same distribution."""
    ids = smol.post("/tokenize", prompt=STORY).json()["tokens"]
    made = complete(client, ids, logprobs=3, max_tokens=8).choices[0]
    whole = smol.post("/tokenize", prompt=STORY + made.text).json()["tokens"]
    assert whole[: len(ids)] == ids and len(whole) == len(ids) + 8
    scored = complete(client, whole, echo=True, max_tokens=0, logprobs=3)
    (choice,) = scored.choices
    assert (choice.text, scored.usage.completion_tokens) == (STORY + made.text, 0)
    lp = choice.logprobs
    assert lp.token_logprobs[0] is None and len(lp.tokens) == len(whole) == len(lp.top_logprobs)
    assert lp.tokens[len(ids) :] == made.logprobs.tokens
    assert lp.token_logprobs[len(ids) :] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)
    assert [choice.text[a:].startswith(t) for a, t in zip(lp.text_offset, lp.tokens, strict=True)] == [True] * len(
        whole
    )
    both = complete(client, ids, echo=True, logprobs=3, max_tokens=8).choices[0]
    assert both.text == STORY + made.text and both.logprobs.tokens == lp.tokens
    assert both.logprobs.token_logprobs[1:] == pytest.approx(lp.token_logprobs[1:], abs=1e-3)
    _, parts, _ = streamed(complete(client, ids, echo=True, logprobs=3, max_tokens=8, **STREAM))
    assert [t for part in parts for t in part.tokens] == lp.tokens
    assert [o for part in parts for o in part.text_offset] == both.logprobs.text_offset


def test_prompts_of_every_kind(smol: Serve, client: openai.OpenAI) -> None:
    other = "The sun rises in the"
    ids = [smol.post("/tokenize", prompt=p).json()["tokens"] for p in (STORY, other)]
    first, second, by_ids, answer, (texts, _, usage), default = together(
        lambda: complete(client, STORY).choices[0].text,
        lambda: complete(client, other).choices[0].text,
        lambda: complete(client, ids[0]).choices[0].text,
        lambda: complete(client, [STORY, other], n=2),
        lambda: streamed(complete(client, ids, n=2, **STREAM)),
        lambda: complete(client, STORY, max_tokens=None),
    )
    assert by_ids == first
    twice = [first, first, second, second]
    assert [(c.index, c.text) for c in answer.choices] == list(enumerate(twice))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (sum(map(len, ids)), 20)
    assert texts == twice
    assert (usage.prompt_tokens, usage.completion_tokens) == (sum(map(len, ids)), 20)
    assert default.usage.completion_tokens == 16, "OpenAI's default"
    back = smol.post("/detokenize", tokens=ids[1]).json()["prompt"]
    assert back == other


def test_a_bias_forces_and_forbids_tokens(smol: Serve, client: openai.OpenAI) -> None:
    (token,) = smol.post("/tokenize", prompt=" Rome").json()["tokens"]
    forced = chat(client, logit_bias={str(token): 100}, max_tokens=4)
    assert forced.choices[0].message.content == " Rome" * 4
    (paris,) = smol.post("/tokenize", prompt=" Paris").json()["tokens"]
    assert "Paris" not in chat(client, logit_bias={str(paris): -100}).choices[0].message.content


def test_min_tokens_stop_token_ids_and_ignore_eos(smol: Serve, client: openai.OpenAI) -> None:
    (of,) = smol.post("/tokenize", prompt=" of").json()["tokens"]
    longer, ended, not_yet, through, hidden = together(
        lambda: chat(client, min_tokens=11),
        lambda: chat(client, stop_token_ids=[of]),
        lambda: chat(client, stop_token_ids=[of], min_tokens=4),
        lambda: chat(client, ignore_eos=True, max_tokens=10, skip_special_tokens=False),
        lambda: chat(client, ignore_eos=True, max_tokens=10),
    )
    assert longer.usage.completion_tokens in (11, 12)
    assert longer.choices[0].message.content.startswith(ANSWER)
    assert (ended.choices[0].message.content, ended.choices[0].stop_reason) == ("The capital", of)
    assert ended.usage.completion_tokens == 3
    assert not_yet.choices[0].message.content != "The capital" and not_yet.usage.completion_tokens >= 4
    assert through.usage.completion_tokens == 10 and through.choices[0].finish_reason == "length"
    shown = through.choices[0].message.content
    assert shown.startswith(f"{ANSWER}<|im_end|>")
    assert hidden.choices[0].message.content == shown.replace("<|im_end|>", "").replace("<|im_start|>", "")


def test_what_leaves_one_token_is_greedy(client: openai.OpenAI) -> None:
    kinds: list[dict[str, Any]] = [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-6}]
    calls = [lambda kind=kind: chat(client, **{"temperature": 1.5, "seed": 3, **kind}) for kind in kinds]
    assert [answer.choices[0].message.content for answer in together(*calls)] == [ANSWER] * 4


def test_penalties_drive_repetitions_away(client: openai.OpenAI) -> None:
    prompt = "one two one two one two one two one two one two"
    kinds = [{}, {"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 2.0}]
    calls = [lambda kind=kind: complete(client, prompt, max_tokens=8, **kind) for kind in kinds]
    plain, *others = [answer.choices[0].text.split().count("two") for answer in together(*calls)]
    assert plain >= 5 and max(others) < plain, (plain, others)


def test_messages_of_every_kind(smol: Serve, client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": PARIS[0]["content"]}]}]
    system = [{"role": "system", "content": "You are a pirate."}, *PARIS]
    developer = [{"role": "developer", "content": "You are a pirate."}, *PARIS]
    history = [*PARIS, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And of Italy?"}]
    half = [*PARIS, {"role": "assistant", "content": "The capital of France"}]
    by_parts, short, by_system, by_developer, second, continued = together(
        lambda: chat(client, parts, user="someone", priority=-1),
        lambda: chat(client, max_tokens=openai.NOT_GIVEN, max_completion_tokens=5),
        lambda: chat(client, system, max_tokens=6),
        lambda: chat(client, developer, max_tokens=6),
        lambda: chat(client, history, max_tokens=20),
        lambda: chat(client, half, continue_final_message=True),
    )
    assert by_parts.choices[0].message.content == ANSWER
    assert short.usage.completion_tokens == 5
    assert by_system.choices[0].message.content == by_developer.choices[0].message.content
    assert by_system.usage.prompt_tokens == by_developer.usage.prompt_tokens != 37
    assert "Rome" in second.choices[0].message.content
    assert continued.choices[0].message.content == " is Paris."
    # An answer can be sent back as it came.
    assert chat(client, [*PARIS, by_parts.choices[0].message, PARIS[0]], max_tokens=1).usage.completion_tokens == 1


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as error:
        chat(client, [{"role": "user", "content": "word " * 2000}])
    assert error.value.code == "context_length_exceeded" and "1024 tokens" in str(error.value)
    with pytest.raises(openai.BadRequestError) as error:
        complete(client, STORY, max_tokens=1020, **STREAM)
    assert error.value.code == "context_length_exceeded" and error.value.param == "prompt"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=PARIS)
    assert missing.value.code == "model_not_found" and "smollm2-135m" in str(missing.value)
    assert [m.id for m in client.models.list()] == ["smollm2-135m"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for later in ({"tools": [tool]}, {"response_format": {"type": "json_object"}}, {"tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError, match="not served yet") as refused:
            chat(client, **later)
        assert refused.value.code == "unsupported" and refused.value.param in later
    with pytest.raises(openai.BadRequestError, match="not served yet"):
        client.embeddings.create(model="smollm2-135m", input="x")
    with pytest.raises(openai.BadRequestError, match="not served yet"):
        client.responses.create(model="smollm2-135m", input="x")
