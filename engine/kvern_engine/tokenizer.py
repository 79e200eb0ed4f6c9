"""Text to token ids and back, and chat messages to a prompt: one class over the `tokenizers` library.

`load_tokenizer` reads it from a model folder or from a GGUF file's metadata. No torch here: API servers import this.
Decoding a stream token by token is `detokenizer.py`'s task.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from kvern_engine.loading.chat_template import SECONDS, ChatTemplate, ChatTemplateError, read_override, read_sources
from kvern_engine.loading.config import json_eos, read_json
from kvern_engine.loading.folder_tokenizer import TokenizerFolder
from kvern_engine.loading.gguf import GGUFFile
from kvern_engine.loading.gguf_config import gguf_eos
from kvern_engine.loading.gguf_tokenizer import TokenizerError, build_tokenizer
from kvern_engine.loading.resolve import ModelFiles
from kvern_engine.token_text import MakeStream, TextStream, byte_of, decoder_steps, stream_maker

__all__ = ["ChatTemplateError", "Tokenizer", "TokenizerError", "load_tokenizer"]

_MAX_ID = 2**32 - 1  # the library's ids are unsigned 32-bit numbers


def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's table: the printable character that stands for each byte in a byte-level vocabulary, reversed."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _bytes_of_characters()
_LONG = 1024  # characters: a longer text takes long enough to let others run


class Tokenizer:
    """A model's tokenizer. Ids without a token (a padded vocabulary) decode to nothing.

    `special_tokens` maps names like "bos_token" to their text; `eos_token_ids` are the ids that end an answer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str],
        eos_token_ids: tuple[int, ...],
        template: ChatTemplate | None = None,
    ) -> None:
        backend.no_truncation()  # a tokenizer.json may carry the truncation and padding of its training
        backend.no_padding()
        self.backend = backend
        self._added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(index for index, token in self._added.items() if token.special)
        self.bos_token_id = self._id(special_tokens.get("bos_token"))
        eos = self._id(special_tokens.get("eos_token"))
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if eos is None else [eos])]))
        self._template = template
        self._bytes: dict[int, bytes] = {}

    def _id(self, text: str | None) -> int | None:
        return None if text is None else self.backend.token_to_id(text)

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def longest_token(self) -> int:
        """Bytes of the longest token. Ids may lie far apart: only those that have a token are looked at."""
        ids = self.backend.get_vocab(with_added_tokens=True).values()
        return max((len(self.token_bytes(index)) for index in ids), default=1) or 1

    @cached_property
    def is_byte_level(self) -> bool:
        """True where each token stands for fixed bytes, so that a text is the bytes of its tokens in a row."""
        return [step.get("type") for step in decoder_steps(self.backend.decoder)] == ["ByteLevel"]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written in the text become their ids, as with transformers and vLLM,
        unless the model's tokenizer_config.json says `split_special_tokens`; `add_special_tokens` is about those that
        the model puts around a text (off for a rendered chat). Raises ValueError for invalid Unicode, TokenizerError
        for a text that the library gives up on: what no token stands for, what its regular expressions run away on."""
        try:
            if len(text) > _LONG:
                # Of the library's calls only those for batches let other threads run meanwhile.
                return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
            return self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (TypeError, UnicodeEncodeError):  # which of them depends on the library's version
            _refuse_surrogates(text)
            raise
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # bare Exception, and for a panic a BaseException of its own
            raise TokenizerError(f"the tokenizer cannot read this text: {error}") from error

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are no valid UTF-8 become U+FFFD."""
        if self.is_byte_level:
            skip = self.special_token_ids if skip_special_tokens else ()
            return b"".join([self.token_bytes(index) for index in ids if index not in skip]).decode("utf-8", "replace")
        stream = self.text_stream(skip_special_tokens)
        return stream.push(ids) + stream.flush()

    def text_stream(self, skip_special_tokens: bool = True, before: Sequence[int] = ()) -> TextStream:
        """A decoder of tokens that come one after the other, for vocabularies that are not byte-level. `before` are
        the tokens in front of them: where they have a text, the first of those that come does not begin one, and
        keeps the space that a text's first token loses."""
        stream = self._make_stream(self.special_token_ids if skip_special_tokens else frozenset())
        for token in before:
            if stream.push((token,)):
                break
        stream.flush()
        stream.taken_off = 0
        return stream

    @cached_property
    def _make_stream(self) -> MakeStream:
        return stream_maker(self.backend.decoder, self._text_of, self._decode_at_once)

    def _text_of(self, token_id: int) -> str | None:
        return self.backend.id_to_token(token_id) if 0 <= token_id <= _MAX_ID else None

    def _decode_at_once(self, ids: list[int]) -> str:
        possible = [index for index in ids if 0 <= index <= _MAX_ID]
        return self.backend.decode(possible, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for: a byte-level token may be part of a character."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._compute_bytes(token_id)
        return found

    def _compute_bytes(self, token_id: int) -> bytes:
        text = self._text_of(token_id)
        if text is None:
            return b""
        if token_id in self._added:
            return text.encode("utf-8")
        if self.is_byte_level:
            known = all(character in _BYTE_OF for character in text)
            return bytes([_BYTE_OF[character] for character in text]) if known else text.encode("utf-8")
        if (byte := byte_of(text)) is not None:
            return bytes([byte])
        return text.replace("\u2581", " ").encode("utf-8")  # SentencePiece's mark of a space

    def token_text(self, token_id: int) -> str:
        """A token for display (logprobs): its text, U+FFFD where it is a part of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template; None where the model has none."""
        return self._template.sources["default"] if self._template else None

    @property
    def template_variables(self) -> frozenset[str] | None:
        """Names of the variables that the chat templates read; None where the model has none."""
        return self._template.check() if self._template else None

    def render_chat(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The prompt of a conversation; encode it with `add_special_tokens=False`. `kwargs` as for
        `ChatTemplate.render`. Raises ChatTemplateError."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template; pass --chat-template FILE, or use completions")
        return self._template.render(messages, add_generation_prompt=add_generation_prompt, **kwargs)


def _refuse_surrogates(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not valid Unicode: lone surrogate {text[error.start]!r} at character {error.start}"
        ) from error


def load_tokenizer(
    files: ModelFiles, override: str | None = None, chat_template: str | None = None, template_seconds: float = SECONDS
) -> Tokenizer:
    """Reads the tokenizer of `files`.

    `override` is a folder, a tokenizer.json or a .gguf file to take it from instead; `chat_template` is a file with a
    Jinja template (or the template itself), `template_seconds` what rendering a conversation may take. The ids that end
    an answer stay those of the model. Raises TokenizerError, ChatTemplateError, ModelConfigError or GGUFError before
    anything large is read.
    """
    own_templates = read_override(chat_template) if chat_template is not None else None
    path = _override_path(override) if override is not None else files.path
    own_file = GGUFFile(files.path) if files.kind == "gguf" else None
    eos = gguf_eos(own_file.metadata) if own_file else json_eos(files.path, read_json(files.path / "config.json"))
    if path.suffix.lower() == ".gguf" and path.is_file():
        file = own_file if own_file and path == files.path else GGUFFile(path)
        special = _gguf_special_tokens(file)
        sources = own_templates if own_templates is not None else _gguf_templates(file)
        build: Callable[[], tokenizers.Tokenizer] = partial(build_tokenizer, file)
        eos = eos or gguf_eos(file.metadata)
    else:
        folder = TokenizerFolder(path)
        special = folder.special_tokens
        sources = own_templates if own_templates is not None else read_sources(folder.path, folder.config)
        build = folder.build
    # The template's process starts while the vocabulary is read.
    template = ChatTemplate(sources, special, template_seconds) if sources else None
    backend = build()
    if template is not None:
        template.check()
    return Tokenizer(backend, special_tokens=special, eos_token_ids=eos, template=template)


def _override_path(override: str) -> Path:
    path = Path(override).expanduser()
    if not path.exists():
        raise TokenizerError(f"tokenizer: no such folder or file {override!r}")
    return path


def _gguf_special_tokens(file: GGUFFile) -> dict[str, str]:
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {}
    for name, key in names.items():
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(tokens, list) and isinstance(index, int) and 0 <= index < len(tokens):
            special[name] = tokens[index]
    return special


def _gguf_templates(file: GGUFFile) -> dict[str, str]:
    """tokenizer.chat_template, and tokenizer.chat_template.NAME for further ones."""
    key = "tokenizer.chat_template"
    found = {name.removeprefix(f"{key}."): text for name, text in file.metadata.items() if name.startswith(f"{key}.")}
    if key in file.metadata:
        found["default"] = file.metadata[key]
    if found and "default" not in found:
        found["default"] = next(iter(found.values()))
    return found
