"""Settings from the environment (``OTEL_TORCHPROF_*``).

A bad value is warned of once and ignored, as OpenTelemetry requires of environment variables; a bad keyword argument raises.
"""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_logger = logging.getLogger("otel_torchprof")

OTEL_TORCHPROF_ENABLED = "OTEL_TORCHPROF_ENABLED"
"""``false`` switches the package off: profiles record nothing, labels cost next to nothing. Default ``true``."""

OTEL_TORCHPROF_BUILD_DIR = "OTEL_TORCHPROF_BUILD_DIR"
"""Folder for the library that records torch's operators, instead of the user's cache folder (container images, read-only
homes). Nothing is loaded from a folder that others can write to."""

OTEL_TORCHPROF_CHROME_TRACE = "OTEL_TORCHPROF_CHROME_TRACE"
"""File that ``ChromeTraceExporter`` writes when it is given no path, ``OTEL_TRACES_EXPORTER=chrome`` for one; ``{pid}`` in it
is replaced by the process id, and a name that ends in ``.gz`` is compressed. Default ``trace-{pid}.json`` in the working
directory."""

OTEL_TORCHPROF_MEMORY_LIMIT = "OTEL_TORCHPROF_MEMORY_LIMIT"
"""Memory that one recording may hold in the recorder, in bytes, ``K``, ``M`` or ``G``. Default ``512M``."""

OTEL_TORCHPROF_DETAIL = "OTEL_TORCHPROF_DETAIL"
"""What ``TorchInstrumentor`` records: ``off``, ``steps``, ``modules`` or ``ops``. Default ``steps``."""

OTEL_TORCHPROF_NVTX_LIBRARY = "OTEL_TORCHPROF_NVTX_LIBRARY"
"""NVTX library that ``emit_nvtx`` uses instead of looking for one: a file with ``nvtxRangePushA``, ``nvtxRangePop`` and
``nvtxMarkA``."""

DEFAULT_CHROME_TRACE = "trace-{pid}.json"
DEFAULT_MEMORY_LIMIT = 512 << 20
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@functools.cache
def _warn_once(name: str, value: str, allowed: str) -> None:
    _logger.warning("%s=%r is ignored: %s", name, value, allowed)


def enabled() -> bool:
    """Whether the package may record at all."""
    value = os.environ.get(OTEL_TORCHPROF_ENABLED, "true").strip().lower()
    if value in {"true", "1", "yes", "on", ""}:
        return True
    if value in {"false", "0", "no", "off"}:
        return False
    _warn_once(OTEL_TORCHPROF_ENABLED, value, "allowed are true and false")
    return True


def memory_limit() -> int:
    """Bytes that a recording may hold when nobody says otherwise."""
    value = os.environ.get(OTEL_TORCHPROF_MEMORY_LIMIT, "").strip()
    number, unit = (value[:-1], value[-1].lower()) if value[-1:].isalpha() else (value, "")
    if not value:
        return DEFAULT_MEMORY_LIMIT
    if number.isdecimal() and unit in _UNITS and int(number) > 0:
        return int(number) * _UNITS[unit]
    _warn_once(OTEL_TORCHPROF_MEMORY_LIMIT, value, "allowed is a whole number of bytes, or one with K, M or G, above 0")
    return DEFAULT_MEMORY_LIMIT


def detail(allowed: Sequence[str]) -> str:
    """What is recorded when nobody says otherwise."""
    value = os.environ.get(OTEL_TORCHPROF_DETAIL, "").strip().lower()
    if value in {"", *allowed}:
        return value or "steps"
    _warn_once(OTEL_TORCHPROF_DETAIL, value, f"allowed are {', '.join(allowed)}")
    return "steps"


def chrome_trace() -> str:
    """The file for a Chrome trace when nobody says otherwise; may hold ``{pid}``."""
    value = os.environ.get(OTEL_TORCHPROF_CHROME_TRACE, "").strip()
    return os.path.expanduser(value) or DEFAULT_CHROME_TRACE  # noqa: PTH111 - Path raises where there is no home


def build_dir() -> Path | None:
    """The folder that the environment names for the torch library, if any."""
    value = os.environ.get(OTEL_TORCHPROF_BUILD_DIR, "").strip()
    return Path(value).expanduser() if value else None


def nvtx_library() -> str | None:
    """The NVTX library that the environment names, if any; without a folder it is looked for as the system does."""
    return os.environ.get(OTEL_TORCHPROF_NVTX_LIBRARY, "").strip() or None
