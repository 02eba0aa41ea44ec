"""Rules for names: hidden events, events that share an entry, and demangled C++ names.

``_filter_name``, ``_rewrite_name`` and ``_filter_stack_entry`` have torch's own names, underscore included.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections import defaultdict
from typing import Any

from otel_torchprof._tree.stacks import HIDDEN_STACK_ENTRIES
from otel_torchprof._tree.tree import HIDDEN_NAMES, display_name

MEMORY_EVENT_NAME = "[memory]"
OUT_OF_MEMORY_EVENT_NAME = "[OutOfMemory]"


def demangle(name: str) -> str:
    """Returns a C++ name in readable form; any other name, and every name without a C++ library, unchanged.

    Uses torch if it is imported, else the system's C++ library. The short ABI names of built-in types are demangled
    too: ``Pd`` becomes ``double*``. Mirrors torch's function of that name. Thread-safe; costs about a microsecond.

    Examples:
        >>> otp.demangle("_ZN2at6Tensor3addEv"), otp.demangle("aten::add")
        ('at::Tensor::add()', 'aten::add')
    """
    torch = sys.modules.get("torch")
    demangle_of_torch = getattr(getattr(torch, "_C", None), "_demangle", None)
    if demangle_of_torch is not None:
        return str(demangle_of_torch(name))
    return _demangled_by_the_system(name)


class StringTable(defaultdict[str, str]):
    """Dictionary from raw names to readable names that demangles each name once; names of one character stay unchanged.

    Mirrors torch's class of that name.

    Examples:
        >>> otp.StringTable()["_ZN2at6Tensor3addEv"]
        'at::Tensor::add()'
    """

    def __missing__(self, name: str) -> str:
        readable = self[name] = demangle(name) if len(name) > 1 else name
        return readable


def _filter_name(name: str) -> bool:
    """Whether events of this name are hidden in every list."""
    return name in HIDDEN_NAMES


def _rewrite_name(name: str, with_wildcard: bool = False) -> str:
    """Returns the display name of an event; ``with_wildcard`` gives all numbered profiler steps one name."""
    readable = StringTable()[name]
    return display_name(readable) if with_wildcard else readable


def _filter_stack_entry(entry: str) -> bool:
    """Whether a stack entry is displayed."""
    return not any(file in entry and function in entry for file, function in HIDDEN_STACK_ENTRIES)


def _demangled_by_the_system(name: str) -> str:
    functions = _cxx_functions()
    if functions is None or "\0" in name:
        return name
    demangled, free = functions
    status = ctypes.c_int()
    address = demangled(name.encode("utf-8", "surrogateescape"), None, None, ctypes.byref(status))
    if not address:
        return name
    try:
        return ctypes.string_at(address).decode("utf-8", "surrogateescape")
    finally:
        free(ctypes.c_void_p(address))


@functools.cache
def _cxx_functions() -> tuple[Any, Any] | None:
    """``__cxa_demangle`` of the system's C++ library, and the ``free`` for what it returns; None without one."""
    # By its path on macOS, where a name alone is also looked for in the working directory.
    for file in ("/usr/lib/libc++abi.dylib",) if sys.platform == "darwin" else ("libstdc++.so.6", "libc++abi.so.1"):
        try:
            library = ctypes.CDLL(file)
        except OSError:
            continue
        demangled, free = library["__cxa_demangle"], library["free"]
        demangled.restype, free.restype = ctypes.c_void_p, None
        return demangled, free
    return None
