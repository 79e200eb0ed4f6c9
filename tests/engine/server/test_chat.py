"""/v1/chat/completions against a real server process's stack and a fake core: answers, streams, parameters."""

import json

import httpx
import pytest
from server_harness import Setup, events_of, saying, wait_until

from kvern_engine.tokenizer import Tokenizer

TEXT = "In the beginning God created the heaven and the earth."
HI = [{"role": "user", "content": "hi"}]


def ask(http: httpx.Client, **fields) -> httpx.Response:
    return http.post("/v1/chat/completions", json={"model": "tiny", "messages": HI, **fields})


def test_answer(live: Setup, http: httpx.Client) -> None:
    live.cores[0].cached_tokens = 5
    answer = ask(http).json()
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    assert answer["model"] == "tiny" and answer["system_fingerprint"].startswith("fp_")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": TEXT, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)
    assert "tool_calls" not in choice["message"]
    usage = answer["usage"]
    request = live.cores[0].requests[0]
    assert usage["prompt_tokens"] == len(request.prompt_token_ids)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}


def test_template_is_rendered_and_not_wrapped_again(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    ask(
        http,
        messages=[
            {"role": "developer", "content": "Be kind."},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
            {"role": "assistant", "content": "c", "refusal": None, "annotations": [], "audio": None},
            {"role": "tool", "content": "d", "tool_call_id": "1"},
        ],
    )
    prompt = tokenizer.decode(live.cores[0].requests[0].prompt_token_ids)
    assert prompt == "[system] Be kind.\n[user] a\nb\n[assistant] c\n[tool] d\n[assistant] "


def test_history_with_tool_calls(live: Setup, http: httpx.Client) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    history = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert ask(http, messages=history).status_code == 200


def test_continue_final_message(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    ask(http, messages=[*HI, {"role": "assistant", "content": "In the"}], continue_final_message=True)
    assert tokenizer.decode(live.cores[0].requests[0].prompt_token_ids) == "[user] hi\n[assistant] In the"


@pytest.mark.parametrize("content", ["e", "im_end", "In the ", "user", "hi"])
@pytest.mark.parametrize("filtered", ["m.content", "m.content | trim"])
def test_what_is_continued_may_stand_in_the_template_too(
    setup: Setup, tokenizer: Tokenizer, content: str, filtered: str
) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ " + filtered + " }}<|im_end|>\n{% endfor %}"
    core, server = setup.core(), setup.server(chat_template=template)
    server.wait_for(200)
    fields = {"messages": [*HI, {"role": "assistant", "content": content}], "continue_final_message": True}
    assert httpx.post(f"{server.url}/v1/chat/completions", json=fields | {"max_tokens": 1}).status_code == 200
    prompt = tokenizer.decode(core.requests[0].prompt_token_ids, skip_special_tokens=False)
    shown = content.strip() if "trim" in filtered else content
    assert prompt == f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n{shown}"


def test_a_message_that_the_template_changes_cannot_be_continued(setup: Setup) -> None:
    setup.core()
    server = setup.server(chat_template="{% for m in messages %}{{ m.content | upper }}\n{% endfor %}")
    server.wait_for(200)
    fields = {"messages": [*HI, {"role": "assistant", "content": "In the"}], "continue_final_message": True}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=fields).json()["error"]
    assert "the chat template changes the last message" in error["message"]
    assert error["param"] == "continue_final_message"


def test_template_variables(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    fields = {"chat_template_kwargs": {"style": "terse", "enable_thinking": False}, "add_generation_prompt": False}
    assert ask(http, **fields).status_code == 200
    assert tokenizer.decode(live.cores[0].requests[0].prompt_token_ids) == "[user] hi\n(terse)"


def test_every_parameter_reaches_the_core(live: Setup, http: httpx.Client) -> None:
    given = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "presence_penalty": 0.1,
        "frequency_penalty": -0.2,
        "repetition_penalty": 1.1,
        "seed": 7,
        "ignore_eos": True,
        "min_tokens": 2,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
    }
    response = ask(
        http,
        **given,
        stop="x" * 30,
        stop_token_ids=[5],
        logit_bias={"9": -100, "10": 1.5},
        logprobs=True,
        top_logprobs=3,
        max_completion_tokens=4,
        priority=-3,
        cache_salt="tenant",
        user="me",
        reasoning_effort="low",
        response_format={"type": "text"},
        stream_options=None,
        tools=None,
        tool_choice="none",
        metadata={"a": "b"},
        store=False,
        service_tier="auto",
        parallel_tool_calls=True,
        modalities=["text"],
    )
    assert response.status_code == 200, response.text
    request = live.cores[0].requests[0]
    params = request.params
    assert {name: getattr(params, name) for name in given} == given
    assert (params.max_tokens, params.logprobs, params.stop_token_ids) == (4, 3, (5,))
    assert params.logit_bias == {9: -100.0, 10: 1.5} and params.stop == ("x" * 30,)
    assert (request.priority, request.cache_salt, request.client) == (-3, "tenant", 0)
    assert request.eos_token_ids == (0,)  # those that the tokenizer names: config.json may lack them
    assert [c["finish_reason"] for c in response.json()["choices"]] == ["length", "length"]


def test_default_limit_is_what_fits(live: Setup, http: httpx.Client) -> None:
    ask(http)
    request = live.cores[0].requests[0]
    assert request.params.max_tokens == 512 - len(request.prompt_token_ids)
    assert request.params.temperature == 1.0


def test_tiny_temperature_is_greedy(live: Setup, http: httpx.Client) -> None:
    ask(http, temperature=1e-300)
    assert live.cores[0].requests[0].params.temperature == 0.0


def test_stream(live: Setup, http: httpx.Client) -> None:
    events = events_of(ask(http, stream=True))
    assert all(e["object"] == "chat.completion.chunk" and len(e["choices"]) == 1 for e in events)
    assert len({e["id"] for e in events}) == 1 and not any("usage" in e for e in events)
    choices = [e["choices"][0] for e in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["delta"].get("content", "") for c in choices) == TEXT
    assert all(c["delta"].keys() == {"content"} for c in choices[1:-1])
    assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["stop"]
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "stop"


def test_stream_of_several_choices(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    texts = ["And God said.", "Let there be light, and there was light.", "Amen."]
    live.cores[0].reply = lambda r, i: [*tokenizer.encode(texts[i], add_special_tokens=False), 0]
    events = events_of(ask(http, stream=True, n=3, stream_options={"include_usage": True}))
    usage = events.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == sum(
        len(tokenizer.encode(t, add_special_tokens=False)) + 1 for t in texts
    )
    for i, text in enumerate(texts):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == i]
        assert own[0]["delta"]["role"] == "assistant"
        assert "".join(c["delta"].get("content", "") for c in own) == text
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"]


def test_usage_in_every_chunk(live: Setup, http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = events_of(ask(http, stream=True, stream_options=options))
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and counts[-1] > counts[0] >= 1
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events[:-1]) == TEXT


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": "created"}, "In the beginning God "),
        ({"stop": ["earth", "God created"]}, "In the beginning "),
        ({"stop": ["God created"], "include_stop_str_in_output": True}, "In the beginning God created"),
    ],
)
def test_stop_strings_never_leak(live: Setup, http: httpx.Client, stream: bool, fields: dict, text: str) -> None:
    live.cores[0].step_seconds = 0.002
    if stream:
        choices = [e["choices"][0] for e in events_of(ask(http, stream=True, **fields))]
        assert "".join(c["delta"].get("content", "") for c in choices) == text
        end = choices[-1]
    else:
        (end,) = ask(http, **fields).json()["choices"]
        assert end["message"]["content"] == text
    assert end["finish_reason"] == "stop"
    assert end["stop_reason"] == (fields["stop"] if isinstance(fields["stop"], str) else end["stop_reason"])
    assert end["stop_reason"] in fields["stop"]


def test_stop_string_aborts_the_rest(live: Setup, http: httpx.Client) -> None:
    live.cores[0].step_seconds = 0.01
    usage = ask(http, stop="beginning").json()["usage"]
    assert usage["completion_tokens"] == 4  # In, the, begin, ning
    wait_until(lambda: live.cores[0].requests[0].request_id in live.cores[0].aborts)


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_at_its_stop_string_is_not_computed_on(
    live: Setup, http: httpx.Client, tokenizer: Tokenizer, stream: bool
) -> None:
    """Its siblings go on to their ends, and what the engine says about the aborted choice is not an error."""
    core = live.cores[0]
    (the,) = tokenizer.encode(" the", add_special_tokens=False)
    (lord,) = tokenizer.encode(" Lord", add_special_tokens=False)
    core.step_seconds = 0.01
    core.reply = lambda request, choice: [the] * 3 + [lord] if choice == 1 else [the]
    fields = {"n": 3, "stop": " Lord", "max_tokens": 25, "ignore_eos": True}
    ends: dict[int, str] = {}
    if stream:
        for event in events_of(ask(http, stream=True, **fields)):
            for choice in event["choices"]:
                if choice["finish_reason"]:
                    ends[choice["index"]] = choice["finish_reason"]
    else:
        answer = ask(http, **fields).json()
        ends = {choice["index"]: choice["finish_reason"] for choice in answer["choices"]}
        assert [choice["message"]["content"] for choice in answer["choices"]] == [" the" * 25, " the" * 3, " the" * 25]
        assert answer["usage"]["completion_tokens"] == 25 + 4 + 25
    assert ends == {0: "length", 1: "stop", 2: "length"}
    assert core.aborted_choices == [(core.requests[0].request_id, 1)] and not core.aborts


def test_stop_token_is_counted_but_not_text(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    the = tokenizer.encode(" the", add_special_tokens=False)[0]
    answer = ask(http, stop_token_ids=[the]).json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("In", "stop", the)
    assert answer["usage"]["completion_tokens"] == 2


def test_length(live: Setup, http: httpx.Client) -> None:
    choice = ask(http, max_tokens=2).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("In the", "length")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs(live: Setup, http: httpx.Client, stream: bool) -> None:
    response = ask(http, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        choices = [e["choices"][0] for e in events_of(response)]
        content = [entry for c in choices if c["logprobs"] for entry in c["logprobs"]["content"]]
        for c in choices:  # each chunk's entries are those of its text
            entries = c["logprobs"]["content"] if c["logprobs"] else []
            assert "".join(e["token"] for e in entries) == c["delta"].get("content", "")
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == TEXT
    for entry in content:
        assert entry["logprob"] == -0.25 and bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2 and entry["top_logprobs"][0]["token"] == entry["token"]


def test_logprobs_without_alternatives(live: Setup, http: httpx.Client) -> None:
    content = ask(http, logprobs=True, max_tokens=1).json()["choices"][0]["logprobs"]["content"]
    assert content == [{"token": "In", "logprob": -0.25, "bytes": [73, 110], "top_logprobs": []}]


def test_characters_are_never_cut(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = 'naïve 🌾 “mill” \u2028 "quoted"\n\\end'
    assert len(tokenizer.encode(text, add_special_tokens=False)) > 20  # bytes, mostly
    live.cores[0].reply = saying(tokenizer, text)
    live.cores[0].step_seconds = 0.002
    deltas = [e["choices"][0]["delta"].get("content", "") for e in events_of(ask(http, stream=True, logprobs=True))]
    assert "".join(deltas) == text and not any("\ufffd" in d for d in deltas)


def test_text_ending_in_half_a_character(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    live.cores[0].reply = lambda r, i: [*tokenizer.encode("a🌾", add_special_tokens=False)[:-1], 0]
    assert ask(http).json()["choices"][0]["message"]["content"] == "a\ufffd"


def test_alias_and_default_model(live: Setup, http: httpx.Client) -> None:
    assert ask(http, model="alias").json()["model"] == "alias"
    assert ask(http, model=None).json()["model"] == "tiny"


def test_request_id_is_echoed(live: Setup, http: httpx.Client) -> None:
    body = {"messages": HI}
    response = http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "abc-1"})
    assert response.headers["x-request-id"] == "abc-1"
    made_up = http.post("/v1/chat/completions", json=body, headers={"X-Request-Id": "white space"})
    assert len(made_up.headers["x-request-id"]) == 32


def test_answer_is_one_json_document(live: Setup, http: httpx.Client) -> None:
    response = ask(http)
    assert response.headers["content-type"] == "application/json"
    assert int(response.headers["content-length"]) == len(response.content)
    json.loads(response.content)
