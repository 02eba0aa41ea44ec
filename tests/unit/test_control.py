"""The control socket of a process, and those who ask over it: friendly clients, hostile ones, and what is left of dead processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from asked import ask

from otel_torchprof._cli import control_client
from otel_torchprof._cli.control_client import ControlCall, Process, ask_each, process_of, processes
from otel_torchprof._instrument import control as control_module
from otel_torchprof._instrument.control import MOST_CONNECTIONS, ControlSocket
from otel_torchprof._instrument.control_verbs import socket as own_socket
from otel_torchprof._process import private_folder
from otel_torchprof._process.control_wire import (
    MAX_FILES,
    MAX_REQUEST,
    ControlError,
    address,
    opened_folder,
    request_line,
)
from otel_torchprof._process.private_folder import FolderError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="control sockets are for Linux")

LARGE = "x" * (4 << 20)


class Running:
    """An instrumentation."""

    is_running = True


def fail(_request):
    raise ValueError("no luck")


def files_of(request):
    """Says what the client's files are, and writes into the first."""
    os.write(request.files[0].number, b"written")
    return {"files": len(request.files)}


def descriptors() -> int:
    """How many the process has."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """The folder of the sockets."""
    monkeypatch.setenv("OTEL_TORCHPROF_CONTROL", str(tmp_path / "sockets"))
    return tmp_path / "sockets"


@pytest.fixture
def control(folder):
    """A socket whose time does not pass by itself."""
    made = ControlSocket(
        {"status": lambda request: dict(request.arguments), "record": files_of, "dump": fail}, clock=lambda: made.now
    )
    made.now = 0.0
    running = Running()
    made.enter(running)
    yield made
    made.leave(running)
    assert not list(folder.glob("*.sock"))


@contextlib.contextmanager
def looked_at(control):
    """A thread looks at the socket, as that does which drains."""
    is_over = threading.Event()

    def look():
        while not is_over.wait(0.001):
            control.look()

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def connected(control):
    """A client's end, that waits for nothing."""
    client = socket.socket(socket.AF_UNIX)
    client.setblocking(False)
    try:
        with opened_folder(control.path.parent) as folder:
            client.connect(address(folder, control.path.name))
    except OSError:
        client.close()
        raise
    return client


def reply(client):
    """The only line of the reply, after which the server has closed the connection."""
    received = b""
    with client:
        while data := client.recv(1 << 20):
            received += data
    assert received.count(b"\n") == 1
    return json.loads(received)


def test_a_question_has_an_answer(control, folder):
    """The client finds the process by its socket, whose folder nobody else may enter, and gets what the verb returns."""
    assert stat.S_IMODE(folder.stat().st_mode) & stat.S_IWOTH == 0
    with looked_at(control):
        (process,) = processes()
        assert process == process_of(os.getpid()) == Process(os.getpid(), folder, control.path.name)
        assert ask(process, "status", {"a": [1, "ü\n"]}) == {"a": [1, "ü\n"]}


def test_large_answers_and_many_processes(control):
    """An answer may be larger than any buffer, and several are read at once, in the order of the calls."""
    with looked_at(control):
        process = process_of(os.getpid())
        calls = [ControlCall(process, "status", {"n": n, "size": n * 1000}) for n in range(5)]
        assert [answer["n"] for answer in ask_each(calls)] == list(range(5))
        control._verbs = {"status": lambda _request: {"text": LARGE}}
        assert ask(process, "status")["text"] == LARGE


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"hello\n", "no line of JSON"),
        (b"[" * 60_000 + b"\n", "no line of JSON"),
        (b"\xff\xfe\n", "no line of JSON"),
        (b"[1]\n", "no object"),
        (b'{"version": 2, "verb": "status"}\n', "version 2, this process understands 1"),
        (b'{"verb": "status"}\n', "version None"),
        (b'{"version": 1, "verb": "exec"}\n', "the verb is 'exec'; it must be one of status, record, dump"),
        (b'{"version": 1, "verb": ["status"]}\n', "the verb is"),
        (b'{"version": 1, "verb": "status", "arguments": [1]}\n', "no object"),
        (b'{"version": 1, "verb": "dump"}\n', "dump failed: ValueError: no luck"),
        (b"x" * (MAX_REQUEST + 1), f"longer than {MAX_REQUEST} bytes"),
    ],
)
def test_what_is_no_request_is_refused(control, line, error):
    """The client is told why, and the next one is answered."""
    client = connected(control)
    client.send(line)
    control.look()
    assert error in reply(client)["error"]
    client = connected(control)
    client.send(request_line("status", {}))
    control.look()
    assert reply(client) == {"result": {}}


def test_a_request_may_come_in_pieces(control):
    """Half a line is waited for; a client that leaves after half of one is forgotten."""
    client, other = connected(control), connected(control)
    for byte in request_line("status", {"a": 1}):
        control.look()
        client.send(bytes([byte]))
    other.send(b'{"version"')
    control.look()
    assert reply(client) == {"result": {"a": 1}}
    other.close()
    control.look()
    assert not control._connections


def test_nobody_is_waited_for(control):
    """Clients that say nothing, or never read, are dropped at their deadline; others are answered meanwhile."""
    control._verbs = {"status": lambda _request: {"text": LARGE}}
    silent, deaf = connected(control), connected(control)
    deaf.send(request_line("status", {}))
    control.look()
    assert len(control._connections) == 2
    control._verbs = {"status": lambda _request: {}}
    client = connected(control)
    client.send(request_line("status", {}))
    control.look()
    assert reply(client) == {"result": {}}
    control.now = 6.0
    control.look()
    assert not control._connections
    assert silent.recv(1) == b""
    for each in (silent, deaf):
        each.close()


def test_an_answer_that_comes_before_the_end_of_the_request(control, tmp_path, monkeypatch):
    """A process may answer and close the connection while the client still sends: its answer counts."""
    send_fds = socket.send_fds

    def answered_meanwhile(*arguments):
        sent = send_fds(*arguments)
        control.look()
        return sent

    monkeypatch.setattr(socket, "send_fds", answered_meanwhile)
    with (tmp_path / "a").open("wb") as file:
        answer = ask(Process(os.getpid(), control.path.parent, control.path.name), "record", {}, [file.fileno()])
    assert answer == {"files": 1}


def test_an_answer_is_told_of_while_others_are_waited_for(control):
    """Whoever asks several processes has each answer at once: another one may come much later, or never."""
    taken = []
    control._verbs = {"status": lambda _request: {"of": "status"}, "dump": lambda request: taken.append(request.take())}
    process = Process(os.getpid(), control.path.parent, control.path.name)

    def on_answer(call, _answer):
        told.append(call.verb)
        for connection in taken:
            connection.end({"of": "dump"})

    told = []
    with looked_at(control):
        answers = ask_each(
            [ControlCall(process, "dump", {}), ControlCall(process, "status", {})], on_answer=on_answer, seconds=60
        )
    assert told == ["status", "dump"]
    assert answers == [{"of": "dump"}, {"of": "status"}]


def test_a_thousand_clients(control):
    """Some wait, the others get an error that there are too many, or find no room; no descriptor is left, and the next is answered."""
    before, clients, refused = descriptors(), [], 0
    for number in range(1_000):
        try:
            clients.append(connected(control))
        except BlockingIOError:
            refused += 1
        if number % 100 == 99:
            control.look()
            assert len(control._connections) <= MOST_CONNECTIONS
    control.look()
    assert refused
    assert "too many clients" in reply(clients.pop())["error"]
    for client in clients:
        client.close()
    control.look()
    control.look()
    assert descriptors() == before
    client = connected(control)
    client.send(request_line("status", {}))
    control.look()
    assert reply(client) == {"result": {}}


def test_the_client_opens_the_files(control, tmp_path):
    """A verb writes into the descriptors that come with the request; those that it does not take are closed."""
    before = descriptors()
    with (tmp_path / "file").open("wb") as file:
        with looked_at(control):
            process = process_of(os.getpid())
            assert ask(process, "record", {}, [file.fileno()]) == {"files": 1}
            assert ask(process, "status", {}, [file.fileno()] * 3) == {}
        client = connected(control)
        client.setblocking(True)
        socket.send_fds(client, [request_line("record", {})], [file.fileno()] * (MAX_FILES + 9))
        control.look()
        assert reply(client) == {"result": {"files": MAX_FILES}}
    assert (tmp_path / "file").read_bytes() == b"written" * 2
    assert descriptors() == before


def test_a_file_that_is_somebody_elses_now(control, tmp_path):
    """Where other code has closed a client's file and opened its own under that number, the end of the request leaves it open."""
    client = connected(control)
    with (tmp_path / "client").open("w") as theirs, (tmp_path / "own").open("w") as own:
        socket.send_fds(client, [b"no request yet"], [theirs.fileno()])
        control.look()
        number = control._connections[0].files[0].number
        os.dup2(own.fileno(), number)
        client.close()
        control.look()
        assert not control._connections
        assert os.write(number, b"text") == 4
        os.close(number)


def test_other_users_are_not_answered(control, monkeypatch):
    """The system reports who has connected; root may ask."""
    users = iter((os.geteuid() + 1, 0))
    monkeypatch.setattr(control_module, "peer", lambda _connection: (1, next(users)))
    stranger = connected(control)
    stranger.send(request_line("status", {}))
    control.look()
    with stranger, pytest.raises(ConnectionResetError):
        stranger.recv(1)
    root = connected(control)
    root.send(request_line("status", {}))
    control.look()
    assert reply(root) == {"result": {}}


def test_sockets_of_other_users_are_not_asked(control, monkeypatch):
    """In a folder that a group may write to, somebody else could listen under any name."""
    users = iter((os.geteuid() + 1, 0))
    monkeypatch.setattr(control_client, "peer", lambda _connection: (1, next(users)))
    assert processes() == []
    assert [process.pid for process in processes()] == [1]
    control.look()


def test_a_folder_of_somebody_else_is_not_used(monkeypatch, tmp_path):
    """Neither does a process listen there, nor is anyone asked: not behind a link, and not where others may write."""
    monkeypatch.delenv("OTEL_TORCHPROF_CONTROL", raising=False)
    monkeypatch.setattr(private_folder, "_SHARED_MEMORY", str(tmp_path))
    (tmp_path / "theirs").mkdir(mode=0o700)
    default = private_folder.default_folder()
    default.symlink_to(tmp_path / "theirs")
    control = ControlSocket({})
    control.enter(Running())
    assert control.state == f"off: {default} is no folder; remove it, or name another"
    assert control.path is None
    control.look()
    if os.geteuid():
        with pytest.raises(FolderError, match="is no folder"):
            processes()
    assert processes() == [] if not os.geteuid() else True
    default.unlink()
    default.mkdir(mode=0o777)
    default.chmod(0o777)
    control = ControlSocket({})
    control.enter(Running())
    assert "others can write to it" in control.state


def test_a_long_path(monkeypatch, tmp_path):
    """The path of a socket may be longer than the 108 bytes that an address has."""
    folder = tmp_path / ("long" * 30) / ("longer" * 30)
    monkeypatch.setenv("OTEL_TORCHPROF_CONTROL", str(folder))
    control, running = ControlSocket({"status": lambda _request: {"it": "works"}}), Running()
    control.enter(running)
    with looked_at(control):
        assert ask(process_of(os.getpid()), "status") == {"it": "works"}
    control.leave(running)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("value", ["off", "false"])
def test_it_can_be_switched_off(monkeypatch, value):
    """Then there is no socket, and its state says so."""
    monkeypatch.setenv("OTEL_TORCHPROF_CONTROL", value)
    control = ControlSocket({})
    control.enter(Running())
    assert control.state == "off: OTEL_TORCHPROF_CONTROL is off"
    assert control.path is None


def test_the_last_to_leave_removes_it(folder):
    """Several recordings share the socket; it is there until the last has ended, and again with the next."""
    control, first, second = ControlSocket({}), Running(), Running()
    for running in (first, second, first):
        control.enter(running)
    path = control.path
    control.leave(first)
    assert path.exists()
    control.leave(second)
    control.leave(second)
    assert not path.exists()
    control.enter(first)
    assert control.state == "on"
    control.leave(first)
    assert not list(folder.iterdir())


def test_a_number_that_is_somebody_elses_now(control, tmp_path):
    """Where other code has closed the socket and opened a file under its number, that stays open, and the state says so."""
    listener = control._listener.socket.fileno()
    with (tmp_path / "own").open("w") as file:
        os.dup2(file.fileno(), listener)
        control.look()
        assert control.state == "off: other code closed its descriptor"
        assert control.path is None
        assert os.write(listener, b"text") == 4
        os.close(listener)


def test_a_connection_ends_with_the_socket(control):
    """Whoever waits for an answer is not left waiting."""
    client = connected(control)
    control.look()
    for running in control._running.copy():
        control.leave(running)
    assert client.recv(1) == b""
    client.close()


def test_what_the_dead_have_left_is_removed(folder):
    """A socket on which nobody listens is removed by the next who looks; other files in the folder are not touched."""
    folder.mkdir()
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(folder / "77.dead.sock"))
    left.close()
    (folder / "notes.sock").write_text("mine")
    (folder / "box.otpbox").touch()
    assert processes() == []
    assert sorted(path.name for path in folder.iterdir()) == ["box.otpbox", "notes.sock"]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"", "ended before it had answered"),
        (b'{"result": 1', "ended before it had answered"),
        (b"nonsense\n", "no line of JSON"),
        (b"{}\n", "no line of JSON"),
        (b'{"error": "busy"}\n', "busy"),
        (None, "has not answered for 0 seconds"),
    ],
)
def test_processes_that_answer_badly(folder, answer, error):
    """The client never waits for ever, and its error names the process."""
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(folder / "1.sock"))
        server.listen()

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                if answer is None:
                    connection.recv(1)
                else:
                    connection.send(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        (found,) = ask_each(
            [ControlCall(Process(1, folder, "1.sock"), "status", {})], seconds=0.2 if answer is None else 30
        )
        thread.join()
    assert isinstance(found, ControlError)
    assert str(found).startswith("process 1: ")
    assert error in str(found)


def test_a_forked_child_has_none_until_it_is_instrumented(folder):
    """It closes what it inherits without taking the parent's socket away; its own has its own name."""
    running = Running()
    own_socket.enter(running)
    client, long = connected(own_socket), connected(own_socket)
    taken = []
    own_socket._verbs, verbs = {"record": lambda request: taken.append(request.take())}, own_socket._verbs
    long.send(request_line("record", {}))
    own_socket.look()
    own_socket._verbs = verbs
    child = os.fork()
    if child == 0:
        try:
            inherited = own_socket.path is None and own_socket.state.startswith("off") and taken[0]._socket.fileno() < 0
            own_socket.leave(running)
            own_socket.enter(running)
            os._exit(0 if inherited and own_socket.path.name.startswith(f"{os.getpid()}.") else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.send(b"{}\n")
    own_socket.look()
    assert "version None" in reply(client)["error"]
    taken[0].end({"steps": 1})
    assert reply(long) == {"result": {"steps": 1}}
    assert [process.pid for process in processes()] == [os.getpid()]  # the child's, which has died, is removed
    own_socket.leave(running)
    assert not list(folder.iterdir())


_EXECUTES = """
import os, sys
from otel_torchprof._instrument.control import ControlSocket
class Running: is_running = True
control = ControlSocket({})
control.enter(Running())
os.execv("/bin/sleep", ["sleep", "60"])
"""


def test_a_program_that_executes_another_has_none(folder):
    """The new program of the process inherits nothing, and whoever looks removes the socket."""
    child = subprocess.Popen([sys.executable, "-c", _EXECUTES], cwd=Path(__file__).parents[2])
    try:
        command = Path(f"/proc/{child.pid}/comm")
        while command.read_text() != "sleep\n":
            threading.Event().wait(0.01)
        assert list(folder.glob("*.sock"))
        deadline = time.monotonic() + 30
        while processes():  # the name is the new program's shortly before the system closes what the old one had open
            assert time.monotonic() < deadline
            threading.Event().wait(0.01)
        assert not list(folder.glob("*.sock"))
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
