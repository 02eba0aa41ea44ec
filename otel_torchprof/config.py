"""The table of options: variables (``OTEL_TORCHPROF_*``), arguments in code and flags of ``otel-torchprof run``.

A bad value of a variable is ignored with one warning, as OpenTelemetry requires; a bad argument or flag raises.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar, get_args

from . import parsers
from .errors import check_names, checked, displayed, on_forget, warn_once

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

_T = TypeVar("_T")

SpanDetail = Literal["steps", "modules", "ops", "frames"]
Detail = Literal["off", "metrics", SpanDetail]
DETAILS: tuple[Detail, ...] = get_args(Detail)
DeviceEvents = Literal["ops", "all", "labels", "off"]
RankTraces = Literal["apart", "together"]
ExportRanks = parsers.ExportRanks
GPU_CHOICES = ("visible", "all")
_KEY = re.compile(r"(?:^|,)\s*(\w+)\s*=")


@dataclass(frozen=True)
class Option:
    """One option: an environment variable or a part of one, an argument, a flag of ``otel-torchprof run``, or several.

    Everything that reads, checks, suggests or documents an option takes it from here. A variable with parts has the
    form ``VALUE,key=value,key=value``, each of them optional. The text between two keys, including commas, is the value
    of the first.
    """

    variable: str
    """Empty: it is an argument only."""
    meaning: str
    """In Markdown: an entry of the documentation's tables, and the help of the flag."""
    key: str = ""
    """Key of the part; empty for the text before the first key, or for the whole variable."""
    parse: Callable[[str], Any] = str
    """Converts text; raises ValueError with the allowed values, or leaves the text to :attr:`check`."""
    check: Callable[[Any], Any] = lambda value: value
    """Checks and returns a value; raises ValueError or TypeError with the allowed values."""
    fallback: Any = None
    """Value if none is given, and the environment has none or a bad one."""
    default: str = ""
    """The fallback as the documentation describes it; empty: as it is."""
    general: str = ""
    """OpenTelemetry's variable for all signals, which applies if the one for traces is absent or bad."""
    argument: str = ""
    """Name of the argument in code; empty if there is none."""
    flag: str = ""
    """Flag with what stands for its value, ``--every N``, or without one, ``--shapes``; empty if there is none."""

    def __str__(self) -> str:
        return f"{self.variable}: {self.key}" if self.key else self.variable

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables to read; the first that is set counts."""
        return (self.variable, self.general) if self.general else (self.variable,)

    @property
    def displayed_default(self) -> str:
        """Default, as text for the documentation."""
        if self.default or self.fallback is None:
            return self.default or "none"
        value = self.fallback
        return f"`{f'{value:g}' if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else value}`"

    @property
    def flag_name(self) -> str:
        """Name of the flag as an attribute of the parsed command line."""
        return self.flag.partition(" ")[0].strip("-").replace("-", "_")

    @property
    def help(self) -> str:
        """Meaning of the argument or flag, inside of a sentence."""
        text = self.meaning.removeprefix("`true`: ")
        return f"{text[0].lower()}{text[1:]}"

    @property
    def flag_help(self) -> str:
        """Help of the flag, as plain text."""
        default = f" (default: {self.displayed_default})" if " " in self.flag else ""
        return f"{self.help}{default}".replace("`", "")

    def text(self, environ: Mapping[str, str] = os.environ) -> str:
        """Text from the environment, stripped; empty if there is none."""
        return next(filter(None, (self._text_of(name, environ) for name in self.variables)), "")

    def read(self, environ: Mapping[str, str] = os.environ) -> Any:
        """Returns the value from the environment, else the fallback. Warns once of a bad value."""
        for name in self.variables:
            if text := self._text_of(name, environ):
                try:
                    return self.of_text(text)
                except (TypeError, ValueError) as error:
                    _ignored(f"{name}: {self.key}" if self.key else name, text, str(error))
        return self.fallback

    def _text_of(self, variable: str, environ: Mapping[str, str]) -> str:
        text = environ.get(variable, "").strip()
        return _parts(variable, text).get(self.key, "") if variable in KEYS else text

    def of_text(self, text: str) -> Any:
        """Returns the value of a text; raises ValueError or TypeError with the allowed values."""
        return self.check(self.parse(text))

    def given(self, value: object, environ: Mapping[str, str] = os.environ) -> Any:
        """Returns the checked value of the argument; if that is None, the value from the environment.

        Raises:
            TypeError, ValueError: the value is not allowed; the message has its name, its value and the allowed values.
        """
        return self.read(environ) if value is None else checked(self.argument, value, self.check)

    def ignore(self, reason: str) -> None:
        """Warns once that the value from the environment is ignored."""
        _ignored(str(self), self.text(), reason)


def _field(
    variable: str, name: str, meaning: str, check: Callable[[Any], Any], fallback: Any = None, **others: Any
) -> Option:
    """A part of a variable that is a field of a class too, by the same name; of a number, unless it has a parser."""
    others = {"parse": parsers.number_or_text, **others}
    return Option(variable, meaning, name, check=check, fallback=fallback, argument=name, **others)


ENABLED = Option(
    "OTEL_TORCHPROF_ENABLED",
    "`false` disables the package: profiles record nothing, and labels cost almost nothing",
    parse=parsers.switch,
    fallback=True,
)
DETAIL = Option(
    "OTEL_TORCHPROF_DETAIL",
    "Level of detail of `TorchInstrumentor`: `off`, `metrics`, `steps`, `modules`, `ops` or `frames`; `metrics` creates "
    "no spans and needs no TracerProvider",
    check=parsers.one_of(*DETAILS),
    fallback="steps",
    argument="detail",
)
POLICY = "OTEL_TORCHPROF_POLICY"
"""The fields of ``SpanPolicy``, where an instrumentation is given none."""
WAIT = Option(
    POLICY, "Steps at the start of each cycle that are not traced in full", "wait", parsers.steps, default="`0`"
)
WARMUP = Option(POLICY, "Steps after `wait` that are not traced in full", "warmup", parsers.steps, default="`0`")
ACTIVE = Option(
    POLICY,
    "Steps at the end of each cycle that are traced in full; required with `wait`, `warmup`, `repeat` and `skip_first`",
    "active",
    parsers.steps,
    default="all",
)
REPEAT = Option(POLICY, "Number of cycles; 0: unlimited", "repeat", parsers.steps, default="`0`")
SKIP_FIRST = Option(
    POLICY, "Steps before the first cycle, which are not traced in full", "skip_first", parsers.steps, default="`0`"
)
SCHEDULE = (WAIT, WARMUP, ACTIVE, REPEAT, SKIP_FIRST)
EVERY = _field(
    POLICY,
    "every",
    "Traces only every n-th step in full, from step 0",
    parsers.whole("a whole number above 0", 1),
    1,
    flag="--every N",
)
RATIO = _field(
    POLICY,
    "ratio",
    "Share of the steps traced in full, above 0, up to 1, selected by trace id",
    parsers.number("a number above 0, up to 1", lambda value: 0 < value <= 1),
    1.0,
)
KEEP = _field(
    POLICY,
    "keep",
    "Tail sampling of the steps traced in full, except in Chrome files: `all`, or `slow`: steps that are slow, contain "
    "an error or were requested with `keep_step()`",
    parsers.one_of("all", "slow"),
    "all",
    default="`all`; `slow` if no policy is set with `opentelemetry-instrument`, or with `otel-torchprof run` that sends "
    "spans",
    parse=str,
    flag="--keep WHICH",
)
SLOW_QUANTILE = _field(
    POLICY,
    "slow_quantile",
    "Quantile of recent durations above which a step is slow",
    parsers.or_none(parsers.number("a number between 0 and 1, or None", lambda value: 0 < value < 1)),
    0.95,
)
SLOW_LIMIT = _field(
    POLICY,
    "slow_limit",
    "Duration in seconds from which a step is always slow",
    parsers.or_none(parsers.number("a number of seconds above 0, or None", lambda value: value > 0)),
)
MAX_SPANS = _field(
    POLICY,
    "max_spans",
    "Maximum number of spans per trace",
    parsers.whole("a whole number from 10 on", 10),
    5_000,
)
MAX_TRACE_BYTES = _field(
    POLICY,
    "max_bytes",
    "Maximum size of a trace as OTLP, in bytes",
    parsers.whole("a whole number of bytes from 10000 on", 10_000),
    4_000_000,
)
SHORT = _field(
    POLICY,
    "short",
    "Duration in seconds below which spans may be aggregated and collapsed",
    parsers.or_none(parsers.number("a number of seconds from 0 on, or None", lambda value: value >= 0)),
    default="step duration / `max_spans`",
)
JOB_INTERVAL = _field(
    POLICY,
    "job_interval",
    "Seconds after which a `torch.job` span ends and the next one begins; 0: no job spans",
    parsers.number("a number of seconds, 0 for none", lambda value: value >= 0),
    600.0,
)
FRAMES = "OTEL_TORCHPROF_FRAMES"
"""The fields of ``FrameFilter``, where a profile or an instrumentation is given none."""
INCLUDE = _field(
    FRAMES,
    "include",
    "Functions whose calls are recorded, if calls are recorded: module names, paths and globs, separated by commas",
    parsers.code_names,
    (),
    parse=parsers.items,
    default="all",
)
EXCLUDE = _field(
    FRAMES,
    "exclude",
    "Functions whose calls are not recorded, in the same form",
    parsers.code_names,
    (),
    parse=parsers.items,
    default="none",
)
MAX_DEPTH = _field(
    FRAMES,
    "max_depth",
    "Maximum number of nested recorded calls per thread",
    parsers.or_none(parsers.whole("a whole number of calls, from 1 to 2**31 - 1, or None", 1, 2**31 - 1)),
    default="no limit",
)
MIN_DURATION = _field(
    FRAMES,
    "min_duration",
    "Minimum duration in seconds; shorter calls are removed",
    parsers.number("a number of seconds, 0 or more", lambda value: value >= 0),
    0.0,
)
C_FUNCTIONS = _field(
    FRAMES,
    "c_functions",
    "`false`: calls of C functions are not recorded",
    parsers.boolean("True or False"),
    parse=parsers.switch,
    fallback=True,
)
MODULES_ONLY = _field(
    FRAMES,
    "modules_only",
    "`true`: records only calls of `torch.nn.Module` objects and optimizer steps",
    parsers.boolean("True or False"),
    parse=parsers.switch,
    fallback=False,
)
LABELS = Option(
    "OTEL_TORCHPROF_LABELS",
    "File with the functions to label, one dotted name per line; read when the first recording starts",
)
METRICS = "OTEL_TORCHPROF_METRICS"
OVERHEAD = Option(
    METRICS,
    "Share of the time that `detail=metrics` may cost, above 0, up to 1; 1 records every step",
    "overhead",
    check=parsers.share,
    fallback=0.01,
    argument="overhead",
)
MAX_OPERATORS = Option(
    METRICS,
    "Number of operators with a time series of their own with `detail=metrics`; all others are counted as `other`",
    "max_operators",
    check=parsers.whole_number,
    fallback=50,
    argument="max_operators",
)
RECORD_SHAPES = Option(
    "",
    "`true`: records the shapes of operators' inputs, with the details `ops` and `frames`",
    check=bool,
    fallback=False,
    argument="record_shapes",
    flag="--shapes",
)
PROFILE_MEMORY = Option(
    DETAIL.variable,
    "`true`: follows torch's allocations, on the thread that imports torch: of each span, and for the report of a program that runs "
    "out of memory; torch's own profiler cannot run there meanwhile",
    "memory",
    parse=parsers.switch,
    check=parsers.boolean("True, False, or None: the default"),
    fallback=False,
    argument="profile_memory",
    flag="--memory",
)
DEVICE = Option(
    "OTEL_TORCHPROF_DEVICE",
    "Type of device to time, such as `cuda`, from its first use on; with `detail=steps`, energy only",
    check=parsers.type_of_device,
    argument="use_device",
    flag="--device TYPE",
)
DEVICE_EVENTS = Option(
    DEVICE.variable,
    "Events to time on the device: `ops` (operators that launch device work, labels and modules), `all` (all operators "
    "except views), `labels` (labels and modules) or `off`",
    "events",
    check=parsers.one_of(*get_args(DeviceEvents)),
    fallback="ops",
    argument="device_events",
)
PEAK_FLOPS = Option(
    DEVICE.variable,
    "Peak of the device in FLOP/s, such as `312e12`: steps with FLOPs then say which share of it they reach (MFU)",
    "peak_flops",
    parse=parsers.number_or_text,
    check=parsers.number("a number of FLOP/s above 0, such as 312e12", lambda value: value > 0),
    default="that of some datacenter GPUs in bfloat16, by their name",
)
ENERGY = Option(
    "",
    "Whether a thread reads the energy counters of NVIDIA GPUs ten times a second",
    check=parsers.boolean("True, False, or None: the default"),
    default="`true` if the device is `cuda`",
    argument="energy",
)
SAMPLING = Option(
    "OTEL_TORCHPROF_SAMPLING",
    "Samples of the loop's Python stack per second, up to 1000; `true`: 100; `false`: none",
    parse=parsers.number_or_switch,
    check=parsers.sampling_rate,
    fallback=100.0,
    argument="sampling",
)
GPU_METRICS = Option(
    "",
    "Whether `GpuMetrics` go to the `meter_provider`",
    check=parsers.boolean("True, False, or None: the default"),
    default="`true` if it has a reader, unless `OTEL_TORCHPROF_GPU_DEVICES` is `none`",
    argument="gpu_metrics",
)
GPU_DEVICES = Option(
    "OTEL_TORCHPROF_GPU_DEVICES",
    "GPUs with metrics: `visible` (those that CUDA shows to the process), `all` (of the host) or `none` (no GPU "
    "metrics unless enabled in code)",
    check=parsers.one_of(*GPU_CHOICES, "none"),
    fallback="visible",
)
RANKS = Option(
    "OTEL_TORCHPROF_RANKS",
    "`apart`: one trace per step and rank; `together`: one trace per step for all ranks",
    check=parsers.one_of(*get_args(RankTraces)),
    fallback="apart",
    argument="ranks",
)
EXPORT_RANKS = Option(
    RANKS.variable,
    "Ranks that record and export: `all`, `node` (the first of each node), `one` (rank 0), or a share above 0, up to 1; "
    "others record nothing, except metrics",
    "export",
    check=parsers.share_of_ranks,
    fallback="all",
    argument="export_ranks",
)
RUN_ID = Option(
    RANKS.variable,
    "Id of the run, the same on all ranks; overrides the launcher's",
    "run_id",
    default="the launcher's run id, else generated",
)
ALIASES = Option(
    RANKS.variable,
    "`nemo_lens`: rank and number of a step also have the names of NVIDIA's NeMo Lens: `nv.dl.rank`, `nv.dl.world_size`, "
    "`nv.dl.local_rank` and `dl.iteration`",
    "aliases",
    check=parsers.one_of("nemo_lens"),
    default="none",
)
LOADER_WORKERS = Option(
    "OTEL_TORCHPROF_LOADER_WORKERS",
    "`true`: worker processes of a `DataLoader` also record and export, each on its own",
    parse=parsers.switch,
    check=parsers.boolean("True, False, or None: the default"),
    fallback=False,
    argument="loader_workers",
)
HIDDEN_ATTRIBUTES = Option(
    "OTEL_TORCHPROF_HIDDEN_ATTRIBUTES",
    "Span attributes to omit, by name, separated by commas: `code.file.path,torch.op.concrete_inputs`",
    parse=parsers.names,
    fallback=frozenset(),
    default="none",
)
CODE = frozenset(("code.file.path", "code.function.name", "code.line.number", "code.stacktrace"))
"""Attributes whose values are also in stacks: hiding one of them hides stacks."""
CHROME_TRACE = Option(
    "OTEL_TORCHPROF_CHROME_TRACE",
    "File of a `ChromeTraceExporter` without a path, for example with `OTEL_TRACES_EXPORTER=chrome`; `{pid}` is "
    "replaced by the process id, `{rank}` by the rank from the launcher; a name that ends in `.gz` is compressed",
    parse=os.path.expanduser,
    fallback="trace-{pid}.json",
    default="`trace-{pid}.json` in the working directory",
)
CHROME_MAX_BYTES = Option(
    CHROME_TRACE.variable,
    "Size on disk at which the next Chrome file begins, in bytes or with `K`, `M` or `G`",
    "max_bytes",
    check=parsers.byte_size,
    default="no limit",
    argument="max_bytes",
    flag="--max-bytes SIZE",
)
CHROME_STEPS_PER_FILE = Option(
    CHROME_TRACE.variable,
    "Number of steps after which the next Chrome file begins",
    "steps_per_file",
    check=parsers.whole_number,
    default="no limit",
    argument="steps_per_file",
    flag="--steps-per-file N",
)
CHROME_MAX_FILES = Option(
    CHROME_TRACE.variable,
    "Number of Chrome files to keep; the oldest are deleted",
    "max_files",
    check=parsers.whole_number,
    default="all",
    argument="max_files",
    flag="--max-files N",
)
OTLP_FILE = Option(
    "OTEL_TORCHPROF_OTLP_FILE",
    "File of an `OTLPFileExporter` without a path, for example with `OTEL_TRACES_EXPORTER=otlp_file`; a name that "
    "ends in `.json` or `.jsonl` selects OTLP/JSON, any other name protobuf, and `.gz` after either compresses the "
    "file",
    parse=os.path.expanduser,
    fallback="trace-{pid}.otlp",
    default="`trace-{pid}.otlp` in the working directory",
)
BLACK_BOX = Option(
    "OTEL_TORCHPROF_BLACKBOX",
    "Events recorded in the black box, which outlives the process: `steps` or `ops`; optionally with a folder "
    "(`ops,/scratch/boxes`), a size (`ops,32M`) and the seconds without an event after which a thread of the loop "
    "counts as hung (`ops,hang=60`; `ops,hang=60,exit` then ends the process)",
    check=parsers.black_box,
    argument="blackbox",
)
BLACK_BOX_LABELS = Option(
    "OTEL_TORCHPROF_BLACKBOX_LABELS",
    "Labels whose names are stored in the black box: patterns such as `forward*`, separated by commas; other labels "
    "are stored as `(hidden label)`",
    parse=parsers.names,
    default="all",
)
CONTROL = Option(
    "OTEL_TORCHPROF_CONTROL",
    "Folder of the sockets through which `otel-torchprof top`, `record` and `dump` reach running processes; `off`: no "
    "socket",
    check=parsers.control_folder,
    fallback="",
    default="`/dev/shm/otel-torchprof-UID`",
)
MEMORY_LIMIT = Option(
    "OTEL_TORCHPROF_MEMORY_LIMIT",
    "Memory limit of the recorder for one recording, in bytes or with `K`, `M` or `G`",
    parse=parsers.byte_size,
    fallback=512 << 20,
    default="`512M`",
    argument="memory_limit",
)
MAX_QUEUE_BYTES = Option(
    "OTEL_TORCHPROF_MAX_QUEUE_BYTES",
    "Memory limit of the spans queued for one exporter, for example during an outage of its backend, in bytes or "
    "with `K`, `M` or `G`",
    parse=parsers.byte_size,
    fallback=256 << 20,
    default="`256M`",
    argument="max_queue_bytes",
)
SIGTERM_TIMEOUT = Option(
    "OTEL_TORCHPROF_SIGTERM_TIMEOUT",
    "Seconds for `TorchInstrumentor` to send the recorded spans at SIGTERM if the program does not handle it; 0: "
    "SIGTERM is not handled",
    check=parsers.seconds,
    fallback=5.0,
    argument="sigterm_timeout",
)
BUILD_DIR = Option(
    "OTEL_TORCHPROF_BUILD_DIR",
    "Folder of the library that records torch's operators, for container images and read-only home folders. A folder "
    "that other users can write to, or that is inside such a folder, is refused",
    parse=lambda text: Path(text).expanduser(),
    default="the user's cache folder",
)
NVTX_LIBRARY = Option(
    "OTEL_TORCHPROF_NVTX_LIBRARY",
    "NVTX library for `emit_nvtx`: a file with `nvtxRangePushA`, `nvtxRangePop` and `nvtxMarkA`",
    default="torch's library, else an installed one",
)

OPTIONS: tuple[Option, ...] = tuple(value for value in list(globals().values()) if isinstance(value, Option))
"""All options, in the order of the documentation."""

KEYS: Mapping[str, frozenset[str]] = {
    variable: keys
    for variable in dict.fromkeys(option.variable for option in OPTIONS)
    if (keys := frozenset(option.key for option in OPTIONS if option.variable == variable)) != {""}
}
"""Keys of the variables that have parts."""


class SourceOptions(TypedDict, total=False):
    """Types of the arguments of ``profile``, ``stream`` and ``instrument()`` that belong to a source of events."""

    energy: bool | None
    sampling: float | None  # True and False, too


class LiveOptions(SourceOptions, total=False):
    """Types of the arguments of both ``stream`` and ``instrument()`` that are options of the table."""

    record_shapes: bool
    profile_memory: bool | None
    use_device: str | None
    device_events: DeviceEvents | None


class InstrumentOptions(LiveOptions, total=False):
    """Types of the arguments of ``instrument()`` that are options of the table."""

    detail: Detail | None
    overhead: float | None
    max_operators: int | None
    gpu_metrics: bool | None
    export_ranks: ExportRanks | float | None
    ranks: RankTraces | None
    loader_workers: bool | None
    sigterm_timeout: float | None
    blackbox: str | parsers.BlackBoxOptions | None


def arguments_in(kind: type) -> list[Option]:
    """Returns the options that are arguments of a function, in the order of the table, by the types of these."""
    return [option for option in OPTIONS if option.argument in kind.__annotations__]


def takes_options(kind: type) -> Callable[[_T], _T]:
    """Gives a function the signature that ``help()`` and editors display: the options in place of ``**options``."""

    def decorate(function: Any) -> Any:
        signature = inspect.signature(function)
        others = [
            parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD
        ]
        options = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation.__forward_arg__)
            for name, annotation in kind.__annotations__.items()
        ]
        function.__signature__ = signature.replace(parameters=[*others, *options])
        return function

    return decorate


def checked_arguments(
    function: Callable[..., object], name: str, kind: type, given: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the values of all options that a function takes: the arguments, checked, else those of the environment.

    Args:
        function: takes them, besides its other arguments (see :func:`takes_options`).
        name: its name in messages.
        kind: types of the options, such as :class:`LiveOptions`.
        given: arguments that are options, or unknown.

    Raises:
        TypeError, ValueError: an argument is unknown or bad; the message has its name, its value and what is allowed.
    """
    options = arguments_in(kind)
    names = [option.argument for option in options]
    if given.keys() - set(names):
        _self, *others = inspect.signature(function).parameters.values()
        check_names(
            name,
            given,
            dict.fromkeys(
                [*(parameter.name for parameter in others if parameter.kind is not parameter.VAR_POSITIONAL), *names]
            ),
        )
    return {option.argument: option.given(given.get(option.argument)) for option in options}


def of_flags(parsed: Mapping[str, Any], options: Iterable[Option]) -> dict[str, Any]:
    """Returns the values of the flags that a command line has, checked, by argument.

    Raises:
        TypeError, ValueError: a value is not allowed; the message has its name, its value and the allowed values.
    """
    values = {option: parsed.get(option.flag_name) for option in options if option.flag}
    return {
        option.argument: value if value is True else checked(option.argument, value, option.of_text)
        for option, value in values.items()
        if value is not None and value is not False
    }


def fields_in(variable: str) -> dict[str, Option]:
    """Returns the options with an argument among the parts of a variable, by argument."""
    return {option.argument: option for option in OPTIONS if option.variable == variable and option.argument}


def _ignored(name: str, value: str, allowed: str) -> None:
    warn_once(f"{name}={displayed(value)} is ignored: {allowed}")


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
    parts = dict(zip((match[1] for match in begins), values, strict=True)) | {"": first}
    for key in sorted(parts.keys() - keys):
        if key or first:
            allowed = f"allowed are {', '.join(f'{name}=' for name in sorted(keys) if name)}"
            _ignored(variable, f"{key}={parts[key]}" if key else first, parsers.suggestion(key, keys) or allowed)
    return parts


on_forget.append(_parts.cache_clear)
