"""Strings that tokenizers have got wrong, and random mixtures of them: the same for a seed on every machine."""

import os
import random
from collections.abc import Iterator

# A few hundred in an ordinary run; KVERN_TEST_FULL=1 takes ten thousand.
COUNT = 10_000 if os.environ.get("KVERN_TEST_FULL") == "1" else 300

FIXED = [
    "",
    " ",
    "  ",
    "   leading and trailing   ",
    "x =  1",
    "\n\n1. foo",
    "a\t\tb \r\n  c\n\n\n   d\r\r\n",
    "In 2024, 1,234.56 + 789 = 42; 1234567890123",
    "a1b22c333d4444e55555",
    "١٢٣ ½ ² ³¹ Ⅷ ①②③ 四五六 ௧௨௩",
    "Don't we'll I'VE they're 'Tis y'all'd've",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<s>[INST] x [/INST]</s><pad><unk> <bos><start_of_turn>",
    "< |im_end|> <|im_en <0x41> <0xZZ> ▁▁x ▁ Ġx Ċ",
    "😀👩‍👩‍👧🏳️‍🌈🇳🇴🇳 👍🏿 ☺️",
    "naïve café cafe\u0301 e\u0301\u0302\u0303\u0304 \u0301start",
    "日本語の文章です。中文，测试！ 한국어 텍스트 ㄱㄴ ｆｕｌｌｗｉｄｔｈ　space",
    "Ελληνικά Кириллица עברית العربية हिन्दी ไทย ქართული ᚠᛇᚻ",
    "\x00 \x00\x00nul\x00 \x01\x1f\x7f\x80\x9f",
    "\ufeffbom \u200b\u200c\u200d zero \u2028\u2029 \u00a0\u3000\u2003 spaces \u00ad soft",
    "\u202eright to left\u202c \u2066x\u2069",
    "\ufffd \ufffe \uffff \U0010ffff \U000e0001",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "ababababababab aabaabaab   a  a   a    a",
    "def f(x):\n    return x ** 2  # 100%\n\tif not x:\n\t\tpass\n",
    "https://example.org/a?b=c&d=%20#e user@example.org /usr/lib/x.so.1",
    "ﬁ ﬂ Ⅳ ㎏ ™ … — “quotes” ‘single’ «guillemets»",
    "ǅ ǆ ß ẞ İ ı ſ K Å Ω",
    "\u0344\u0f73\u0f75 \u1fef\u1ffd \u2126 \uf900 \U0002f800",  # what NFC changes
]
_ATOMS = [
    *FIXED,
    *"abcdefghijklmnopqrstuvwxyzABCXYZ0123456789",
    *" \n\t\r.,;:!?'\"()[]{}<>|/\\@#$%^&*-_=+`~",
    *(" the", " and", "ing", "'s", "'LL", "123", "  ", "\n\n", " \n", "\r\n", "<s>", "</s>", "<|im_end|>", "##x", "▁"),
    *("é", "e\u0301", "日", "本", "語", "한", "국", "😀", "\u200d", "\ufe0f", "Ω", "д", "ا", "ह", "्", "ไ", "\x00"),
]


def hostile_strings(seed: int = 7, count: int = COUNT) -> Iterator[str]:
    """`count` strings: the fixed ones, then mixtures of atoms and of code points of every plane."""
    rng = random.Random(seed)
    yield from FIXED[:count]
    for _ in range(count - len(FIXED)):
        kind = rng.random()
        if kind < 0.6:
            yield "".join(rng.choices(_ATOMS, k=rng.randint(1, 25)))
        elif kind < 0.8:
            yield "".join(_character(rng) for _ in range(rng.randint(1, 30)))
        elif kind < 0.9:
            yield rng.choice(_ATOMS) * rng.randint(1, 40)
        else:
            yield "".join(rng.choices(" \n\tab1", k=rng.randint(1, 60)))


def _character(rng: random.Random) -> str:
    while True:
        limit = rng.choice([0x80, 0x500, 0x3000, 0x10000, 0x20000, 0x110000])
        point = rng.randrange(limit)
        if not 0xD800 <= point <= 0xDFFF:
            return chr(point)
