"""The table of causes: each is recognised by its calls, operators or counters, and the docs list it."""

from __future__ import annotations

import os
from pathlib import Path

import generated
import pytest
from explained_files import STEP_MS, Trace
from sampled_steps import HOME, PYTHON, TORCH, Part, SampledTrace, explanation, main

import otel_torchprof as otp
from otel_torchprof._answers.causes import CAUSES, GAPS, OF_LOOP
from otel_torchprof._columns.samples import Call

PAGE = Path(__file__).resolve().parents[2] / "docs" / "verdicts.md"
FORWARD = Part(6.0, main(20), "torch.phase.forward")
MATMUL = Part(6.0, main(20), "aten::mm")

BY_CALLS = {
    "deepcopy": [
        ("", f"{PYTHON}/copy.py deepcopy"),
        ("", f"{TORCH}/optim/swa_utils.py update_parameters"),
        ("", "update_ema"),
    ],
    "logging": [
        ("", f"{PYTHON}/logging/__init__.py emit"),
        ("", "log_metrics"),
        ("data", f"{TORCH}/../tqdm/std.py refresh"),
    ],
    "clipping": [("", "clip_gradients"), ("optimizer", f"{TORCH}/nn/utils/clip_grad.py _get_total_norm")],
    "scheduler": [("", f"{TORCH}/optim/lr_scheduler.py get_lr"), ("", "WarmupScheduler.step"), ("", "update_lr")],
    "metrics": [("", f"{TORCH}/../torchmetrics/metric.py wrapped_func"), ("", "top5_accuracy")],
    "synchronization": [("device_wait", f"{TORCH}/cuda/__init__.py synchronize")],
    "collate": [("data", f"{TORCH}/utils/data/_utils/collate.py collate"), ("data", "pad_collate")],
    "dataset": [("data", "__getitem__"), ("data", f"{TORCH}/utils/data/_utils/fetch.py fetch")],
    "waits": [("data", f"{PYTHON}/threading.py wait"), ("", f"{PYTHON}/queue.py get")],
    "workers": [("data", f"{TORCH}/utils/data/dataloader.py _try_get_data")],
    "optimizer-not-fused": [("optimizer", f"{TORCH}/optim/adamw.py _single_tensor_adamw")],
    "checkpoint-in-loop": [("checkpoint", f"{TORCH}/serialization.py _save")],
}
"""By cause, the phase that the time is in, and the function that it is in."""
BY_SOURCE = {
    "sleep": ("", "time.sleep(0.003)"),
    "deepcopy": ("", "kept = copy.deepcopy(model.state_dict())"),
    "logging": ("", 'print(f"step {number}")'),
    "clipping": ("", "clip_grad_norm(parameters)"),
    "scheduler": ("", "scheduler.step()"),
    "item": ("", "total += loss.item()"),
    "synchronization": ("device_wait", "torch.cuda.synchronize()"),
    "checkpoint-in-loop": ("checkpoint", "torch.save(state, path)"),
    "conversions": ("", "weights = weights.double()"),
    "gc-by-hand": ("gc", "gc.collect()"),
    "waits": ("data", "batch = connection.recv(1 << 20)"),
}
"""By cause, the phase, and the text of the line."""
BY_OPERATORS = {"item": "aten::_local_scalar_dense", "conversions": "aten::_to_copy"}


def of_phase(phase, stack):
    """Steps that are in a stack for 40 % of their time."""
    return SampledTrace().of_parts(
        60, FORWARD if phase else MATMUL, Part(4.0, stack, f"torch.phase.{phase}" if phase else "")
    )


def call_of(text):
    """A call in a file, or in the program."""
    file, _, function = text.rpartition(" ")
    return Call(file or f"{HOME}/train.py", 7, function)


@pytest.mark.parametrize(
    ("cause", "phase", "call"), [(cause, *case) for cause, cases in BY_CALLS.items() for case in cases]
)
def test_by_calls(tmp_path, cause, phase, call):
    """A cause is recognised by the function that the time is in, with its own advice and check."""
    [fault] = explanation(tmp_path, of_phase(phase, (call_of(call), *main(22)))).faults
    [rule] = [each for each in CAUSES if each.name == cause]
    assert (fault.cause, fault.next_action, fault.check) == (cause, rule.advice, rule.check)
    assert fault.sentence.endswith(f": {rule.sentence}")


@pytest.mark.parametrize("bar", ["tqdm/std.py __iter__", "tqdm/std.py tqdm.__iter__", "rich/progress.py track"])
def test_what_a_progress_bar_waits_for_is_not_its_own(tmp_path, bar):
    """Its iterator is in all stacks of the loader that it goes through: the cause is what the loader does."""
    wait = call_of(f"{TORCH}/utils/data/dataloader.py _try_get_data")
    [fault] = explanation(tmp_path, of_phase("data", (wait, call_of(f"{TORCH}/../{bar}"), *main(22)))).faults
    assert fault.cause == "workers"
    [fault] = explanation(
        tmp_path, of_phase("data", (call_of("/opt/reader.py next_record"), call_of(f"{TORCH}/../{bar}"), *main(22)))
    ).faults
    assert fault.cause != "logging"


@pytest.mark.parametrize(("cause", "phase", "text"), [(cause, *case) for cause, case in BY_SOURCE.items()])
def test_by_the_text_of_a_line(tmp_path, cause, phase, text):
    """Calls of C are no part of a stack: the line tells them, if its file is there and has that function."""
    program = tmp_path / "train.py"
    program.write_text(f"def work():\n    {text}\n")
    trace = of_phase(phase, (Call(str(program), 2, "work"), *main(22)))
    [fault] = explanation(tmp_path, trace).faults
    assert (fault.line, fault.cause) == (f"{program}:2 work", cause)
    [fault] = explanation(tmp_path, of_phase(phase, (Call(str(program), 2, "other"), *main(22)))).faults
    assert (fault.line, fault.cause == cause) == (f"{program}:2 other", False)


def test_a_file_that_is_edited(tmp_path):
    """A program that changes between two recordings of one process has its new text."""
    program = tmp_path / "train.py"
    for time, (text, cause) in enumerate((("time.sleep(0.1)", "sleep"), ("total += loss.item()", "item"))):
        program.write_text(f"def work():\n    {text}\n")
        os.utime(program, (time, time))
        [fault] = explanation(tmp_path, of_phase("", (Call(str(program), 2, "work"), *main(22)))).faults
        assert fault.cause == cause


@pytest.mark.parametrize("file", ["/dev/zero", "/dev/zero.py", "\0.py", "folder.py"])
def test_only_files_of_python_are_read(tmp_path, file):
    """What a trace says is a file may be anything."""
    (tmp_path / "folder.py").mkdir()
    [fault] = explanation(tmp_path, of_phase("", (Call(str(tmp_path / file), 1, "work"), *main(22)))).faults
    assert fault.cause == ""


@pytest.mark.parametrize(("cause", "operator"), BY_OPERATORS.items())
def test_by_operators(tmp_path, cause, operator):
    """Operators tell what a line does."""
    trace = SampledTrace().of_parts(60, MATMUL, Part(4.0, (Call(f"{HOME}/a.py", 2, "work"), *main(22)), operator))
    [fault] = explanation(tmp_path, trace).faults
    assert (fault.verdict, fault.line, fault.cause) == ("operator-bound", "a.py:2 work", cause)


def step_of(**usage):
    """The attributes of a step, by the end of their names."""
    return {f"torch__step__{key}": value for key, value in usage.items()}


@pytest.mark.parametrize(
    ("usage", "cause"),
    [({"context_switches__involuntary": 9}, "oversubscription"), ({"context_switches__involuntary": 0}, "")],
)
def test_threads_that_compete(tmp_path, usage, cause):
    """Threads of the process that run beside the loop's, and take its processor, make the machine busy."""
    seconds = STEP_MS / 1e3
    more = step_of(**usage, runnable_duration=0.4 * seconds, other_threads_duration=0.8 * seconds)
    found = otp.explain(Trace().steps(60, **more).chrome(tmp_path / "t.json"))
    [busy] = [fault for fault in found.faults if fault.verdict == "machine-busy"]
    assert busy.cause == cause


@pytest.mark.parametrize(("odd", "cause"), [(8000, "first-touch"), (40_000, "changing-sizes")])
def test_fresh_memory(tmp_path, odd, cause):
    """Steps that take as much memory anew each time differ from those that take more or less."""
    trace = Trace()
    for number in range(60):
        trace.span("aten::mm", trace.now, 9.0)
        trace.step(**step_of(page_faults__minor=odd if number % 2 else 8000))
    [fault] = otp.explain(trace.chrome(tmp_path / "t.json")).faults
    assert (fault.verdict, fault.cause) == ("allocation-churn", cause)


@pytest.mark.parametrize(("count", "cause"), [(400, "small-operators"), (20, "")])
def test_many_operators(tmp_path, count, cause):
    """Python between hundreds of short operators has them as its cause; a few have none."""
    trace = Trace()
    for _ in range(40):
        for place in range(count):
            trace.span("aten::add", trace.now + place * STEP_MS / count, 0.2 * STEP_MS / count)
        trace.step()
    found = otp.explain(trace.chrome(tmp_path / "t.json"))
    [gap] = [fault for fault in found.faults if fault.verdict == "python-gap"]
    assert gap.cause == cause


def test_a_collection_that_nobody_calls(tmp_path):
    """A collection of garbage that no line calls is set off by new objects."""
    [fault] = explanation(tmp_path, of_phase("gc", main(22))).faults
    assert (fault.verdict, fault.line, fault.cause) == ("gc-bound", "train.py:22 main", "gc-often")


def test_a_recompilation(tmp_path):
    """Steps that compile again do so for shapes that change."""
    trace = Trace()
    for number in range(100):
        slow = number % 10 == 9
        trace.step(STEP_MS * (9 if slow else 1), **({"compile": 0.88} if slow else {}))
    [fault] = otp.explain(trace.chrome(tmp_path / "t.json")).faults
    assert (fault.verdict, fault.cause) == ("compile-bound", "changing-shapes")


def listed(verdicts):
    """Verdicts as text, by name."""
    return ", ".join(f"`{verdict}`" for verdict in sorted(verdicts))


def explained(verdicts):
    """The verdicts that a cause may explain, with the name of the largest group that is among them."""
    name, group = next(((name, group) for name, group in GROUPS.items() if group <= verdicts), ("", frozenset()))
    return ", ".join(filter(None, (name, listed(verdicts - group))))


GROUPS = {"loop": OF_LOOP, "gaps": GAPS}


def test_every_cause_is_listed():
    """The last table of the page of verdicts is made from that of causes."""
    before, mark, _ = PAGE.read_text().partition("<!-- causes -->\n")
    rows = [
        "| Cause | Explains | What the program does | What to do |",
        "| --- | --- | --- | --- |",
        *(f"| `{cause.name}` | {explained(cause.verdicts)} | {cause.sentence} | {cause.advice} |" for cause in CAUSES),
        "",
        *(f"- *{name}*: {listed(group)}" for name, group in GROUPS.items()),
    ]
    generated.check(PAGE, f"{before}{mark}{chr(10).join(rows)}\n")


def test_rules_are_whole():
    """Every cause has a sentence, an advice, a check, and one way to be recognised."""
    for cause in CAUSES:
        assert all((cause.verdicts, cause.sentence, cause.advice, cause.check))
        assert (cause.test is None) is bool(cause.calls or cause.operators)
    assert len({cause.name for cause in CAUSES}) == len(CAUSES)
