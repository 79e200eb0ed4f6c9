"""What sampling parameters say of texts and prompts, in tokens: bad words, and how a prompt is cut. Pure.

As in vLLM, a bad word is banned both at the beginning of a text and behind a space, and in each spelling only its last
token is, where the tokens before it are the others: a text that another division into tokens spells is not found.
"""

from collections.abc import Sequence
from typing import Protocol

from kvern_engine.request import MAX_BAD_WORD


class Encoder(Protocol):
    """What is needed of `tokenizer.Tokenizer`."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


def bad_word_ids(tokenizer: Encoder, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token ids of each of `words`, with and without a space before it. Raises ValueError for one without a token."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        spellings = [tuple(tokenizer.encode(before + bare, add_special_tokens=False)) for before in ("", " ")]
        if not any(spellings):
            raise ValueError(f"bad_words must be texts of at least one token, got {word!r}")
        if (longest := max(map(len, spellings))) > MAX_BAD_WORD:
            raise ValueError(f"bad_words must be at most {MAX_BAD_WORD} tokens each, got {longest} in {word[:40]!r}")
        found |= dict.fromkeys(tokens for tokens in spellings if tokens)
    return tuple(found)


def truncated(ids: list[int], wanted: int | None, most: int) -> list[int]:
    """The last `wanted` tokens of a prompt (vLLM's truncate_prompt_tokens), -1 meaning `most`; all of it for None."""
    if wanted is None:
        return ids
    return ids[-(most if wanted == -1 else wanted) :]
