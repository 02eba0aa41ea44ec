"""Names of modules: their full names in the module that was called first."""

from __future__ import annotations

import functools
import sys
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    ("torch.nn.parallel.data_parallel", "DataParallel", "module"),
    ("torch.nn.parallel.distributed", "DistributedDataParallel", "module"),
)
"""Torch's wrappers, which are called in place of the module that they contain."""

Name = str | tuple[str, int]
"""A name; with the id of the wrapper that is called in its place, where there is one."""


class Table(dict[int, Name]):
    """Names of a root and of all that is in it, by id."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self.root = weakref.ref(root)
        self.root_name = ""
        self.misses = 0


class ModuleNames:
    """Gives modules the names of the tree that they are called in.

    The top-level module that a thread calls is a root, named by its class, and everything in it has its path there, as in
    ``named_modules()``. A root is walked over once. What is called inside a root and is not in it may have been put there
    since then, so it is walked over again, the less often the more of these there have been: a forward that makes a new
    ``nn.ReLU()`` for every call is no reason to walk every time. A module that is not found is a root of its own.

    A module that is called on its own keeps the name that it got first. An entry goes with its module, so no other module
    has its name. Thread-safe under Python's lock; walking costs about a microsecond per module.
    """

    def __init__(self) -> None:
        self.tables: dict[int, Table] = {}
        """By ``id()`` of a module: the table with its name for calls outside of other modules."""
        # Also the other tables that a module is in: weakly, since they are of no use once their root is freed.
        self._members: dict[int, tuple[weakref.ref[Any], list[weakref.ref[Table]]]] = {}

    @property
    def size(self) -> int:
        """Modules that have a name now."""
        return len(self._members)

    def find(self, module: Any, inside: Table | None) -> Table:
        """A table with the module's name. ``inside``: that of the module that calls it, in which it is not."""
        known = self.tables.get(id(module))
        if known is not None:
            return known
        if inside is not None and self._found_again(module, inside):
            return inside
        declared = _declared.tables.get(id(module))
        root = None if declared is None else declared.root()
        table = self._walk(module if root is None else root, Table(module if root is None else root))
        return table if id(module) in table else self._walk(module, Table(module))

    def declare(self, root: Any) -> None:
        """Names a root and all modules that it contains now, before any of them is called."""
        known = self.tables.get(id(root))
        self._walk(root, Table(root) if known is None or known.root() is not root else known)

    def _found_again(self, module: Any, table: Table) -> bool:
        table.misses += 1
        root = table.root()
        if root is None or table.misses & (table.misses - 1):
            return False
        self._walk(root, table)
        return id(module) in table

    def _walk(self, root: Any, table: Table) -> Table:
        for module, name in _named(root):
            key = id(module)
            if module is root:
                table.root_name = name if isinstance(name, str) else name[0]
            if key not in table:
                self._join(key, module, table)
                table[key] = name
        return table

    def _join(self, key: int, module: Any, table: Table) -> None:
        reference, tables = self._members.get(key) or (weakref.ref(module, functools.partial(self._forget, key)), [])
        self._members[key] = reference, [*(other for other in tables if other() is not None), weakref.ref(table)]
        self.tables.setdefault(key, table)

    def _forget(self, key: int, _reference: object) -> None:
        _, tables = self._members.pop(key, (None, ()))
        for table in (reference() for reference in tables):
            if table is not None:
                table.pop(key, None)
        self.tables.pop(key, None)


_declared = ModuleNames()
"""Names of declared roots, which need not be called."""


def declare_root(module: Any) -> None:
    """Makes all modules in ``module`` have their names there, even if a program calls only them, as with a LightningModule.

    Any thread; a microsecond per module.
    """
    _declared.declare(module)


def full_name(module: Any) -> str:
    """The name of a module that is called at top level: that in the root that was declared, else its class."""
    table = _declared.tables.get(id(module))
    name = None if table is None else table.get(id(module))
    if name is None:
        return root_name(module)
    return name if isinstance(name, str) else name[0]


def _named(root: Any) -> Iterator[tuple[Any, Name]]:
    """Every module in a root, each once, with its name; a parent before what is in it."""
    wrappers = _wrappers()
    seen = set()
    waiting: list[tuple[Any, str, int]] = [(root, "", 0)]
    while waiting:
        module, path, wrapper = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        name = path or root_name(root)
        yield module, (name, wrapper) if wrapper else name
        inner = _wrapped(module, wrappers)
        children = [
            (child, path, id(module)) if child is inner else (child, f"{path}.{key}" if path else key, 0)
            for key, child in held_items(module, "_modules")
        ]
        waiting.extend(reversed(children))


def held(owner: Any, name: str) -> Any:
    """An attribute that the object itself has; None where it has none. Runs nothing that a program can put in its place."""
    return object.__getattribute__(owner, "__dict__").get(name)


def held_items(module: Any, name: str) -> list[tuple[str, Any]]:
    """The items of ``_modules`` or ``_parameters`` of a module, without those that are None."""
    dictionary = held(module, name) or {}
    # TorchScript has objects that only look like dictionaries.
    # dict.copy is atomic: another thread, or a finalizer, may add an item meanwhile.
    items = dict.copy(dictionary).items() if isinstance(dictionary, dict) else list(dictionary.items())
    return [(key, value) for key, value in items if value is not None]


def _wrappers() -> list[tuple[type, str]]:
    kinds = ((getattr(sys.modules.get(module), name, None), attribute) for module, name, attribute in _WRAPPERS)
    return [(kind, attribute) for kind, attribute in kinds if kind is not None]


def _wrapped(module: Any, wrappers: list[tuple[type, str]]) -> Any:
    for kind, attribute in wrappers:
        if isinstance(module, kind):
            return getattr(module, attribute)
    return None


def root_name(module: Any) -> str:
    """The name of a top-level module: its class, without wrappers of torch's around it."""
    wrappers = _wrappers()
    while (inner := _wrapped(module, wrappers)) is not None:
        module = inner
    script = getattr(sys.modules.get("torch.jit"), "ScriptModule", None)
    if script is not None and isinstance(module, script):
        return str(module.original_name)
    return type(module).__name__
