"""How many prompt tokens a step may compute while others decode, so that running streams hardly notice.

Pure arithmetic over the times of finished steps; the clock is the worker's (`StepResult.seconds`). It decides nothing
but a number of tokens; who gets them is the scheduler's business.

The model of a step is  seconds = decode + cost x prefill_tokens.  `decode` is the median of the last steps that only
decoded, for about as many rows; `cost` comes from the last few mixed steps, so that it follows attention's growth with
the context within two chunks, while one outlier moves nothing. A fixed price of having a prompt in the step at all is
part of `cost` at the present chunk size: the cap still settles where the whole step meets the target.
"""

from collections import deque
from collections.abc import Iterable

_DECODE_WINDOW = 15  # steps; a median over them ignores seven outliers
_FEW_ROWS = 8  # fewer take about as long as one
_RUSH = 3  # see `cap`; 1,000 chats as in `_class_of`: 17.2 s, with 0 18.5; with 5 17.2, ITL p99.9 46 ms for 33
_COST_WINDOW = 3  # mixed steps; two of them make a new median


def _median(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def _class_of(rows: int) -> int:
    """The same for numbers of rows that share a window; rising. Two classes from one power of two to the next: ..., 97
    to 128, 129 to 192, 193 to 256, ...

    A full batch, mostly a power of two, is in a class with one that is nearly full: under a burst only the full one
    decodes without prompts. And classes are narrow: were 129 to 255 rows one class, the step that is asked for, at some
    130 rows on the way up, would judge 250 rows from then on (on an H200 8 ms, where 250 rows take 12). Chunks would be
    too small for the batch ever to fill, and so nothing would correct it: 1,000 chats at once, simulated with an H200's
    coefficients, take 17.5 s like that and 17.2 s with these classes (17.05 s in the offline schedule).
    """
    size = rows - 1
    shift = max(0, size.bit_length() - 2)
    return size >> shift << shift


class ChunkGovernor:
    """`itl_factor`: how many times longer than a decode-only step a mixed one may take (above 1).

    `min_chunk` and `max_chunk` bound the answer in tokens; `default` is the answer before anything was measured.
    Answers are multiples of 8 (of 16 from 64 on). Raises ValueError where a bound makes no sense.
    """

    def __init__(self, itl_factor: float, max_chunk: int, min_chunk: int = 16, default: int = 128) -> None:
        if not itl_factor > 1:
            raise ValueError(f"itl_factor must be above 1, got {itl_factor}")
        if max_chunk < 1 or min_chunk < 1:
            raise ValueError(f"min_chunk and max_chunk must be at least 1, got {min_chunk} and {max_chunk}")
        self.itl_factor = itl_factor
        self.max_chunk = max_chunk
        self.min_chunk = min(min_chunk, max_chunk)
        self.default = default
        self._decode: dict[int, deque[float]] = {}  # class of rows -> seconds of decode-only steps
        self._mixed: deque[float] = deque(maxlen=_COST_WINDOW)  # seconds a prefill token, beside decodes
        self._alone: deque[float] = deque(maxlen=_COST_WINDOW)  # the same of steps without decodes
        self._asked: set[int] = set()  # classes for which a step without prompts was asked

    def observe(self, decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        """A finished step: rows that decoded, prompt tokens beside them, and the device's time for it."""
        if not seconds > 0:
            return
        if prefill_tokens == 0:
            if decode_rows:
                size = _class_of(decode_rows)
                window = self._decode.get(size)
                if window is None:
                    window = self._decode[size] = deque(maxlen=_DECODE_WINDOW)
                window.append(seconds)
        elif decode_rows == 0:
            self._alone.append(seconds / prefill_tokens)
        else:
            decode = self.decode_seconds(decode_rows)
            if decode is not None:
                # A step faster than decoding alone is noise; it still says that tokens are cheap.
                self._mixed.append(max(seconds - decode, 0.01 * seconds) / prefill_tokens)

    def decode_seconds(self, decode_rows: int) -> float | None:
        """Expected time of a decode-only step; where this many rows were not seen, that of fewer rows, else of more."""
        size = _class_of(decode_rows)
        known = [other for other in self._decode if other <= size]
        if known:
            return _median(self._decode[max(known)])
        return _median(self._decode[min(self._decode)]) if self._decode else None

    def token_seconds(self) -> float | None:
        """Expected time that one more prompt token adds to a step."""
        window = self._mixed or self._alone
        return _median(window) if window else None

    def cap(self, decode_rows: int, idle_share: float = 0.0) -> int:
        """Most prompt tokens for the next step, where `decode_rows` rows decode in it.

        `idle_share` is the share of the rows that lie idle though somebody waits for them. Where a crowd is at the
        door, small chunks beside few decodes waste the device: the more of the batch is still to be filled, the longer
        a step may take, up to 1 + _RUSH times what `itl_factor` allows.

        0, once, where steps of about this many rows were never seen to decode only: while prompts keep coming there
        would be no such step, and against that of far fewer rows every mixed step would look too long, whatever was
        in it. One step of decodes tells.
        """
        if decode_rows == 0:
            return self.max_chunk
        size = _class_of(decode_rows)
        if (
            decode_rows >= _FEW_ROWS
            and size not in self._decode
            and size not in self._asked
            and (self._alone or self._mixed)
        ):
            self._asked.add(size)
            return 0
        decode, cost = self.decode_seconds(decode_rows), self.token_seconds()
        if decode is None or cost is None:
            tokens = float(self.default)
        else:
            tokens = (self.itl_factor * (1 + _RUSH * idle_share) - 1) * decode / cost
        grain = 16 if tokens >= 64 else 8
        rounded = int(min(tokens, self.max_chunk)) // grain * grain
        return min(max(rounded, self.min_chunk), self.max_chunk)
