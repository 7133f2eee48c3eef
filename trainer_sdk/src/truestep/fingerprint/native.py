"""The sums in compiled C, for tensors in host memory: about ten times as fast as torch operations. And whether there is
a NaN or Inf.

The kernel is one C file without dependencies, compiled for this very CPU into a private directory that is deleted once
it is loaded: there is no cache that could be stale, foreign or tampered with. It is built by a process that has
fingerprinted `BUILD_AFTER_BYTES` or a thousand small tensors (by then the build has paid for itself), and used only if
it gives the definition's values. Without a C compiler, or with ``TRUESTEP_NATIVE_FINGERPRINTS=off``, torch operations
go on doing the work.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from truestep.fingerprint.reference import fingerprint_bytes
from truestep.fingerprint.sums import Fingerprint

_log = logging.getLogger(__name__)

BUILD_AFTER_BYTES = 1 << 26
"""Torch operations take as long for so much as the build takes: a few tenths of a second."""
_CALL_BYTES = 1 << 16
"""What a tensor counts at least: torch operations take 0.2 ms for the smallest one too."""
_BUILD_TIMEOUT_SECONDS = 60
_SOURCE = Path(__file__).with_suffix(".c")
_FLAG_SETS = (("-O3", "-march=native"), ("-O3",))
_Format = ctypes.c_uint64 * 3
_Results = ctypes.c_int64 * 3


def _format(bits: int, exponent: int) -> Any:
    """What native.c wants to know of a format: the bits that NaN and Inf have set and no finite number, those below the
    sign, and the sign, each repeated to 64 bits."""
    repeated = sum(1 << shift for shift in range(0, 64, bits))
    sign = 1 << bits - 1
    return _Format(repeated * exponent, repeated * (sign - 1), repeated * sign)


_FORMATS = {
    torch.float16: _format(16, 0x7C00),
    torch.bfloat16: _format(16, 0x7F80),
    torch.float32: _format(32, 0x7F800000),
    torch.float64: _format(64, 0x7FF0000000000000),
}


@dataclass(frozen=True)
class _Library:
    sums: Callable[[int, Any, Any, int], None]
    nonfinite: Callable[[int, int, Any], int]
    look: Callable[[int, int, Any, Any], int]


class NativeKernel:
    """The compiled kernel of this process, once there is one."""

    def __init__(self, *, build_after_bytes: int = BUILD_AFTER_BYTES) -> None:
        """Builds nothing yet."""
        self._left_bytes = build_after_bytes
        self._lock = threading.Lock()
        self._tried = False
        self._library: _Library | None = None
        self.reason = "not built yet"
        """Why there is no kernel; empty where there is one."""

    def sums(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """int64 [n, 3] of contiguous tensors in host memory, of any dtype; None while there is no kernel.

        Builds the kernel when enough bytes went by. Safe to call from several threads.
        """
        if self._library is None:
            self._left_bytes -= sum(max(tensor.nbytes, _CALL_BYTES) for tensor in tensors)
            if self._tried or self._left_bytes > 0 or not self.build():
                return None
        assert self._library is not None
        return _call(self._library, tensors)

    def nonfinite(self, tensor: torch.Tensor) -> bool | None:
        """Whether a tensor in host memory holds NaN or Inf; None while there is no kernel, or none for it."""
        number_format = _FORMATS.get(tensor.dtype)
        if self._library is None or number_format is None or not tensor.is_contiguous():
            return None
        return bool(self._library.nonfinite(tensor.data_ptr(), tensor.nbytes, number_format))

    def look(self, tensor: torch.Tensor) -> tuple[bool, tuple[int, ...]] | None:
        """Whether a tensor in host memory holds NaN or Inf, and its three sums, in one pass; None like `nonfinite`."""
        number_format = _FORMATS.get(tensor.dtype)
        if self._library is None or number_format is None or not tensor.is_contiguous():
            return None
        sums = _Results()
        found = self._library.look(tensor.data_ptr(), tensor.nbytes, number_format, sums)
        return bool(found), tuple(sums)

    def build(self) -> bool:
        """Build now if that was not tried yet; whether there is a kernel. Never raises, warns of a wrong one."""
        # Another thread that comes while it is built does not wait: torch operations serve it.
        if not self._tried and self._lock.acquire(blocking=False):
            try:
                if not self._tried:
                    self._library, self.reason = _built()
                    self._tried = True
            finally:
                self._lock.release()
        return self._library is not None


KERNEL = NativeKernel()
"""The process's own."""


def _built() -> tuple[_Library | None, str]:
    if os.environ.get("TRUESTEP_NATIVE_FINGERPRINTS", "").lower() == "off":
        return None, "switched off by TRUESTEP_NATIVE_FINGERPRINTS"
    compiler = next(filter(None, (shutil.which(name) for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"))), "")
    if not compiler:
        return None, "no C compiler (cc, gcc, clang or $CC)"
    reason = ""
    for flags in _FLAG_SETS:
        try:
            library = _compile_and_load(compiler, flags)
        except (OSError, subprocess.SubprocessError, AttributeError) as error:
            reason = f"{compiler} {' '.join(flags)}: {error}"
            continue
        wrong = _wrong_value(library)
        if not wrong:
            _log.debug("fingerprints in host memory use a kernel compiled by %s %s", compiler, " ".join(flags))
            return library, ""
        reason = f"{compiler} {' '.join(flags)}: {wrong}"
        _log.warning("the compiled fingerprint kernel is not used: %s", reason)
    _log.debug("no compiled fingerprint kernel: %s", reason)
    return None, reason


def _compile_and_load(compiler: str, flags: Sequence[str]) -> _Library:
    with tempfile.TemporaryDirectory(prefix="truestep-fingerprint-") as directory:
        path = Path(directory) / "native.so"
        command = [compiler, *flags, "-shared", "-fPIC", "-o", str(path), str(_SOURCE)]
        subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_BUILD_TIMEOUT_SECONDS,
        )
        # Once mapped, the file is no longer needed.
        loaded = ctypes.CDLL(str(path))
        sums, nonfinite, look = loaded.truestep_sums, loaded.truestep_nonfinite, loaded.truestep_look
    sums.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    sums.restype = None
    nonfinite.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
    look.argtypes = [*nonfinite.argtypes, ctypes.c_void_p]
    nonfinite.restype = look.restype = ctypes.c_int
    return _Library(sums=sums, nonfinite=nonfinite, look=look)


def _call(library: _Library, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    count = len(tensors)
    pointers = (ctypes.c_void_p * count)(*[tensor.data_ptr() for tensor in tensors])
    lengths = (ctypes.c_uint64 * count)(*[tensor.nbytes for tensor in tensors])
    results = torch.empty(count, 3, dtype=torch.int64, device="cpu")  # whatever the user's default device is
    library.sums(count, pointers, lengths, results.data_ptr())
    return results


def _wrong_value(library: _Library) -> str:
    """Compare with the definition over every tail length, a run of ones, and enough words for the vectorised loop; and
    look for NaN and Inf at every place of one that is as long."""
    samples = [bytes((89 * i + 7 * n) % 256 for i in range(n)) for n in (*range(18), 513, 1021)] + [b"\xff" * 136]
    raws = [torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)] for data in samples]
    for data, row in zip(samples, _call(library, raws).tolist(), strict=True):
        if Fingerprint.from_sums(*row, length_bytes=len(data)) != fingerprint_bytes(data):
            return f"it gives a wrong fingerprint of {len(data)} bytes"
    for dtype, number_format in _FORMATS.items():
        # Largest finite numbers: one bit of the exponent is missing. More than a block of them, and a tail.
        count = 600 // dtype.itemsize + 3
        finite = torch.full((count,), torch.finfo(dtype).max, dtype=dtype, device="cpu")
        for place in range(-1, count):
            numbers = finite.clone()
            if place >= 0:
                numbers[place] = float("nan") if place % 2 else -float("inf")
            sums, where = _Results(), (numbers.data_ptr(), numbers.nbytes, number_format)
            if not library.nonfinite(*where) == library.look(*where, sums) == (place >= 0):
                return f"it finds NaN and Inf of {dtype} in the wrong places"
            if list(sums) != _call(library, [numbers])[0].tolist():
                return f"its sums of {dtype} are others in one pass with NaN and Inf"
    return ""
