"""This machine's memory, by the standard library alone: how much there is, how much is free, how much this process had."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def total_memory() -> int | None:
    """Bytes of main memory that this process may use: the machine's, or its container's limit. None where nobody says."""
    if sys.platform == "win32":
        return _windows_memory()[0]
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None
    limits = [int(text) for text in map(_text, _LIMITS) if text.isdecimal()]
    return min([total, *limits])


def free_memory() -> int | None:
    """Bytes of main memory that could be had without swapping. None where nobody says."""
    if sys.platform == "win32":
        return _windows_memory()[1]
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def peak_memory() -> int | None:
    """The most main memory this process has ever held (resident set), in bytes. None where nobody says."""
    if resource is None:
        return _windows_peak()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def size(number: float) -> str:
    """A number of bytes for people: three digits and a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 999.5:
            return f"{number:.3g} {unit}"
        number /= 1024
    return f"{number:.3g} TiB" if number < 999.5 else f"{number:.0f} TiB"


def _text(file: str) -> str:
    try:
        return Path(file).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


class _MemoryStatus(ctypes.Structure):
    _fields_ = [("length", ctypes.c_uint32), ("load", ctypes.c_uint32)] + [
        (name, ctypes.c_uint64) for name in ("total", "free", "pages", "free_pages", "virtual", "free_virtual", "extended")
    ]


class _ProcessMemory(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("faults", ctypes.c_uint32), ("peak", ctypes.c_size_t)] + [
        (f"other{index}", ctypes.c_size_t) for index in range(7)
    ]


def _windows_memory() -> tuple[int | None, int | None]:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None, None
    return status.total, status.free


def _windows_peak() -> int | None:
    counters = _ProcessMemory(size=ctypes.sizeof(_ProcessMemory))
    kernel = ctypes.windll.kernel32
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    kernel.K32GetProcessMemoryInfo.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint32]
    if not kernel.K32GetProcessMemoryInfo(kernel.GetCurrentProcess(), ctypes.byref(counters), counters.size):
        return None
    return counters.peak
