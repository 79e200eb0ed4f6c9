#!/usr/bin/env python3
"""kvern-operator with a profile of its processor time.

    profiled.py FILE [ARGUMENTS OF kvern-operator]

Every 5 ms of processor time the stack is noted; SIGUSR1 throws away what was noted so far, so that a phase can be
looked at by itself, and SIGUSR2 writes FILE, as does the end: one line a stack, outermost function first, and how
often, as flame graph tools read it.
"""

import signal
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

EVERY = 0.005  # seconds of processor time
DEEPEST = 60  # frames


class Sampler:
    """Stacks of the main thread, in which everything of the operator runs."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._stacks: Counter[tuple[object, ...]] = Counter()
        self._names: dict[object, str] = {}

    def start(self) -> None:
        """Begin to note."""
        signal.signal(signal.SIGPROF, self._note)
        signal.signal(signal.SIGUSR1, lambda *_: self._stacks.clear())
        signal.signal(signal.SIGUSR2, lambda *_: self.write())
        signal.setitimer(signal.ITIMER_PROF, EVERY, EVERY)

    def _note(self, number: int, frame: FrameType | None) -> None:
        codes: list[object] = []
        while frame is not None and len(codes) < DEEPEST:
            codes.append(frame.f_code)
            frame = frame.f_back
        self._stacks[tuple(codes)] += 1

    def _name(self, code: object) -> str:
        if code not in self._names:
            path = Path(code.co_filename)  # type: ignore[attr-defined]
            where = ".".join(path.with_suffix("").parts[-2:]) if path.suffix == ".py" else path.name
            self._names[code] = f"{where}:{code.co_qualname}".replace(" ", "_").replace(";", ",")  # type: ignore[attr-defined]
        return self._names[code]

    def write(self) -> None:
        """Write what was noted, whole or not at all."""
        lines = [f"{';'.join(self._name(c) for c in reversed(s))} {n}\n" for s, n in list(self._stacks.items())]
        part = self._file.with_suffix(".part")
        part.write_text("".join(lines))
        part.rename(self._file)


def main() -> int:
    sampler = Sampler(Path(sys.argv[1]))
    from kvern_operator.main import main as operate

    sampler.start()
    try:
        return operate(sys.argv[2:])
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        sampler.write()


if __name__ == "__main__":
    sys.exit(main())
