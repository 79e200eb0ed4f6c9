"""How many prompt tokens a step may compute while others decode, so that running streams hardly notice.

Pure arithmetic over the times of finished steps; the clock is the worker's (`StepResult.seconds`). It decides nothing
but a number of tokens; who gets them is the scheduler's business.

The model of a step is  seconds = decode + cost x prefill_tokens.  `decode` is the median of the last steps that only
decoded, for about as many rows; `cost` comes from the last few mixed steps, so that it follows attention's growth with
the context within two chunks, while one outlier moves nothing. A fixed price of having a prompt in the step at all is
part of `cost` at the present chunk size: the cap still settles where the whole step meets the target. So only chunks of
about that size count: a short prompt pays the same fixed price with few tokens, and by it the next long one would get
half of what it may have.

*Long steps.* What streams are promised is a percentile: of 100 gaps between tokens 99 are hardly longer than
`itl_factor` decode steps (`limits.py` has the number). A prompt of many chunks pays for that with its TTFT, since each
chunk brings a decode step along. But long prompts are few. So steps earn credit, and a long prompt may spend it on
being computed at once, in a step that is longer than promised. Three bounds hold for such steps:

- one in _LONG_EVERY, whatever arrives: half of what the percentile leaves free, the other half is for what is not
  planned. A token bucket holds _LONG_KEPT, because long prompts do not come at equal distances: in n steps there are at
  most _LONG_KEPT + n / _LONG_EVERY;
- _LONG_SECONDS: a stream that pauses that long for a token still comes faster than anybody reads;
- _LONG_FACTOR decode steps, so that where decode steps are short, streams lose at most _LONG_FACTOR / _LONG_EVERY of
  their speed, 5 %.

Credit is spent only where all prompts that are there fit into the step: a longer one is computed in chunks until its
rest does, and where the usual step takes _LONG_SECONDS already (CPUs), all are.
"""

from collections import deque
from collections.abc import Iterable, Sequence

_DECODE_WINDOW = 15  # steps; a median over them ignores seven outliers
_FEW_ROWS = 8  # fewer take about as long as one
_RUSH = 3  # see `cap`; 1,000 chats as in `_class_of`: 17.2 s, with 0 18.5; with 5 17.2, ITL p99.9 46 ms for 33
_COST_WINDOW = 3  # mixed steps; two of them make a new median
_FULL = 0.5  # of the usual chunk: smaller ones do not count. Simulated as in `limits.py`: TTFT p99 60.8 -> 59.0 ms
_LONG_PROMPT = 3  # usual chunks; were credit kept for one step only, 4 would be better (simulated)
_LONG_EVERY = 200  # steps
_LONG_KEPT = 3  # long steps; simulated with the two above, TTFT p99 60 -> 56 ms where a decode step takes 5 ms
_LONG_FACTOR = 10  # decode steps
_LONG_SECONDS = 0.05


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
    """`itl_factor`: how many times longer than a decode-only step a mixed one may take (above 1), but for long steps.

    `min_chunk` and `max_chunk` bound the answer in tokens; `default` is the answer before anything was measured.
    `pipeline`: plans on their way at once, each for another part of the streams; a gap of a stream is so many steps.
    Answers are multiples of 8 (of 16 from 64 on), but for those of long steps. Raises ValueError where a bound makes no
    sense. Tell it of every plan (`planned`) and of every finished step (`observe`).
    """

    def __init__(
        self, itl_factor: float, max_chunk: int, min_chunk: int = 16, default: int = 128, pipeline: int = 1
    ) -> None:
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
        self._long: deque[float] = deque(maxlen=_COST_WINDOW)  # the same of mixed steps of several caps
        self._long_every = _LONG_EVERY * pipeline
        self._credit = _LONG_KEPT * self._long_every  # steps
        self._free: int | None = None  # tokens of the next step that cost no credit, where it may have more
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
                cost = max(seconds - decode, 0.01 * seconds) / prefill_tokens
                usual = self._usual_tokens(decode_rows)
                if usual is not None and prefill_tokens > _LONG_PROMPT * usual:
                    self._long.append(cost)
                if (
                    usual is None
                    or len(self._mixed) < _COST_WINDOW
                    or prefill_tokens >= _FULL * min(usual, self.max_chunk)
                ):
                    self._mixed.append(cost)

    def planned(self, decode_rows: int, prefill_tokens: int) -> None:
        """The next step, as it was planned: it earns credit, or spends it where it is as long as `cap` allowed."""
        if decode_rows:
            if self._free is not None and prefill_tokens > self._free:
                self._credit -= self._long_every
            self._credit = min(self._credit + 1, _LONG_KEPT * self._long_every)
        self._free = None

    @property
    def has_credit(self) -> bool:
        """The next step may be a long one."""
        return self._credit >= self._long_every

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

    def _usual_tokens(self, decode_rows: int, rush: float = 0.0) -> float | None:
        """Prompt tokens of a step of 1 + `rush` times what `itl_factor` allows; None before anything was measured."""
        decode, cost = self.decode_seconds(decode_rows), self.token_seconds()
        if decode is None or cost is None:
            return None
        return (self.itl_factor * (1 + rush) - 1) * decode / cost

    def long_tokens(self, decode_rows: int) -> float:
        """Prompt tokens of a step as long as may be; 0 where there is no credit or no long prompt would fit. A token's
        price is that of long steps, or the present one where that is higher: behind a long context."""
        decode, cost, usual = self.decode_seconds(decode_rows), self.token_seconds(), self._usual_tokens(decode_rows)
        if decode is None or cost is None or usual is None or not self.has_credit:
            return 0.0
        if self._long:
            cost = max(cost, _median(self._long))
        tokens = min((min(_LONG_FACTOR * decode, _LONG_SECONDS) - decode) / cost, self.max_chunk)
        return tokens if tokens > _LONG_PROMPT * usual else 0.0

    def cap(
        self, decode_rows: int, idle_share: float = 0.0, wanted: Sequence[int] = (), most: float | None = None
    ) -> int:
        """Most prompt tokens for the next step, where `decode_rows` rows decode in it.

        `idle_share` is the share of the rows that lie idle though somebody waits for them. Where a crowd is at the
        door, small chunks beside few decodes waste the device: the more of the batch is still to be filled, the longer
        a step may take, up to 1 + _RUSH times what `itl_factor` allows.

        `wanted`: tokens that each of the prompts still needs. Where one of them is long, they fit into a long step and
        there is credit for one, the answer is their sum. `most` is what `long_tokens` says of such a step, for those
        who have asked it before.

        0, once, where steps of about this many rows were never seen to decode only: while prompts keep coming there
        would be no such step, and against that of far fewer rows every mixed step would look too long, whatever was
        in it. One step of decodes tells.
        """
        self._free = None
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
        tokens = self._usual_tokens(decode_rows, _RUSH * idle_share)
        if tokens is None:
            tokens = float(self.default)
        grain = 16 if tokens >= 64 else 8
        rounded = int(min(tokens, self.max_chunk)) // grain * grain
        usual = min(max(rounded, self.min_chunk), self.max_chunk)
        if wanted and max(wanted) > _LONG_PROMPT * usual:
            most = self.long_tokens(decode_rows) if most is None else most
            if sum(wanted) <= most:
                self._free = usual
                return sum(wanted)
        return usual
