"""/v1/completions, /tokenize and /detokenize against a fake core."""

import httpx
import pytest
from server_harness import Setup, events_of

from kvern_engine.tokenizer import Tokenizer

TEXT = "In the beginning God created the heaven and the earth."


def complete(http: httpx.Client, **fields) -> httpx.Response:
    return http.post("/v1/completions", json={"model": "tiny", "prompt": "And God", **fields})


def test_answer_and_default_of_16_tokens(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = complete(http).json()
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    request = live.cores[0].requests[0]
    assert request.params.max_tokens == 16 and request.prompt_token_ids == tokenizer.encode("And God")


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["And God", "said"], ["And God", "said"]),
    ],
)
def test_prompt_kinds(live: Setup, http: httpx.Client, tokenizer: Tokenizer, prompt: list, ids: list) -> None:
    answer = complete(http, prompt=prompt, n=2).json()
    seen = [r.prompt_token_ids for r in live.cores[0].requests]
    assert seen == [tokenizer.encode(p) if isinstance(p, str) else p for p in ids]
    assert [c["index"] for c in answer["choices"]] == list(range(2 * len(ids)))
    assert all(c["text"] == TEXT for c in answer["choices"])
    assert answer["usage"]["prompt_tokens"] == sum(map(len, seen))


def test_default_limit_shrinks_near_the_end_of_the_context(live: Setup, http: httpx.Client) -> None:
    assert complete(http, prompt=[[5] * 507, [6]]).status_code == 200
    assert [r.params.max_tokens for r in live.cores[0].requests] == [5, 16]


def test_stream_over_prompts_and_choices(live: Setup, http: httpx.Client) -> None:
    events = events_of(complete(http, prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True}))
    usage = events.pop()
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] > 0
    for index in range(4):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(c["text"] for c in own) == TEXT
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["stop"] and own[-1]["finish_reason"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_says_its_usage_in_a_comment_where_a_router_asks(live: Setup, http: httpx.Client, path: str) -> None:
    body = {"prompt": "And God"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "x"}]}
    body["stream"] = True
    usage = http.post(path, json={**body, "stream_options": {"include_usage": True}}).text.split("\n\n")[-3]
    said = httpx.Response(200, text=usage.removeprefix("data: ")).json()["usage"]
    plain = http.post(path, json=body).text
    assert "kvern-usage" not in plain
    asked = http.post(path, json=body, headers={"X-Kvern-Usage": "comment"}).text
    comment = f": kvern-usage {said['prompt_tokens']} {said['completion_tokens']}\n\ndata: [DONE]\n\n"
    assert asked.endswith(comment)
    assert asked.count("kvern-usage") == 1


def test_a_pod_says_its_name_to_whoever_asks_whether_it_is_ready(
    live: Setup, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "x-kvern-pod" not in http.get("/ready").headers
    monkeypatch.setenv("KVERN_POD_NAME", "smol-r0-0")
    assert http.get("/ready").headers["x-kvern-pod"] == "smol-r0-0"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(live: Setup, http: httpx.Client, stream: bool) -> None:
    response = complete(http, echo=True, logprobs=2, stream=stream, n=2)
    if stream:
        by_index: dict[int, list] = {0: [], 1: []}
        for event in events_of(response):
            by_index[event["choices"][0]["index"]].append(event["choices"][0])
        choices = [
            {
                "text": "".join(c["text"] for c in own),
                "logprobs": {k: [v for c in own for v in c["logprobs"][k]] for k in own[0]["logprobs"]},
            }
            for own in by_index.values()
        ]
    else:
        choices = response.json()["choices"]
    assert len(choices) == 2
    for choice in choices:
        assert choice["text"] == "And God" + TEXT
        logprobs = choice["logprobs"]
        tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
        assert tokens[:2] == ["And", " God"] and "".join(tokens) == choice["text"]
        assert all(choice["text"].startswith(t, o) for t, o in zip(tokens, offsets, strict=True))
        assert logprobs["token_logprobs"] == [None] + [-0.25] * (len(tokens) - 1)
        assert logprobs["top_logprobs"][0] is None
        assert all(top[t] == -0.25 for top, t in zip(logprobs["top_logprobs"][1:], tokens[1:], strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_nothing_but_the_prompt(live: Setup, http: httpx.Client, stream: bool) -> None:
    response = complete(http, echo=True, max_tokens=0, logprobs=0, stream=stream)
    if stream:
        choices = [e["choices"][0] for e in events_of(response)]
        assert "".join(c["text"] for c in choices) == "And God"
        assert [c["finish_reason"] for c in choices if c["finish_reason"]] == ["length"]
        return
    answer = response.json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("And God", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.25]
    assert answer["usage"]["completion_tokens"] == 0


def test_logprobs_follow_the_text_that_a_stop_string_leaves(live: Setup, http: httpx.Client) -> None:
    (choice,) = complete(http, stop="ning God", logprobs=1).json()["choices"]
    assert choice["text"] == "In the begin"
    assert choice["logprobs"]["tokens"] == ["In", " the", " begin"]


def test_logprob_alternatives_hold_the_chosen_token(live: Setup, http: httpx.Client) -> None:
    (choice,) = complete(http, logprobs=0, max_tokens=1).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"In": -0.25}]


def test_tokenize_and_back(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = http.post("/tokenize", json={"prompt": "And God said", "return_token_strs": True}).json()
    ids = tokenizer.encode("And God said")
    assert answer == {
        "count": len(ids),
        "max_model_len": 512,
        "tokens": ids,
        "token_strs": [tokenizer.token_text(i) for i in ids],
    }
    assert http.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "And God said"}


def test_tokenize_messages(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert tokenizer.decode(answer["tokens"]) == "[user] hi\n[assistant] " and answer["token_strs"] is None


def test_long_text_is_tokenized_too(live: Setup, http: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "And God said, Let there be light. " * 3000
    assert http.post("/tokenize", json={"prompt": text}).json()["tokens"] == tokenizer.encode(text)


def test_models(live: Setup, http: httpx.Client) -> None:
    listed = http.get("/v1/models").json()
    assert listed["object"] == "list" and [m["id"] for m in listed["data"]] == ["tiny", "alias"]
    assert http.get("/v1/models/alias").json() == listed["data"][1]
    assert listed["data"][0]["max_model_len"] == 512 and listed["data"][0]["object"] == "model"


def test_probes_and_version(live: Setup, http: httpx.Client) -> None:
    assert http.get("/health").status_code == http.get("/ping").status_code == http.post("/ping").status_code == 200
    ready = http.get("/ready")
    assert ready.status_code == 200 and ready.json()["engines"][0]["state"] == "ready"
    assert http.get("/version").json().keys() == {"version"}
