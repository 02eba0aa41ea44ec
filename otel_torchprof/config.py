"""Settings from the environment (``OTEL_TORCHPROF_*``).

A bad value is ignored with one warning, as OpenTelemetry requires of environment variables; a bad keyword argument
raises.
"""

from __future__ import annotations

import functools
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, ParamSpec, TypeVar, get_args

from . import parsers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_logger = logging.getLogger("otel_torchprof")

_P = ParamSpec("_P")
_T = TypeVar("_T")

SpanDetail = Literal["steps", "modules", "ops", "frames"]
Detail = Literal["off", "metrics", SpanDetail]
DETAILS: tuple[Detail, ...] = get_args(Detail)
DeviceEvents = Literal["ops", "all", "labels", "off"]
RankTraces = Literal["apart", "together"]
ExportRanks = parsers.ExportRanks
GPU_CHOICES = ("visible", "all")
_KEY = re.compile(r"(?:^|,)\s*(\w+)\s*=")
_URL = r"(?s)//|@|:\d+[/?]|\?.*="
"""Matches parts of a URL that may carry credentials, which no glob and no list of names contains."""


class Setting(NamedTuple):
    """One setting: an environment variable, or a part of one.

    A variable with parts has the form ``VALUE,key=value,key=value``, each of them optional. The text between two keys,
    including commas, is the value of the first.
    """

    variable: str
    default: str
    """Default, as text for the documentation."""
    meaning: str
    key: str = ""
    """Key of the part; empty for the text before the first key, or for the whole variable."""
    parse: Callable[[Any], Any] = str
    """Converts text, or checks a keyword's value; raises ValueError or TypeError with the allowed values."""
    fallback: Any = None
    """Value if the environment has none, or a bad one."""
    general: str = ""
    """OpenTelemetry's variable for all signals, which applies if the one for traces is absent or bad."""
    keyword: str = ""
    """Name of the keyword argument, if callers do not pass it."""

    def __str__(self) -> str:
        return f"{self.variable}: {self.key}" if self.key else self.variable

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables to read; the first that is set counts."""
        return (self.variable, self.general) if self.general else (self.variable,)

    def text(self, environ: Mapping[str, str] = os.environ) -> str:
        """Text from the environment, stripped; empty if there is none."""
        texts = (environ.get(name, "").strip() for name in self.variables)
        text = next(filter(None, texts), "")
        return _parts(self.variable, text).get(self.key, "") if self.variable in KEYS else text

    def read(self, environ: Mapping[str, str] = os.environ) -> Any:
        """Returns the parsed value from the environment, else the fallback. Warns once of a bad value."""
        for name in self.variables:
            one = self if name == self.variable else self._replace(variable=name)
            if text := one._replace(general="").text(environ):
                try:
                    return self.parse(text)
                except (TypeError, ValueError) as error:
                    _ignored(str(one), text, str(error))
        return self.fallback

    def given(self, name: str, value: object, environ: Mapping[str, str] = os.environ) -> Any:
        """Returns the checked value of the keyword argument; if that is None, the value from the environment.

        Raises:
            ValueError: the value is not allowed; the message has its name, its value and the allowed values.
        """
        return self.read(environ) if value is None else checked(name, value, self.parse)

    def ignore(self, reason: str) -> None:
        """Warns once that the value from the environment is ignored."""
        _ignored(str(self), self.text(), reason)


def checked(name: str, value: object, parse: Callable[[Any], _T]) -> _T:
    """Parses the value of a keyword argument.

    Raises:
        ValueError: the value is not allowed; the message has its name, its value and the allowed values.
    """
    try:
        return parse(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} is {displayed(value)}; {error}") from None


def displayed(value: object) -> str:
    """Formats a value for messages, without credentials of a URL."""
    return repr(without_credentials(value) if isinstance(value, str) and re.search(_URL, value) else value)


def without_credentials(url: str) -> str:
    """Returns the URL with ``***`` for user and password, and for the query.

    Works on the text and not on its parts, since it also has to hide credentials of a URL that cannot be parsed.
    """
    return re.sub(r"\?.+", "?***", re.sub(r"^((?:[\w+.-]+:)?//)?.*@", r"\1***@", url, flags=re.DOTALL), flags=re.DOTALL)


ENABLED = Setting(
    "OTEL_TORCHPROF_ENABLED",
    "`true`",
    "`false` disables the package: profiles record nothing, and labels cost almost nothing",
    parse=parsers.switch,
    fallback=True,
)
DETAIL = Setting(
    "OTEL_TORCHPROF_DETAIL",
    "`steps`",
    "Level of detail of `TorchInstrumentor`: `off`, `metrics`, `steps`, `modules`, `ops` or `frames`",
    parse=parsers.one_of(*DETAILS),
    fallback="steps",
)
POLICY = "OTEL_TORCHPROF_POLICY"
"""What ``SpanPolicy`` takes, where an instrumentation is given none."""
WAIT = Setting(POLICY, "0", "Steps at the start of each cycle that are not traced in full", "wait", parsers.steps)
WARMUP = Setting(POLICY, "0", "Steps after `wait` that are not traced in full", "warmup", parsers.steps)
ACTIVE = Setting(
    POLICY,
    "all",
    "Steps at the end of each cycle that are traced in full; required with `wait`, `warmup`, `repeat` and `skip_first`",
    "active",
    parsers.steps,
)
REPEAT = Setting(POLICY, "0", "Number of cycles; 0: unlimited", "repeat", parsers.steps)
SKIP_FIRST = Setting(
    POLICY, "0", "Steps before the first cycle, which are not traced in full", "skip_first", parsers.steps
)
SCHEDULE = (WAIT, WARMUP, ACTIVE, REPEAT, SKIP_FIRST)
EVERY = Setting(POLICY, "1", "`n`: traces only every n-th step in full, from step 0", "every")
RATIO = Setting(POLICY, "1", "Share of the steps traced in full, above 0, up to 1, selected by trace id", "ratio")
KEEP = Setting(
    POLICY,
    "`all`; `slow` with `opentelemetry-instrument` if no policy is set",
    "Tail sampling of the steps traced in full: `all`, or `slow`: steps that are slow, contain an error or were "
    "requested with `keep_step()`",
    "keep",
)
SLOW_QUANTILE = Setting(POLICY, "0.95", "Quantile of recent durations above which a step is slow", "slow_quantile")
SLOW_LIMIT = Setting(POLICY, "none", "Duration in seconds from which a step is always slow", "slow_limit")
MAX_SPANS = Setting(POLICY, "5000", "Maximum number of spans per trace", "max_spans")
MAX_TRACE_BYTES = Setting(POLICY, "4000000", "Maximum size of a trace as OTLP, in bytes", "max_bytes")
SHORT = Setting(
    POLICY,
    "step duration / `max_spans`",
    "Duration in seconds below which spans may be aggregated and collapsed",
    "short",
)
JOB_INTERVAL = Setting(
    POLICY,
    "600",
    "Seconds after which a `torch.job` span ends and the next one begins; 0: no job spans",
    "job_interval",
)
FRAMES = "OTEL_TORCHPROF_FRAMES"
"""What ``FrameFilter`` takes, where a profile or an instrumentation is given none."""
INCLUDE = Setting(
    FRAMES,
    "all",
    "Functions whose calls are recorded, if calls are recorded: module names, paths and globs, separated by commas",
    "include",
)
EXCLUDE = Setting(FRAMES, "none", "Functions whose calls are not recorded, in the same form", "exclude")
MAX_DEPTH = Setting(FRAMES, "no limit", "Maximum number of nested recorded calls per thread", "max_depth")
MIN_DURATION = Setting(FRAMES, "0", "Minimum duration in seconds; shorter calls are removed", "min_duration")
C_FUNCTIONS = Setting(FRAMES, "`true`", "`false`: calls of C functions are not recorded", "c_functions")
MODULES_ONLY = Setting(
    FRAMES, "`false`", "`true`: records only calls of `torch.nn.Module` objects and optimizer steps", "modules_only"
)
LABELS = Setting(
    "OTEL_TORCHPROF_LABELS",
    "none",
    "File with the functions to label, one dotted name per line; read when the first recording starts",
)
METRICS = "OTEL_TORCHPROF_METRICS"
OVERHEAD = Setting(
    METRICS,
    "0.01",
    "Share of the time that `detail=metrics` may cost, above 0, up to 1; 1 records every step",
    "overhead",
    parse=parsers.share,
    fallback=0.01,
)
MAX_OPERATORS = Setting(
    METRICS,
    "50",
    "Number of operators with a time series of their own; all others are counted as `other`",
    "max_operators",
    parse=parsers.whole_number,
    fallback=50,
)
DEVICE = Setting(
    "OTEL_TORCHPROF_DEVICE",
    "none",
    "Type of device that `TorchInstrumentor` times, such as `cuda`",
    parse=parsers.type_of_device,
)
DEVICE_EVENTS = Setting(
    DEVICE.variable,
    "`ops`",
    "Events to time on the device: `ops`, `all`, `labels` or `off`",
    "events",
    parse=parsers.one_of(*get_args(DeviceEvents)),
    fallback="ops",
)
GPU_DEVICES = Setting(
    "OTEL_TORCHPROF_GPU_DEVICES",
    "`visible`",
    "GPUs with metrics: `visible` (those that CUDA shows to the process), `all` (of the host) or `none` (no GPU "
    "metrics unless enabled in code)",
    parse=parsers.one_of(*GPU_CHOICES, "none"),
    fallback="visible",
)
RANKS = Setting(
    "OTEL_TORCHPROF_RANKS",
    "`apart`",
    "`apart`: one trace per step and rank; `together`: one trace per step for all ranks",
    parse=parsers.one_of(*get_args(RankTraces)),
    fallback="apart",
)
EXPORT_RANKS = Setting(
    RANKS.variable,
    "`all`",
    "Ranks that record and export: `all`, `node` (the first of each node), `one` (rank 0), or a share above 0, up to 1",
    "export",
    parse=parsers.share_of_ranks,
    fallback="all",
)
RUN_ID = Setting(
    RANKS.variable,
    "the launcher's run id, else generated",
    "Id of the run, the same on all ranks; overrides the launcher's",
    "run_id",
)
LOADER_WORKERS = Setting(
    "OTEL_TORCHPROF_LOADER_WORKERS",
    "`false`",
    "`true`: worker processes of a `DataLoader` also record and export, each on its own",
    parse=parsers.switch,
    fallback=False,
)
HIDDEN_ATTRIBUTES = Setting(
    "OTEL_TORCHPROF_HIDDEN_ATTRIBUTES",
    "none",
    "Span attributes to omit, by name, separated by commas: `code.file.path,torch.op.concrete_inputs`",
    parse=parsers.names,
    fallback=frozenset(),
)
CHROME_TRACE = Setting(
    "OTEL_TORCHPROF_CHROME_TRACE",
    "`trace-{pid}.json` in the working directory",
    "File of a `ChromeTraceExporter` without a path, for example with `OTEL_TRACES_EXPORTER=chrome`; `{pid}` is "
    "replaced by the process id, `{rank}` by the rank from the launcher; a name that ends in `.gz` is compressed",
    parse=os.path.expanduser,
    fallback="trace-{pid}.json",
)
CHROME_MAX_BYTES = Setting(
    CHROME_TRACE.variable,
    "no limit",
    "Size on disk at which the next file begins, in bytes or with `K`, `M` or `G`",
    "max_bytes",
    parse=parsers.byte_size,
)
CHROME_STEPS_PER_FILE = Setting(
    CHROME_TRACE.variable,
    "no limit",
    "Number of steps after which the next file begins",
    "steps_per_file",
    parse=parsers.whole_number,
)
CHROME_MAX_FILES = Setting(
    CHROME_TRACE.variable,
    "all",
    "Number of files to keep; the oldest are deleted",
    "max_files",
    parse=parsers.whole_number,
)
OTLP_FILE = Setting(
    "OTEL_TORCHPROF_OTLP_FILE",
    "`trace-{pid}.otlp` in the working directory",
    "File of an `OTLPFileExporter` without a path, for example with `OTEL_TRACES_EXPORTER=otlp_file`; a name that "
    "ends in `.json` or `.jsonl` selects OTLP/JSON, any other name protobuf, and `.gz` after either compresses the "
    "file",
    parse=os.path.expanduser,
    fallback="trace-{pid}.otlp",
)
BLACK_BOX = Setting(
    "OTEL_TORCHPROF_BLACKBOX",
    "none",
    "Events recorded in the black box, which outlives the process: `steps` or `ops`; optionally with a folder "
    "(`ops,/scratch/boxes`), a size (`ops,32M`) and the seconds without an event after which a thread of the loop "
    "counts as hung (`ops,hang=60`)",
    parse=parsers.black_box,
)
BLACK_BOX_LABELS = Setting(
    "OTEL_TORCHPROF_BLACKBOX_LABELS",
    "all",
    "Labels whose names are stored in the black box: patterns such as `forward*`, separated by commas; other labels "
    "are stored as `(hidden label)`",
    parse=parsers.names,
)
MEMORY_LIMIT = Setting(
    "OTEL_TORCHPROF_MEMORY_LIMIT",
    "`512M`",
    "Memory limit of the recorder for one recording, in bytes or with `K`, `M` or `G`",
    parse=parsers.byte_size,
    fallback=512 << 20,
)
MAX_QUEUE_BYTES = Setting(
    "OTEL_TORCHPROF_MAX_QUEUE_BYTES",
    "`256M`",
    "Memory limit of the spans queued for one exporter, for example during an outage of its backend, in bytes or "
    "with `K`, `M` or `G`",
    parse=parsers.byte_size,
    fallback=256 << 20,
)
SIGTERM_TIMEOUT = Setting(
    "OTEL_TORCHPROF_SIGTERM_TIMEOUT",
    "`5`",
    "Seconds for `TorchInstrumentor` to send the recorded spans at SIGTERM if the program does not handle it; 0: "
    "SIGTERM is not handled",
    parse=parsers.seconds,
    fallback=5.0,
)
BUILD_DIR = Setting(
    "OTEL_TORCHPROF_BUILD_DIR",
    "the user's cache folder",
    "Folder of the library that records torch's operators, for container images and read-only home folders. A folder "
    "that other users can write to, or that is inside such a folder, is refused",
    parse=lambda text: Path(text).expanduser(),
)
NVTX_LIBRARY = Setting(
    "OTEL_TORCHPROF_NVTX_LIBRARY",
    "torch's library, else an installed one",
    "NVTX library for `emit_nvtx`: a file with `nvtxRangePushA`, `nvtxRangePop` and `nvtxMarkA`",
)

SETTINGS: tuple[Setting, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Setting))
"""All of them, as the documentation has them; ``otel-torchprof doctor`` knows the variables from here."""

KEYS: Mapping[str, frozenset[str]] = {
    variable: keys
    for variable in dict.fromkeys(setting.variable for setting in SETTINGS)
    if (keys := frozenset(setting.key for setting in SETTINGS if setting.variable == variable)) != {""}
}
"""Of the variables that have parts."""


_forget: list[Callable[[], None]] = []


def once(function: Callable[_P, None]) -> Callable[_P, None]:
    """Decorates a function that warns: a call with the same arguments does nothing until :func:`forget_warnings`."""
    said: dict[tuple[object, ...], object] = {}
    _forget.append(said.clear)

    @functools.wraps(function)
    def unless_said(*arguments: _P.args, **named: _P.kwargs) -> None:
        own = object()
        if said.setdefault((*arguments, *named.items()), own) is own:  # in one go: of two threads one warns
            function(*arguments, **named)

    return unless_said


@once
def warn_once(message: str) -> None:
    """Logs a warning, unless it was logged before."""
    _logger.warning("%s", message)


def _ignored(name: str, value: str, allowed: str) -> None:
    warn_once(f"{name}={displayed(value)} is ignored: {allowed}")


def forget_warnings() -> None:
    """Allows all warnings again."""
    for forget in _forget:
        forget()
    _parts.cache_clear()


@functools.lru_cache(maxsize=64)
def _parts(variable: str, text: str) -> Mapping[str, str]:
    """Splits a value into parts by key. Unknown keys are ignored with one warning."""
    keys = KEYS[variable]

    def is_key(word: str) -> bool:
        # A value may contain texts that are not like a key: the file lr=0.1,bs=32.json.
        return word in keys or "" not in keys or bool(parsers.nearest(word, keys))

    begins = [match for match in _KEY.finditer(text) if is_key(match[1])]
    ends = [*(match.start() for match in begins), len(text)]
    first = text[: ends[0]].strip()
    values = (text[match.end() : end].strip(", ") for match, end in zip(begins, ends[1:], strict=True))
    found = dict(zip((match[1] for match in begins), values, strict=True)) | {"": first}
    for key in sorted(found.keys() - keys):
        if key or first:
            near = parsers.nearest(key, keys)
            mean = (
                f"did you mean {near}?"
                if near
                else f"allowed are {', '.join(f'{each}=' for each in sorted(keys) if each)}"
            )
            _ignored(variable, f"{key}={found[key]}" if key else first, mean)
    return found
