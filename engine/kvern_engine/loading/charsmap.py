"""SentencePiece's compiled normalization rules (NFKC and the like): a table of what stands for each run of characters.

The `tokenizers` library applies them to grapheme clusters, and leaves those alone that it does not find whole; here, as
in SentencePiece, the longest run that the table knows is replaced at each place.
"""

import struct
from array import array

from tokenizers import NormalizedString, Regex

_EVERYTHING = Regex(r"\A[\s\S]+\z")


class CharsMap:
    """Rules as a model file brings them: the size of a double-array trie (Aoe 1989, as Darts-clone stores it), the
    trie, and the replacements, each ended by a NUL. Raises ValueError for what is none."""

    def __init__(self, data: bytes) -> None:
        if len(data) < 8:
            raise ValueError(f"the normalization table has only {len(data)} bytes")
        size = struct.unpack_from("<I", data)[0]
        if size % 4 or not 4 <= size <= len(data) - 4:
            raise ValueError(f"the trie of the normalization table cannot have {size:,} of {len(data):,} bytes")
        self._units = array("I")
        self._units.frombytes(data[4 : 4 + size])
        self._replacements = data[4 + size :]
        self._known: dict[int, bytes] = {}

    def normalize(self, normalized: NormalizedString) -> None:
        """Called by the library with each text between added tokens."""
        old = normalized.normalized
        new = self.apply(old)
        if new != old:
            normalized.replace(_EVERYTHING, new)

    def apply(self, text: str) -> str:
        """`text` with every run of characters replaced that the table knows."""
        data = text.encode("utf-8")
        out, at, size = bytearray(), 0, len(data)
        while at < size:
            value, length = self._longest(data, at)
            if length:
                out += self._replacement(value)
                at += length
            else:  # one character as it is
                end = at + 1
                while end < size and data[end] & 0xC0 == 0x80:
                    end += 1
                out += data[at:end]
                at = end
        return out.decode("utf-8", "replace")

    def _longest(self, data: bytes, start: int) -> tuple[int, int]:
        """(value, length in bytes) of the longest key that `data` has at `start`; a length of 0 where it has none."""
        units, count = self._units, len(self._units)
        found = (0, 0)
        node = _offset(units[0])
        for at in range(start, len(data)):
            node ^= data[at]
            if node >= count:
                break
            unit = units[node]
            if unit & 0x8000_00FF != data[at]:
                break
            node ^= _offset(unit)
            if unit & 0x100:  # a key ends here
                if node >= count:
                    break
                found = (units[node] & 0x7FFF_FFFF, at + 1 - start)
        return found

    def _replacement(self, value: int) -> bytes:
        known = self._known.get(value)
        if known is None:
            end = self._replacements.find(b"\0", value)
            known = self._known[value] = self._replacements[value : end if end >= 0 else None]
        return known


def _offset(unit: int) -> int:
    return (unit >> 10) << ((unit & 0x200) >> 6)
