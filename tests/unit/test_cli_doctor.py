"""``otel-torchprof doctor``: what is on, what is off, what to do, and no secret."""

from __future__ import annotations

import json
import os
import socket
from types import SimpleNamespace

import pytest

from otel_torchprof._cli import main as cli
from otel_torchprof._native import frames, torch_build, torch_library
from otel_torchprof.errors import TorchLibraryError


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """An environment without any variable of OpenTelemetry's and without torch."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch_library, "installed_torch", lambda: None)


@pytest.fixture
def receiver():
    """The address of something that takes connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def doctor(capsys) -> tuple[int, dict[str, list[dict[str, str]]], str]:
    """The status, what was found by name, and all that was printed."""
    status = cli.main(["doctor", "--json"])
    text = capsys.readouterr().out
    found: dict[str, list[dict[str, str]]] = {}
    for check in json.loads(text):
        found.setdefault(check["name"], []).append(check)
    return status, found, text


def problems(found) -> list[str]:
    return [check["text"] for checks in found.values() for check in checks if check["state"] == "problem"]


def test_where_nothing_was_asked_for(capsys, monkeypatch):
    """Without torch, GPU, receiver and distribution it can still record, and says what each of them would need."""

    def refuse(*_):
        raise ConnectionRefusedError

    monkeypatch.setattr(socket, "create_connection", refuse)
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
            "OTEL_TORCHPROF_METRICS: overhead",
            "OTEL_TORCHPROF_CHROME_TRACE: max_files",
            "OTEL_TORCHPROF_SIGTERM_TIMEOUT",
            "OTEL_TORCHPROF_POLICY: every",
            "OTEL_BSP_MAX_QUEUE_SIZE",
        ]
        fixes = {check["fix"] for check in found["variable"]}
        assert {"did you mean OTEL_TORCHPROF_DETAIL?", "did you mean OTEL_TORCHPROF_POLICY=max_spans=...?"} <= fixes


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_the_receiver(capsys, monkeypatch, receiver, protocol):
    """One that takes connections is on; one that was asked for and does not is a problem with the reason."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver)
    status, found, _ = doctor(capsys)
    assert (status, found["receiver"][0]["state"]) == (0, "on")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    status, found, _ = doctor(capsys)
    assert status == 1
    assert "Connection refused" in problems(found)[0]


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
