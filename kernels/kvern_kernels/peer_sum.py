"""Sums over the GPUs of an engine by writes into each other's memory, with the norm behind them (`peer_sum.cu`).

The one-shot all-reduce of few rows, as TensorRT-LLM and vLLM have it: each rank sends its rows to all others, who add
up. With two ranks that moves as few bytes as any other way, so that it serves prompts too; with more it is for small
sums. The buffers come from `kvern_engine.parallel.peers`.
"""

import torch
from torch import Tensor

from .large_products import folder
from .launch_triton import early_launch
from .nvrtc import Kernel, compiled
from .peer_memory import PeerMemory
from .peer_sum_source import SLOTS, Variant, options, source

SLOT_BYTES = 8 << 20  # that a sender writes in one call: 1,024 rows of 4,096 numbers; more rows are several calls
SMALL_BYTES = 512 << 10  # up to which more than two ranks send everything to everybody
EMPTY = 0x80008000  # two negative zeros of 16 bits
_TYPES = torch.bfloat16, torch.float16


def buffer_bytes(ranks: int) -> int:
    """Of the memory of each of `ranks` ranks that the others write to."""
    return SLOTS * (ranks - 1) * SLOT_BYTES


class PeerSum:
    """One rank's end over `memory`, which all ranks have opened. All ranks make one of these and meet before any of
    them sums; from then on they make the same calls in the same order."""

    def __init__(self, rank: int, memory: PeerMemory) -> None:
        self.rank, self.ranks, self._memory = rank, len(memory.addresses), memory
        self._table = torch.tensor(memory.addresses, dtype=torch.int64, device=memory.device)
        self._state = torch.zeros(4, dtype=torch.int32, device=memory.device)
        self._kernels: dict[tuple[int, torch.dtype], tuple[Kernel, int]] = {}
        memory.fill(EMPTY)  # nothing has arrived

    def fits(self, width: int, dtype: torch.dtype) -> bool:
        """Rows of `width` numbers of `dtype` can be summed. Compiles what that takes, or finds it on disk: not for the
        first time while a graph is recorded. Raises CudaError where the compiler or driver cannot be used."""
        if dtype not in _TYPES or width % 8 or 2 * width > SLOT_BYTES:
            return False
        self._kernel(width, dtype)
        return True

    def takes(self, x: Tensor) -> bool:
        """Whether the sum of such an `x` [T, H] is faster here than by NCCL."""
        return (
            x.dim() == 2
            and (self.ranks == 2 or x.shape[0] * x.shape[1] * 2 <= SMALL_BYTES)
            and x.stride(1) == 1
            and x.stride(0) % 8 == 0
            and self.fits(x.shape[1], x.dtype)
        )

    def add_up(self, x: Tensor) -> Tensor:
        """The sum of `x` [T, H] over the ranks, in `x` itself."""
        self._launch(x, None, None, x, 0.0)
        return x

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(s + residual), s + residual), both [T, H], where s is the sum of `x` over the ranks; the second
        overwrites `residual`. `x` [T, H], or in parts that are added up too, [P, T, H] float32."""
        out = torch.empty(residual.shape, dtype=residual.dtype, device=residual.device)
        self._launch(x, residual, weight, out, eps)
        return out, residual

    def _kernel(self, width: int, dtype: torch.dtype) -> tuple[Kernel, int]:
        """The kernel for rows of `width` numbers, and the threads of its blocks."""
        found = self._kernels.get((width, dtype))
        if found is None:
            variant = Variant(self.ranks, width, dtype == torch.float16, SLOT_BYTES)
            device = self._memory.device
            with torch.cuda.device(device):
                capability = "{}{}".format(*torch.cuda.get_device_capability(device))
                code = compiled(source(), options(variant, capability), folder())
                found = self._kernels[width, dtype] = Kernel(code, "peer_sum", 0), variant.threads
        return found

    def _launch(self, x: Tensor, residual: Tensor | None, weight: Tensor | None, out: Tensor, eps: float) -> None:
        rows, width = out.shape
        kernel, threads = self._kernel(width, out.dtype)
        parts, part_stride = (x.shape[0], x.stride(0)) if x.dim() == 3 else (0, 0)
        most = SLOT_BYTES // (2 * width)
        for first in range(0, rows, most):
            some = slice(first, min(rows, first + most))
            stream = None if residual is None else residual[some]
            kernel.launch(
                some.stop - first,
                threads,
                [
                    x[:, some] if parts else x[some],
                    parts,
                    part_stride,
                    x.stride(-2),
                    stream,
                    0 if residual is None else residual.stride(0),
                    weight,
                    out[some],
                    out.stride(0),
                    self._table,
                    self.rank,
                    self._state,
                    eps,
                ],
                early=bool(early_launch()),
            )
