"""The black box of a process: what its file holds at any moment, and when it is there."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys

import forked_programs
import pytest
from opentelemetry.sdk.trace import TracerProvider
from threaded import in_threads

import otel_torchprof as otp
from otel_torchprof._columns.schema import Flag, Kind
from otel_torchprof._files.box import _CUT, BlackBox
from otel_torchprof._files.box_file import memory_file
from otel_torchprof._native.blackbox import read_image, set_info
from otel_torchprof._native.recorder import recorder_stats
from otel_torchprof._process import threads
from otel_torchprof.errors import forget_warnings
from otel_torchprof.parsers import BlackBoxOptions

LONG = 60
ON = "on"

PREAMBLE = """
import os, shutil, signal, sys
import otel_torchprof as otp
from otel_torchprof._files.box import BlackBox
from otel_torchprof.parsers import black_box

def box():
    made = BlackBox(black_box(f"ops,1M,{sys.argv[1]}"))
    made.start()
    return made

def say(*words):
    os.write(1, f"{' '.join(map(str, words))}\\n".encode())

parents = box()
with otp.record_function("before"):
    pass
"""


@pytest.fixture(autouse=True)
def as_at_first(monkeypatch):
    """No variables of OpenTelemetry's, nothing warned of, and no box is left open."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    forget_warnings()
    yield
    if otp.TorchInstrumentor().is_instrumented_by_opentelemetry:
        otp.TorchInstrumentor().uninstrument()
    forget_warnings()
    assert recorder_stats().sessions == 0


@pytest.fixture
def started(tmp_path):
    """Starts boxes in a folder of the test's, and stops them after it."""
    boxes = []

    def start(identity=None, detail="ops"):
        boxes.append(BlackBox(BlackBoxOptions(detail, str(tmp_path), 1 << 20), identity))
        boxes[-1].start()
        return boxes[-1]

    yield start
    for box in boxes:
        box.stop()


def label(name: str, *arguments: str) -> None:
    with otp.record_function(name, *arguments):
        pass


def contents(path):
    return read_image(path.read_bytes())


def names(path) -> list[str]:
    """Of the events in a file, in the order in which they began."""
    batch = contents(path).batch
    return [batch.names[batch["name"][row]] for row in batch["start"].argsort(kind="stable")]


def ran(folder, program: str, *words: str) -> tuple[list[str], int, str]:
    """What a program with a box in a folder says, its exit status, and its errors."""
    command = [sys.executable, "-c", PREAMBLE + program, str(folder), *words]
    done = forked_programs.run(command, timeout=LONG)
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout.splitlines(), done.returncode, done.stderr


def test_every_event_is_in_the_file_at_once(started):
    """What has ended, on any thread, and what is open, which is marked so: nothing is drained or flushed for it."""
    box = started()
    assert box.state == ON
    in_threads(lambda: label("in a thread"))
    with pytest.raises(KeyError), otp.record_function("fails"):
        raise KeyError
    with otp.record_function("open"):
        label("ended")
        found = contents(box.path)
    batch = found.batch
    by_name = {batch.names[name]: row for row, name in enumerate(batch["name"])}
    assert sorted(by_name) == ["ended", "fails", "in a thread", "open"]
    assert {name for name, row in by_name.items() if batch["flags"][row] & Flag.UNFINISHED} == {"open"}
    assert set(batch["kind"].tolist()) == {Kind.LABEL}
    assert batch.names[batch["error_type"][by_name["fails"]]] == "KeyError"
    assert batch["parent"][by_name["ended"]] == by_name["open"]
    assert batch["thread"][by_name["in a thread"]] != batch["thread"][by_name["open"]]
    assert (found.pid, found.is_closed, found.chunks_damaged, found.dropped) == (os.getpid(), False, 0, 0)


def test_the_latest_events_are_there(started):
    """More than the file can hold: the last are in it without a gap, and none is counted as dropped."""
    box = started()
    for number in range(60_000):
        label(f"label {number % 100}")
    label("last")
    found = names(box.path)
    assert found[-1] == "last"
    assert 1000 < len(found) < 60_000
    first = int(found[0].removeprefix("label "))
    assert found[:-1] == [f"label {number % 100}" for number in range(first, first + len(found) - 1)]
    assert contents(box.path).dropped == 0


def test_steps_alone_have_no_labels(started):
    """With the detail ``steps`` labels are no events of the box."""
    box = started(detail="steps")
    label("a")
    assert names(box.path) == []


def test_who_it_is_of(started):
    """The file says the process's place in its run, its host, program and versions; what is not known is left out."""
    box = started({"rank": 3, "world_size": 4, "local_world_size": 1, "role": None, "run_id": "job 7"})
    info = contents(box.path).info
    assert box.path.name.startswith(f"rank3.{os.getpid()}.")
    place = {"rank": 3, "world_size": 4, "local_world_size": 1, "run_id": "job 7"}
    assert {key: info[key] for key in place} == place
    of_process = {"owner", "started", "machine", "pids", "memory_events", "cgroup", "killed"}
    assert set(info) - set(place) - of_process == {"host", "program", "detail", "opened", "python", "otel_torchprof"}
    assert info["owner"] == os.getpid()
    assert (info["host"], info["detail"]) == (os.uname().nodename, "ops")


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ({"program": "caf\udce9.py"}, {"program": "caf\\udce9.py"}),
        ({"rank": 1 << 63, "world_size": -(1 << 63)}, {"rank": None, "world_size": -(1 << 63)}),
        ({"rank": True, "host": ["a"], "role": {"a": 1}}, {"rank": None, "host": None, "role": None}),
        ({"program": "x" * 8192}, {}),
    ],
)
def test_what_is_said_of_a_process_is_not_trusted(said, read):
    """What no trace could hold is not read: texts that cannot be encoded, numbers that are too large, anything else. Nor is too much written."""
    file = memory_file(1 << 20)
    box = BlackBox(BlackBoxOptions("ops"), file=file)
    box.start()
    try:
        set_info({})
        set_info(said)
        assert read_image(os.pread(file.descriptor, file.size, 0)).info == read
    finally:
        box.stop()


def test_a_stop_removes_it(started, tmp_path):
    """After a stop, and another, the file is gone, and a new box may begin."""
    box = started()
    path = box.path
    box.stop()
    box.stop()
    assert (box.state, box.path, path.exists(), list(tmp_path.iterdir())) == ("off: stopped", None, False, [])
    assert started().state == ON


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(3)",
        "raise SystemExit(3)",
        "try:\n    1 / 0\nexcept ValueError:\n    pass\nexcept ZeroDivisionError:\n    sys.exit(3)",
    ],
)
def test_it_goes_with_the_end_of_the_interpreter(tmp_path, end):
    """A program that ends as programs do leaves nothing."""
    assert ran(tmp_path, f"say(parents.state)\n{end}")[:2] == ([ON], 3 if end else 0)
    assert list(tmp_path.iterdir()) == []


def test_it_stays_where_an_exception_ends_the_program(tmp_path):
    """A program that an unhandled exception ends leaves its box, with what was recorded before."""
    program = "with otp.record_function('failed'):\n    raise ValueError('of the program')"
    command = [sys.executable, "-c", PREAMBLE + program, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG, check=False)
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "ValueError: of the program")
    assert [names(path) for path in tmp_path.iterdir()] == [["before", "failed"]]


@pytest.mark.parametrize(
    "program",
    [
        "import code; code.InteractiveInterpreter().runsource('1 / 0')",
        "import threading; thread = threading.Thread(target=lambda: 1 / 0); thread.start(); thread.join()",
        "import signal; signal.raise_signal(signal.SIGINT)",
    ],
    ids=["of an interpreter in the program", "in a thread", "an interrupt"],
)
def test_errors_that_do_not_end_the_program_leave_nothing(tmp_path, program):
    """A program that continues after an error, or that its user has interrupted, removes its box at the end."""
    command = [sys.executable, "-c", PREAMBLE + program, str(tmp_path)]
    done = forked_programs.run(command, timeout=LONG)
    assert "Error" in done.stderr or "KeyboardInterrupt" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_no_memory_for_the_copy(tmp_path):
    """Where the copy cannot be made, one warning says so, nothing is left, and the other exit functions run."""
    program = """
import atexit
from otel_torchprof._files import box_file

def no_memory(*_):
    raise MemoryError("none")

box_file.shutil.copyfileobj = no_memory
raise ValueError("of the program")
"""
    command = [sys.executable, "-c", PREAMBLE + program, str(tmp_path)]
    done = forked_programs.run(command, timeout=LONG)
    assert "the black box of a program that failed is not kept: none" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os._exit(7)", 7),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.abort()", -signal.SIGABRT),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV),
    ],
)
def test_it_outlives_the_process(tmp_path, end, status):
    """A program that nothing lets clean up leaves its last events, and what was open."""
    assert ran(tmp_path, f"with otp.record_function('open'):\n    {end}")[:2] == ([], status)
    (path,) = tmp_path.iterdir()
    assert names(path) == ["before", "open"]
    assert not contents(path).is_closed


def test_a_forked_child_has_none(tmp_path):
    """What it records is not in its parent's file, which stays when the child ends; it may have one of its own."""
    program = """
pid = os.fork()
with otp.record_function("child" if pid == 0 else "parent"):
    pass
if pid == 0:
    say(parents.state, parents.path)
    own = box()
    with otp.record_function("child's own"):
        pass
    shutil.copy(own.path, f"{sys.argv[1]}/child")
    parents.stop()
    sys.exit()
os.waitpid(pid, 0)
say(parents.state, len(os.listdir(sys.argv[1])))
os._exit(0)
"""
    said, status, _ = ran(tmp_path, program)
    assert said == ["off: this process was forked from the one that has it None", "on 2"]
    assert status == 0
    (path,) = tmp_path.glob("*.otpbox")
    assert (names(path), names(tmp_path / "child")) == (["before", "parent"], ["child's own"])


def test_a_child_of_one_that_has_stopped_closes_nothing(tmp_path):
    """The number of the file's descriptor may be another file's by then."""
    program = """
number = parents._file.descriptor
parents.stop()
os.dup2(0, number)
pid = os.fork()
if pid == 0:
    os.fstat(number)
    say(parents.state)
    os._exit(0)
say(os.waitpid(pid, 0)[1])
"""
    assert ran(tmp_path, program)[0] == ["off: stopped", "0"]


def test_a_second_one_is_off(started, tmp_path, caplog):
    """A process has one at a time: the second says so and leaves no file, the first records on."""
    first = started()
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        second = started()
    assert (second.state, second.path) == ("off: this process has one already", None)
    assert [record.getMessage() for record in caplog.records] == ["no black box is kept: this process has one already"]
    label("still")
    second.stop()
    assert names(first.path) == ["still"]
    assert list(tmp_path.iterdir()) == [first.path]


def test_hidden_labels_are_not_in_the_file(started, monkeypatch):
    """With a list of patterns, no byte of the file has another label, or an argument of any, recorded before the box or in it."""
    label("secret before", "secret argument")
    monkeypatch.setenv("OTEL_TORCHPROF_BLACKBOX_LABELS", "forward*, exact")
    box = started()
    for name in ("secret before", "secret after", "exactly secret", "forward 7", "exact"):
        label(name, "another secret argument")
    image = box.path.read_bytes()
    assert b"secret" not in image
    assert names(box.path) == [*["(hidden label)"] * 3, "forward 7", "exact"]


@pytest.mark.parametrize("hidden", ["error.type", "torch.module", "code.function.name", "code.line.number"])
def test_hidden_names_of_code_are_not_in_the_file(started, monkeypatch, hidden):
    """Where an attribute is hidden that has names of exceptions, modules or functions, no byte of the file has one."""
    monkeypatch.setenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", hidden)

    class SecretError(Exception):
        pass

    box = started()
    with contextlib.suppress(SecretError), otp.record_function("label"):
        raise SecretError
    assert b"SecretError" not in box.path.read_bytes()
    assert names(box.path) == ["label"]


def test_hidden_names_of_threads_are_not_in_the_file(started, monkeypatch):
    """No byte of the file has the name that the system knows of a thread, of one that ended an event of another's either."""
    monkeypatch.setenv("OTEL_TORCHPROF_HIDDEN_ATTRIBUTES", "thread.name")
    box = started()
    thread = threads.Thread(target=lambda: label("in a thread"))
    thread.start()
    thread.join()
    assert names(box.path) == ["in a thread"]
    assert threads.NAME.encode() not in box.path.read_bytes()[12288:]  # behind what the process says of itself


def test_labels_that_are_not_hidden_are_in_the_file(started):
    """By default every label stands in it as it is, which is what the pattern is for."""
    box = started()
    label("plainly visible", "and its argument")
    assert b"plainly visible" in box.path.read_bytes()


def test_patterns_that_are_no_text(started, monkeypatch):
    """Bytes in the variable that are no UTF-8 match no label and stop nothing."""
    monkeypatch.setenv("OTEL_TORCHPROF_BLACKBOX_LABELS", "caf\udce9,shown")
    box = started()
    label("shown")
    assert (box.state, names(box.path)) == (ON, ["shown"])


def test_a_folder_that_is_refused_stops_nothing(tmp_path, caplog):
    """The program continues without a box, with one warning and the reason in the state."""
    (tmp_path / "file").touch()
    boxes = [BlackBox(BlackBoxOptions("ops", f"{tmp_path}/file")) for _ in range(2)]
    with caplog.at_level(logging.WARNING, "otel_torchprof"):
        for box in boxes:
            box.start()
    reason = f"{tmp_path}/file cannot be made: File exists; name another folder"
    assert [box.state for box in boxes] == [f"off: {reason}"] * 2
    assert [record.getMessage() for record in caplog.records] == [f"no black box is kept: {reason}"]


def instrument(**given) -> otp.TorchInstrumentor:
    provider = TracerProvider(shutdown_on_exit=False)
    otp.TorchInstrumentor().instrument(tracer_provider=provider, detail="modules", skip_dep_check=True, **given)
    return otp.TorchInstrumentor()


def test_instrument_opens_one(tmp_path, monkeypatch):
    """By keyword or by variable; health says that it is on, and ``uninstrument()`` removes it."""
    for given in ({"blackbox": f"ops,1M,{tmp_path}"}, {}):
        monkeypatch.setenv("OTEL_TORCHPROF_BLACKBOX", "" if given else f"steps,1M,{tmp_path}")
        instrumentor = instrument(**given)
        assert instrumentor.health.sources["black box"] == ON
        (path,) = tmp_path.iterdir()
        assert contents(path).info["detail"] == ("ops" if given else "steps")
        instrumentor.uninstrument()
        assert list(tmp_path.iterdir()) == []
    monkeypatch.delenv("OTEL_TORCHPROF_BLACKBOX")
    assert "black box" not in instrument().health.sources


def test_instrument_without_a_place_for_it(tmp_path):
    """What keeps the box from being opened is in health; all else is recorded."""
    (tmp_path / "file").touch()
    sources = instrument(blackbox=f"ops,{tmp_path}/file").health.sources
    assert sources["recording"] == ON
    assert sources["black box"].startswith(f"off: {tmp_path}/file cannot be made")


def test_instrument_names_a_bad_keyword():
    """The error has the keyword, its value and what is allowed, and nothing is begun."""
    with pytest.raises(ValueError, match=r"^blackbox is 'ops,8K'; allowed is a size from 1M to 1G$"):
        instrument(blackbox="ops,8K")
    assert not otp.TorchInstrumentor().is_instrumented_by_opentelemetry


def test_another_box_is_another_argument(tmp_path):
    """A second ``instrument()`` with another box opens that one in the place of the first; with the same one nothing changes."""
    for number in (1, 1, 2):
        instrument(blackbox=f"ops,{number}M,{tmp_path}")
        (path,) = tmp_path.iterdir()
        assert path.stat().st_size == number << 20


def test_a_rank_that_exports_nothing_has_one(tmp_path, monkeypatch):
    """A box is of each rank, also where ``export_ranks`` leaves its spans out: its name and its size go by the rank."""
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    instrumentor = instrument(export_ranks="one", blackbox=f"ops,1M,{tmp_path}")
    assert instrumentor.health.sources["recording"].startswith("off")
    assert instrumentor.health.sources["black box"] == ON
    label("of a silent rank")
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("rank1.")
    assert names(path) == ["of a silent rank"]


CUT = """
import faulthandler

def own(*_):
    say("the program's handler")

def record(count):
    for _ in range(count):
        with otp.record_function("a label"):
            pass

def arrange():
    if sys.argv[2] == "faulthandler":
        faulthandler.enable()
    elif sys.argv[2] == "handler":
        signal.signal(signal.SIGBUS, own)

is_before, is_cut = sys.argv[3] == "before", sys.argv[4] == "cut"
parents.stop()
if is_before:
    arrange()
parents = box()
if not is_before:
    arrange()
record(20_000)  # over chunks
if is_cut:
    os.truncate(parents.path, 0)
    record(20_000)
    say(parents.state)
else:
    os.kill(os.getpid(), signal.SIGBUS)
parents.stop()
say("continued", signal.getsignal(signal.SIGBUS) == (own if sys.argv[2] == "handler" else signal.SIG_DFL))
"""


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("handler", ["none", "faulthandler", "handler"])
def test_a_file_that_is_cut_does_not_end_the_program(tmp_path, handler, when):
    """Whatever handler of SIGBUS the program has set before the box or after it: it continues, and its handler is not called."""
    found = ran(tmp_path, CUT, handler, when, "cut")
    assert found == ([_CUT, "continued True"], 0, "")


@pytest.mark.parametrize(
    ("handler", "end"),
    [
        ("none", ([], -signal.SIGBUS)),
        ("faulthandler", ([], -signal.SIGBUS)),
        ("handler", (["the program's handler", "continued True"], 0)),
    ],
)
def test_other_signals_are_as_without_a_box(tmp_path, handler, end):
    """A SIGBUS that is not about the file ends the program as by default, makes faulthandler write stacks, or calls its handler."""
    for when in ("before", "after"):
        said, status, errors = ran(tmp_path, CUT, handler, when, "sent")
        assert (said, status) == end
        assert ("Fatal Python error: Bus error" in errors) == (handler == "faulthandler")
