"""The lines that ``explain`` names, from samples of Python stacks and from recorded calls."""

from __future__ import annotations

import numpy as np
import pytest
from explained_files import STEP_MS, kineto, piece
from sampled_steps import HOME, PYTHON, TORCH, Part, SampledTrace, explanation, main

import otel_torchprof as otp
from otel_torchprof._answers.lines import folder_of, interval, own_calls, text_of_call
from otel_torchprof._cli.show_lines import sampled_lines
from otel_torchprof._columns.samples import WAITS_FOR_LOCK, Call, Samples, is_own
from otel_torchprof._profile.events import export_sampled

LOG = (Call(f"{HOME}/train.py", 5, "log_metrics"), *main(22))
FORWARD = Part(6.0, main(20), "torch.phase.forward")
MATMUL = Part(6.0, main(20), "aten::mm")


@pytest.mark.parametrize("compute", [FORWARD, MATMUL])
def test_the_line_of_a_gap(tmp_path, compute):
    """A gap is in a line that another calls, whether operators are known or only phases."""
    [fault] = explanation(tmp_path, SampledTrace().of_parts(60, compute, Part(4.0, LOG))).faults
    assert (fault.verdict, fault.line) == ("python-gap", "train.py:5 log_metrics")
    where = "no operator runs" if compute is MATMUL else "is in no phase"
    assert (
        fault.sentence
        == f"python-gap: 40% of step time {where}, in train.py:5 log_metrics: it prints, logs or writes to a file"
    )
    assert fault.evidence[1] == (
        "40% of step time in train.py:5 log_metrics, called from train.py:22 main (95 % interval 39% to 40%, 220 samples)"
    )


def test_a_gap_beside_the_table_of_phases(tmp_path):
    """Of the time in no phase a part is torch's own code: the sentence has both shares, and that of the first of two lines."""
    relu = Call(f"{TORCH}/nn/functional.py", 1700, "relu"), *main(21)
    parts = FORWARD, Part(2.0, relu), Part(3.0, LOG), Part(1.0, main(25))
    found = explanation(tmp_path, SampledTrace().of_parts(60, *parts))
    assert (
        "python-gap: 33% of step time is in no phase and no operator (50% is in no phase), in train.py:5 log_metrics (25%)"
        in str(found)
    )
    [rest] = [row for row in found.phases if row.phase == "unattributed"]
    assert round(rest.share, 2) == 0.5


def test_an_operator_has_its_time(tmp_path):
    """Samples inside an operator count for it and not for the gap, and name its line."""
    sort = Part(5.0, (Call(f"{HOME}/model.py", 9, "top"), *main(21)), "aten::sort")
    found = explanation(tmp_path, SampledTrace().of_parts(60, sort, Part(4.0, LOG))).faults
    assert {fault.verdict: fault.line for fault in found} == {
        "operator-bound": "model.py:9 top",
        "python-gap": "train.py:5 log_metrics",
    }


@pytest.mark.parametrize(
    ("phase", "verdict"),
    [
        ("data", "input-bound"),
        ("optimizer", "optimizer-bound"),
        ("checkpoint", "checkpoint-bound"),
        ("evaluation", "evaluation-bound"),
        ("device_wait", "device-wait-bound"),
        ("gc", "gc-bound"),
    ],
)
def test_the_line_of_a_phase(tmp_path, phase, verdict):
    """The line of a phase is the program's own, though the time is in what it calls in an installed package."""
    library = Call(f"{TORCH}/somewhere.py", 300, "inner")
    stack = library, Call(f"{HOME}/lib/work.py", 12, "work"), *main(23)
    [fault] = explanation(
        tmp_path, SampledTrace().of_parts(60, FORWARD, Part(4.0, stack, f"torch.phase.{phase}"))
    ).faults
    assert (fault.verdict, fault.line) == (verdict, "lib/work.py:12 work")
    assert "in lib/work.py:12 work" in fault.sentence


def test_the_line_of_a_pause(tmp_path):
    """Checkpoints between steps are in the line that writes them."""
    trace = SampledTrace()
    stack = Call(f"{TORCH}/serialization.py", 900, "save"), Call(f"{HOME}/train.py", 31, "store"), *main(24)
    for _ in range(6):
        trace.of_parts(10, FORWARD)
        trace.samples += [(trace.now + at, stack) for at in range(30)]
        trace.pause("checkpoint", 30.0)
    [fault] = explanation(tmp_path, trace).faults
    assert (fault.verdict, fault.line, fault.cause) == ("checkpoint-bound", "train.py:31 store", "checkpoint-in-loop")


def test_a_program_that_a_package_drives(tmp_path):
    """Where one line of the program holds all of every step, as ``fit()`` does, the package's line is named."""
    package = TORCH.replace("torch", "trainer")
    compute, decode = ((Call(f"{package}/loop.py", line, "run"), *main(20)) for line in (8, 9))
    trace = SampledTrace().of_parts(60, Part(6.0, compute, "torch.phase.forward"), Part(4.0, decode))
    [fault] = explanation(tmp_path, trace).faults
    assert fault.line == "trainer/loop.py:9 run"


def test_a_gap_in_the_line_of_a_phase(tmp_path):
    """A gap in the line that a phase's verdict names is evidence of that verdict, and no other fault."""
    trace = SampledTrace().of_parts(60, Part(8.0, main(23), "torch.phase.optimizer"), MATMUL)
    [fault] = explanation(tmp_path, trace).faults
    assert (fault.verdict, fault.line) == ("optimizer-bound", "train.py:23 main")
    assert "python-gap" in fault.evidence[-1]


def test_a_line_that_hands_its_time_on(tmp_path):
    """Where no function has half of the time, the line of the loop with the most of it hands that on to a function, which is named."""
    clip = Call(f"{HOME}/clip.py", 52, "clip"), Call(f"{HOME}/clip.py", 32, "reduce"), *main(25)
    rest = [Part(1.0, main(line)) for line in (26, 27, 28, 29)]
    [fault] = explanation(tmp_path, SampledTrace().of_parts(60, FORWARD, Part(3.0, clip), *rest)).faults
    assert fault.line == "clip.py:52 clip"
    assert "23% of step time in clip.py:52 clip, called from clip.py:32 reduce" in fault.evidence[1]
    scale = Call(f"{HOME}/clip.py", 60, "scale"), *clip[1:]
    parts = Part(2.0, clip), Part(2.0, scale)
    [fault] = explanation(tmp_path, SampledTrace().of_parts(60, FORWARD, *parts, *rest)).faults
    assert fault.line == "clip.py:32 reduce"


def test_the_line_of_an_evaluation(tmp_path):
    """An evaluation is in the line that calls the model, whose own code is what every step runs; without a module, in its innermost line."""
    call = Call(f"{TORCH}/nn/modules/module.py", 1789, "_call_impl")
    inside = Call(f"{TORCH}/nn/functional.py", 9, "linear"), call, Call(f"{HOME}/model.py", 8, "forward"), call
    around = Call(f"{HOME}/train.py", 31, "evaluate"), *main(24)
    work = Call(f"{HOME}/measure.py", 4, "measure"), *around
    for stack, line in (((*inside, *around), "train.py:31 evaluate"), (work, "measure.py:4 measure")):
        trace = SampledTrace().of_parts(60, FORWARD, Part(4.0, stack, "torch.phase.evaluation"))
        [fault] = explanation(tmp_path, trace).faults
        assert (fault.verdict, fault.line) == ("evaluation-bound", line)


def test_the_autograd_engine_is_no_gap(tmp_path):
    """Between operators of a backward pass the engine runs and not Python: it is no part of a gap."""
    engine = Part(4.0, (Call(f"{TORCH}/autograd/graph.py", 979, "_engine_run_backward"), *main(21)))
    assert explanation(tmp_path, SampledTrace().of_parts(60, MATMUL, engine)).faults == ()
    [fault] = explanation(tmp_path, SampledTrace().of_parts(60, MATMUL, engine, Part(5.0, LOG))).faults
    assert (fault.verdict, fault.line, round(fault.share, 2)) == ("python-gap", "train.py:5 log_metrics", 0.33)


def test_short_operators_of_a_loop_in_python(tmp_path):
    """Short operators in no phase are a part of the gap that their loop makes; a long one is a fault of its own."""
    compute, trace = Part(3.0, main(20), "torch.phase.forward/aten::mm"), SampledTrace(interval=0.02)
    pieces = [Part(0.02, LOG, event) for event in ("aten::clamp_", "", "aten::mul_", "")]
    [fault] = explanation(tmp_path, trace.of_parts(40, compute, *pieces * 25)).faults
    assert (fault.verdict, round(fault.share, 2)) == ("python-gap", 0.4)
    assert (
        "is Python outside of operators, or short operators in no phase, in train.py:5 log_metrics:" in fault.sentence
    )
    long = Part(1.0, LOG, "aten::sort"), Part(1.0, LOG)
    faults = explanation(tmp_path, SampledTrace(interval=0.1).of_parts(40, compute, *long)).faults
    assert {fault.verdict: round(fault.share, 2) for fault in faults} == {"operator-bound": 0.2, "python-gap": 0.2}


COLLATE = Call(f"{HOME}/data.py", 7, "pad_collate"), Call(f"{TORCH}/utils/data/_utils/fetch.py", 5, "fetch"), *main(19)
COLLECT = Call("<built-in>", 0, "<built-in function collect>"), *COLLATE


@pytest.mark.parametrize(
    ("making", "stack", "verdicts", "cause"),
    [
        (3.0, COLLATE, {"input-bound": 0.5}, "collate"),
        (3.0, COLLECT, {"input-bound": 0.5}, "gc-by-hand"),
        (0.1, COLLATE, {"gc-bound": 0.36}, "gc-often"),
        (3.0, LOG, {"gc-bound": 0.29, "input-bound": 0.21}, "gc-often"),
    ],
)
def test_collections_while_batches_are_made(tmp_path, making, stack, verdicts, cause):
    """Collections of garbage are a part of making a batch if it sets them off and is slow without them; else they are a fault of their own."""
    parts = Part(making, COLLATE, "torch.phase.data"), Part(4.0, stack, "torch.phase.gc")
    faults = explanation(
        tmp_path, SampledTrace().of_parts(60, Part(7.0, main(20), "torch.phase.forward"), *parts)
    ).faults
    assert {fault.verdict: round(fault.share, 2) for fault in faults} == pytest.approx(verdicts, abs=0.03)
    assert faults[0].cause == cause
    said = sum("garbage collections that making batches sets off" in text for text in faults[0].evidence)
    assert said == (len(faults) == 1 and making > 1)


def test_what_an_update_needs(tmp_path):
    """One pass over the parameters is no fault of an optimizer: the longest of its operators is left out of its share."""
    stack = Call(f"{TORCH}/optim/sgd.py", 300, "sgd"), *main(23)
    parts = [Part(time, stack, f"torch.phase.optimizer/aten::{name}") for time, name in ((2.0, "add_"), (1.0, "mul_"))]
    trace = SampledTrace().of_parts(60, MATMUL, *parts, Part(3.0, stack, "torch.phase.optimizer"))
    [fault] = explanation(tmp_path, trace).faults
    assert (fault.verdict, round(fault.share, 2)) == ("optimizer-bound", 0.33)
    assert "besides, 17% is what an update needs at least: the longest of its operators" in fault.evidence


def test_a_function_of_several_lines(tmp_path):
    """The function that has most of the time is named, in its line with the most, and its other lines beside it."""
    lines = [(Call(f"{HOME}/train.py", line, "work"), *main(22)) for line in (5, 6, 7)]
    parts = [Part(time, stack) for time, stack in zip((1.0, 2.0, 1.0), lines, strict=True)]
    [fault] = explanation(tmp_path, SampledTrace().of_parts(60, FORWARD, *parts)).faults
    assert fault.line == "train.py:6 work"
    assert "40% of step time in train.py:6 work" in fault.evidence[1]
    assert fault.evidence[2] == "innermost lines: train.py:5 work 10%, train.py:7 work 10%"


def test_lines_of_one_function(tmp_path):
    """A program that is one function has a line of it named."""
    parts = [Part(time, main(line)) for time, line in ((3.0, 30), (1.0, 31))]
    [fault] = explanation(tmp_path, SampledTrace().of_parts(60, FORWARD, *parts)).faults
    assert fault.line == "train.py:30 main"
    assert "called from" not in fault.evidence[1]


def test_what_a_loader_calls(tmp_path):
    """A line that the loader calls in the loop's own thread has that as its cause, however deep it is; waits for workers have another."""
    work = Call(f"{HOME}/data.py", 3, "decode"), Call(f"{HOME}/data.py", 9, "__call__")
    fetch, ask = (Call(f"{TORCH}/utils/data/{file}", 5, name) for file, name in ASKED)
    stacks = {"dataset": (*work, fetch, *main(19)), "workers": (ask, fetch._replace(function="_next_data"), *main(19))}
    for cause, stack in stacks.items():
        trace = SampledTrace().of_parts(60, FORWARD, Part(4.0, stack, "torch.phase.data"))
        [fault] = explanation(tmp_path, trace).faults
        assert (fault.verdict, fault.cause) == ("input-bound", cause)


ASKED = (("_utils/fetch.py", "fetch"), ("dataloader.py", "_try_get_data"))


def test_a_comprehension(tmp_path):
    """The line of a comprehension is one of the function that it is in, and so is what it calls."""
    file = f"{HOME}/train.py"
    inner = Call(f"{HOME}/row.py", 2, "row"), Call(file, 6, "<listcomp>"), Call(file, 5, "rows"), *main(22)
    trace = SampledTrace().of_parts(60, FORWARD, Part(1.0, inner), Part(3.0, inner[1:]))
    [fault] = explanation(tmp_path, trace).faults
    assert fault.line == "train.py:6 rows"
    assert "called from train.py:22 main" in fault.evidence[1]
    assert fault.evidence[2] == "innermost lines: row.py:2 row 10%"


HELD = (Call(f"{WAITS_FOR_LOCK} {HOME}/hog.py", 12, "busy"), *LOG)


def test_the_line_that_has_the_lock(tmp_path):
    """Where samples say which thread has the interpreter's lock, its line is named, and not the one that waits."""
    [fault] = explanation(tmp_path, SampledTrace().of_parts(60, FORWARD, Part(3.0, HELD), Part(1.0, LOG))).faults
    assert (fault.verdict, fault.line, fault.cause) == ("python-gap", "hog.py:12 busy", "lock")
    assert fault.sentence.endswith("in hog.py:12 busy: it waits for Python's lock (GIL), which another thread has")
    assert "40% of step time in train.py:5 log_metrics" in fault.evidence[1]
    few = SampledTrace().of_parts(60, FORWARD, Part(1.0, HELD), Part(3.0, LOG))
    [fault] = explanation(tmp_path, few).faults
    assert (fault.line, fault.cause) == ("train.py:5 log_metrics", "logging")


def test_waits_for_the_lock(tmp_path):
    """A verdict on such waits, by their number and length, names the line of the thread that has it."""
    trace = SampledTrace().of_parts(60, MATMUL, Part(2.0, HELD), Part(2.0, LOG))
    for span in trace.spans:
        if span["name"] == "torch.step":
            waits = {"context_switches.voluntary": 8, "blocked_duration": 4e-3, "other_threads_duration": 9e-3}
            span["attributes"] |= {f"torch.step.{name}": value for name, value in waits.items()}
    [fault] = explanation(tmp_path, trace).faults
    assert (fault.verdict, fault.line) == ("gil", "hog.py:12 busy")
    assert fault.sentence.endswith("which another Python thread has, in hog.py:12 busy")
    assert fault.next_action.endswith("lets go of the lock: hog.py:12 busy")


def test_samples_beside_a_busy_machine(tmp_path):
    """Where the loop's thread waited for a processor, the evidence says that samples lean towards waits; else it does not."""
    for share, said in ((0.0, 0), (0.15, 1)):
        trace = SampledTrace().of_parts(60, MATMUL, Part(4.0, LOG))
        for span in trace.spans:
            if span["name"] == "torch.step":
                span["attributes"]["torch.step.runnable_duration"] = share * STEP_MS / 1e3
        [fault] = [each for each in explanation(tmp_path, trace).faults if each.verdict == "python-gap"]
        assert sum("samples lean towards waits" in text for text in fault.evidence) == said


def test_few_samples(tmp_path):
    """Fewer than 20 samples name no line, and a gap without operators stays unknown."""
    found = explanation(tmp_path, SampledTrace(interval=20.0).of_parts(40, FORWARD, Part(4.0, LOG)))
    assert found.faults == ()
    few = SampledTrace(interval=20.0).of_parts(40, MATMUL, Part(4.0, LOG))
    [fault] = explanation(tmp_path, few).faults
    assert (fault.line, fault.sentence) == ("", "python-gap: 40% of step time no operator runs, cause unknown")


def test_spikes_have_lines_that_others_have_not(tmp_path):
    """The line of slow steps is one that other steps have not, though all spend more time elsewhere."""
    stack = Call(f"{HOME}/train.py", 8, "report"), *main(22)
    trace = SampledTrace().of_parts(200, FORWARD, Part(60.0, stack, period=20))
    found = explanation(tmp_path, trace)
    [spikes] = [finding for finding in (*found.findings, *found.notes) if finding.verdict == "spikes"]
    assert spikes.line == "train.py:8 report"


def test_a_late_rank_has_a_line(tmp_path):
    """Of a rank for which others wait, the line is named that takes more time than on the others."""
    slow = Part(8.0, (Call(f"{HOME}/data.py", 3, "augment"), *main(19)))
    traces = [SampledTrace(rank) for rank in range(3)]
    for trace in traces:
        wait = Part(1.0 if trace.rank == 1 else 8.0, main(21), "torch.phase.collective")
        parts = [FORWARD, slow._replace(duration=1.0 if trace.rank != 1 else 8.0), wait]
        for number in range(60):
            begin = trace.now
            trace.of_parts(1, *parts)
            start = begin + sum(part.duration for part in parts[:2])
            attributes = {"torch__collective__name": "all_reduce", "torch__collective__group": "0"}
            trace.span("c10d::allreduce_", start, wait.duration, torch__collective__sequence_nr=number, **attributes)
            trace.spans[-1], trace.spans[-2] = trace.spans[-2], trace.spans[-1]  # a step comes after what is in it
    found = explanation(tmp_path, *traces)
    [late] = [fault for fault in found.faults if fault.verdict == "straggler"]
    assert any(
        "more than the others in data.py:3 augment, called from train.py:19 main" in text for text in late.evidence
    )


def test_recorded_calls_have_lines(tmp_path):
    """Recorded calls are a gap as what is between them is, and name the function in which a built-in one is called."""

    def inside(begin):
        calls = [
            ("train.py(20): main", 0, 9.9),
            ("train.py(4): send", 6.0, 3.9),
            ("<built-in function sleep>", 6.1, 3.7),
        ]
        slices = [piece(name, begin + at, time, cat="python_function") for name, at, time in calls]
        return [slices[0], piece("aten::mm", begin + 0.1, 5.8), *slices[1:]]

    [fault] = otp.explain(kineto(tmp_path / "calls.json", 60, inside)).faults
    assert (fault.verdict, fault.line, fault.cause) == ("python-gap", "train.py:4 send", "sleep")
    assert "39% of step time in train.py:4 send, called from train.py:20 main" in fault.evidence


@pytest.mark.parametrize(
    ("file", "own"),
    [
        (f"{HOME}/train.py", True),
        ("train.py", True),
        ("models/net.py", True),
        ("<ipython-input-3-abc>", True),
        ("/scratch/ipykernel_12/34.py", True),
        (f"{HOME}/bin/train.py", True),
        (f"{HOME}/bin/jobs/train", True),
        ("/opt/python/bin/otel-torchprof", False),
        ("/venv/bin/torchrun", False),
        ("bin/pytest", False),
        ("C:\\venv\\Scripts\\torchrun.exe\\__main__.py", False),
        ("/venv/lib/python3.11/site-packages/lightning/loop.py", False),
        ("/usr/lib/python3/dist-packages/yaml.py", False),
        (f"{PYTHON}/logging/__init__.py", False),
        ("/opt/py/lib/python3.14t/copy.py", False),
        ("typing.py", False),
        ("torch/nn/functional.py", False),
        ("<frozen runpy>", False),
        ("<string>", False),
        ("<built-in>", False),
        ("", False),
        (otp.__file__, False),
        (np.__file__, False),
    ],
)
def test_own_code(file, own):
    """Code is the program's own unless it is of Python, of an installed package, of this one, or made by ``exec``."""
    assert is_own(file) is own


@pytest.mark.parametrize(
    ("files", "folder"),
    [
        ([f"{HOME}/train.py", f"{HOME}/lib/work.py", f"{TORCH}/x.py", "/venv/bin/otel-torchprof", "a.py"], f"{HOME}/"),
        ([f"{HOME}/train.py", "/elsewhere/data.py"], ""),
        (["/train.py"], ""),
        (["train.py"], ""),
    ],
)
def test_the_folder_of_a_program(files, folder):
    """The folder is that of the program's own files, without the launcher's, and never the root, which shortens nothing."""
    assert folder_of(files) == folder


def test_the_text_of_a_call():
    """A file is shown without the folder of the program or of installed packages; a built-in function has none."""
    texts = [
        text_of_call(Call(file, line, "f"), f"{HOME}/")
        for file, line in ((f"{HOME}/a/b.py", 2), (f"{HOME}/.venv/lib/python3.11/site-packages/torch/x.py", 3))
    ]
    assert texts == ["a/b.py:2 f", "torch/x.py:3 f"]
    assert text_of_call(Call("/elsewhere/a.py", 4, "f"), "") == "/elsewhere/a.py:4 f"
    assert text_of_call(Call("<built-in>", 0, "<built-in function sleep>"), "") == "<built-in function sleep>"


def test_lines_below_a_launcher(tmp_path):
    """A program that a console script runs has the same lines: the script is not one of its files."""
    launcher = Call("/opt/py/bin/otel-torchprof", 8, "<module>")
    parts = [Part(6.0, (*main(20), launcher), "aten::mm"), Part(4.0, (*LOG, launcher))]
    [fault] = explanation(tmp_path, SampledTrace().of_parts(60, *parts)).faults
    assert fault.line == "train.py:5 log_metrics"
    installed = Call("/venv/lib/python3.11/site-packages/trainer/loop.py", 3, "run")
    assert own_calls((installed, launcher)) == (installed,)


def test_stacks_without_samples(tmp_path):
    """A process has more stacks than some samples, and calls of equal stacks are found once: only stacks with time are looked at."""

    class Stacks(list):
        def __iter__(self):
            pytest.fail("all stacks are read")

        def __getitem__(self, at):
            read.append(at)
            return super().__getitem__(at)

    read = []
    times = np.array([1, 2, 3], np.int64)
    samples = Samples(times, times * 1_000_000, times * 0, np.array([5, 2, 5]), Stacks([LOG] * 9))
    assert [(line.call, line.caller, line.samples) for line in sampled_lines(samples)] == [(LOG[0], LOG[1], 3)]
    export_sampled(samples, tmp_path / "stacks")
    assert [line.split()[-1] for line in (tmp_path / "stacks").read_text().splitlines()] == ["2000", "4000"]
    assert read == [2, 5, 2, 5]
    assert own_calls(LOG) is own_calls((LOG[0], *LOG[1:]))


def test_intervals():
    """The interval of a share is Wilson's: wide of few samples, and within 0 and 1."""
    assert interval(0.5, 20) == pytest.approx((0.299, 0.701), abs=1e-3)
    assert interval(1.0, 20) == pytest.approx((0.839, 1.0), abs=1e-3)
    assert interval(0.0, 20)[0] == 0.0
