"""Memory ranges that stay on a CUDA device, and copies to and from them by CUDA's driver.

An MLX array on a CUDA device becomes managed memory when the host looks at it. With the advice to keep it on the
device, the device reads it at its own rate, also after the driver copied something into it (H100: 2,100 GB/s; memory
that stays on the host is read over the bus at 50). The host must not touch it: each page would travel to it, and back.
So bytes go by ``cuMemcpyAsync``, on one stream for each calling thread: 10 GB/s for an expert of a megabyte.

Source: CUDA's driver API, "Memory Management" and "Unified Addressing".
"""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from outcore.machine.allocator import PREFERRED_LOCATION, address_of

# ``CU_STREAM_NON_BLOCKING``: this stream and other streams do not wait for each other.
NON_BLOCKING = 1


class CudaDriver:
    """Calls CUDA's driver for device 0, which MLX uses. Raises OSError if there is no driver or a call fails."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        _check(self._cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self._context), 0))

    def keep(self, address: int, nbytes: int) -> None:
        _check(self._cuda.cuCtxSetCurrent(self._context))
        at, n, device = ctypes.c_uint64(address), ctypes.c_size_t(nbytes), ctypes.c_int(0)
        # Errors are ignored: without this advice memory is slower, never wrong.
        self._cuda.cuMemAdvise(at, n, ctypes.c_int(PREFERRED_LOCATION), device)
        self._cuda.cuMemPrefetchAsync(at, n, device, None)
        _check(self._cuda.cuCtxSynchronize())

    def stream(self) -> Any:
        stream = ctypes.c_void_p()
        _check(self._cuda.cuCtxSetCurrent(self._context))
        _check(self._cuda.cuStreamCreate(ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING)))
        return stream

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        to, of, n = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes)
        _check(self._cuda.cuMemcpyAsync(to, of, n, stream) or self._cuda.cuStreamSynchronize(stream))

    def destroy(self, stream: Any) -> None:
        self._cuda.cuStreamDestroy_v2(stream)


class DeviceMemory:
    """Memory ranges that stay on the device. Thread-safe. Methods raise OSError if a call to the driver fails."""

    def __init__(self, driver: CudaDriver | None = None) -> None:
        self._driver = driver or CudaDriver()
        self._kept: dict[int, int] = {}  # start and end of each range
        self._mine, self._streams = threading.local(), list[Any]()
        self._lock = threading.Lock()

    def keep(self, address: int, nbytes: int) -> None:
        self._driver.keep(address, nbytes)
        with self._lock:
            self._kept = self._kept | {address: address + nbytes}

    def forget(self, address: int) -> None:
        """Forgets the range that begins at ``address``. Call it before the memory is freed."""
        with self._lock:
            self._kept = {a: end for a, end in self._kept.items() if a != address}

    def move(self, target: memoryview, source: memoryview) -> None:
        """Copies ``source`` to ``target``; each may be on the device."""
        to, of = address_of(target), address_of(source)
        if not any(begin <= at < end for begin, end in self._kept.items() for at in (to, of)):
            ctypes.memmove(to, of, len(source))
            return
        if not hasattr(self._mine, "stream"):
            self._mine.stream = self._driver.stream()
            self._streams.append(self._mine.stream)
        self._driver.copy(to, of, len(source), self._mine.stream)

    def close(self) -> None:
        self._mine = threading.local()
        while self._streams:
            self._driver.destroy(self._streams.pop())


def _check(status: int) -> None:
    if status:
        raise OSError(f"CUDA error {status}")
