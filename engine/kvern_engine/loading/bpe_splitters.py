"""How the families of byte-level BPE vocabularies cut a text into words before they merge bytes, by the names that GGUF
gives them (`tokenizer.ggml.pre`).

A GGUF file names only the family; its original tokenizer.json states the pipeline, which is written out here. Where the
pipeline of a name is not known for certain, the name is not listed: a wrong splitter gives plausible but wrong ids.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s+(?!\S)|\s+"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS_AND_SPACES = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _tiktoken(digits: str) -> str:
    """The words of cl100k and what follows it; they differ in how many digits stand together."""
    return rf"{_CONTRACTIONS}|{_WORD}|{digits}|{_MARKS_AND_SPACES}"


def _cased(digits: str, ending: str = "") -> str:
    """The words of o200k, which end where lower case turns into upper case."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|{_SPACES}"


# DeepSeek's first splitter spells out the cased letters of its version of Unicode.
_CASED_LETTERS = (
    "41-5a 61-7a b5 c0-d6 d8-f6 f8-1ba 1bc-1bf 1c4-293 295-2af 370-373 376-377 37b-37d 37f 386 388-38a 38c 38e-3a1 "
    "3a3-3f5 3f7-481 48a-52f 531-556 10a0-10c5 13a0-13f5 13f8-13fd 1c90-1cba 1cbd-1cbf 1d00-1d2b 1d6b-1d77 1d79-1d9a "
    "1e00-1f15 1f18-1f1d 1f20-1f45 1f48-1f4d 1f50-1f57 1f59 1f5b 1f5d 1f5f-1f7d 1f80-1fb4 1fb6-1fbc 1fbe 1fc2-1fc4 "
    "1fc6-1fcc 1fd0-1fd3 1fd6-1fdb 1fe0-1fec 1ff2-1ff4 1ff6-1ffc 2102 2107 210a-2113 2115 2119-211d 2124 2126 2128 "
    "212a-212d 212f-2134 2139 213c-213f 2145-2149 214e 2183-2184 2c00-2c7b 2c7e-2ce4 2ceb-2cee 2cf2-2cf3 a640-a66d "
    "a680-a69b a722-a76f a771-a787 a78b-a78e ab70-abbf fb00-fb06 fb13-fb17 ff21-ff3a ff41-ff5a 10400-1044f 104b0-104d3 "
    "104d8-104fb 10c80-10cb2 10cc0-10cf2 118a0-118df 1e900-1e943"
)
_MARKS = "21-2f 3a-7e ff01-ff0f ff1a-ff5e 2018-201f 3000-3002"
_CJK = "4e00-9fa5 800-4e00 ac00-d7ff"


def _characters(ranges: str) -> str:
    """A class of characters from ranges of hexadecimal code points."""
    bounds = (entry.partition("-") for entry in ranges.split())
    return "[" + "".join(rf"\x{{{low}}}-\x{{{high or low}}}" for low, _, high in bounds) + "]"


@dataclass(frozen=True)
class Splitter:
    """Each of `patterns` in its turn makes words of what it matches; `gpt2_words` cuts what is left as GPT-2 does.

    `nfc`: text is normalized first. `whole_words`: words in the vocabulary are taken without merging. `add_bos`: what
    holds for a file that does not say. `custom` builds a pipeline that patterns cannot say.
    """

    patterns: tuple[str, ...] = ()
    gpt2_words: bool = False
    single_digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False
    custom: Callable[[], list[Any]] | None = None

    def build(self) -> Any:
        """The pre-tokenizer, bytes mapped to characters at its end."""
        steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if self.single_digits else []
        steps += [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        if self.custom is not None:
            return pre_tokenizers.Sequence(self.custom())
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.gpt2_words))
        return steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)


def _falcon() -> list[Any]:
    """Digits are cut after bytes were mapped to characters, some of which count as digits."""
    return [
        pre_tokenizers.Punctuation(behavior="contiguous"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), behavior="isolated"),
    ]


_gpt2 = Splitter(gpt2_words=True)
_gpt2_nfc = replace(_gpt2, nfc=True)
_digits_gpt2 = Splitter(single_digits=True, gpt2_words=True)
_llama3 = Splitter((_tiktoken(r"\p{N}{1,3}"),), whole_words=True, add_bos=True)
_cl100k = Splitter((_tiktoken(r"\p{N}{1,3}"),))
_qwen = Splitter((_tiktoken(r"\p{N}"),))
_o200k = Splitter((_cased(r"\p{N}{1,3}", f"{_CONTRACTIONS}?"),))
_deepseek_v3 = Splitter(
    (
        r"\p{N}{1,3}",
        f"{_characters('4e00-9fa5 3040-309f 30a0-30ff')}+",
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|\s*[\r\n]+|{_SPACES}",
    )
)
_bloom = Splitter((r" ?[^(\s|[.,!?…。，、।۔،])]+",))

SPLITTERS: dict[str, Splitter] = {
    # What llama.cpp falls back to where a file, written before May 2024, does not say.
    "default": Splitter((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _gpt2,
    "phi-2": _gpt2,
    "jais": _gpt2,
    "trillion": _gpt2,
    "exaone4": _gpt2,
    "granite-docling": _gpt2,
    "olmo": _gpt2_nfc,
    "mpt": _gpt2_nfc,
    "modern-bert": _gpt2_nfc,
    "smollm": _digits_gpt2,
    "starcoder": _digits_gpt2,
    "refact": _digits_gpt2,
    "codeshell": _digits_gpt2,
    "exaone": _digits_gpt2,
    "minerva-7b": _digits_gpt2,
    "command-r": replace(_digits_gpt2, nfc=True),
    "llama-bpe": _llama3,
    "llama3": _llama3,
    "llama-v3": _llama3,
    "falcon3": _llama3,
    "falcon-h1": _llama3,
    "pixtral": _llama3,
    "midm-2.0": _llama3,
    "lfm2": _llama3,
    "dbrx": _cl100k,
    "smaug-bpe": _cl100k,
    "chatglm-bpe": _cl100k,
    "glm4": _cl100k,
    "qwen2": replace(_qwen, nfc=True),
    "megrez": replace(_qwen, nfc=True),
    "deepseek-r1-qwen": _qwen,
    "stablelm2": _qwen,
    "hunyuan": _qwen,
    "grok-2": _qwen,
    "solar-open": _qwen,
    "qwen35": Splitter(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
            rf"|\s*[\r\n]+|{_SPACES}",
        ),
        nfc=True,
    ),
    "tekken": Splitter((_cased(r"\p{N}"),), whole_words=True, add_bos=True),
    "gpt-4o": _o200k,
    "llama4": _o200k,
    "kanana2": _o200k,
    "minimax-m2": _o200k,
    "falcon": Splitter(custom=_falcon),
    "deepseek-llm": Splitter(
        (
            r"[\r\n]",
            rf"\s?{_characters(_CASED_LETTERS)}+",
            rf"\s?{_characters(_MARKS)}+",
            r"\s+$",
            f"{_characters(_CJK)}+",
            r"\p{N}",
        )
    ),
    "deepseek-coder": Splitter((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", f"{_characters(_CJK)}+", r"\p{N}")),
    "deepseek-v3": _deepseek_v3,
    "hunyuan-dense": _deepseek_v3,
    "poro-chat": _bloom,
    "bloom": _bloom,
    "gpt3-finnish": _bloom,
    "viking": Splitter((*_bloom.patterns, r"\p{N}")),
    "superbpe": Splitter((r"\p{N}+", r"(?=(\d{3})+(?!\d))")),
    "seed-coder": Splitter((rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|{_SPACES}",)),
    "bailingmoe": Splitter(
        (
            rf"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{{L}}\p{{N}}]?+\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]++[\r\n]*|\s*[\r\n]"
            rf"|{_SPACES}",
        )
    ),
}
