"""StepPlans in a file: written as they are submitted, read back for a replay or a bug report.

Each plan is its length (four bytes, little endian) and its msgpack. Nothing else is in the file.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from kvern_engine.core.plan import StepPlan


class PlanRecorder:
    """Appends plans to a new file at `path`; each is on its way to disk before its step begins. Raises OSError."""

    def __init__(self, path: str | Path) -> None:
        self._file: BinaryIO = Path(path).open("wb")  # noqa: SIM115  (closed by `close`)
        self._encode = msgspec.msgpack.Encoder().encode

    def write(self, plan: StepPlan) -> None:
        data = self._encode(plan)
        self._file.write(len(data).to_bytes(4, "little") + data)
        self._file.flush()  # a step that kills the process is the one somebody wants to replay

    def close(self) -> None:
        self._file.close()


def read_plans(path: str | Path) -> Iterator[StepPlan]:
    """The recorded plans, in order. Raises ValueError, after the whole ones, where the file ends inside a plan."""
    decode = msgspec.msgpack.Decoder(StepPlan).decode
    with Path(path).open("rb") as file:
        while header := file.read(4):
            size = int.from_bytes(header, "little")
            data = file.read(size)
            if len(header) < 4 or len(data) < size:
                raise ValueError(f"{path}: the last plan is cut off ({len(header) + len(data)} bytes of {size + 4})")
            yield decode(data)
