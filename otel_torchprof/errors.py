"""The exceptions of this package, in a module that every layer can import."""

from __future__ import annotations


class TorchProfError(RuntimeError):
    """Base class of the errors that this package raises on purpose.

    A RuntimeError, like the errors of torch's profiler.
    """


class NativeError(TorchProfError):
    """The native core refused a call."""

    status: int = 0
    """Error code of the core (``otp_status`` in ``recorder.h``)."""


class TorchLibraryError(TorchProfError):
    """The library that records torch operators could not be built or loaded; the message names the fix."""


class ExportError(TorchProfError):
    """Recorded data could not be written or sent; the recording itself is unchanged and can be exported again."""

    reason: str = ""
    """The transport's reason, with advice where there is some; header values are never included. Also part of the
    message."""
