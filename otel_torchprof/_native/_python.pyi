# The extension module of the sources that need Python's API: native/src/sources/python_*.cc.

import types
from collections.abc import Callable
from typing import Any

from typing_extensions import Self

def attach(address: int) -> None: ...

# What follows is there only after attach().

class Label:
    name: str
    args: str | None
    run_callbacks_on_exit: bool
    def __init__(self, name: str, args: str | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None: ...
    def finish(self, exc_type: type[BaseException] | None, /) -> None: ...
    def is_open(self) -> bool: ...
    def suspend(self) -> bool: ...
    def resume(self) -> bool: ...

# Torch's global hooks of modules.
def module_begin(module: object, args: object, /) -> None: ...
def module_end(module: object, args: object, output: object, /) -> None: ...

# names: by a module's id, the table of names in which it stands. find(module, table): asked for the table of a module that
# is in none (None), or not in the one of the module that calls it. A table has, by a module's id, its name, or that and the
# id of the wrapper that is called in its place. running(): ids of the modules in whose calls the calling thread is, outermost
# first, without the one that begins.
def follow_modules(
    names: dict[int, Any],
    find: Callable[[Any, Any], dict[int, Any]],
    running: Callable[[], list[int]],
    outermost_only: bool,
    /,
) -> None: ...
def leave_modules() -> None: ...

# resolver: number of the context of the calling thread. by_identity: the resolver knows only what is in context variables.
# Returns whether the context is known to be the same without asking.
def set_context_resolver(resolver: Callable[[], int] | None, by_identity: bool = True, /) -> bool: ...

# Calls of the resolver, and of a finder of modules, that raised.
def errors() -> int: ...

# Calls of Python and C functions, as events of the session with that bit, on all threads that there are. prefixes: what paths
# of files lose; own: directory whose functions are left out, with what they call, unless they are in one of the files
# `passing`; module_call: code that is named after the module that is called. Returns how many threads were passed over since they have a profile function. There where can_trace_frames.
can_trace_frames: int

def start_frames(
    consumer: int, prefixes: tuple[str, ...], own: str, passing: tuple[str, ...], module_call: types.CodeType | None, /
) -> int: ...

# No longer for the sessions with those bits. Returns how many threads were taken by others meanwhile.
def stop_frames(consumers: int, /) -> int: ...
def trace_new_thread(frame: types.FrameType, event: str, argument: object, /) -> None: ...

class Frames: ...
