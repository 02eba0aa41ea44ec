"""Where modules are, without importing them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import types
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec


def spec_of(
    name: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None, *, besides: object = None
) -> ModuleSpec | None:
    """As the import system finds it: each finder on ``sys.meta_path`` is asked, except ``besides`` and those that predate specs.

    ``importlib.util.find_spec`` takes the lock of all imports, which an interrupt may leave taken: every later import would hang.
    """
    for finder in sys.meta_path.copy():
        find = None if finder is besides else getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = None if find is None else find(name, path, target)
        if spec is not None:
            return spec
    return None


def is_there(name: str) -> bool:
    """Whether a top-level module is imported, or can be found."""
    return name in sys.modules or spec_of(name) is not None
