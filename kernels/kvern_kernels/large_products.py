"""Which cuBLASLt kernel computes the products of a long prompt: measured once, at a card's own speed under load.

The library's heuristic, which torch follows, picks for a cool card. In a long prompt the card is at its power limit,
and the kernel counts that needs the least energy: on an H200, 8,192 rows, gate_up takes 2,829 us by another kernel
where torch's takes 2,885, in FP8 1,460 where 1,526. So `choose` times the candidates of each shape after a while of
load, keeps the winner in a file (`folder`) for later starts, and `linear` uses it from LARGE_ROWS rows on.
"""

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from . import hopper_product, hopper_stream
from .cublaslt import FP8, CublasLt, CublasLtError, Shape
from .fp8 import Fp8Weight

log = logging.getLogger(__name__)

LARGE_ROWS = 2048
_MOST = 8  # candidates of a shape
_MILLISECONDS = 25.0  # of each, and as many before that do not count
_ROUNDS = 2
_GAIN = 0.99  # another kernel than the heuristic's must take at most this part of its time

Key = tuple[int, int, torch.dtype]  # rows and columns of a weight, its type


@dataclass
class _Chosen:
    library: CublasLt
    algos: dict[Key, tuple[int, ...]]


_chosen: dict[torch.device, _Chosen] = {}


def folder() -> Path:
    """Where choices are kept: beside Triton's compiled kernels, in TRITON_CACHE_DIR or ~/.triton/cache."""
    configured = os.environ.get("TRITON_CACHE_DIR")
    return Path(configured) if configured else Path.home() / ".triton" / "cache"


def read_choices(path: Path) -> dict[str, list[int] | None]:
    """What earlier starts have chosen, by `label`; nothing where the file is missing or torn."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_choices(path: Path, choices: dict[str, list[int] | None]) -> None:
    """Add to the file what it does not hold. A folder that cannot be written costs the next start a measurement."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({**read_choices(path), **choices}, indent=1))
        partial.replace(path)
    except OSError as error:
        log.info("the choice of kernels cannot be kept in %s: %s", path, error)


def label(device: str, version: int, shape: Shape) -> str:
    """A shape's name in the file: a choice holds for a card and a version of the library."""
    kinds = f"{shape.dtype}->{shape.out}".replace("torch.", "")
    return f"{device}, cuBLASLt {version}, {shape.columns} x {shape.inner} {kinds}, {shape.rows} rows"


def pick(times: Sequence[float]) -> int:
    """The place of the fastest candidate; 0, the heuristic's, where none is clearly faster."""
    best = min(range(len(times)), key=times.__getitem__)
    return best if times[best] < _GAIN * times[0] else 0


def choose(weights: Sequence[Tensor | Fp8Weight], rows: int, dtype: torch.dtype) -> None:
    """Find the kernel of each of the weights' shapes at `rows` rows; results are in `dtype`. Our own kernels for Hopper
    are compiled, too. Does nothing where the weights are not on a GPU, and finds nothing where no step has so many
    rows."""
    known = [weight for weight in weights if _values(weight).is_cuda and _values(weight).element_size() <= 2]
    if not known:
        return
    device = _values(known[0]).device
    kinds = {_values(weight).dtype for weight in known}
    for stored in kinds:
        hopper_stream.prepare(device, stored, folder())
    if rows < LARGE_ROWS:
        return
    for stored in kinds if dtype == torch.bfloat16 else ():
        hopper_product.prepare(device, stored, folder())
    try:
        library = CublasLt(device)
        chosen = _Chosen(library, {})
        path = folder() / "kvern-products.json"
        kept = read_choices(path)
        fresh: dict[str, list[int] | None] = {}
        for weight in known:
            values = _values(weight)
            shape = Shape(rows, values.shape[0], values.shape[1], values.dtype, dtype)
            name = label(torch.cuda.get_device_name(device), library.version, shape)
            if name not in kept:
                kept[name] = fresh[name] = _fastest(library, values, shape)
            algo = kept[name]
            if algo is not None:
                chosen.algos[shape.columns, shape.inner, shape.dtype] = tuple(algo)
    except CublasLtError as error:
        log.warning("long prompts use the library's own choice of kernels: %s", error)
        return
    if fresh:
        write_choices(path, fresh)
    _chosen[device] = chosen


def _values(weight: Tensor | Fp8Weight) -> Tensor:
    return weight.values if isinstance(weight, Fp8Weight) else weight


def _fastest(library: CublasLt, weight: Tensor, shape: Shape) -> list[int] | None:
    """The fastest candidate's algorithm; None where that is the heuristic's own."""
    candidates = library.candidates(shape, _MOST)
    if len(candidates) < 2:
        return None
    x = torch.randn(shape.rows, shape.inner, dtype=torch.bfloat16, device=weight.device)
    x = x.clamp_(-4, 4).to(shape.dtype)
    times = [float("inf")] * len(candidates)
    for _ in range(_ROUNDS):
        for place, algo in enumerate(candidates):
            took = _milliseconds(partial(library.linear, x, weight, algo, shape.out))
            times[place] = min(times[place], took)
    best = pick(times)
    return list(candidates[best]) if best else None


def _milliseconds(call: Callable[[], object]) -> float:
    """Of one call, while the card has been busy with it for a while."""
    start, middle, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))  # type: ignore[no-untyped-call]
    start.record()
    call()
    middle.record()
    middle.synchronize()
    count = max(1, round(_MILLISECONDS / max(start.elapsed_time(middle), 1e-3)))
    for _ in range(count):
        call()
    middle.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(middle.elapsed_time(end) / count)


def linear(x: Tensor, weight: Tensor, out: torch.dtype, scale: Tensor | None = None) -> Tensor | None:
    """`x` [M, K] times `weight` [N, K] transposed (times `scale` in FP8) by the kernel chosen for it; None where there
    is none: the caller has the library choose."""
    chosen = _chosen.get(x.device)
    if chosen is None or x.shape[0] < LARGE_ROWS or not x.is_contiguous() or not weight.is_contiguous():
        return None
    columns, inner = weight.shape
    algo = chosen.algos.get((columns, inner, x.dtype))
    if algo is None or (x.dtype == FP8) != (scale is not None):
        return None
    if not chosen.library.fits(Shape(x.shape[0], columns, inner, x.dtype, out), algo):
        return None
    return chosen.library.linear(x, weight, algo, out, scale)
