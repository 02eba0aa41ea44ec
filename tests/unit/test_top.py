"""The command ``top``: its page, its keys, the terminal that it leaves as it was, and real boxes."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from checked_json import checked
from opentelemetry.sdk.trace import TracerProvider

import otel_torchprof as otp
from otel_torchprof._answers.running import OpenCall, OpenThread, ProcessView, SelfTime
from otel_torchprof._cli import main as cli
from otel_torchprof._cli import top_sources
from otel_torchprof._cli.control_client import Process
from otel_torchprof._cli.top import after_key
from otel_torchprof._cli.top_page import PageState, page
from otel_torchprof._cli.top_sources import Boxes, Sources, view_of_status
from otel_torchprof._columns.schema import Kind
from otel_torchprof._files.box import BlackBox
from otel_torchprof._files.box_file import box_of, memory_file
from otel_torchprof._files.rank_state import RunKey
from otel_torchprof._instrument import control_verbs
from otel_torchprof._process import private_folder
from otel_torchprof.parsers import BlackBoxOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

NOW = 1_700_000_000 * 10**9
LONG = 60.0


@pytest.fixture
def box(tmp_path):
    """An open one in a folder of the test's."""
    made = BlackBox(BlackBoxOptions("ops", str(tmp_path / "boxes"), 1 << 20), {"rank": 3, "world_size": 4})
    made.start()
    yield made
    made.stop()


def view(rank: int | None = 0, **given) -> ProcessView:
    calls = [OpenCall("torch.phase.data", Kind.PHASE, NOW - 10**9), OpenCall("load_batch", Kind.LABEL, NOW - 5 * 10**8)]
    found = ProcessView(
        100 + (rank or 0),
        rank,
        RunKey("run", 0, 2),
        "train.py",
        "node",
        1234,
        True,
        9.87,
        {"data": 0.5, "forward": 0.25, "unattributed": 0.25},
        [SelfTime("aten::mm", 0.12), SelfTime("aten::add", 0.001)],
        [OpenThread(100, "main", calls)],
        NOW,
        host_bytes=512 << 20,
        collectives=0.1,
        step_seconds=0.0934,
    )
    return found._replace(**given)


def rows(columns: int, *views: ProcessView, **given) -> str:
    return "\n".join(page(views, given.pop("state", PageState()), columns=columns, **given))


@pytest.mark.parametrize("columns", [40, 80, 120, 160])
def test_a_page_fits_its_width(columns):
    """No line is longer than the terminal is wide, whatever the names are."""
    text = rows(columns, view(0), view(1, program="x" * 200, is_late=True), view(None, step=None, threads=[]))
    assert max(map(len, text.split("\n"))) <= columns


def test_what_a_page_says():
    """A row has step, rate, collectives, memory, phases in proportion and what is open; the late rank is marked."""
    text = rows(120, view(0), view(1, is_late=True, is_numbered=False))
    assert "train.py on node, 2 of 2 ranks: the others wait for rank 1" in text
    assert re.search(r"0 +100 +1234 +9.87 93.4ms +10% 536.9M d{15}[f.]{15} data > load_batch 0.5 s +aten::mm 12%", text)
    assert re.search(r"1 +101 +\+1234 .*LATE data", text)
    assert "d data f forward . unattributed" in text
    assert "\x1b" not in text


def test_what_is_open_has_the_rest_of_the_width():
    """It is cut only where the page has no room: on a wide one it leaves some to the operators, and without a terminal it is whole."""
    calls = [
        OpenCall("torch.phase.forward", Kind.PHASE, NOW),
        OpenCall("a_function_with_a_long_name", Kind.LABEL, NOW - 10**9),
    ]
    open_now = view(threads=[OpenThread(100, "main", calls)])
    whole = "forward > a_function_with_a_long_name 1.0 s"
    assert all(whole in rows(columns, open_now) for columns in (118, 160, 10_000))
    assert all(whole not in rows(columns, open_now) for columns in (80, 100, 120))
    assert "aten::mm 12%" in rows(160, open_now)


def test_memory_of_devices_and_tokens():
    """A process that reports memory of devices, or rates, gives the page columns; where none does, there are none."""
    assert "DEVICE" not in rows(160, view(0))
    rates = {"tokens": 4321.4, "samples": 8.25, "flops": 1.25e13, "mfu": 0.4012}
    text = rows(160, view(0), view(1, device_bytes=12_300_000_000, rates=rates))
    assert re.search(r"MEM DEVICE  TOK/S  SMP/S FLOP/S    MFU PHASES", text)
    assert re.search(r"0 +100 .* 536.9M +- +- +- +- +- d", text)
    assert re.search(r"1 +101 .* 536.9M  12.3G   4321   8.25  12.5T  40.1% d", text)
    assert max(map(len, rows(40, view(1, device_bytes=1, rates={"tokens": 1.0})).split("\n"))) <= 40


def test_memory_of_devices_is_what_allocators_count(monkeypatch):
    """It is what torch has for tensors on all devices of a process that uses one; of others nothing is asked."""
    monkeypatch.delitem(sys.modules, "torch.xpu", raising=False)
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace(is_initialized=lambda: False))
    assert control_verbs._device_bytes() is None
    used = SimpleNamespace(
        is_initialized=lambda: True,
        default_generators=(None, None),
        memory_stats_as_nested_dict=lambda index: {"allocated_bytes": {"all": {"current": 1000 + index}}},
    )
    monkeypatch.setitem(sys.modules, "torch.cuda", used)
    assert control_verbs._device_bytes() == 2001
    monkeypatch.setitem(sys.modules, "torch.cuda", SimpleNamespace())  # it is being imported
    assert control_verbs._device_bytes() is None


def test_a_process_with_a_box_is_asked_seldom(monkeypatch, box):
    """With a number for its step it is asked only for what its box does not have, if it has that, and without a drain."""
    asked = []
    answer = {"step": 7, "step_end_ns": time.time_ns(), "device_bytes": None, "rates": {"tokens": 30.0}}

    def ask(calls, **_):
        asked.extend(call.arguments for call in calls)
        return [answer for _ in calls]

    monkeypatch.setattr(top_sources, "ask_each", ask)
    monkeypatch.setattr(top_sources, "processes", lambda: [Process(os.getpid(), box.path.parent, "a.sock")])
    monkeypatch.setattr(top_sources, "client_folders", lambda: [box.path.parent])
    sources = Sources([], [os.getpid()])
    sources.boxes.places = {box.path}
    assert sources.statuses is not None
    for _ in range(10):
        sources.statuses.poll()
        (found,) = sources.look(time.time_ns())
        (found,) = sources.look(time.time_ns())
    assert asked == [{"drain": True}, {"drain": False}, {"drain": False}]
    assert (found.step, found.rates, found.device_bytes) == (7, {"tokens": 30.0}, None)
    answer["rates"] = {}
    sources.statuses.answers.clear()
    for _ in range(10):
        sources.statuses.poll()
    assert len(asked) == 3


def test_a_narrow_page_has_the_operators_below():
    """At 80 columns the slowest operators of all processes have lines of their own."""
    assert "  12.0%  aten::mm" in rows(80, view(0), view(1))


def test_hostile_names_are_escaped():
    """Names of a program move no cursor."""
    text = rows(160, view(0, program="a\x1b[2J", operators=[SelfTime("b\x1b[H\n", 0.5)]))
    assert "\x1b" not in text
    assert len(text.split("\n")) == len(rows(160, view(0)).split("\n"))


def test_a_low_page_says_what_it_leaves_out():
    """Rows beyond the height are counted; title and keys stay."""
    lines = page([view(rank) for rank in range(64)], PageState(), columns=80, lines=24, has_keys=True)
    assert len(lines) <= 24
    assert any("more lines" in line for line in lines)
    assert lines[-1].startswith("q quit")


def test_keys():
    """The key s changes the order, / begins a filter that Enter keeps and Escape removes; q is a letter in it."""
    state = after_key(PageState(), "s")
    assert state.sort == "collectives"
    for key in "/Rq\x7fank 1\r":
        state = after_key(state, key)
    assert state == PageState("collectives", "Rank 1")
    assert "101" in rows(80, view(0), view(1), state=state)
    assert " 100 " not in rows(80, view(0), view(1), state=state)
    assert after_key(state, "\x1b").filter == ""
    order = rows(80, view(0, collectives=0.5), view(1), state=PageState("collectives"))
    assert order.index(" 101 ") < order.index(" 100 ")


def test_a_process_without_a_box():
    """Its answer to ``status`` gives what it knows: the step, the rate, its rank."""
    status = {
        "rank": 1,
        "program": "serve.py",
        "host": "node",
        "step": 41,
        "step_seconds": 0.25,
        "step_median": 0.2,
        "world_size": 2,
        "phases": {"data": 0.75, "unattributed": 0.25},
        "line": "serve.py:5 load",
    }
    found = view_of_status(os.getpid(), status, NOW)
    assert (found.rank, found.step, found.step_rate, found.step_seconds, found.run.world_size) == (1, 42, 4.0, 0.2, 2)
    assert found.host_bytes > 1 << 20
    assert view_of_status(1, {"step": None}, NOW).step is None
    assert "ddddddddddddddd....." in rows(100, found)
    assert "serve.py:5 load" in rows(80, found)


def test_a_box_is_displayed(box, capsys):
    """The command prints what is open in a living process now, as text and as JSON; memory is that of the process."""
    folder = str(box.path.parent)
    with otp.record_function("load_batch"):
        assert cli.main(["top", folder]) == 0
        assert "load_batch" in capsys.readouterr().out
        assert cli.main(["top", "--json", folder]) == 0
    (found,) = checked("top", capsys.readouterr().out)
    assert (found["pid"], found["rank"], found["run"]["world_size"]) == (os.getpid(), 3, 4)
    assert found["threads"][0]["calls"][0]["name"] == "load_batch"
    assert found["host_bytes"] > 1 << 20


def test_processes_come_and_end(box, tmp_path):
    """Boxes of dead processes, files that are none, and folders that are missing are left out; a process that ends, from then on."""
    folder = box.path.parent
    shutil.copy(box.path, folder / "copy.1.otpbox")
    (folder / "empty.2.otpbox").touch()
    boxes = Boxes([folder, tmp_path / "missing"])
    assert [found.pid for found in boxes.look(time.time_ns())] == [os.getpid()]
    assert [found.pid for found in Boxes([folder], [os.getpid()]).look(time.time_ns())] == [os.getpid()]
    assert Boxes([folder], [1]).look(time.time_ns()) == []
    box.stop()
    assert boxes.look(time.time_ns()) == []
    assert boxes.running == {}


def test_a_look_reads_what_is_new(box):
    """What was open at one look and ended before the next is not open any more; events between are there."""
    boxes = Boxes([box.path])
    with otp.record_function("first"):
        (found,) = boxes.look(time.time_ns())
        assert found.threads[0].calls[0].name == "first"
    with otp.record_function("second"):
        (found,) = boxes.look(time.time_ns() + 10**9)
    assert [call.name for call in found.threads[0].calls] == ["second"]
    assert "first" in {each.name for each in found.operators}


def test_a_box_in_memory_is_found():
    """The box of a process that has no file is read through the process's descriptors."""
    made = BlackBox(BlackBoxOptions("ops"), file=memory_file(1 << 20))
    made.start()
    try:
        path = box_of(os.getpid())
        assert path is not None
        assert [found.pid for found in Boxes([path]).look(time.time_ns())] == [os.getpid()]
    finally:
        made.stop()
    assert box_of(os.getpid()) is None


def test_steps_get_the_numbers_of_the_process(box):
    """An answer of a process with a box gives the number of its step, once."""
    sources = Sources([], [os.getpid()])
    sources.boxes.places = {box.path}
    sources.look(time.time_ns())
    assert sources.statuses is not None
    sources.statuses.answers[os.getpid()] = {"step": 7, "step_end_ns": time.time_ns(), "asked_ns": time.time_ns()}
    (found,) = sources.look(time.time_ns())
    assert (found.is_numbered, found.step) == (True, 7)
    assert sources.statuses.numbered == {os.getpid()}


def test_a_process_that_does_not_answer(box, monkeypatch, tmp_path):
    """A process that is named is found by its descriptors, wherever its box is and whether it answers or not."""
    monkeypatch.setattr(private_folder, "_SHARED_MEMORY", str(tmp_path))
    (found,) = Sources([], [os.getpid()]).look(time.time_ns())
    assert (found.pid, found.rank) == (os.getpid(), 3)


@pytest.mark.parametrize("has_box", [False, True])
def test_an_instrumented_process_is_found(has_box, monkeypatch, tmp_path):
    """By its socket, with a box or without one, and wherever the box is."""
    monkeypatch.setattr(private_folder, "_SHARED_MEMORY", str(tmp_path))
    provider = TracerProvider(shutdown_on_exit=False)
    box = f"ops,1M,{tmp_path}/elsewhere" if has_box else None
    otp.TorchInstrumentor().instrument(tracer_provider=provider, skip_dep_check=True, blackbox=box)
    try:
        sources = Sources([], [os.getpid()])
        sources.statuses.poll()
        assert [found.pid for found in sources.look(time.time_ns())] == [os.getpid()]
        assert len(sources.boxes.running) == has_box
    finally:
        otp.TorchInstrumentor().uninstrument()


def test_wrong_arguments(capsys):
    """What is neither a process nor a folder is named; no process is no page, and status 1."""
    assert cli.main(["top", "no-such-folder"]) == 1
    assert "'no-such-folder' is neither a process id nor a folder" in capsys.readouterr().err


def test_a_process_that_cannot_be_displayed_is_told_why(capsys):
    """A process that is named and has neither box nor socket is told of: that there is none, or that it is not instrumented."""
    with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
        assert cli.main(["top", "--once", "4194305", str(process.pid)]) == 1
        process.communicate()
    words = " ".join(capsys.readouterr().out.split())
    assert "there is no process 4194305" in words
    assert f"process {process.pid} is not instrumented, or has no control socket" in words


class Terminal:
    """The command in a terminal of the test's."""

    def __init__(self, *words: str, program: Sequence[str] = ("-m", "otel_torchprof", "top")) -> None:
        self.master, slave = pty.openpty()
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        environ = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
        self.process = subprocess.Popen(
            [sys.executable, *program, *words],
            stdin=slave,
            stdout=slave,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
        )
        self.text = ""

    def read(self) -> None:
        """Reads what there is."""
        while select.select([self.master], [], [], 0)[0]:
            self.text += os.read(self.master, 1 << 16).decode()

    def wait_until_full(self) -> None:
        """Until the terminal takes no more output, which nobody reads."""
        deadline = time.monotonic() + LONG
        while select.select([], [self.slave], [], 0)[1]:
            assert time.monotonic() < deadline
            os.sched_yield()

    def read_until(self, *words: str) -> None:
        """Reads until all words were written since the last call."""
        deadline, begin = time.monotonic() + LONG, len(self.text)
        while not all(word in self.text[begin:] for word in words):
            assert select.select([self.master], [], [], max(deadline - time.monotonic(), 0))[0], self.text
            self.text += os.read(self.master, 1 << 16).decode()

    def end(self) -> int:
        """Waits for the end; asserts that the terminal is as it was."""
        self.read_until("\x1b[?1049l")
        status = self.process.wait(LONG)
        assert termios.tcgetattr(self.slave) == self.before
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self.slave)


@pytest.fixture
def terminal(box):
    with otp.record_function("load_batch"):
        made = Terminal(str(box.path.parent))
        yield made
        made.close()


def test_the_terminal_is_restored(terminal):
    """The page is drawn on the alternate screen, again each second; s sorts, and q ends it with the terminal as it was."""
    terminal.read_until("\x1b[?1049h", "RANK", "load_batch", "sort: rank")
    os.write(terminal.master, b"s")
    terminal.read_until("sort: collectives")
    terminal.read_until("RANK")
    os.write(terminal.master, b"q")
    assert terminal.end() == 0


def test_the_terminal_is_restored_after_a_signal(terminal):
    """So it is after SIGTERM."""
    terminal.read_until("RANK")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.end() == 128 + signal.SIGTERM


def stopped(process: subprocess.Popen) -> bool:
    """Whether it is, or has been, stopped by a signal; waits for that."""
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        pid, status = os.waitpid(process.pid, os.WUNTRACED | os.WNOHANG)
        if pid:
            return os.WIFSTOPPED(status)
        os.sched_yield()
    return False


def test_the_terminal_is_restored_while_it_is_suspended(terminal):
    """At Ctrl-Z it is as before the command, which enters its page again when it continues, also after a SIGSTOP."""
    for number in (signal.SIGTSTP, signal.SIGSTOP):
        terminal.read_until("RANK", "sort: rank")
        terminal.process.send_signal(number)
        assert stopped(terminal.process)
        if number == signal.SIGTSTP:
            assert termios.tcgetattr(terminal.slave) == terminal.before
        termios.tcsetattr(terminal.slave, termios.TCSANOW, terminal.before)  # as a shell does
        terminal.process.send_signal(signal.SIGCONT)
        terminal.read_until("\x1b[?1049h")
        assert not termios.tcgetattr(terminal.slave)[3] & termios.ICANON
    terminal.read_until("RANK", "sort: rank")
    os.write(terminal.master, b"q")
    assert terminal.end() == 0


DRAWS = """
from otel_torchprof._cli.screen import Screen
with Screen() as screen:
    while True:
        screen.draw(["x" * 70] * 20)
"""


def test_a_terminal_that_takes_no_output_is_restored():
    """Ctrl-Z and SIGTERM in the middle of an output that blocks restore the terminal, and raise nothing."""
    terminal = Terminal(program=["-c", DRAWS])
    try:
        terminal.read_until("\x1b[?1049h", "x" * 70)
        terminal.wait_until_full()
        terminal.process.send_signal(signal.SIGTSTP)
        assert stopped(terminal.process)
        assert termios.tcgetattr(terminal.slave) == terminal.before
        terminal.process.send_signal(signal.SIGCONT)
        terminal.read_until("\x1b[?1049h")
        assert not termios.tcgetattr(terminal.slave)[3] & termios.ICANON
        terminal.wait_until_full()
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.process.wait(LONG) == 128 + signal.SIGTERM
        assert termios.tcgetattr(terminal.slave) == terminal.before
        terminal.read()
        assert "Error" not in terminal.text
    finally:
        terminal.close()
