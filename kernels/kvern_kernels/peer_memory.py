"""Memory of one GPU that processes of other GPUs of this machine write to: allocated, exported and opened through the
driver (CUDA's inter-process handles), where torch's symmetric memory takes two seconds at every start.
"""

import ctypes
import weakref

import torch

from .nvrtc import driver

HANDLE_BYTES = 64  # CUipcMemHandle
_LAZY_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class PeerMemory:
    """`size` bytes on `device`, whose context is current. `addresses`: of each rank's memory, as this process reaches
    it, once `open` has been called. Given back with the object. Raises CudaError."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self.addresses: list[int] = []
        address = ctypes.c_uint64()
        driver().check(driver().lib.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(size)), "memory for peers")
        self.address = address.value
        self._opened: list[int] = []
        weakref.finalize(self, _give_back, self.address, self._opened).atexit = False  # an ending process frees it

    def handle(self) -> bytes:
        """What other processes open the memory by."""
        found = _Handle()
        status = driver().lib.cuIpcGetMemHandle(ctypes.byref(found), ctypes.c_uint64(self.address))
        driver().check(status, "exporting memory to peers")
        return bytes(found)

    def open(self, rank: int, handles: list[bytes]) -> None:
        """`handles` of all ranks in their order, of which this one is `rank`."""
        for number, data in enumerate(handles):
            if number == rank:
                self.addresses.append(self.address)
                continue
            address = ctypes.c_uint64()
            status = driver().lib.cuIpcOpenMemHandle_v2(
                ctypes.byref(address), _Handle.from_buffer_copy(data), ctypes.c_uint(_LAZY_PEER_ACCESS)
            )
            driver().check(status, f"opening the memory of rank {number}")
            self._opened.append(address.value)
            self.addresses.append(address.value)

    def fill(self, word: int) -> None:
        """Every 32 bits of it, on the current stream."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = driver().lib.cuMemsetD32Async(
            ctypes.c_uint64(self.address), ctypes.c_uint(word), ctypes.c_size_t(self.size // 4), stream
        )
        driver().check(status, "clearing memory for peers")


def _give_back(address: int, opened: list[int]) -> None:
    """What the driver says of it changes nothing any more."""
    lib = driver().lib
    for one in opened:
        lib.cuIpcCloseMemHandle(ctypes.c_uint64(one))
    lib.cuMemFree_v2(ctypes.c_uint64(address))
