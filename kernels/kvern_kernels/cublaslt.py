"""cuBLASLt through ctypes: what its heuristic offers for a product, and a product by one of these kernels.

torch runs the first candidate. `large_products.py` measures which of them is the fastest and says when it is used.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_TYPES = {torch.bfloat16: 14, torch.float16: 2, FP8: 28}
_FLOAT32, _COMPUTE_32F = 0, 68
_TRANSA, _A_SCALE, _B_SCALE, _FAST_ACCUM = 3, 17, 18, 25  # attributes of a product
_MAX_WORKSPACE_BYTES = 1  # attribute of a preference
_WORKSPACE = 32 << 20
_MOST_PRODUCTS = 2048  # numbers of rows whose descriptors are kept


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algo", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Shape:
    """y [M, N] = x [M, K] W^T with W [N, K]; `dtype` of x and W, `out` of y."""

    rows: int
    columns: int
    inner: int
    dtype: torch.dtype
    out: torch.dtype


class CublasLtError(RuntimeError):
    """The library is not there or refuses a call."""


def _check(status: int, what: str) -> None:
    if status:
        raise CublasLtError(f"cuBLASLt: {what} failed with status {status}")


def _load() -> ctypes.CDLL:
    """torch has loaded the library; the system's is as good where its name is another."""
    names = ["libcublasLt.so.13", "libcublasLt.so.12"]
    with_torch = Path(torch.__file__).parent.parent / "nvidia"
    names += [str(path) for path in sorted(with_torch.glob("*/lib/libcublasLt.so.*"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CublasLtError(f"cuBLASLt: none of {', '.join(names)} can be loaded")


class CublasLt:
    """The library on one device. Raises CublasLtError where it cannot be used."""

    def __init__(self, device: torch.device) -> None:
        self._lib, self._handle = _load(), ctypes.c_void_p()
        _check(self._lib.cublasLtCreate(ctypes.byref(self._handle)), "create")
        self._lib.cublasLtGetVersion.restype = ctypes.c_size_t
        self.version = int(self._lib.cublasLtGetVersion())
        self._workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device=device)
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._alpha, self._beta = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._products: dict[Shape, tuple[Any, ...]] = {}
        self._fits: dict[tuple[Shape, tuple[int, ...]], bool] = {}

    def _set(self, desc: Any, attribute: int, value: Any) -> None:
        size = ctypes.c_size_t(ctypes.sizeof(value))
        _check(self._lib.cublasLtMatmulDescSetAttribute(desc, attribute, ctypes.byref(value), size), "attribute")

    def _layout(self, rows: int, columns: int, dtype: torch.dtype) -> ctypes.c_void_p:
        """Of a column-major matrix without gaps."""
        found = ctypes.c_void_p()
        sizes = ctypes.c_uint64(rows), ctypes.c_uint64(columns), ctypes.c_int64(rows)
        _check(self._lib.cublasLtMatrixLayoutCreate(ctypes.byref(found), _TYPES[dtype], *sizes), "layout")
        return found

    def _product(self, shape: Shape) -> tuple[Any, ...]:
        """(description, W, x, y) in the library's column-major terms: y^T [N, M] = W x^T."""
        found = self._products.get(shape)
        if found is None:
            if len(self._products) >= _MOST_PRODUCTS:
                self._forget()
            desc = ctypes.c_void_p()
            _check(self._lib.cublasLtMatmulDescCreate(ctypes.byref(desc), _COMPUTE_32F, _FLOAT32), "description")
            self._set(desc, _TRANSA, ctypes.c_int32(1))
            if shape.dtype == FP8:
                self._set(desc, _FAST_ACCUM, ctypes.c_int8(1))
                self._set(desc, _A_SCALE, ctypes.c_void_p(self._one.data_ptr()))
                self._set(desc, _B_SCALE, ctypes.c_void_p(self._one.data_ptr()))
            weight = self._layout(shape.inner, shape.columns, shape.dtype)
            x = self._layout(shape.inner, shape.rows, shape.dtype)
            found = desc, weight, x, self._layout(shape.columns, shape.rows, shape.out)
            self._products[shape] = found
        return found

    def _forget(self) -> None:
        for desc, *layouts in self._products.values():
            self._lib.cublasLtMatmulDescDestroy(desc)
            for layout in layouts:
                self._lib.cublasLtMatrixLayoutDestroy(layout)
        self._products.clear()
        self._fits.clear()

    def candidates(self, shape: Shape, most: int) -> list[tuple[int, ...]]:
        """What the heuristic offers, its favourite first; each is what `linear` takes as `algo`."""
        desc, weight, x, y = self._product(shape)
        preference, size = ctypes.c_void_p(), ctypes.c_size_t(_WORKSPACE)
        _check(self._lib.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)), "preference")
        found, count = (_Found * most)(), ctypes.c_int()
        try:
            set_attribute = self._lib.cublasLtMatmulPreferenceSetAttribute
            _check(set_attribute(preference, _MAX_WORKSPACE_BYTES, ctypes.byref(size), ctypes.c_size_t(8)), "workspace")
            get = self._lib.cublasLtMatmulAlgoGetHeuristic
            _check(get(self._handle, desc, weight, x, y, y, preference, most, found, ctypes.byref(count)), "heuristic")
        finally:
            self._lib.cublasLtMatmulPreferenceDestroy(preference)
        return [tuple(one.algo) for one in found[: count.value] if one.state == 0]

    def fits(self, shape: Shape, algo: tuple[int, ...]) -> bool:
        """Whether `algo`, found for another number of rows, computes `shape`."""
        known = self._fits.get((shape, algo))
        if known is None:
            found = _Found()
            words = (ctypes.c_uint64 * 8)(*algo)
            desc, weight, x, y = self._product(shape)
            check = self._lib.cublasLtMatmulAlgoCheck
            status = check(self._handle, desc, weight, x, y, y, ctypes.byref(words), ctypes.byref(found))
            known = self._fits[shape, algo] = status == 0 and found.workspace <= _WORKSPACE
        return known

    def linear(
        self, x: Tensor, weight: Tensor, algo: tuple[int, ...], out: torch.dtype, scale: Tensor | None = None
    ) -> Tensor:
        """`x` [M, K] times `weight` [N, K] transposed (times `scale`, float32, in FP8), both contiguous, by `algo`, on
        the current stream."""
        shape = Shape(x.shape[0], weight.shape[0], x.shape[1], x.dtype, out)
        desc, of_weight, of_x, of_y = self._product(shape)
        if scale is not None:
            self._set(desc, _A_SCALE, ctypes.c_void_p(scale.data_ptr()))
        y = torch.empty(shape.rows, shape.columns, dtype=out, device=x.device)
        words = (ctypes.c_uint64 * 8)(*algo)
        result = ctypes.c_void_p(y.data_ptr())
        status = self._lib.cublasLtMatmul(
            self._handle,
            desc,
            ctypes.byref(self._alpha),
            ctypes.c_void_p(weight.data_ptr()),
            of_weight,
            ctypes.c_void_p(x.data_ptr()),
            of_x,
            ctypes.byref(self._beta),
            result,
            of_y,
            result,
            of_y,
            ctypes.byref(words),
            ctypes.c_void_p(self._workspace.data_ptr()),
            ctypes.c_size_t(_WORKSPACE),
            ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream),
        )
        _check(status, "product")
        return y
