"""``otel-torchprof doctor``: what is on, what is off, what to do, and no secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from checked_json import checked
from fault_server import Abort, GrpcReceiver, HttpReceiver, status
from slow_receiver import SlowReceiver, answering

from otel_torchprof._cli import doctor as checks
from otel_torchprof._cli import main as cli
from otel_torchprof._export.response import Outcome, Response
from otel_torchprof._export.sending import Sender
from otel_torchprof._native import frames, torch_build, torch_library
from otel_torchprof._record.nvml import Nvml, RefusedError
from otel_torchprof.errors import TorchLibraryError

RECEIVERS = {"grpc": GrpcReceiver, "http/protobuf": HttpReceiver}


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """An environment without any variable of OpenTelemetry's and without torch."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_library, "installed_torch", lambda: None)


@pytest.fixture
def receiver():
    """The address of a receiver."""
    with GrpcReceiver() as server:
        yield f"http://127.0.0.1:{server.port}"


def doctor(capsys) -> tuple[int, dict[str, list[dict[str, str]]], str]:
    """The status, what was found by name, and all that was printed."""
    status = cli.main(["doctor", "--json"])
    text = capsys.readouterr().out
    found: dict[str, list[dict[str, str]]] = {}
    for check in checked("doctor", text):
        found.setdefault(check["name"], []).append(check)
    return status, found, text


def problems(found) -> list[str]:
    return [check["text"] for checks in found.values() for check in checks if check["state"] == "problem"]


def test_where_nothing_was_asked_for(capsys, monkeypatch):
    """Without torch, GPU, receiver and distribution it can still record, and says what each of them would need."""
    refused = Response(Outcome.RETRY, "ConnectionRefusedError")
    monkeypatch.setattr(Sender, "attempt", lambda *_: refused)
    status, found, _ = doctor(capsys)
    assert status == 0
    assert problems(found) == []
    assert {found[name][0]["state"] for name in ("torch", "gpus", "receiver")} == {"off"}
    assert found["package"][0]["state"] == "on"
    assert found["torch"][0]["fix"] == "pip install torch"


def test_for_people(capsys, monkeypatch):
    """Each thing has a line, what can be done about it another, and the last one counts the problems."""
    monkeypatch.setenv("OTEL_TORCHPROF_ENABLED", "false")
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("problem  switch: OTEL_TORCHPROF_ENABLED is false: nothing is recorded")
    assert lines[at + 1].strip() == "fix: unset OTEL_TORCHPROF_ENABLED"
    assert lines[-1] == "1 problem"


def test_no_secret_is_printed(capsys, monkeypatch, receiver):
    """Headers, credentials, resource attributes and variables that nobody knows are set, and that is all one learns."""
    secrets = {
        "OTEL_EXPORTER_OTLP_HEADERS": "api-key=s3cret,bad header s3cret",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Basic%20s3cret",
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.replace("//", "//user:s3cret@"),
        "OTEL_RESOURCE_ATTRIBUTES": "deployment=s3cret,team=s3cret",
        "OTEL_VENDOR_ACCESS": "s3cret",
        "OTEL_PYTHON_API_KEY": "s3cret",
        "OTEL_EXPORTER_OTLP_TIMEOUT": "https://user:s3cret@host",
    }
    for name, value in secrets.items():
        monkeypatch.setenv(name, value)
    for command in (["doctor"], ["doctor", "--json"]):
        cli.main(command)
        text = capsys.readouterr().out
        assert "s3cret" not in text
        assert all(name in text for name in secrets)
        assert "deployment=***,team=***" in text


def test_bad_values_are_told(capsys, monkeypatch):
    """What a program would warn of and ignore is a problem, every time one asks."""
    monkeypatch.setenv("OTEL_TORCHPROF_METRICS", "overhead=7")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "many")
    monkeypatch.setenv("OTEL_TORCHPROF_CHROME_TRACE", "t.json,max_files=0")
    monkeypatch.setenv("OTEL_TORCHPROF_POLICY", "every=other")
    monkeypatch.setenv("OTEL_TORCHPROF_DETIAL", "ops")
    monkeypatch.setenv("OTEL_TORCHPROF_MAX_SPANS", "50")
    monkeypatch.setenv("OTEL_TORCHPROF_SIGTERM_TIMEOUT", "soon")
    for _ in range(2):
        status, found, _ = doctor(capsys)
        assert status == 1
        assert [text.partition("=")[0].partition(" is")[0] for text in problems(found)] == [
            "OTEL_TORCHPROF_DETIAL",
            "OTEL_TORCHPROF_MAX_SPANS",
            "OTEL_TORCHPROF_POLICY: every",
            "OTEL_TORCHPROF_METRICS: overhead",
            "OTEL_TORCHPROF_CHROME_TRACE: max_files",
            "OTEL_TORCHPROF_SIGTERM_TIMEOUT",
            "OTEL_BSP_MAX_QUEUE_SIZE",
        ]
        fixes = {check["fix"] for check in found["variable"]}
        assert {"did you mean OTEL_TORCHPROF_DETAIL?", "did you mean OTEL_TORCHPROF_POLICY=max_spans=...?"} <= fixes


def test_misspelt_variables(capsys, monkeypatch, receiver):
    """One that is nearly OpenTelemetry's is a problem with what is meant, and its value, which may be secret, is not shown."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADRES", "api-key=s3cret")
    status, found, text = doctor(capsys)
    assert (status, problems(found)) == (
        1,
        ["OTEL_EXPORTER_OTLP_HEADRES is none of OpenTelemetry's variables, and nobody reads it"],
    )
    assert "did you mean OTEL_EXPORTER_OTLP_HEADERS?" in {check["fix"] for check in found["variable"]}
    assert "s3cret" not in text


@pytest.mark.parametrize("protocol", RECEIVERS)
def test_the_receiver(capsys, monkeypatch, protocol):
    """One that takes an empty request is on; one that was asked for and is not there is a problem with the reason."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with RECEIVERS[protocol]() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
        status, found, _ = doctor(capsys)
        assert (status, found["receiver"][0]["state"]) == (0, "on")
        assert [arrived.names for arrived in receiver.arrived] == [[]]
    status, found, _ = doctor(capsys)
    assert status == 1
    assert "Connection refused" in problems(found)[0]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>",
            "the receiver's response cannot be read",
        ),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "HTTP 404 Not Found"),
        (b"\0\0\0\4\0\0\0\0\0\n", "its answer is HTTP/2"),
        (b"", "TimeoutError"),
    ],
    ids=["a page", "not found", "gRPC", "nothing"],
)
def test_what_is_no_receiver(capsys, monkeypatch, answer, said):
    """Something that takes connections, and even answers, is believed only if it answers as a receiver does."""
    monkeypatch.setattr(checks, "_SECONDS_TO_ANSWER", 0.3)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with SlowReceiver(answering(answer)) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        status, found, _ = doctor(capsys)
    assert status == 1
    assert said in problems(found)[0]


@pytest.mark.parametrize(
    ("response", "state", "fix"),
    [
        (Response(Outcome.RETRY, "ConnectionRefusedError"), "off", "start a collector there"),
        (Response(Outcome.REFUSED, "HTTP 401", advice="set the headers"), "problem", "set the headers"),
        (Response(Outcome.REFUSED, "HTTP 500", answered=True), "problem", "the receiver answers"),
        (Response(Outcome.RETRY, "HTTP 503", answered=True), "off", "the receiver answers, and is busy"),
        (Response(Outcome.REFUSED, "no certificate"), "problem", "correct the OTEL_EXPORTER_OTLP_ variable"),
        (Response(Outcome.ACCEPTED, "no answer of OTLP", advice="see the endpoint"), "problem", "see the endpoint"),
    ],
)
def test_a_receiver_that_nobody_asked_for(capsys, monkeypatch, response, state, fix):
    """One that is not there is no problem, one that answers and refuses is; the fix is what its response advises."""
    monkeypatch.setattr(Sender, "attempt", lambda *_: response)
    status, found, _ = doctor(capsys)
    assert (status, found["receiver"][0]["state"]) == (state == "problem", state)
    assert found["receiver"][0]["fix"].startswith(fix)


@pytest.mark.parametrize(
    ("protocol", "turn", "said"),
    [
        *(("http/protobuf", status(code), "look at its log") for code in (400, 407, 415, 429, 500, 503)),
        ("http/protobuf", status(413), "look at its limit"),
        ("grpc", Abort(grpc.StatusCode.INTERNAL, "no"), "look at its log"),
        ("grpc", Abort(grpc.StatusCode.UNAVAILABLE, "no"), "look at its log"),
    ],
)
def test_a_receiver_that_answers_is_there(capsys, monkeypatch, protocol, turn, said):
    """Nobody is told to start a collector where one has just answered."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    with RECEIVERS[protocol](turns=[turn]) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.port}")
        code, found, _ = doctor(capsys)
    fix = found["receiver"][0]["fix"]
    assert code == 1
    assert fix.startswith("the receiver answers")
    assert said in fix


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "api-key=x", "receiver"),
        ("OTEL_TRACES_EXPORTER", "otlp", "receiver"),
        ("OTEL_TORCHPROF_DETAIL", "ops", "torch"),
        ("OTEL_TORCHPROF_DEVICE", "cuda", "torch"),
        ("OTEL_TORCHPROF_GPU_DEVICES", "all", "gpus"),
        ("OTEL_PYTHON_DISTRO", "nonsense", "opentelemetry-instrument"),
    ],
)
def test_what_a_variable_asks_for(capsys, monkeypatch, variable, value, name):
    """What is off by itself is a problem, and the exit status 1, where a variable needs it."""
    monkeypatch.setattr(Sender, "attempt", lambda *_: Response(Outcome.RETRY, "ConnectionRefusedError"))
    monkeypatch.setattr(Nvml, "open", no_driver)
    assert doctor(capsys)[0] == 0
    monkeypatch.setenv(variable, value)
    status, found, _ = doctor(capsys)
    assert (status, found[name][0]["state"]) == (1, "problem")
    assert found[name][0]["fix"]


@pytest.mark.parametrize("sampler", ["always_off", " Parentbased_always_off"])
def test_a_sampler_that_samples_nothing(capsys, monkeypatch, sampler):
    """A service that leaves no trace because its sampler drops all is told so, with the way out."""
    monkeypatch.setattr(Sender, "attempt", lambda *_: Response(Outcome.RETRY, "ConnectionRefusedError"))
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    status, found, _ = doctor(capsys)
    assert (status, found["switch"][0]["fix"]) == (1, "unset OTEL_TRACES_SAMPLER")
    assert f"OTEL_TRACES_SAMPLER is {sampler.strip().lower()}: " in found["switch"][0]["text"]


def no_driver(_) -> None:
    raise RefusedError("there is no driver")


def test_exporters_and_instrumentations(capsys, monkeypatch, tmp_path):
    """Names that lead nowhere, a Chrome file that cannot be written, and a torch that is left out are problems."""
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "chrome,nonsense,none")
    monkeypatch.setenv("OTEL_TORCHPROF_CHROME_TRACE", str(tmp_path / "no" / "t.json"))
    monkeypatch.setenv("OTEL_PYTHON_DISABLED_INSTRUMENTATIONS", "requests, torch")
    status, found, _ = doctor(capsys)
    assert status == 1
    assert "receiver" not in found
    reported = problems(found)
    assert "create the folder first" in reported[0]
    assert "names 'nonsense', which no installed package has" in reported[1]
    assert "leaves torch out" in reported[2]


class Torch:
    """As much of a torch as is asked for."""

    __version__ = "2.99"
    __file__ = "/nowhere/torch/__init__.py"
    distributed = SimpleNamespace(is_available=lambda: False)


@pytest.mark.parametrize(
    ("compiler", "state"), [("/usr/bin/c++", "note"), (TorchLibraryError("no compiler"), "problem")]
)
def test_the_library_of_operators(capsys, monkeypatch, tmp_path, compiler, state):
    """Not built yet is no problem where it can be built, and one where it cannot; nothing is built for asking."""

    def find():
        if isinstance(compiler, str):
            return compiler
        raise compiler

    monkeypatch.setenv("OTEL_TORCHPROF_BUILD_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(torch_library, "installed_torch", Torch)
    monkeypatch.setattr(torch_build, "library_name", lambda _: "torch_ops.so")
    monkeypatch.setattr(torch_build, "compiler", find)
    status, found, _ = doctor(capsys)
    assert found["operators"][0]["state"] == state
    assert status == (state == "problem")
    assert list(tmp_path.iterdir()) == []


def test_other_tools_in_the_way(capsys, monkeypatch):
    """Calls that cannot be recorded are a problem only where they were asked for."""

    def check():
        raise frames.FramesError("sys.setprofile is in use by somebody")

    monkeypatch.setattr(frames, "check", check)
    assert doctor(capsys)[1]["calls"][0]["state"] == "off"
    monkeypatch.setenv("OTEL_TORCHPROF_DETAIL", "frames")
    assert doctor(capsys)[1]["calls"][0]["state"] == "problem"


@pytest.mark.parametrize(
    ("variable", "value", "allowed"),
    [
        ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "abc", "a whole number from 0 on"),
        ("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "-1", "a whole number from 0 on"),
        ("OTEL_BLRP_SCHEDULE_DELAY", "soon", "a whole number above 0"),
        ("OTEL_BSP_MAX_QUEUE_SIZE", "0", "a whole number above 0"),
        ("OTEL_METRIC_EXPORT_INTERVAL", "1 s", "number above 0"),
        ("OTEL_TRACES_SAMPLER", "sometimes", "parentbased_traceidratio"),
        ("OTEL_PROPAGATORS", "tracecontext,b4", "baggage, none, tracecontext"),
        ("OTEL_PYTHON_TRACER_PROVIDER", "mine", "sdk_tracer_provider"),
        ("OTEL_PYTHON_ID_GENERATOR", "dice", "random"),
        ("OTEL_METRICS_EXEMPLAR_FILTER", "all", "trace_based"),
        ("OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE", "sum", "'cumulative', 'delta', 'lowmemory'"),
    ],
)
def test_a_bad_value_of_the_sdk(capsys, monkeypatch, variable, value, allowed):
    """A value that the SDK refuses or ignores is a problem, with its variable and what is allowed."""
    monkeypatch.setattr(Sender, "attempt", lambda *_: Response(Outcome.RETRY, "ConnectionRefusedError"))
    monkeypatch.setenv(variable, value)
    status, found, _ = doctor(capsys)
    assert status == 1
    assert [text for text in problems(found) if f"{variable}={value!r}" in text and allowed in text]


def test_good_values_of_the_sdk(capsys, monkeypatch):
    """What the SDK documents is no problem."""
    monkeypatch.setattr(Sender, "attempt", lambda *_: Response(Outcome.RETRY, "ConnectionRefusedError"))
    good = {
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "0",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "1e-3",
        "OTEL_PROPAGATORS": "tracecontext, baggage",
        "OTEL_METRIC_EXPORT_INTERVAL": "500.5",
        "OTEL_METRICS_EXPORTER": "none",
    }
    for name, value in good.items():
        monkeypatch.setenv(name, value)
    assert [text for text in problems(doctor(capsys)[1]) if "not valid" in text or "ignored" in text] == []


REFUSED = {
    "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "abc",
    "OTEL_ATTRIBUTE_COUNT_LIMIT": "-5",
    "OTEL_PROPAGATORS": "b4",
}
PROVIDERS = {"OTEL_PYTHON_TRACER_PROVIDER": "abc", "OTEL_PYTHON_METER_PROVIDER": "abc"}
PROGRAM = """
import os, otel_torchprof as otp
from otel_torchprof._cli.main import main
with otp.profile() as prof, otp.record_function("work"): pass
assert [event.name for event in prof.events()] == ["work"]
with otp.stream() as stream, otp.record_function("work"): pass
assert stream.key_averages()[0].count == 1
instrumentor = otp.TorchInstrumentor()
instrumentor.instrument()
instrumentor.uninstrument()
assert main(["show", "nowhere.json"]) == 1
print({name: os.environ[name] for name in %r})
"""


def test_values_that_the_sdk_refuses_at_import(tmp_path):
    """With values that OpenTelemetry raises for at import, or when it is asked for a provider, a program imports the package, records, and is warned of each."""
    environment = {**os.environ, **REFUSED, **PROVIDERS, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    command = [sys.executable, "-c", PROGRAM % list(REFUSED)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"{REFUSED}\n")
    assert "Traceback" not in done.stderr
    given = {**REFUSED, **PROVIDERS}
    for name in ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_PROPAGATORS", *PROVIDERS):
        assert done.stderr.count(f"{name}='{given[name]}' is ignored: ") == 1
