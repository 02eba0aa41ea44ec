"""Operators as ranges of another profiler: the typed side of ``torch/ranges.h``, and finding where ranges can go.

Through ctypes and not cffi: these calls keep Python's lock, since a label's begin and end are among them.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib.util
from pathlib import Path

from otel_torchprof import config
from otel_torchprof.errors import TorchLibraryError, TorchProfError

from . import torch_build, torch_library


class Parts(enum.IntFlag):
    """Parts of a range's text after the name (``otp_range_parts``)."""

    SEQ = 1
    STASHED = 2
    OP_ID = 4
    SIZES = 8
    PRODUCERS = 16


class RangeFunctions(ctypes.Structure):
    """Functions that output ranges (``otp_range_functions``): the addresses of a push, a pop and a mark."""

    _fields_ = (("push", ctypes.c_void_p), ("pop", ctypes.c_void_p), ("mark", ctypes.c_void_p))


class TorchRanges:
    """The functions of the torch library that make ranges. Thread-safe; every call costs a microsecond or less.

    Raises:
        TorchLibraryError: the library cannot be had; the message names the fix.
    """

    def __init__(self) -> None:
        library = torch_library.load()
        if not library.functions.makes_ranges:
            raise TorchLibraryError(torch_build.why_left_out(library.path, "torch/ranges.cc"))
        structures = {"otp_range_functions": RangeFunctions}
        self._native = library.functions.keeping_lock("otp_ranges_", structures)

    def of_torch(self, *, itt: bool) -> RangeFunctions | None:
        """Torch's own functions for ITT or NVTX; None if it was built without."""
        functions = RangeFunctions()
        return functions if self._native.otp_ranges_of_torch(itt, functions) else None

    def start(self, functions: RangeFunctions, parts: Parts) -> int:
        """Outputs ranges for operators of the calling thread and of threads that work for it; returns a handle.

        Raises:
            TorchProfError: such ranges exist already, 16 others exist, or torch refused.
        """
        if self._native.otp_ranges_here():
            raise TorchProfError("Profiler is already enabled on this thread.")
        handle = int(self._native.otp_ranges_start(functions, parts))
        if handle == 0:
            raise TorchProfError("no ranges can be made: torch refused an observer, or 16 others make some")
        return handle

    def stop(self, handle: int) -> None:
        """Stops the ranges; open ones of the calling thread end now. Thread-safe; repeated calls have no effect."""
        self._native.otp_ranges_stop(handle)

    def mark(self, handle: int, text: str) -> None:
        """An instant; nothing once the handle has ended."""
        self._native.otp_ranges_mark(handle, _bytes(text))

    def label_begin(self, key: int, name: str) -> None:
        """A range around a label, where ranges are made for the calling thread."""
        self._native.otp_ranges_label_begin(key, _bytes(name))

    def label_end(self, key: int) -> None:
        """Ends it, where it is open on the calling thread."""
        self._native.otp_ranges_label_end(key)


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@functools.cache
def ranges() -> TorchRanges:
    """The one of this process.

    Raises:
        TorchLibraryError: the library cannot be had; the message names the fix.
    """
    return TorchRanges()


_NVTX_NAMES = ("libnvToolsExt.so.1", "libnvtx3interop.so.1")
"""NVTX 2, which finds the profiler that is attached; NVTX 3 as a library, which does the same."""


def _nvtx_files() -> list[str]:
    """Possible files of NVTX: the system's, then those in the packages that pip installs under ``nvidia``."""
    package = importlib.util.find_spec("nvidia")
    folders = (package.submodule_search_locations or []) if package is not None else []
    return [*_NVTX_NAMES, *(str(path) for f in folders for n in _NVTX_NAMES for path in Path(f).glob(f"*/lib/{n}"))]


def _open_nvtx(file: str) -> RangeFunctions:
    library = ctypes.CDLL(file)
    functions = (library.nvtxRangePushA, library.nvtxRangePop, library.nvtxMarkA)
    return RangeFunctions(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))


def nvtx_functions() -> RangeFunctions:
    """Returns the functions of NVTX: of the library in the environment variable, else torch's own, else an installed one.

    Raises:
        TorchProfError: there is none; the message has the searched libraries and the fix.
        TorchLibraryError: the library that observes operators cannot be built or loaded.
    """
    chosen = config.NVTX_LIBRARY.read()
    if chosen is None:
        return ranges().of_torch(itt=False) or _installed_nvtx()
    opened = _try_nvtx(chosen)
    if isinstance(opened, str):
        raise TorchProfError(f"{config.NVTX_LIBRARY}={chosen!r} is no NVTX library that can be used: {opened}")
    return opened


def _try_nvtx(file: str) -> RangeFunctions | str:
    """The library's functions, or why it cannot be used."""
    try:
        return _open_nvtx(file)
    except (OSError, AttributeError) as error:
        return f"{file} ({error})"


def _installed_nvtx() -> RangeFunctions:
    tried = []
    for file in _nvtx_files():
        functions = _try_nvtx(file)
        if not isinstance(functions, str):
            return functions
        tried.append(functions)
    raise TorchProfError(
        "there is no NVTX library: torch was built without, and none of these could be loaded: "
        f"{'; '.join(tried)}. Install one with `pip install nvidia-nvtx-cu12`, or name one in "
        f"{config.NVTX_LIBRARY}"
    )


def itt_functions() -> RangeFunctions:
    """Torch's functions for ITT, which call the collector that INTEL_LIBITTNOTIFY64 names (VTune sets it).

    Raises:
        TorchProfError: torch was built without ITT.
        TorchLibraryError: the library that observes operators cannot be had.
    """
    functions = ranges().of_torch(itt=True)
    if functions is None:
        raise TorchProfError(
            "Can't use ITT: this torch was built without it (torch.profiler.itt.is_available() is false); install one that "
            "has it, such as torch's own packages for x86-64"
        )
    return functions
