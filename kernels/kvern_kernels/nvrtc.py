"""CUDA C++ for one kernel: compiled by NVRTC, which torch brings along, kept on disk, launched by the driver.

For what Triton cannot say (clusters that share loads). `Kernel` takes raw arguments: tensor maps, pointers, integers.
"""

import ctypes
import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from torch import Tensor

_SHARED_BYTES_ATTRIBUTE = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_MAP_TYPES = {torch.float8_e4m3fn: 0, torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType; E4M3 as bytes
_SWIZZLE_128B, _PROMOTE_256B = 3, 3
_EARLY_ATTRIBUTE = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class CudaError(RuntimeError):
    """The compiler or the driver refused something."""


def on_hopper(device: torch.device) -> bool:
    """Whether code for sm_90a runs on `device`."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def _nvrtc() -> ctypes.CDLL:
    """torch's NVRTC, the system's where its place is another. What it loads itself by name must be there before."""
    folder = Path(torch.__file__).parent.parent / "nvidia"
    for path in sorted(folder.glob("*/lib/libnvrtc-builtins.so.*")):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    for name in [*(str(path) for path in sorted(folder.glob("*/lib/libnvrtc.so.*"))), "libnvrtc.so.13", "libnvrtc.so"]:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError("NVRTC cannot be loaded")


def compile_source(source: str, options: Sequence[str]) -> bytes:
    """The machine code of `source`. Raises CudaError with what the compiler said."""
    lib, program = _nvrtc(), ctypes.c_void_p()
    if lib.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None):
        raise CudaError("NVRTC: no program could be made")
    try:
        given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        status, size = lib.nvrtcCompileProgram(program, len(options), given), ctypes.c_size_t()
        if status:
            lib.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            said = ctypes.create_string_buffer(size.value + 1)
            lib.nvrtcGetProgramLog(program, said)
            raise CudaError(f"NVRTC: status {status}: {said.value.decode(errors='replace')[:2000]}")
        lib.nvrtcGetCUBINSize(program, ctypes.byref(size))
        code = ctypes.create_string_buffer(size.value)
        lib.nvrtcGetCUBIN(program, code)
        return code.raw
    finally:
        lib.nvrtcDestroyProgram(ctypes.byref(program))


def compiled(source: str, options: Sequence[str], folder: Path) -> bytes:
    """As `compile_source`, from `folder` where an earlier start has left it there."""
    digest = hashlib.sha256("\0".join([source, *options, str(torch.version.cuda)]).encode()).hexdigest()
    path = folder / f"kvern-{digest[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code = compile_source(source, options)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(code)
        partial.replace(path)
    except OSError:
        pass  # compiled again at the next start
    return code


class Driver:
    """libcuda; the context is that of torch, current in every thread that has used the device."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL("libcuda.so.1")

    def check(self, status: int, what: str) -> None:
        if status:
            name = ctypes.c_char_p()
            self.lib.cuGetErrorName(status, ctypes.byref(name))
            raise CudaError(f"CUDA: {what} failed: {(name.value or b'?').decode()}")


class TensorMap:
    """What the tensor memory accelerator needs to know of a matrix: where it begins and its type, how many elements
    each dimension has, from the innermost, which is contiguous, how many bytes the others are apart, and how many
    elements of each one access takes, 128 bytes of the innermost, swizzled by 128 bytes. What lies outside reads as
    zeros and is not written."""

    def __init__(self, matrix: Tensor, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int]) -> None:
        size, align, rank = 128, 64, len(sizes)
        self._room = ctypes.create_string_buffer(size + align)
        self.address = (ctypes.addressof(self._room) + align - 1) & ~(align - 1)
        cuda = driver()
        cuda.check(
            cuda.lib.cuTensorMapEncodeTiled(
                ctypes.c_void_p(self.address),
                _MAP_TYPES[matrix.dtype],
                rank,
                ctypes.c_void_p(matrix.data_ptr()),
                (ctypes.c_uint64 * rank)(*sizes),
                (ctypes.c_uint64 * (rank - 1))(*strides),
                (ctypes.c_uint32 * rank)(128 // matrix.element_size(), *box),
                (ctypes.c_uint32 * rank)(*[1] * rank),
                0,
                _SWIZZLE_128B,
                _PROMOTE_256B,
                0,
            ),
            "tensor map",
        )

    @classmethod
    def of_rows(cls, matrix: Tensor, box_rows: int) -> "TensorMap":
        """Of `matrix` [rows, columns] whose rows are contiguous: boxes of `box_rows` rows."""
        rows, columns = matrix.shape
        return cls(matrix, (columns, rows), (matrix.stride(0) * matrix.element_size(),), (box_rows,))

    @classmethod
    def of_halves(cls, matrix: Tensor, box_rows: int) -> "TensorMap":
        """Of contiguous `matrix` [rows, 256 bytes]: boxes of `box_rows` rows, their second halves behind the first."""
        sizes = (128 // matrix.element_size(), matrix.shape[0], 2)
        return cls(matrix, sizes, (256, 128), (box_rows, 2))

    @classmethod
    def of_gate_and_up(cls, weight: Tensor, box_rows: int) -> "TensorMap":
        """Of contiguous `weight` [2F, K] = gate | up: boxes of `box_rows` rows in which 8 of either alternate."""
        rows, inner = weight.shape
        row = inner * weight.element_size()
        sizes = (inner, 8, 2, rows // 16)
        return cls(weight, sizes, (row, rows // 2 * row, 8 * row), (8, 2, box_rows // 16))


_MOST_MAPS = 4096
_maps: dict[tuple[Callable[..., TensorMap], int, torch.Size, int, torch.dtype, int], TensorMap] = {}


def kept_map(make: Callable[[Tensor, int], TensorMap], matrix: Tensor, box_rows: int) -> TensorMap:
    """`make(matrix, box_rows)`, or the one that was made of the same before; the device's memory says no more of
    a matrix than where it is."""
    key = (make, matrix.data_ptr(), matrix.shape, matrix.stride(0), matrix.dtype, box_rows)
    found = _maps.get(key)
    if found is None:
        if len(_maps) >= _MOST_MAPS:
            _maps.clear()
        found = _maps[key] = make(matrix, box_rows)
    return found


_found: list[Driver] = []


def driver() -> Driver:
    """The one of this process."""
    if not _found:
        _found.append(Driver())
    return _found[0]


Argument: TypeAlias = TensorMap | Tensor | int | float | None


class Kernel:
    """One entry function of `code`, loaded in the current context."""

    def __init__(self, code: bytes, name: str, shared_bytes: int) -> None:
        self._driver, self._shared = driver(), shared_bytes
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        lib, check = self._driver.lib, self._driver.check
        check(lib.cuModuleLoadData(ctypes.byref(self._module), code), "loading a kernel")
        check(lib.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), f"kernel {name}")
        check(lib.cuFuncSetAttribute(self._function, _SHARED_BYTES_ATTRIBUTE, shared_bytes), "shared memory")

    def launch(self, blocks: int, threads: int, arguments: Sequence[Argument], early: bool = False) -> None:
        """On the current stream; integers and floats are 32 bits wide, tensors are passed by their addresses. `early`:
        as `launch_triton.early_launch`, for a kernel that waits for the one before it."""
        kept = [_raw(argument) for argument in arguments]
        addresses = (ctypes.c_void_p * len(kept))(
            *(one.address if isinstance(one, TensorMap) else ctypes.addressof(one) for one in kept)
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        config = _LaunchConfig((blocks, 1, 1), (threads, 1, 1), self._shared, stream)
        if early:
            config.attributes, config.count = ctypes.pointer(_LaunchAttribute(_EARLY_ATTRIBUTE, 0, (1,))), 1
        status = self._driver.lib.cuLaunchKernelEx(ctypes.byref(config), self._function, addresses, None)
        self._driver.check(status, "a launch")


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: its value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int * 16))


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    )


def _raw(argument: Argument) -> "TensorMap | ctypes.c_int32 | ctypes.c_float | ctypes.c_uint64":
    if isinstance(argument, TensorMap):
        return argument
    if isinstance(argument, int):
        return ctypes.c_int32(argument)
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_uint64(0 if argument is None else argument.data_ptr())
