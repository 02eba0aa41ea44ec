"""The only importer of the compiled modules: ``ffi`` and ``lib`` of the core, and what needs Python's API.

Everything else sees the typed wrappers beside it. The handshake happens here, once.
"""

from __future__ import annotations

import sys
from typing import Any

from otel_torchprof.version import __version__

if "t" in sys.abiflags:  # the compiled modules would crash: the layout of objects differs
    raise ImportError(
        "otel_torchprof was imported in a free-threaded build of Python, and does not support these: use the build with "
        "the GIL (python3.14 instead of python3.14t; PYTHON_GIL=1 is not enough)"
    )
from . import _python  # noqa: I001 - after the check, and before _core, since it rejects subinterpreters
from . import _core  # type: ignore[attr-defined]

ffi: Any = _core.ffi
lib: Any = _core.lib

_built = ffi.string(lib.otp_version()).decode()
if _built != __version__:
    raise ImportError(
        f"the native core was built for otel-torchprof {_built}, the Python part is {__version__}: an old build was left in "
        "place; reinstall with `pip install --force-reinstall otel-torchprof` (or `pip install -e .` in a checkout)"
    )
_python.attach(int(ffi.cast("uintptr_t", lib.otp_get_api())))
Label = _python.Label
python_sources = _python
"""Functions of the other sources that need Python's API; their types are in ``_python.pyi``."""


def owner(memory: Any, free: str) -> object:
    """Returns an owner of native memory, which calls the core's function ``free`` when its last reference is dropped.

    Not ``ffi.gc``, which frees in a finalizer: in a garbage collection, finalizers of other objects may run after it and use the memory,
    such as one that stops its profile.
    """
    as_number = ffi.typeof("uintptr_t")
    function = ffi.addressof(lib, free)
    return _python.owner(int(ffi.cast(as_number, memory)), int(ffi.cast(as_number, function)), memory)
