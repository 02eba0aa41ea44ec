"""Full names of modules within the root module that was called first."""

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
"""Torch's wrappers: module, class, and attribute with the wrapped module."""

Name = str | tuple[str, int]
"""A name; for a wrapped module, with the id of its wrapper."""


class Table(dict[int, Name]):
    """Names of a root and its submodules, by id."""

    def __init__(self, root: Any) -> None:
        super().__init__()
        self.root = weakref.ref(root)
        self.root_name = ""
        self.misses = 0


class ModuleNames:
    """Names modules by the tree in which they are called.

    The top-level module that a thread calls is a root, named by its class; its submodules are named by their path, as in
    ``named_modules()``. A root is walked once. If an unknown module is called inside a root, it may be a new submodule, so the root
    is walked again, but ever more rarely: a forward may create a new ``nn.ReLU()`` for every call. A module that is not found
    is a root of its own.

    A module that is called on its own keeps its first name. An entry is removed with its module, so no other module gets its name.
    Thread-safe under the GIL; a walk costs about a microsecond per module.
    """

    def __init__(self) -> None:
        self.tables: dict[int, Table] = {}
        """By ``id()`` of a module, the table with its name for calls outside of other modules."""
        # All tables with a module; weak references, since a table is useless after its root is freed.
        self._members: dict[int, tuple[weakref.ref[Any], list[weakref.ref[Table]]]] = {}

    @property
    def size(self) -> int:
        """Number of named modules."""
        return len(self._members)

    def find(self, module: Any, inside: Table | None) -> Table:
        """Returns a table with the module's name. ``inside``: table of the calling module, which does not have it."""
        known = self.tables.get(id(module))
        if known is not None:
            return known
        if inside is not None and self._rewalk_finds(module, inside):
            return inside
        declared = _declared.tables.get(id(module))
        root = None if declared is None else declared.root()
        table = self._walk(module if root is None else root, Table(module if root is None else root))
        return table if id(module) in table else self._walk(module, Table(module))

    def declare(self, root: Any) -> None:
        """Names a root and its current submodules before any of them is called."""
        known = self.tables.get(id(root))
        self._walk(root, Table(root) if known is None or known.root() is not root else known)

    def _rewalk_finds(self, module: Any, table: Table) -> bool:
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
    """Names submodules by their path in ``module``, even if a program calls only them, as with a LightningModule.

    Thread-safe; costs a microsecond per module.
    """
    _declared.declare(module)


def full_name(module: Any) -> str:
    """Returns the name of a module called at top level: its name in a declared root, else its class."""
    table = _declared.tables.get(id(module))
    name = None if table is None else table.get(id(module))
    if name is None:
        return root_name(module)
    return name if isinstance(name, str) else name[0]


def _named(root: Any) -> Iterator[tuple[Any, Name]]:
    """Yields every module in a root once, with its name; parents first."""
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
    """Returns an attribute in the object's own dictionary, or None. Runs no code of the program."""
    return object.__getattribute__(owner, "__dict__").get(name)


def held_items(module: Any, name: str) -> list[tuple[str, Any]]:
    """Returns the items of ``_modules`` or ``_parameters`` of a module, without None values."""
    dictionary = held(module, name) or {}
    # TorchScript modules have objects that are no dictionaries. dict.copy is atomic: another thread, or a finalizer, may add
    # an item meanwhile.
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
    """Returns the name of a top-level module: its class, without torch's wrappers."""
    wrappers = _wrappers()
    while (inner := _wrapped(module, wrappers)) is not None:
        module = inner
    script = getattr(sys.modules.get("torch.jit"), "ScriptModule", None)
    if script is not None and isinstance(module, script):
        return str(module.original_name)
    return type(module).__name__
