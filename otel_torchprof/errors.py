"""The exceptions of this package; in a module of their own so that every layer can raise them without importing another."""

from __future__ import annotations


class TorchProfError(RuntimeError):
    """Base of every error that this package raises on purpose; a RuntimeError, as torch's profiler raises."""


class NativeError(TorchProfError):
    """The native core refused a call."""

    status: int = 0
    """The core's own code (``otp_status`` in ``recorder.h``)."""


class TorchLibraryError(TorchProfError):
    """The library that records torch operators could not be built or loaded; the message names the fix."""


class ExportError(TorchProfError):
    """Recorded data could not be written or sent; what was recorded is still there."""

    reason: str = ""
    """What the transport said, of a receiver that did not take it, with advice where there is some; without what the headers hold. The message has it too."""
