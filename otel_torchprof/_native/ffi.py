"""The only importer of the compiled core: ``ffi`` and ``lib``. Everything else sees the typed wrappers beside it."""

from __future__ import annotations

from typing import Any

from . import _core  # type: ignore[attr-defined]

ffi: Any = _core.ffi
lib: Any = _core.lib
