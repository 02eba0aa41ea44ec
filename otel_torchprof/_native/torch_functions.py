"""The functions of the torch library, as its headers declare them: ``torch.cdef`` is made from these by ``build.py``."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_INTEGERS = {"int": ctypes.c_int, "uint32_t": ctypes.c_uint32, "uint64_t": ctypes.c_uint64}
_TARGETS = {"char": ctypes.c_char_p, "void": ctypes.c_void_p}

CDEF = Path(__file__).with_name("torch.cdef")


class TorchFunctions:
    """Functions of a loaded library; ``handle`` is from ``dlopen``. Calls release the GIL."""

    def __init__(self, handle: int) -> None:
        from cffi import FFI  # its parser takes 20 ms: only where operators are recorded

        self.ffi: Any = FFI()
        """Knows the types of the functions: those of the core are others to cffi."""
        self.ffi.cdef(CDEF.read_text())
        self.lib: Any = self.ffi.dlopen(self.ffi.cast("void *", handle))
        self._handle = handle

    def keeping_lock(self, prefix: str, structures: Mapping[str, type[ctypes.Structure]] | None = None) -> ctypes.PyDLL:
        """The functions with a prefix, as ctypes functions whose calls do not release the GIL.

        ``structures``: ctypes classes of the types to which their arguments point. Empty if that part was not compiled.
        """
        native = ctypes.PyDLL(None, handle=self._handle)
        targets = {**_TARGETS, **{name: ctypes.POINTER(kind) for name, kind in (structures or {}).items()}}

        def as_ctypes(kind: Any) -> Any:
            return targets[kind.item.cname] if kind.kind == "pointer" else _INTEGERS[kind.cname]

        for name in dir(self.lib):
            if name.startswith(prefix):
                declared, function = self.ffi.typeof(getattr(self.lib, name)), getattr(native, name)
                function.argtypes = [as_ctypes(argument) for argument in declared.args]
                function.restype = None if declared.result.kind == "void" else as_ctypes(declared.result)
        return native

    @property
    def reports_memory(self) -> bool:
        """False where that part did not compile against the torch that is installed."""
        return hasattr(self.lib, "otp_torch_attach_memory")

    @property
    def times_devices(self) -> bool:
        """Likewise."""
        return hasattr(self.lib, "otp_torch_attach_devices")

    @property
    def reports_collectives(self) -> bool:
        """Likewise, and where torch was built without distributed."""
        return hasattr(self.lib, "otp_torch_attach_collectives")

    @property
    def makes_ranges(self) -> bool:
        """False where that part did not compile against the torch that is installed."""
        return hasattr(self.lib, "otp_ranges_start")

    @property
    def stands_in(self) -> bool:
        """Likewise."""
        return hasattr(self.lib, "otp_fast_records_stand_in")
