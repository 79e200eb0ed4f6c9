"""Every refusal that a client can meet: status, OpenAI's shape, and a text that says what would be right."""

import gzip
import socket

import httpx
import pytest
from server_harness import Setup

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]


def error_of(response: httpx.Response, status: int = 400) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json" and response.headers["x-request-id"]
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"temprature": 1}, "temprature", "Unknown field 'temprature'; did you mean 'temperature'?"),
        ({"temperature": -1}, "temperature", "temperature must be greater than or equal to 0, got -1"),
        ({"temperature": "hot"}, "temperature", 'temperature must be a number, got "hot" (a string).'),
        ({"temperature": True}, "temperature", "temperature must be a number, got true (a boolean)."),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens must be an integer, got 1.5 (a number)."),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0."),
        ({"max_completion_tokens": 0}, "max_completion_tokens", "max_completion_tokens must be at least 1, got 0."),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "name the same limit"),
        ({"max_tokens": 10**30}, "max_tokens", "max_tokens must be less than or equal to 2147483647"),
        ({"n": 0}, "n", "n must be greater than or equal to 1, got 0."),
        ({"n": 129}, "n", "n must be less than or equal to 128, got 129."),
        ({"top_p": 0}, "top_p", "top_p must be greater than 0, got 0"),
        ({"top_k": -2}, "top_k", "top_k must be greater than or equal to -1"),
        ({"min_p": 2}, "min_p", "min_p must be less than or equal to 1"),
        ({"presence_penalty": 3}, "presence_penalty", "presence_penalty must be less than or equal to 2, got 3"),
        ({"repetition_penalty": 0}, "repetition_penalty", "repetition_penalty must be greater than or equal to 0.01"),
        ({"seed": 2**63}, "seed", "seed must be"),
        ({"stop": ["a"] * 17}, "stop", "stop must have at most 16 items (max_stop), got 17."),
        ({"stop": [""]}, "stop[0]", "stop[0]: String should have at least 1 character"),
        ({"stop": 5}, "stop", "stop must be an array, got 5 (an integer)."),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias must map token ids to biases, got the key 'a'."),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "token id 99999 is outside the vocabulary (0..2047)."),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "logit_bias.5 must be less than or equal to 100, got 101"),
        ({"stop_token_ids": [2048]}, "stop_token_ids", "token id 2048 is outside the vocabulary (0..2047)."),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "min_tokens must be at most max_tokens (3), got 9."),
        ({"top_logprobs": 2}, "top_logprobs", "top_logprobs needs logprobs to be true."),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "must be less than or equal to 20, got 21."),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when stream is true."),
        (
            {"stream": True, "stream_options": {"include_usag": True}},
            "stream_options.include_usag",
            "Unknown field 'stream_options.include_usag'; did you mean 'include_usage'?",
        ),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
            "is not served yet by this version of Kvern. Give false.",
        ),
        ({"verbosity": "low"}, "verbosity", "Choosing how long answers are is not served yet"),
        ({"tools": [{"type": "function"}]}, "tools", "Tool calling is not served yet"),
        ({"tool_choice": "auto"}, "tool_choice", "Tool calling is not served yet"),
        ({"response_format": {"type": "json_object"}}, "response_format", "is not served yet"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "is not served yet"),
        ({"response_format": {"type": "xml"}}, "response_format", 'must be {"type": "text"}'),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "Structured output is not served yet"),
        ({"modalities": ["audio"]}, "modalities", 'modalities must be ["text"]'),
        ({"cache_salt": ""}, "cache_salt", "cache_salt: String should have at least 1 character"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages", "is set by the server"),
        ({"chat_template_kwargs": {"stile": 1}}, "chat_template_kwargs.stile", "known are: date_string, documents"),
        ({"continue_final_message": True}, "continue_final_message", "needs the last message to be an assistant's"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "exclude each other",
        ),
        ({"messages": []}, "messages", "messages must have at least 1 items, got 0."),
        ({"messages": ["hi"]}, "messages[0]", 'messages[0] must be an object, got "hi" (a string).'),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role must be one of system, developer"),
        ({"messages": [{"role": "bot", "content": "x"}]}, "messages[0].role", 'got "bot".'),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "messages[0].content must be a string or a non-empty array of text parts, got 5.",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0].type",
            'messages[0].content[0].type must be "text", got "image_url": this model takes text only.',
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "a string"),
        (
            {"messages": [{"role": "user", "content": "x", "nme": "y"}]},
            "messages[0].nme",
            "Unknown field 'messages[0].nme'; did you mean 'name'?",
        ),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]}, "messages[0].tool_call_id", "Unknown"),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
            "messages[0].tool_calls[0]",
            '"function": {"name", "arguments"}',
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            "must be JSON text",
        ),
    ],
)
def test_chat_fields(live: Setup, http: httpx.Client, fields: dict, param: str, text: str) -> None:
    error = error_of(http.post(CHAT, json={"messages": HI, **fields}))
    assert text in error["message"] and error["param"] == param and error["type"] == "invalid_request_error"
    assert not live.cores[0].requests, "refused before an engine hears of it"


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"prompt": ""}, "prompt", "prompt has no tokens; give at least one."),
        ({"prompt": []}, "prompt", "prompt must be a string, an array of strings, an array of token ids"),
        ({"prompt": {"a": 1}}, "prompt", "prompt must be a string, an array of strings"),
        ({"prompt": [1, "a"]}, "prompt", 'got [1, "a"].'),
        ({"prompt": [True]}, "prompt", "prompt must be"),
        ({"prompt": [[]]}, "prompt[0]", "prompt[0] must be a non-empty array of token ids, got []."),
        ({"prompt": [5, 2048]}, "prompt", "prompt: token id 2048 is outside the vocabulary (0..2047)."),
        ({"prompt": [[5], [-1]]}, "prompt", "prompt[1]: token id -1 is outside the vocabulary"),
        ({"prompt": ["a"] * 257}, "prompt", "prompt must have at most 256 prompts (max_prompts_per_request), got 257."),
        ({"suffix": "x"}, "suffix", "Inserting text before a suffix is not served yet"),
        ({"suffix": "none"}, "suffix", "Inserting text before a suffix is not served yet"),
        ({"best_of": 2}, "best_of", "best_of (2) other than n (1) is not served; leave best_of out."),
        ({"logprobs": 21}, "logprobs", "logprobs must be less than or equal to 20, got 21."),
        ({"logprobs": True}, "logprobs", "logprobs must be an integer, got true (a boolean)."),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0."),
        ({"messages": HI}, "messages", "Unknown field 'messages'"),
    ],
)
def test_completion_fields(live: Setup, http: httpx.Client, fields: dict, param: str, text: str) -> None:
    error = error_of(http.post(COMPLETIONS, json={"prompt": "x", **fields}))
    assert text in error["message"] and error["param"] == param
    assert not live.cores[0].requests


def test_required_fields(live: Setup, http: httpx.Client) -> None:
    assert error_of(http.post(CHAT, json={}))["message"] == "messages is required."
    assert error_of(http.post(COMPLETIONS, json={}))["message"] == "prompt is required."


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (
            COMPLETIONS,
            {"prompt": [5] * 500, "max_tokens": 13},
            "This model's maximum context length is 512 tokens. However, you requested 513 tokens (500 in the prompt, "
            "13 in the completion). Please reduce the length of the prompt or completion: at most 12 tokens of "
            "completion fit.",
        ),
        (
            COMPLETIONS,
            {"prompt": [5] * 512},
            "This model's maximum context length is 512 tokens. However, your prompt resulted in 512 tokens, and at "
            "least 1 token must be left for the completion. Please reduce the length of the prompt.",
        ),
        (CHAT, {"messages": [{"role": "user", "content": "God " * 700}]}, "your messages resulted in"),
        (CHAT, {"messages": HI, "max_tokens": 512}, "512 in the completion"),
        (COMPLETIONS, {"prompt": "x " * 2_000_000}, "resulted in at least"),
    ],
)
def test_context_length(live: Setup, http: httpx.Client, path: str, body: dict, text: str) -> None:
    error = error_of(http.post(path, json=body))
    assert text in error["message"] and error["code"] == "context_length_exceeded"
    assert not live.cores[0].requests


def test_unknown_model(live: Setup, http: httpx.Client) -> None:
    for response in (http.post(CHAT, json={"model": "gpt", "messages": HI}), http.get("/v1/models/gpt")):
        error = error_of(response, 404)
        assert error["code"] == "model_not_found" and error["param"] == "model"
        assert error["message"] == "The model `gpt` does not exist. Served here: `tiny`, `alias`."


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[1", b'{"a": NaN}', b'{"messages": \xff}', b'{"a":' * 5000, b'{"a": "\\ud800"}', b'{"a": 1e999}'],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/tokenize", "/detokenize"])
def test_malformed_json(live: Setup, http: httpx.Client, path: str, body: bytes) -> None:
    error = error_of(http.post(path, content=body, headers={"Content-Type": "application/json"}))
    assert error["message"] and error["type"] == "invalid_request_error"


def test_json_that_is_no_object(live: Setup, http: httpx.Client) -> None:
    assert error_of(http.post(CHAT, json=[1]))["message"] == "The body must be a JSON object, got an array."


def test_media_type(live: Setup, http: httpx.Client) -> None:
    error = error_of(http.post(CHAT, data={"a": "b"}), 415)
    assert "send the body as application/json" in error["message"]
    body = b'{"messages": [{"role": "user", "content": "hi"}]}'
    assert http.post(CHAT, content=body, headers={"Content-Type": "application/json; charset=utf-8"}).is_success
    assert http.post(CHAT, content=body).is_success  # not named at all
    assert http.post(CHAT, content=body, headers={"Content-Encoding": "identity"}).is_success
    error = error_of(http.post(CHAT, content=gzip.compress(body), headers={"Content-Encoding": "gzip"}), 415)
    assert error["message"] == "Content-Encoding 'gzip' is not supported; send the body as it is."


def test_paths_and_methods(live: Setup, http: httpx.Client) -> None:
    assert "/v1/nothing" in error_of(http.get("/v1/nothing"), 404)["message"]
    for path in (CHAT, "/tokenize", "/v1/embeddings"):
        response = http.get(path)
        error = error_of(response, 405)
        assert error["code"] == "method_not_allowed" and "POST" in response.headers["allow"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings", "/v1/messages", "/v1/responses/x/cancel"])
def test_endpoints_that_come_later(live: Setup, http: httpx.Client, path: str) -> None:
    error = error_of(http.post(path, json={}))
    assert "is not served yet by this version of Kvern" in error["message"] and error["code"] == "unsupported"


def test_bytes_that_are_no_http(live: Setup) -> None:
    host, port = live.servers[0].url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        sock.sendall(b"\x16\x03\x01 not http\r\n\r\n")
        answer = sock.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400") and b'"error"' in answer


def test_tokenize_wants_one_of_two(live: Setup, http: httpx.Client) -> None:
    for body in ({}, {"prompt": "a", "messages": HI}):
        assert "Give either prompt" in error_of(http.post("/tokenize", json=body))["message"]
    assert "token id 5000" in error_of(http.post("/detokenize", json={"tokens": [5000]}))["message"]
    assert error_of(http.post("/detokenize", json={"tokens": ["a"]}))["param"] == "tokens[0]"


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_of_the_engine_is_a_400(live: Setup, http: httpx.Client, stream: bool) -> None:
    live.cores[0].refuse = "the request needs 9 blocks, the pool has 4"
    error = error_of(http.post(CHAT, json={"messages": HI, "stream": stream}))
    assert error["message"] == "the request needs 9 blocks, the pool has 4"


def test_engine_failure_in_mid_stream(live: Setup, http: httpx.Client) -> None:
    core = live.cores[0]
    core.step_seconds = 0.02
    body = {"messages": HI, "stream": True, "ignore_eos": True}
    with http.stream("POST", CHAT, json=body, headers={"X-Kvern-Usage": "comment"}) as response:
        assert response.status_code == 200
        lines = []
        for line in response.iter_lines():
            lines.append(line)
            if '"content":"In"' in line:
                core.refuse = "the device is on fire"
    data = [line for line in lines if line]
    assert data.pop(-2).startswith(": kvern-usage "), "what was generated is paid for"
    assert data[-1] == "data: [DONE]" and data[-2].startswith('data: {"error":{"message":"the device is on fire"')
    assert '"code":"engine_error"' in data[-2]
