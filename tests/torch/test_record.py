"""Steps of a program that runs, recorded in more detail: from its own code, over its control socket, and on several ranks at once."""

from __future__ import annotations

import io
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import record_ranks_program
import torch
from asked import ask
from instrumented import Instrumented
from launched import RANKS, launched
from unprepared import unprepared

import otel_torchprof as otp
from otel_torchprof._cli import attach, record_command
from otel_torchprof._cli.control_client import ControlCall, ask_each, process_of, processes
from otel_torchprof._cli.main import _parser, main
from otel_torchprof._files.attribute_keys import STEP
from otel_torchprof._instrument import step_choice, step_recording
from otel_torchprof._instrument.step_choice import KeptSteps, StepRequest
from otel_torchprof._instrument.step_log import StepLog
from otel_torchprof._instrument.step_recording import StepRecording
from otel_torchprof._model.step_spans import RecordedStep
from otel_torchprof._native.recorder import now_ns
from otel_torchprof._process.control_wire import ControlError
from otel_torchprof._record.recording import ProfileSegment
from otel_torchprof._record.source import RecordingOptions

LONG_SECONDS = 0.3
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="control sockets are for Linux")


class Loop:
    """A small training loop, whose steps the program ends, or which a rule finds."""

    def __init__(self, *, says: bool = True, model=None):
        self.parameter = torch.nn.Parameter(torch.ones(2, 2))
        self.model = model or (lambda: self.parameter @ self.parameter)
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.01)
        self.says, self.steps = says, 0

    def step(self):
        self.optimizer.zero_grad()
        self.model().sum().backward()
        self.optimizer.step()
        self.steps += 1
        if self.says:
            otp.TorchInstrumentor().step()

    def until(self, is_over):
        while not is_over():
            self.step()


@pytest.fixture
def service(monkeypatch, tmp_path):
    """A service that is drained often."""
    monkeypatch.setenv("OTEL_TORCHPROF_CONTROL", str(tmp_path / "sockets"))
    made = Instrumented(drained_every=50)
    yield made
    made.provider.shutdown()


class Scripted:
    """An instrumentation whose drains bring steps with the numbers of a script."""

    is_running = True
    raised = RecordingOptions()

    def __init__(self, *drains):
        self.step_log, self._drains = StepLog(), list(drains)

    def ask_drain(self):
        for number in self._drains.pop(0) if self._drains else ():
            self.step_log.add_step(RecordedStep(number, now_ns(), now_ns()))

    def recorded(self, **request):
        """A recording of its steps that is over."""
        recording = StepRecording(self, StepRequest.checked(**request))
        recording.start()
        assert recording.wait(60)
        return recording


def in_background(function, *arguments):
    """Runs a function on a thread; returns a function that says whether it is over, and the list that then has its result."""
    results = []

    def run():
        try:
            results.append(function(*arguments))
        except Exception as error:  # noqa: BLE001 - looked at by the test
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return lambda: not thread.is_alive(), results


@pytest.mark.parametrize(("detail", "says"), [("steps", True), ("steps", False), ("ops", True)])
def test_so_many_steps_whole_and_nothing_else(service, detail, says):
    """The recording has all operators of consecutive steps, and what the instrumentation records itself stays as it was."""
    loop = Loop(says=says)
    with service.on(detail):
        loop.until(lambda: loop.steps == 20)
        recording = otp.TorchInstrumentor().record(4, record_shapes=True)
        loop.until(lambda: recording.wait(0))
        first = recording.steps[0].number
        loop.until(lambda: loop.steps >= first + 10)
    service.provider.force_flush()
    assert not recording.error
    assert [step.number for step in recording.steps] == list(range(first, first + 4))
    columns = recording.columns
    assert ((columns["start"] >= recording.steps[0].start) & (columns["start"] <= recording.steps[-1].end)).all()
    counts = {average.key: average.count for average in recording.key_averages()}
    assert counts["aten::mm"] == 4 * 3
    assert recording.key_averages(group_by_input_shape=True)
    spans = Counter(span.name for span in service.exporter.spans)
    assert ("aten::mm" in spans) == (detail == "ops")
    numbers = [span.attributes[STEP] for span in service.exporter.spans if span.name == "torch.step"]
    assert sorted(set(numbers)) == list(range(min(numbers), max(numbers) + 1))
    starts = {step.number: step.start for step in recording.steps}
    assert starts == {
        number: span.start_time
        for span in service.exporter.spans
        if span.name == "torch.step" and (number := span.attributes[STEP]) in starts
    }


def test_with_metrics_alone_and_with_calls(service):
    """Also where nothing but metrics is recorded: the detail rises to calls of Python, and falls again."""
    loop = Loop()
    instrumentor = otp.TorchInstrumentor()
    instrumentor.instrument(tracer_provider=service.provider, detail="metrics")
    try:
        loop.until(lambda: loop.steps == 5)
        recording = instrumentor.record(2, detail="frames")
        loop.until(lambda: recording.wait(0))
    finally:
        instrumentor.uninstrument()
    assert not recording.error
    assert len(recording.steps) == 2
    assert any("test_record.py" in event.name for event in recording.events())
    assert sys.getprofile() is None


def test_from_a_step_on(service):
    """The first step may be chosen; one that is over is refused."""
    loop = Loop()
    with service.on("steps"):
        loop.until(lambda: loop.steps == 20)
        recording = otp.TorchInstrumentor().record(2, at_step=300)
        loop.until(lambda: recording.wait(0))
        late = otp.TorchInstrumentor().record(2, at_step=2)
        loop.until(lambda: late.wait(0))
    assert [step.number for step in recording.steps] == [300, 301]
    assert "step 2 has ended" in late.error
    with pytest.raises(otp.TorchProfError, match="step 2 has ended"):
        late.key_averages()


def test_drains_that_bring_many_steps():
    """However many steps one drain brings, none is missing between those of the drain before and its own."""
    recording = Scripted(range(3), range(3, 5_000)).recorded(steps=26)
    assert not recording.error
    assert [step.number for step in recording.steps] == list(range(26))


def test_lost_steps():
    """Steps of a recording are consecutive: it begins anew after a lost one, or, if its first step is given, fails and says so."""
    recording = Scripted([7, 8], [25, 26], [27]).recorded(steps=3)
    assert [step.number for step in recording.steps] == [25, 26, 27]
    failed = Scripted([], [7, 8], [25, 26]).recorded(steps=3, at_step=7)
    assert failed.error.startswith("step 9 was lost")


def test_without_steps_by_time(service, monkeypatch):
    """A program without steps is recorded by seconds; by steps it is not, and the error says what to do."""
    monkeypatch.setattr(step_recording, "_STEPLESS_SECONDS", 0.1)
    with service.on("steps"):
        recording = otp.TorchInstrumentor().record(seconds=0.3)
        while not recording.wait(0):
            torch.ones(2).add(1)
        failed = otp.TorchInstrumentor().record()
        assert failed.wait(60)
    assert not recording.error
    assert recording.steps == ()
    assert {average.key for average in recording.key_averages()} >= {"aten::add", "aten::ones"}
    assert "record by time" in failed.error


@pytest.fixture
def parts(monkeypatch):
    """The recordings that were started, weakly; a new one is started as soon as possible."""
    monkeypatch.setattr(step_recording, "_WATCH_SECONDS", 0.01)
    started, start = [], ProfileSegment.start

    def noted(part):
        started.append(weakref.ref(part))
        start(part)

    monkeypatch.setattr(ProfileSegment, "start", noted)
    return started


def test_until_a_step_is_slow(service, parts, monkeypatch):
    """The slow step is kept whole with some before it; what was recorded long before is dropped as the job runs."""
    is_slow = threading.Event()
    monkeypatch.setattr(KeptSteps, "_is_slow", lambda _choice, _step: is_slow.is_set())
    loop = Loop()
    with service.on("steps"):
        loop.until(lambda: loop.steps == 20)
        recording = otp.TorchInstrumentor().record(3, keep="slow")
        loop.until(lambda: len(parts) >= 6)
        assert sum(part() is not None for part in parts) <= 3  # one is being dropped
        assert recording.ended_steps >= 4 * 3
        is_slow.set()
        loop.until(lambda: recording.wait(0))
    assert not recording.error
    first = recording.steps[0].number
    assert [step.number for step in recording.steps] == [first, first + 1, first + 2]
    assert {average.key: average.count for average in recording.key_averages()}["aten::mm"] == 3 * 3
    assert any(note.startswith(f"step {first + 2} took ") for note in recording.health.notes)
    assert not recording.is_cut
    assert sum(part() is not None for part in parts) == 1


class Saved:
    """What takes long to save."""

    def __reduce__(self):
        is_over = time.monotonic() + LONG_SECONDS
        while time.monotonic() < is_over:
            pass
        return int, ()


class SavingLoop(Loop):
    """Saves before each tenth step."""

    def step(self):
        if self.steps % 10 == 9:
            torch.save([Saved()], io.BytesIO())
        super().step()


@pytest.mark.parametrize("says", [True, False])
def test_checkpoints_are_recorded_and_may_be_slow(service, tmp_path, says):
    """What a loop does between its steps, or in some, is in the recording by its name, and is slow from the limit on."""
    loop = SavingLoop(says=says)
    with service.on("steps"):
        loop.until(lambda: loop.steps == 20)
        recording = otp.TorchInstrumentor().record(40)
        loop.until(lambda: recording.wait(0))
        slow = otp.TorchInstrumentor().record(5, keep="slow", slow_limit=LONG_SECONDS)
        loop.until(lambda: slow.wait(0))
    first = recording.steps[0].number
    assert [step.number for step in recording.steps] == list(range(first, first + 40))
    recording.export_chrome_trace(tmp_path / "a.json")
    assert "checkpoint-bound" in [finding.verdict for finding in otp.explain(tmp_path / "a.json").findings]
    assert not slow.error
    assert "took" in slow.health.notes[-1]


def test_in_a_forked_child_the_parents_is_over():
    """Nobody waits in a child for what the parent's thread does."""
    recording = StepRecording(Scripted(), StepRequest.checked(steps=1))
    recording.start()
    child = os.fork()
    if not child:
        os._exit(0 if recording.wait(60) and "forked" in recording.error else 1)
    _, status = os.waitpid(child, 0)
    recording.cancel()
    assert recording.wait(60)
    assert status == 0


def test_what_starts_a_job_is_not_waited_for(capfd):
    """With ``--all`` a process without steps is left out if others have steps, and named; by time it is recorded too."""
    stated = [(SimpleNamespace(pid=1), {"step": None}), (SimpleNamespace(pid=2), {"step": 7})]
    for words, expected in ((["--all"], [2]), (["--all", "--seconds", "1"], [1, 2])):
        options = _parser().parse_args(["record", *words])
        assert [process.pid for process, _ in record_command._with_steps(stated, options)] == expected
    assert "process 1 has no steps" in capfd.readouterr().err


def test_as_many_steps_as_lines_need():
    """By default a recording of short steps has more of them, the same number in all processes of a job."""
    targets = [SimpleNamespace(status={"step": 5, "step_seconds": seconds}) for seconds in (0.02, 0.01, None)]
    for words, expected in (([], 200), (["--steps", "3"], 3), (["--seconds", "3"], None), (["--keep", "slow"], None)):
        options = _parser().parse_args(["record", "--all", *words])
        found = {record_command._arguments(options, target, targets, 0).get("steps") for target in targets}
        assert found == {expected}


def test_no_step_is_slow(service):
    """At the time limit nothing is kept, and the error says how many steps were looked at; a limit needs ``keep``."""
    loop = Loop()
    with service.on("steps"):
        loop.until(lambda: loop.steps == 20)
        recording = otp.TorchInstrumentor().record(keep="slow", slow_limit=10**6, seconds=1e-9)
        loop.until(lambda: recording.wait(0))
        recording = otp.TorchInstrumentor().record(keep="slow", slow_limit=10**6)
        loop.until(lambda: recording.ended_steps > 2)
        recording.cancel()
        loop.until(lambda: recording.wait(0))
    assert re.match(r"nothing is kept: none of [\d,]+ steps was slow, the median is \d", recording.error)
    with pytest.raises(ValueError, match="slow_limit is 1"):
        otp.TorchInstrumentor().record(slow_limit=1)


def test_until_a_step_waits_for_other_ranks(service):
    """The wait in collectives is what counts, and without phases there is none to be looked at."""
    loop = Loop()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with service.on("steps"):
            loop.until(lambda: loop.steps == 20)
            recording = otp.TorchInstrumentor().record(keep="wait", slow_limit=1e-9)
            loop.until(lambda: recording.ended_steps > 2)
            assert not recording.wait(0)
            torch.distributed.all_reduce(torch.ones(2))
            loop.until(lambda: recording.wait(0))
    finally:
        torch.distributed.destroy_process_group()
    assert not recording.error
    assert "waited for other ranks for" in recording.health.notes[-1]
    averages = {average.key: average.count for average in recording.key_averages()}
    assert averages["gloo:all_reduce"] == 1
    assert averages["aten::mm"] == len(recording.steps) * 3
    with service.on("metrics"), pytest.raises(otp.TorchProfError, match="no phases"):
        otp.TorchInstrumentor().record(keep="wait")


@LINUX
def test_until_a_step_raises_the_memory(service, monkeypatch):
    """The step that needs much memory for a moment is the last one that is kept."""
    monkeypatch.setattr(step_choice, "_UNJUDGED_NS", 0)
    most = [0]

    def model():
        if most[0]:
            size, most[0] = most[0], 0
            torch.ones(size, dtype=torch.uint8)
            large.append(loop.steps)
        return loop.parameter @ loop.parameter

    loop, large = Loop(), []
    loop.model = model
    with service.on("steps"):
        loop.until(lambda: loop.steps == 20)
        recording = otp.TorchInstrumentor().record(3, keep="memory")
        loop.until(lambda: recording.ended_steps > 60)
        most[0] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10) + (256 << 20)
        loop.until(lambda: recording.wait(0))
    assert not recording.error
    assert len(recording.steps) == 3
    assert recording.steps[-1].number == large[0]
    assert "raised the memory by" in recording.health.notes[-1]
    with service.on("metrics"), pytest.raises(otp.TorchProfError, match="no phases"):
        otp.TorchInstrumentor().record(keep="memory")


def test_a_full_memory_starts_anew():
    """While no step ends, what is recorded is dropped before the memory is full, so that the next step is whole."""
    window = step_recording._StepWindow(RecordingOptions(operators=True, all_threads=True, memory_limit=4 << 20))
    window.start()
    since = window.since
    while window.since == since:
        for _ in range(100):
            torch.ones(1)
        window.renew((), 1)
    torch.ones(1).mul(2)
    window.renew((), 1)
    window.stop()
    assert not window.health().dropped
    batch = window.batch()
    assert "aten::mul" in {batch.names[name] for name in batch["name"].tolist()}
    assert len(batch) > 10_000


def test_one_at_once_and_only_while_torch_is_instrumented(service):
    """A second one is refused; the end of the instrumentation ends the recording, which says so."""
    with pytest.raises(otp.TorchProfError, match="not instrumented"):
        otp.TorchInstrumentor().record()
    with pytest.raises(ValueError, match="steps is 0"):
        otp.TorchInstrumentor().record(0)
    with service.on("steps"):
        Loop().step()
        recording = otp.TorchInstrumentor().record()
        with pytest.raises(otp.TorchProfError, match="in progress"):
            otp.TorchInstrumentor().record()
        with pytest.raises(otp.TorchProfError, match="not recorded yet"):
            recording.events()
    assert recording.wait(60)
    assert recording.error == "nothing is recorded: the instrumentation ended before the first step had"


def test_nothing_is_compiled_again(service):
    """A compiled model has the same graphs before, while and after its steps are recorded."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter, loop = CompileCounter(), Loop()
    model = torch.compile(torch.nn.Linear(2, 2), backend=counter)
    loop.model = lambda: model(loop.parameter)
    with service.on("steps"):
        loop.until(lambda: loop.steps == 5)
        compiled = counter.frame_count
        for _ in range(2):
            recording = otp.TorchInstrumentor().record(3)
            while not recording.wait(0):
                loop.step()
            assert not recording.error
    assert counter.frame_count == compiled > 0


@LINUX
@pytest.mark.parametrize("name", ["steps.json.gz", "steps.otlp"])
def test_the_command(service, tmp_path, capfd, name):
    """``record`` writes a file of the kind that its name says, with the phases that the instrumentation knows, and explains it."""
    loop = Loop()
    words = ["record", "--pid", str(os.getpid()), "--steps", "26", "-o", str(tmp_path / name), "--explain"]
    with service.on("steps"):
        loop.until(lambda: loop.steps == 20)
        is_over, status = in_background(main, words)
        loop.until(is_over)
    output = capfd.readouterr()
    assert status == [0], output.err
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["sockets", name])
    assert "26 steps" in output.out
    assert re.search(r"^backward +\S+ +\S+ +[1-9]", output.out, re.MULTILINE), output.out
    assert "not known" not in output.out
    profile = otp.load(tmp_path / name)
    first = profile.steps[0].number
    assert [step.number for step in profile.steps] == list(range(first, first + 26))
    assert {average.key: average.count for average in profile.key_averages()}["aten::mm"] == 26 * 3


@LINUX
def test_the_command_until_a_step_is_slow(service, tmp_path, capfd):
    """``record --keep slow`` writes the slow step and those before it, says how slow it is, and explains it."""
    loop = Loop()
    loop.model = lambda: (
        (loop.steps % 10 == 9 and threading.Event().wait(LONG_SECONDS)) or loop.parameter @ loop.parameter
    )
    words = ["record", "--pid", str(os.getpid()), "--keep", "slow", "--slow-limit", str(LONG_SECONDS), "--steps", "5"]
    with service.on("steps"):
        loop.until(lambda: loop.steps == 5)
        is_over, status = in_background(main, [*words, "-o", str(tmp_path / "slow.otlp"), "--explain"])
        loop.until(is_over)
    output = capfd.readouterr()
    assert status == [0], output.err
    steps = otp.load(tmp_path / "slow.otlp").steps
    assert 0 < len(steps) <= 5
    assert steps[-1].end - steps[-1].start >= LONG_SECONDS * 1e9
    assert f"; step {steps[-1].number} took " in output.err
    for state, said in (("recording", "waiting for a slow step"), ("reading", "reading")):
        line = record_command._line({1: {"state": state, "steps": 1200}}, [{"keep": "slow"}])
        assert line == f"otel-torchprof: {said}, 1,200 steps seen"


@LINUX
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_command_that_is_ended_leaves_no_file(service, tmp_path, number, status):
    """``record`` that is ended by SIGTERM or Ctrl-C leaves no file behind, also none without its name."""
    loop = Loop()
    folder = tmp_path / "out"
    folder.mkdir()
    words = ["record", "--pid", str(os.getpid()), "--steps", "1000000", "-o", str(folder / "steps.json"), "-q"]
    with service.on("steps"):
        loop.until(lambda: loop.steps == 5)
        with subprocess.Popen([sys.executable, "-m", "otel_torchprof", *words], stderr=subprocess.DEVNULL) as command:
            loop.until(lambda: any(folder.iterdir()) or command.poll() is not None)
            command.send_signal(number)
            loop.until(lambda: command.poll() is not None)
    assert (command.returncode, list(folder.iterdir())) == (status, [])


@LINUX
@pytest.mark.skipif(sys.version_info < (3, 11), reason="the library is built with an option of Python 3.11")
def test_a_program_that_does_not_know_this_package(monkeypatch, tmp_path):
    """It is instrumented until the file is written, and then as it was: the next command comes in again."""
    monkeypatch.setenv("OTEL_TORCHPROF_CONTROL", str(tmp_path / "sockets"))
    with unprepared("train") as program:
        monkeypatch.setattr(attach, "_remote_exec", program.execute)
        for name in ("first.json", "second.json"):
            words = ["record", "--pid", str(program.process.pid), "--steps", "3", "-o", str(tmp_path / name), "-q"]
            assert main(words) == 0
            profile = otp.load(tmp_path / name)
            assert len(profile.steps) == 3
            assert {average.key: average.count for average in profile.key_averages()}["aten::mm"] == 3 * 3
            assert not processes()
        before, after = program.states()
    assert before == after


@LINUX
def test_a_client_that_leaves(service, tmp_path):
    """The recording ends with it and nothing is written; the next client may record, and one more is refused meanwhile."""
    loop = Loop()
    with service.on("steps"), (tmp_path / "a.json").open("wb") as file:
        loop.until(lambda: loop.steps == 20)

        def leave():
            process = process_of(os.getpid())
            busy = []

            def on_progress(_call, _value):
                busy.append(ask_each([ControlCall(process, "record", {"name": "b.json"}, (file.fileno(),))])[0])
                raise KeyboardInterrupt

            try:
                ask_each(
                    [ControlCall(process, "record", {"steps": 10**9, "name": "a.json"}, (file.fileno(),))],
                    on_progress=on_progress,
                )
            except KeyboardInterrupt:
                return busy[0]

        is_over, (result) = in_background(leave)
        loop.until(is_over)
        assert "in progress" in str(result[0])
        loop.until(lambda: step_recording.in_progress._recording is None)
        recording = otp.TorchInstrumentor().record(1)
        loop.until(lambda: recording.wait(0))
    assert not recording.error
    assert (tmp_path / "a.json").stat().st_size == 0


@LINUX
@pytest.mark.parametrize(
    ("arguments", "files", "error"),
    [
        ({"name": "a.txt"}, 1, "'a.txt' names no format"),
        ({"name": "a.json"}, 0, "0 files came"),
        ({"name": "a.json", "steps": -1}, 1, "steps is -1; it must be a whole number"),
        ({"name": "a.json", "path": "/etc"}, 1, "path is no argument"),
    ],
)
def test_bad_requests(service, tmp_path, arguments, files, error):
    """The error names the argument, its value and the way out."""
    with service.on("steps"), (tmp_path / "a.json").open("wb") as file, pytest.raises(ControlError, match=error):
        ask(process_of(os.getpid()), "record", arguments, [file.fileno()] * files)


@LINUX
def test_all_ranks_from_the_same_step_on(monkeypatch, tmp_path):
    """Four ranks over gloo are recorded from one step on, each into a file with its rank, which are explained together."""
    monkeypatch.setenv("OTEL_TORCHPROF_CONTROL", str(tmp_path / "sockets"))
    is_over, done = in_background(launched, record_ranks_program.__name__, tmp_path)
    try:
        while len(list(tmp_path.glob("begun*"))) < RANKS and not is_over():
            threading.Event().wait(0.05)
        while any(ask(process, "status")["step"] is None for process in processes()):
            threading.Event().wait(0.05)
        assert len(processes()) == RANKS
        assert main(["record", "--all", "--steps", "5", "-o", str(tmp_path / "run.json"), "-q"]) == 0
        words = ["--keep", "slow", "--slow-limit", "1e-9", "--steps", "2", "-o", str(tmp_path / "slow.json"), "-q"]
        assert main(["record", "--all", *words]) == 0
    finally:
        (tmp_path / "stop").touch()
        while not is_over():
            threading.Event().wait(0.05)
    assert done[0].returncode == 0, done[0].stderr
    profiles = [otp.load(tmp_path / f"run.rank{rank}.json") for rank in range(RANKS)]
    numbers = {tuple(step.number for step in profile.steps) for profile in profiles}
    assert len(numbers) == 1
    assert len(numbers.pop()) == 5
    slow = [otp.load(tmp_path / f"slow.rank{rank}.json").steps for rank in range(RANKS)]
    assert len({steps[-1].number for steps in slow}) == 1  # the one that was found first
    assert [profile.rank for profile in profiles] == list(range(RANKS))
    assert all("gloo:all_reduce" in {average.key for average in profile.key_averages()} for profile in profiles)
    assert not list(Path(tmp_path / "sockets").iterdir())
