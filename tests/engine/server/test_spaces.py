"""SentencePiece vocabularies over HTTP: the space at the beginning of an answer, and how logprobs go with it."""

import json
from collections.abc import Iterator

import httpx
import pytest
import tokenizers
from server_harness import LiveServer, Setup, events_of
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

WORDS = ("</s>", "<s>", "<unk>", "▁the", "▁king", "▁of", "▁Israel", "▁", "[", "▁[", "user]", "assistant]")
BOS, THE, KING, OF, ISRAEL, SPACE = 1, 3, 4, 5, 6, 7


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    """A tokenizer of Llama 2's kind: whole words, a space in front of a text, BOS before it."""
    setup = Setup()
    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in WORDS[:3]])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", BOS)]
    )
    folder = setup.folder / "tokenizer"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    setup.core(reply=lambda request, choice: [OF, ISRAEL, 0])
    made = setup.server(tokenizer=str(folder))
    made.wait_for(200)
    yield made
    setup.close()


def post(server: LiveServer, path: str, **fields: object) -> httpx.Response:
    response = httpx.post(f"{server.url}/v1/{path}", json=fields, timeout=20)
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize("prompt", ["the king", [BOS, THE, KING], [THE, KING]])
def test_a_completion_goes_on_from_its_prompt(server: LiveServer, prompt: object) -> None:
    """As with vLLM: what clients put behind the prompt must not run into its last word."""
    assert post(server, "completions", prompt=prompt).json()["choices"][0]["text"] == " of Israel"
    events = events_of(post(server, "completions", prompt=prompt, stream=True))
    assert "".join(e["choices"][0]["text"] for e in events) == " of Israel"
    echoed = post(server, "completions", prompt=prompt, echo=True).json()["choices"][0]["text"]
    assert echoed.removeprefix("<s> ") == "the king of Israel"


def test_a_completion_of_nothing_begins_a_text(server: LiveServer) -> None:
    assert post(server, "completions", prompt=[BOS]).json()["choices"][0]["text"] == "of Israel"


def test_a_message_is_a_text_of_its_own_unless_it_is_continued(server: LiveServer) -> None:
    hi = {"role": "user", "content": "the king"}
    answer = post(server, "chat/completions", messages=[hi]).json()["choices"][0]["message"]["content"]
    assert answer == "of Israel"
    begun = {"role": "assistant", "content": "the king"}
    fields = {"messages": [hi, begun], "continue_final_message": True}
    answer = post(server, "chat/completions", **fields).json()["choices"][0]["message"]["content"]
    assert answer == " of Israel"


def test_offsets_of_an_echoed_prompt_are_those_in_its_text(server: LiveServer) -> None:
    """What was put in front of the prompt (BOS, a space) is not in the text."""
    choice = post(server, "completions", prompt="the king", echo=True, logprobs=0).json()["choices"][0]
    assert choice["text"] == "the king of Israel"
    assert choice["logprobs"]["tokens"] == ["<s>", " the", " king", " of", " Israel"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 3, 8, 11]
    choice = post(server, "completions", prompt=[BOS, THE], echo=True, logprobs=0).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("<s> the of Israel", [0, 3, 7, 10])


@pytest.mark.parametrize(("stop", "words"), [(None, ["of", "Israel"]), (" Israel", ["of"]), ("srael", ["of", "I"])])
def test_logprobs_come_with_their_text(server: LiveServer, stop: str | None, words: list[str]) -> None:
    fields = {"messages": [{"role": "user", "content": "the"}], "logprobs": True, "stop": stop}
    seen = []
    for event in events_of(post(server, "chat/completions", stream=True, **fields)):
        choice = event["choices"][0]
        entries = (choice["logprobs"] or {"content": []})["content"]
        seen.append((choice["delta"].get("content", ""), [entry["token"] for entry in entries]))
    assert "".join(text for text, _ in seen) == " ".join(words)
    assert all(len(text.split()) == len(tokens) for text, tokens in seen), seen
