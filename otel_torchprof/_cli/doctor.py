"""``otel-torchprof doctor``: what is on, what is off and why, and the fix; without a secret."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opentelemetry.sdk.resources import Resource

from otel_torchprof import config
from otel_torchprof._export.file import check_writable
from otel_torchprof._export.file_exporter import own_path
from otel_torchprof._export.formats import FILE_EXPORTERS
from otel_torchprof._export.from_environment import OTEL_TRACES_EXPORTER
from otel_torchprof._export.response import Outcome
from otel_torchprof._export.sdk import bad_values, suppressed
from otel_torchprof._export.sending import Sender
from otel_torchprof._export.settings import QueueSettings, Settings
from otel_torchprof._export.span_policy import SpanPolicy
from otel_torchprof._export.unknown_variables import unknown_variables
from otel_torchprof._export.variables import VARIABLES
from otel_torchprof._instrument.default_processor import sets_up_the_sdk
from otel_torchprof._instrument.processor import left_out_by
from otel_torchprof._native import frames, prebuilt, torch_build, torch_library
from otel_torchprof._process.deadline import Deadline
from otel_torchprof._process.sdk_imports import UNSET
from otel_torchprof._record.nvml import Nvml, RefusedError
from otel_torchprof.errors import ExportError, TorchLibraryError, forget_warnings, without_credentials
from otel_torchprof.version import __version__

from .terminal import show

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Iterator

    from otel_torchprof._export.response import Response


# ---- What ``otel-torchprof doctor`` looks at: one function for each thing, none of which changes anything ----

ON, OFF, NOTE, PROBLEM = "on", "off", "note", "problem"
_SECONDS_TO_ANSWER = 2.0
_EMPTY_REQUEST = b""
"""An ExportTraceServiceRequest without spans."""
_NOT_SECRET = re.compile(
    r"OTEL_(TORCHPROF|BSP|BLRP|METRIC|PYTHON|SPAN|EVENT|LINK|ATTRIBUTE|EXPORTER_OTLP)_\w+|OTEL_SERVICE_NAME|OTEL_SDK_DISABLED"
    r"|OTEL_(TRACES|METRICS|LOGS)_(EXPORTER|SAMPLER|SAMPLER_ARG)|OTEL_PROPAGATORS|OTEL_LOG_LEVEL|OTEL_CONFIG_FILE"
)
"""Variables whose values are no secrets; those of others are not printed."""
_NOTHING_SAMPLED = {
    "always_off": "no trace is sampled, so no span is sent",
    "parentbased_always_off": "only spans below a sampled span of another process are sent",
}
"""Values of OTEL_TRACES_SAMPLER by which a service sends nothing of its own, and what they do."""
_HIDDEN = re.compile(r"HEADERS|TOKEN|SECRET|PASSWORD|API_?KEY|CREDENTIAL")
_ABOUT_THE_RECEIVER = tuple(
    name for option in VARIABLES.values() for name in option.variables if name.startswith("OTEL_EXPORTER_OTLP")
)
"""A program that sets one of these expects a receiver."""
_START_ONE = (
    "start a collector there, or set OTEL_EXPORTER_OTLP_ENDPOINT; OTEL_TRACES_EXPORTER=chrome writes a file instead"
)
_NOT_SENT = "correct the OTEL_EXPORTER_OTLP_ variable that this is about"
_FIX_BY_OUTCOME = {
    Outcome.RETRY: "the receiver answers, and is busy or has no pipeline that works: look at its log",
    Outcome.TOO_LARGE: "the receiver answers, and does not accept messages of this size: look at its limit",
    Outcome.REFUSED: "the receiver answers, and does not accept an empty request: look at its log, and at what it accepts",
}


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    state: str
    """:data:`ON`; :data:`OFF`: not available, and not requested; :data:`NOTE`; :data:`PROBLEM`: requested and off, or wrong."""
    text: str
    fix: str = ""


def checks() -> Iterator[Check]:
    """Yields the result of each check. May import torch; sends an empty request and waits at most two seconds for the response."""
    yield Check(
        "python", NOTE, f"{platform.python_implementation()} {platform.python_version()}, {platform.platform()}"
    )
    yield Check("package", ON, f"otel-torchprof {__version__} with its native core, in {Path(__file__).parent.parent}")
    warnings = _warnings()  # first: a warning is logged once, and later checks read the same variables
    yield from _switches()
    yield from _torch()
    yield _calls()
    yield _gpus()
    yield from _variables(warnings)
    yield from _exporters()
    yield from _instrumentation()


# ---- recording ----


def _switches() -> Iterator[Check]:
    if not config.ENABLED.read():
        name = config.ENABLED
        yield Check("switch", PROBLEM, f"{name} is false: nothing is recorded", f"unset {name}")
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        yield Check("switch", PROBLEM, "OTEL_SDK_DISABLED is true: there are no spans", "unset OTEL_SDK_DISABLED")
    if (sampler := os.environ.get("OTEL_TRACES_SAMPLER", "").strip().lower()) in _NOTHING_SAMPLED:
        text = f"OTEL_TRACES_SAMPLER is {sampler}: {_NOTHING_SAMPLED[sampler]}"
        yield Check("switch", PROBLEM, text, "unset OTEL_TRACES_SAMPLER")
    if config.DETAIL.read() == "off":
        name = config.DETAIL
        yield Check("switch", PROBLEM, f"{name} is off: TorchInstrumentor records nothing", f"unset {name}")


def _torch() -> Iterator[Check]:
    try:
        torch = torch_library.installed_torch()
    except Exception as error:  # noqa: BLE001 - a torch that is broken raises anything
        yield Check("torch", PROBLEM, f"cannot be imported: {type(error).__name__}: {error}", "install torch again")
        return
    if torch is None:
        text = "not installed: labels, Python's calls and every exporter work, operators and modules are not recorded"
        asked = config.DEVICE.read() is not None or config.DETAIL.text() in {"modules", "ops"}
        yield Check("torch", PROBLEM if asked else OFF, text, "pip install torch")
        return
    yield Check("torch", ON, f"{torch.__version__}, in {Path(torch.__file__).parent}")
    yield _library(torch)
    requested = config.DEVICE.read()
    if requested is not None:
        yield _device(torch, requested)


def _library(torch: Any) -> Check:
    name = "operators"
    try:
        path = torch_build.folder() / torch_build.library_name(torch)
        if prebuilt.find(torch) is not None or torch_build.is_whole(path):
            return Check(name, ON, f"the library that records them works: {torch_library.load().path}")
        compiler = torch_build.compiler()
    except TorchLibraryError as error:
        return Check(name, PROBLEM, str(error), "see above, then: otel-torchprof build")
    place = next((folder for folder in (path.parent, *path.parent.parents) if folder.exists()), path.parent)
    if not os.access(place, os.W_OK | os.X_OK):
        way_out = f"set {config.BUILD_DIR} to a folder that can be written"
        return Check(name, PROBLEM, f"the library is not built, and {path.parent} cannot be written", way_out)
    text = f"the library that records them is not built yet; the first use builds it with {compiler}, in some seconds"
    return Check(name, NOTE, text, "otel-torchprof build")


def _device(torch: Any, requested: str) -> Check:
    module = getattr(torch, requested, None)
    there = False
    with contextlib.suppress(Exception):  # a driver that is broken raises anything
        there = bool(module is not None and module.is_available())
    if there:
        return Check("device", ON, f"torch has {requested}")
    name = config.DEVICE
    return Check("device", PROBLEM, f"{name} is {requested!r}, and torch has none of that here", f"unset {name}")


def _calls() -> Check:
    """Whether Python's calls can be recorded, and which other tools record them."""
    others = ""
    if sys.version_info >= (3, 12):
        monitoring: Any = sys.monitoring
        tools = [tool for number in range(6) if (tool := monitoring.get_tool(number))]
        others = f"; sys.monitoring is also used by {', '.join(tools)}" if tools else ""
    elif sys.getprofile() is not None:
        others = f"; sys.setprofile is in use by {sys.getprofile()!r}"
    asked = config.DETAIL.read() == "frames"
    try:
        frames.check()
    except frames.FramesError as error:
        return Check("calls", PROBLEM if asked else OFF, str(error), "stop the other tool")
    return Check("calls", ON, f"Python's calls can be recorded{others}")


def _gpus() -> Check:
    """Whether NVIDIA's management library reports GPUs; no machine needs one."""
    nvml = Nvml()
    try:
        nvml.open()
        cards, unknown = nvml.cards({})
        nvml.close()
    except RefusedError as error:
        asked = config.GPU_DEVICES.text() in config.GPU_CHOICES
        fix = f"install NVIDIA's driver and the package nvidia-ml-py, or unset {config.GPU_DEVICES}" if asked else ""
        return Check("gpus", PROBLEM if asked else OFF, f"NVML reports none: {error}", fix)
    names = ", ".join(f"{card.name} ({card.model})" for card in cards) or "none"
    return Check("gpus", ON, "; ".join((f"NVML reports {names}", *unknown)))


# ---- variables ----


def _variables(warnings: list[str]) -> Iterator[Check]:
    unknown = {variable.name: variable for variable in unknown_variables()}
    environ = {**os.environ, **UNSET}
    for name, value in sorted(environ.items()):
        if name in unknown:
            # Without its value: a misspelt variable may contain headers, and its name does not show that.
            yield Check(
                "variable", PROBLEM, f"{unknown[name].fault}, and nobody reads it", unknown[name].hint or "unset it"
            )
        elif name.startswith("OTEL_"):
            yield Check("variable", NOTE, f"{name}={displayed(name, value)}")
    for message in (*warnings, *bad_values(environ)):
        yield Check("variable", PROBLEM, message, "correct it, or unset it")


def displayed(name: str, value: str) -> str:
    """A variable's value without what may be a secret."""
    if name == "OTEL_RESOURCE_ATTRIBUTES":
        return ",".join(f"{item.partition('=')[0].strip()}=***" for item in value.split(",") if "=" in item)
    if _HIDDEN.search(name) or not _NOT_SECRET.fullmatch(name):
        return "***" if value else ""
    return without_credentials(value) if "://" in value or "@" in value else value


def _warnings() -> list[str]:
    """The warnings that the package logs when it reads its variables, each once."""
    handler = _Messages()
    logger = logging.getLogger("otel_torchprof")
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    forget_warnings()
    try:
        for read in _READERS:
            handler.messages += _failure(read)
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagates
    return list(dict.fromkeys(handler.messages))


def _failure(read: Callable[[], object]) -> list[str]:
    try:
        read()
    except Exception as error:  # noqa: BLE001 - any error is a result of the check
        return [f"{type(error).__name__}: {error}"]
    return []


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


_READERS: tuple[Callable[[], object], ...] = (
    *(option.read for option in config.OPTIONS),
    SpanPolicy.from_environment,
    Settings.from_environment,
    QueueSettings.from_environment,
    Resource.create,
)


# ---- export ----


def _exporters() -> Iterator[Check]:
    names = [name.strip() for name in os.environ.get(OTEL_TRACES_EXPORTER, "otlp").split(",")]
    known = {entry.name for entry in entry_points(group="opentelemetry_traces_exporter")}
    for name in names:
        if name in FILE_EXPORTERS:
            if (path := FILE_EXPORTERS[name].path) is not None:
                yield _file(f"{name.removesuffix('_file')} file", path.read(), path)
        elif name in {"otlp", "otlp_proto_grpc", "otlp_proto_http"}:
            yield _receiver(asked=OTEL_TRACES_EXPORTER in os.environ)
        elif name not in {"", "none", *known}:
            fix = f"install the package that has it; there are {', '.join(sorted({'otlp', 'chrome', 'none', *known}))}"
            yield Check(
                "exporter", PROBLEM, f"{OTEL_TRACES_EXPORTER} names {name!r}, which no installed package has", fix
            )


def _receiver(*, asked: bool) -> Check:
    """Whether the receiver accepts an empty request: a connection alone does not show that it speaks OTLP."""
    settings = Settings.from_environment()
    asked = asked or any(os.environ.get(name, "").strip() for name in _ABOUT_THE_RECEIVER)
    where = f"{settings.displayed_endpoint} ({settings.protocol}, {'no TLS' if settings.insecure else 'TLS'})"
    sender = Sender(settings, "doctor")
    try:
        with suppressed():
            response = sender.attempt(_EMPTY_REQUEST, Deadline.after(_SECONDS_TO_ANSWER))
    finally:
        sender.close()
    if response.outcome is Outcome.ACCEPTED and not response.advice:
        return Check("receiver", ON, f"{where}: it took an empty request")
    reason, fix = settings.redacted(response.reason), settings.redacted(response.advice)
    # A receiver that refuses an empty request refuses spans too: a problem even if no receiver was requested.
    state = OFF if response.outcome is Outcome.RETRY and not asked else PROBLEM
    return Check("receiver", state, f"{where}: {reason}", fix or _what_to_do(response))


def _what_to_do(response: Response) -> str:
    """The fix for a response without advice of its own."""
    if response.answered:
        return _FIX_BY_OUTCOME[response.outcome]
    return _START_ONE if response.outcome is Outcome.RETRY else _NOT_SENT


def _file(name: str, path: str, variable: config.Option) -> Check:
    try:
        check_writable(own_path(path))
    except ExportError as error:
        return Check(name, PROBLEM, str(error), f"set {variable}")
    return Check(name, ON, f"{path} can be written")


def _instrumentation() -> Iterator[Check]:
    """Whether ``opentelemetry-instrument`` would instrument torch, and with which distribution."""
    if disabled := left_out_by():
        text = f"OTEL_PYTHON_DISABLED_INSTRUMENTATIONS={disabled}: opentelemetry-instrument leaves torch out"
        yield Check("opentelemetry-instrument", PROBLEM, text, "take torch out of it")
        return
    entries = [entry for entry in entry_points(group="opentelemetry_instrumentor") if entry.name == "torch"]
    others = [entry.value for entry in entries if not entry.value.startswith("otel_torchprof")]
    if others:
        text = f"another package instruments torch too: {', '.join(others)}"
        yield Check("opentelemetry-instrument", NOTE, text, "uninstall one of the two")
    distros = {entry.name: entry.value for entry in entry_points(group="opentelemetry_distro")}
    named = os.environ.get("OTEL_PYTHON_DISTRO", "")
    if named and named not in distros:
        text = f"OTEL_PYTHON_DISTRO names {named!r}, and there is no distribution of that name"
        fix = "install the package that has it, or unset OTEL_PYTHON_DISTRO"
        yield Check("opentelemetry-instrument", PROBLEM, text, fix)
    elif not sets_up_the_sdk():
        text = "there is no opentelemetry-distro: opentelemetry-instrument sets up no TracerProvider by itself"
        yield Check("opentelemetry-instrument", OFF, text, "pip install opentelemetry-distro")
    elif len(distros) > 1 and not named:
        text = f"there are several distributions, of which any may be taken: {', '.join(distros.values())}"
        yield Check("opentelemetry-instrument", NOTE, text, "name one in OTEL_PYTHON_DISTRO")
    else:
        chosen = distros.get(named) or next(iter(distros.values()), "the SDK")
        yield Check("opentelemetry-instrument", ON, f"sets up {chosen}")


def add_parser(commands: Any) -> None:
    """Adds the command to the parser's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="report what is on, what is off and why, and the fix",
        description="Checks everything that recording and exporting need in this environment, and prints a fix for "
        "what is missing. Changes nothing, sends only an empty request to the receiver, and prints no "
        "header, credential or resource attribute. Exit status: 1 if there is a problem: something that "
        "was requested, for example by a variable, is off or wrong, or a receiver refuses the request; "
        "else 0, also if something that was not requested is off.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list of name, state, text and fix")


def run(options: argparse.Namespace) -> int:
    """Prints the checks; returns 1 if there is a problem, else 0."""
    from .doctor import NOTE, PROBLEM, checks

    results = []
    for check in checks():
        results.append(check)
        if not options.json:
            show(f"{'' if check.state == NOTE else check.state:<8} {check.name}: {check.text}\n")
            if check.fix:
                show(f"{'':<8}   fix: {check.fix}\n")
    if options.json:
        show(json.dumps([asdict(check) for check in results], indent=1) + "\n")
    problems = sum(check.state == PROBLEM for check in results)
    if not options.json:
        show(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}\n")
    return 1 if problems else 0
