"""Processes that are not instrumented, and are for as long as a client asks them."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from contextlib import ExitStack

import pytest
from asked import ask
from unprepared import unprepared

from otel_torchprof._cli import attach
from otel_torchprof._cli.attach import reached
from otel_torchprof._cli.control_client import processes
from otel_torchprof._process.control_wire import ControlError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control sockets are for Linux")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """The folder of the sockets, and that of the scripts, which has nothing after each test."""
    monkeypatch.setenv("OTEL_TORCHPROF_CONTROL", str(tmp_path / "sockets"))
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scripts))
    yield scripts
    assert not list(scripts.iterdir())


def entered(monkeypatch, execute):
    """Has clients enter processes in this way."""
    monkeypatch.setattr(attach, "_remote_exec", execute)


def test_a_program_is_instrumented_for_a_while(monkeypatch):
    """With the client's packages it answers until the client is done; then it is as it was, and the next client comes in again."""
    with unprepared() as program:
        entered(monkeypatch, program.execute)
        for _ in range(2):
            with reached(program.process.pid) as process:
                assert ask(process, "status")["detail"] == "steps"
                assert [thread["name"] for thread in ask(process, "dump")["threads"]] == ["main"]
            assert not processes()
        before, after = program.states()
    assert before == after


def test_two_clients(monkeypatch, folder):
    """The program is instrumented until the last of them leaves, whichever came first; the files of their scripts have no names by then."""
    with unprepared() as program:
        entered(monkeypatch, program.execute)
        with ExitStack() as second:
            with reached(program.process.pid) as process:
                assert second.enter_context(reached(program.process.pid)) == process
                assert not list(folder.iterdir())
            assert ask(process, "status")["detail"] == "steps"
        assert not processes()
        before, after = program.states()
    assert before == after


def test_the_program_has_a_folder_of_its_own(monkeypatch, tmp_path):
    """Its socket is found where the program has it, whatever the client's folder is; text that is not UTF-8 does no harm."""
    own = str(tmp_path / os.fsdecode(b"own\xff"))
    with unprepared(OTEL_TORCHPROF_CONTROL=own) as program:
        entered(monkeypatch, program.execute)
        with reached(program.process.pid) as process:
            assert not processes()
            assert ask(process, "status")["pid"] == program.process.pid
        with pytest.raises(ControlError, match="has not imported torch"), reached(program.process.pid, builds=True):
            pass


def test_the_client_is_terminated(monkeypatch):
    """SIGTERM ends the visit as an exception does, and the program is left as it was."""
    with unprepared() as program:
        entered(monkeypatch, program.execute)
        with pytest.raises(SystemExit) as ended, reached(program.process.pid):
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert not processes()
        before, after = program.states()
    assert before == after


def test_a_script_that_is_late(monkeypatch):
    """Where its client has left meanwhile it opens no stream: the file of the script has all that it wrote."""
    with unprepared() as program:
        path = os.path.join(tempfile.gettempdir(), "late.py")  # noqa: PTH118 - as tempfile does
        with open(path, "w+b") as file:  # noqa: PTH123 - likewise
            file.write(attach._SCRIPT.format(path=path, folders=attach._folders()).encode())
            file.flush()
            size = file.tell()
            program.execute(program.process.pid, path)
            script = attach._Script(program.process.pid, file.fileno(), size, program.execute)
            assert script.wait(2, 60) == ["", ""]
        before, after = program.states()
    assert before == after


def test_the_program_ends(monkeypatch):
    """The client says so, also of a program that its parent has not waited for yet."""

    def end(_pid, _path):
        os.kill(program.process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, program.process.pid, os.WEXITED | os.WNOWAIT)

    with unprepared() as program:
        entered(monkeypatch, end)
        for _ in range(2):
            with pytest.raises(ControlError, match=r"process \d+ has ended"), reached(program.process.pid):
                pass


def test_the_client_ends_before_it_is_let_in(monkeypatch):
    """A script that comes too late does nothing."""
    paths = []
    monkeypatch.setattr(attach, "_SCRIPT_SECONDS", 0.05)
    entered(monkeypatch, lambda _pid, path: paths.append(path))
    with unprepared() as program:
        with (
            pytest.raises(ControlError, match=r"has run no Python for 0 seconds.*try again when it runs"),
            reached(program.process.pid),
        ):
            pass
        assert paths[1:] == [os.devnull]
        assert not os.path.exists(paths[0])  # noqa: PTH110 - a text, as the script has it
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
