"""Settings from the environment (``OTEL_TORCHPROF_*``).

A bad value is warned of once and ignored, as OpenTelemetry requires of environment variables; a bad keyword argument raises.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")

_logger = logging.getLogger("otel_torchprof")

OTEL_TORCHPROF_ENABLED = "OTEL_TORCHPROF_ENABLED"
"""``false`` switches the package off: profiles record nothing, labels cost next to nothing. Default ``true``."""

OTEL_TORCHPROF_BUILD_DIR = "OTEL_TORCHPROF_BUILD_DIR"
"""Folder for the library that records torch's operators, instead of the user's cache folder (container images, read-only
homes). Nothing is loaded from a folder that others can write to, or that has such a folder above it. Default: the
user's cache folder."""

OTEL_TORCHPROF_CHROME_TRACE = "OTEL_TORCHPROF_CHROME_TRACE"
"""File that ``ChromeTraceExporter`` writes when it is given no path, ``OTEL_TRACES_EXPORTER=chrome`` for one; ``{pid}`` in it
is replaced by the process id, and a name that ends in ``.gz`` is compressed. Default ``trace-{pid}.json`` in the working
directory."""

OTEL_TORCHPROF_CHROME_MAX_BYTES = "OTEL_TORCHPROF_CHROME_MAX_BYTES"
"""Size on the disk, in bytes, ``K``, ``M`` or ``G``, up to which ``ChromeTraceExporter`` fills a file before it begins the
next. Default: one file, of any size."""

OTEL_TORCHPROF_CHROME_STEPS_PER_FILE = "OTEL_TORCHPROF_CHROME_STEPS_PER_FILE"
"""Steps after which it begins the next file. Default: any number."""

OTEL_TORCHPROF_CHROME_MAX_FILES = "OTEL_TORCHPROF_CHROME_MAX_FILES"
"""How many files it keeps, where it begins new ones; the oldest go. Default: all."""

OTEL_TORCHPROF_MEMORY_LIMIT = "OTEL_TORCHPROF_MEMORY_LIMIT"
"""Memory that one recording may hold in the recorder, in bytes, ``K``, ``M`` or ``G``. Default ``512M``."""

OTEL_TORCHPROF_MAX_QUEUE_BYTES = "OTEL_TORCHPROF_MAX_QUEUE_BYTES"
"""Memory that spans may hold while they wait for one exporter, for instance while its backend is down: in bytes, ``K``, ``M`` or
``G``. Default ``256M``."""

OTEL_TORCHPROF_OTLP_FILE = "OTEL_TORCHPROF_OTLP_FILE"
"""File that ``OTLPFileExporter`` writes when it is given no path, ``OTEL_TRACES_EXPORTER=otlp_file`` for one; the name says the
form, see there. Default ``trace-{pid}.otlp`` in the working directory."""

OTEL_TORCHPROF_DETAIL = "OTEL_TORCHPROF_DETAIL"
"""What ``TorchInstrumentor`` records: ``off``, ``metrics``, ``steps``, ``modules``, ``ops`` or ``frames``. Default ``steps``."""

OTEL_TORCHPROF_OVERHEAD = "OTEL_TORCHPROF_OVERHEAD"
"""Share of the time that ``metrics`` may cost, above 0; with 1 every step is recorded. Default ``0.01``."""

OTEL_TORCHPROF_MAX_OPERATORS = "OTEL_TORCHPROF_MAX_OPERATORS"
"""How many operators have series of their own with ``metrics``. Default ``50``."""

OTEL_TORCHPROF_HIDDEN_ATTRIBUTES = "OTEL_TORCHPROF_HIDDEN_ATTRIBUTES"
"""Attributes that spans are not to have, by name, separated by commas: ``code.file.path,torch.op.concrete_inputs``. Default: none."""

OTEL_TORCHPROF_NVTX_LIBRARY = "OTEL_TORCHPROF_NVTX_LIBRARY"
"""NVTX library that ``emit_nvtx`` uses instead of looking for one: a file with ``nvtxRangePushA``, ``nvtxRangePop`` and
``nvtxMarkA``. Default: torch's own or an installed one."""

OTEL_TORCHPROF_FRAMES_INCLUDE = "OTEL_TORCHPROF_FRAMES_INCLUDE"
"""Which functions' calls are recorded where calls are: module names, paths and globs, separated by commas. Default: all.

This and the following are what ``FrameFilter`` takes, and count where a profile is given none."""

OTEL_TORCHPROF_FRAMES_EXCLUDE = "OTEL_TORCHPROF_FRAMES_EXCLUDE"
"""Which are not, in the same form. Default: none."""

OTEL_TORCHPROF_FRAMES_MAX_DEPTH = "OTEL_TORCHPROF_FRAMES_MAX_DEPTH"
"""How many recorded calls may be open around each other on a thread. Default: any number."""

OTEL_TORCHPROF_FRAMES_MIN_DURATION = "OTEL_TORCHPROF_FRAMES_MIN_DURATION"
"""Seconds; shorter calls are taken out. Default ``0``."""

OTEL_TORCHPROF_FRAMES_C_FUNCTIONS = "OTEL_TORCHPROF_FRAMES_C_FUNCTIONS"
"""``false``: calls of C functions are not recorded. Default ``true``."""

OTEL_TORCHPROF_FRAMES_MODULES_ONLY = "OTEL_TORCHPROF_FRAMES_MODULES_ONLY"
"""``true``: of all calls only those of ``torch.nn.Module`` objects. Default ``false``."""

OTEL_TORCHPROF_LABELS = "OTEL_TORCHPROF_LABELS"
"""File that lists functions to be labelled, a dotted name in each line; read when the first recording starts. Default: none."""

OTEL_TORCHPROF_GPU_DEVICES = "OTEL_TORCHPROF_GPU_DEVICES"
"""Which GPUs are watched: ``visible``, those that CUDA shows to the process, ``all`` of the host, or ``none``, where nobody asks
for it in code. Default ``visible``."""

OTEL_TORCHPROF_DEVICE = "OTEL_TORCHPROF_DEVICE"
"""Type of device whose times ``TorchInstrumentor`` records, ``cuda`` for one. Default: none."""

OTEL_TORCHPROF_DEVICE_EVENTS = "OTEL_TORCHPROF_DEVICE_EVENTS"
"""For which events: ``ops``, ``leaves``, ``labels`` or ``off``. Default ``ops``."""

OTEL_TORCHPROF_RUN_ID = "OTEL_TORCHPROF_RUN_ID"
"""What the run is called on all its ranks, instead of what the launcher says. Default: the launcher's, else one is made."""

OTEL_TORCHPROF_RANKS = "OTEL_TORCHPROF_RANKS"
"""``apart``: a trace per step and rank; ``together``: one per step for all ranks. Default ``apart``."""

OTEL_TORCHPROF_EXPORT_RANKS = "OTEL_TORCHPROF_EXPORT_RANKS"
"""Which ranks record and export: ``all``, ``node``, ``one``, or a share above 0, up to 1. Default ``all``."""

OTEL_TORCHPROF_SIGTERM_TIMEOUT = "OTEL_TORCHPROF_SIGTERM_TIMEOUT"
"""Seconds in which ``TorchInstrumentor`` sends what was recorded at SIGTERM, where the program does not handle it; 0: SIGTERM is
left alone. Default ``5``."""

OTEL_TORCHPROF_SCHEDULE = "OTEL_TORCHPROF_SCHEDULE"
"""Which steps are recorded in detail: ``wait=5,warmup=1,active=3,repeat=2``. Default: all.

This and the following are what ``SpanPolicy`` takes, and count where an instrumentation is given none."""

OTEL_TORCHPROF_EVERY = "OTEL_TORCHPROF_EVERY"
"""``n``: every n-th step is, from step 0 on. Default ``1``."""

OTEL_TORCHPROF_RATIO = "OTEL_TORCHPROF_RATIO"
"""Share of the steps that is, above 0, up to 1, chosen by trace id. Default ``1``."""

OTEL_TORCHPROF_KEEP = "OTEL_TORCHPROF_KEEP"
"""Whose detail is kept: ``all``, or ``slow``: of steps that are slow, that failed, or that were asked for. Default ``all``."""

OTEL_TORCHPROF_SLOW_QUANTILE = "OTEL_TORCHPROF_SLOW_QUANTILE"
"""Quantile of recent durations above which a step is slow. Default ``0.95``."""

OTEL_TORCHPROF_SLOW_LIMIT = "OTEL_TORCHPROF_SLOW_LIMIT"
"""Seconds from which on a step is slow. Default: none."""

OTEL_TORCHPROF_MAX_SPANS = "OTEL_TORCHPROF_MAX_SPANS"
"""Spans in a trace, at most. Default ``5000``."""

OTEL_TORCHPROF_MAX_TRACE_BYTES = "OTEL_TORCHPROF_MAX_TRACE_BYTES"
"""Bytes of a trace, at most. Default ``4000000``."""

OTEL_TORCHPROF_SHORT = "OTEL_TORCHPROF_SHORT"
"""Seconds below which spans may be merged and folded. Default: a step's duration divided by the spans of a trace."""

OTEL_TORCHPROF_JOB_INTERVAL = "OTEL_TORCHPROF_JOB_INTERVAL"
"""Seconds after which the span of the job is ended and the next begun; 0: no such spans. Default ``600``."""

GPU_DEVICES = ("visible", "all")
DEFAULT_CHROME_TRACE = "trace-{pid}.json"
DEFAULT_OTLP_FILE = "trace-{pid}.otlp"
DEFAULT_MEMORY_LIMIT = 512 << 20
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@functools.cache
def _warn_once(name: str, value: str, allowed: str) -> None:
    _logger.warning("%s=%r is ignored: %s", name, value, allowed)


def forget_warnings() -> None:
    """Lets bad values be warned of again."""
    _warn_once.cache_clear()


def value_of(name: str, parse: Callable[[str], T]) -> T | None:
    """What a variable says; None where it is not set, or badly.

    ``parse`` gets the text, and raises ValueError or TypeError saying what is allowed.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        return parse(text)
    except (TypeError, ValueError) as error:
        _warn_once(name, text, str(error))
        return None


def switch(text: str) -> bool:
    """Yes or no.

    Raises:
        ValueError: neither.
    """
    value = text.lower()
    if value in {"true", "1", "yes", "on"}:
        return True
    if value in {"false", "0", "no", "off"}:
        return False
    raise ValueError("allowed are true and false")


def enabled() -> bool:
    """Whether the package may record at all."""
    return value_of(OTEL_TORCHPROF_ENABLED, switch) is not False


def memory_limit() -> int:
    """Bytes that a recording may hold when nobody says otherwise."""
    return value_of(OTEL_TORCHPROF_MEMORY_LIMIT, byte_size) or DEFAULT_MEMORY_LIMIT


def byte_size(value: object) -> int:
    """A number of bytes; a str may end in K, M or G.

    Raises:
        ValueError: it is none, or not above 0.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    text = value.strip() if isinstance(value, str) else ""
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    if number.isdecimal() and unit in _UNITS and int(number) > 0:
        return int(number) * _UNITS[unit]
    raise ValueError("allowed is a whole number of bytes, or one with K, M or G, above 0")


def detail(allowed: Sequence[str]) -> str:
    """What is recorded when nobody says otherwise."""
    value = os.environ.get(OTEL_TORCHPROF_DETAIL, "").strip().lower()
    if value in {"", *allowed}:
        return value or "steps"
    _warn_once(OTEL_TORCHPROF_DETAIL, value, f"allowed are {', '.join(allowed)}")
    return "steps"


def share(value: object) -> float:
    """A share of the time.

    Raises:
        ValueError: it is none.
    """
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = 0.0
    if isinstance(value, bool) or not 0 < found <= 1:
        raise ValueError("allowed is a number above 0, up to 1")
    return found


def seconds(value: object) -> float:
    """A time.

    Raises:
        ValueError: it is none.
    """
    try:
        found = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        found = -1.0
    if isinstance(value, bool) or not 0 <= found < math.inf:
        raise ValueError("allowed is a number of seconds, 0 or above")
    return found


def type_of_device(value: str) -> str:
    """A type of device, as ``torch.device`` names it.

    Raises:
        ValueError: no name could be that.
    """
    if not value.isidentifier():
        raise ValueError("allowed is the name of a type of device, such as cuda, without an index")
    return value


def whole_number(value: object) -> int:
    """A number of things.

    Raises:
        ValueError: it is none.
    """
    try:
        found = int(value)  # type: ignore[call-overload]
    except (TypeError, ValueError):
        found = 0
    if isinstance(value, bool | float) or found < 1:
        raise ValueError("allowed is a whole number above 0")
    return int(found)


def hidden_attributes() -> frozenset[str]:
    """Names of the attributes that spans are not to have."""
    return frozenset(key.strip() for key in os.environ.get(OTEL_TORCHPROF_HIDDEN_ATTRIBUTES, "").split(","))


def chrome_trace() -> str:
    """The file for a Chrome trace when nobody says otherwise; may hold ``{pid}``."""
    value = os.environ.get(OTEL_TORCHPROF_CHROME_TRACE, "").strip()
    return os.path.expanduser(value) or DEFAULT_CHROME_TRACE  # noqa: PTH111 - Path raises where there is no home


def otlp_file() -> str:
    """The file for OTLP when nobody says otherwise; may hold ``{pid}``."""
    value = os.environ.get(OTEL_TORCHPROF_OTLP_FILE, "").strip()
    return os.path.expanduser(value) or DEFAULT_OTLP_FILE  # noqa: PTH111 - Path raises where there is no home


def build_dir() -> Path | None:
    """The folder that the environment names for the torch library, if any."""
    value = os.environ.get(OTEL_TORCHPROF_BUILD_DIR, "").strip()
    return Path(value).expanduser() if value else None


def nvtx_library() -> str | None:
    """The NVTX library that the environment names, if any; without a folder it is looked for as the system does."""
    return os.environ.get(OTEL_TORCHPROF_NVTX_LIBRARY, "").strip() or None


def labels_file() -> str | None:
    """The list of functions to be labelled that the environment names, if any."""
    return os.environ.get(OTEL_TORCHPROF_LABELS, "").strip() or None


def gpu_devices() -> str:
    """Which GPUs are watched when nobody says otherwise: one of ``GPU_DEVICES``, or ``none``."""

    def one(text: str) -> str:
        if text.lower() in {*GPU_DEVICES, "none"}:
            return text.lower()
        raise ValueError(f"allowed are {', '.join(GPU_DEVICES)} and none")

    return value_of(OTEL_TORCHPROF_GPU_DEVICES, one) or "visible"
