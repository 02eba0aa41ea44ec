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
    def __init__(self, name: str, args: str | None = None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: types.TracebackType | None,
    ) -> None: ...
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
