"""The text that our kernels for Hopper are compiled from, and with what: arithmetic, also for tests without a GPU."""

import functools
from pathlib import Path


@functools.cache
def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text()


def source(name: str, registers: int, **places: object) -> str:
    """The text of the kernel `name`, what it shares with others in front. The operands of its wgmma are written out
    here: @NAMES@ and @OPERANDS@ are a thread's `registers` accumulators `d`, and @NAME@ what `places` say of NAME."""
    names = ", ".join(f"%{number}" for number in range(registers))
    operands = ", ".join(f'"+f"(d[{number}])' for number in range(registers))
    text = _read("hopper_common.cu") + "\n" + _read(name)
    for place, meant in {"NAMES": names, "OPERANDS": operands, **places}.items():
        text = text.replace(f"@{place}@", str(meant))
    return text


def options(**values: int) -> list[str]:
    """NVRTC's, with macros of these `values`."""
    return ["--gpu-architecture=sm_90a", "-std=c++17", *(f"-D{name}={value}" for name, value in values.items())]
