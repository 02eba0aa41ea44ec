"""Processes that are not instrumented, and are for as long as a client asks them."""

from __future__ import annotations

import os
import sys

import pytest
from unprepared import unprepared

from otel_torchprof._cli import control_client
from otel_torchprof._cli.control_client import ask, process_of, processes, reached
from otel_torchprof._process.control_wire import ControlError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control sockets are for Linux")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The folder of the sockets."""
    monkeypatch.setenv("OTEL_TORCHPROF_CONTROL", str(tmp_path / "sockets"))


def entered(monkeypatch, execute):
    """Has clients enter processes in this way."""
    monkeypatch.setattr(control_client, "_remote_exec", execute)


def test_a_program_is_instrumented_for_a_while(monkeypatch):
    """With the client's packages it answers until the client is done; then it is as it was, and the next client comes in again."""
    with unprepared() as program:
        entered(monkeypatch, program.execute)
        for _ in range(2):
            with reached(program.process.pid) as process:
                assert ask(process, "status")["detail"] == "steps"
                assert [thread["name"] for thread in ask(process, "dump")["threads"]] == ["main"]
                with reached(program.process.pid) as same:
                    assert same == process
            assert not processes()
        before, after = program.states()
    assert before == after


def test_the_client_ends_before_it_is_let_in(monkeypatch):
    """A script that comes too late does nothing."""
    paths = []
    monkeypatch.setattr(control_client, "_SCRIPT_SECONDS", 0.05)
    entered(monkeypatch, lambda _pid, path: paths.append(path))
    with unprepared() as program:
        with (
            pytest.raises(ControlError, match=r"has run no Python for 0 seconds.*try again when it runs"),
            reached(program.process.pid),
        ):
            pass
        assert paths[1:] == [os.devnull]
        assert not os.path.exists(paths[0])  # noqa: PTH110
        before, after = program.states()
    assert before == after


@pytest.mark.parametrize(
    ("error", "way_out"),
    [
        (PermissionError(1, "Operation not permitted"), r"Operation not permitted.*ptrace_scope=0.*SYS_PTRACE"),
        (
            RuntimeError("Remote debugging is not enabled"),
            r"not enabled.*Python 3\.\d+ without PYTHON_DISABLE_REMOTE_DEBUG",
        ),
        (None, "under Python 3.14"),
    ],
)
def test_who_is_not_let_in(monkeypatch, error, way_out):
    """The error says what to set, or how else to start the program."""

    def refuse(_pid, _path):
        raise error

    entered(monkeypatch, error and refuse)
    with pytest.raises(ControlError, match=rf"is not instrumented.*instrument\(\).*{way_out}"), reached(os.getpid()):
        pass


def test_a_program_that_refuses(monkeypatch):
    """A program that is to have no control socket gets none, nor one without torch a library for it; the client says why."""
    with unprepared(OTEL_TORCHPROF_CONTROL="off") as program:
        entered(monkeypatch, program.execute)
        with pytest.raises(ControlError, match="OTEL_TORCHPROF_CONTROL is off"), reached(program.process.pid):
            pass
        with pytest.raises(ControlError, match="has not imported torch"), reached(program.process.pid, builds=True):
            pass
        before, after = program.states()
    assert before == after


def test_nobody_is_there():
    """As for every question to a process."""
    with unprepared() as program:
        program.states()
        with pytest.raises(ControlError, match="there is no process"), reached(program.process.pid):
            pass
        with pytest.raises(ControlError, match="there is no process"):
            process_of(program.process.pid)
