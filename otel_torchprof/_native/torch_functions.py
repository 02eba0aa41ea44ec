"""The functions of the torch library, as its headers declare them: ``torch.cdef`` is made from these by ``build.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CDEF = Path(__file__).with_name("torch.cdef")


class TorchFunctions:
    """What a library has that was loaded; ``handle`` is that of ``dlopen``. A call of them gives Python's lock up."""

    def __init__(self, handle: int) -> None:
        from cffi import FFI  # its parser takes 20 ms: only where operators are recorded

        self.ffi: Any = FFI()
        """Knows the types of the functions: those of the core are others to cffi."""
        self.ffi.cdef(CDEF.read_text())
        self.lib: Any = self.ffi.dlopen(self.ffi.cast("void *", handle))

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
