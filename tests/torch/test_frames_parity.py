"""Frames and stacks against torch's own tracer: names, counts, nesting, stacks, what is made of them."""

import collections
import gc
import inspect
import json
import re
import sys
import threading

import call_programs
import frame_models
import pytest
import torch
from frame_programs import PROGRAMS, described, functions, masked, modules, python_ids, training
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity

import otel_torchprof as otp
from examples import one_in
from otel_torchprof import profile

pytestmark = pytest.mark.skipif(
    "python_module_id" not in inspect.signature(torch.autograd.profiler_util.FunctionEvent.__init__).parameters,
    reason="the lists of this torch have no calls of Python functions",
)


def _run(profiler, program):
    program()  # what is made once and then kept is made now
    gc.collect()
    gc.disable()
    try:
        with profiler as prof:
            program()
    finally:
        gc.enable()
    return prof


def _theirs(program):
    verbose = _ExperimentalConfig(verbose=True)
    return _run(
        torch.profiler.profile(activities=[ProfilerActivity.CPU], with_stack=True, experimental_config=verbose), program
    )


def _ours(program):
    return _run(profile(with_stack=True), program)


ALL_PROGRAMS = (*PROGRAMS, *frame_models.PROGRAMS, *call_programs.PROGRAMS)


@pytest.mark.parametrize("program", one_in(2, ALL_PROGRAMS))
def test_same_events_as_torch(program):
    """Every event inside the program is torch's: name, place in the tree, stack, module number; three times over.

    Calls are counted as torch counts them, and know their callers.
    """
    events = _theirs(program).events()
    expected, numbers = described(events, program), python_ids(events, program)
    assert len(numbers) > 10
    for _ in range(3):
        events = _ours(program).events()
        assert described(events, program) == expected
        assert python_ids(events, program) == numbers


def test_language_model_has_torchs_events():
    """A step of a small GPT-2 of the transformers library, forward and backward and AdamW: every event is torch's."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, n_positions=8, vocab_size=16)
    model, tokens = transformers.GPT2LMHeadModel(config), torch.arange(8)[None]
    optimizer = torch.optim.AdamW(model.parameters())

    def gpt2():
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    gpt2()
    events = _theirs(gpt2).events()
    expected, numbers = described(events, gpt2), python_ids(events, gpt2)
    assert any(event.name == "nn.Module: GPT2Block_1" for event in events)
    events = _ours(gpt2).events()
    assert described(events, gpt2) == expected
    assert python_ids(events, gpt2) == numbers


def test_threads_that_start_later_are_traced_beside_torchs():
    """Ours has every thread; torch's tracer has those that are there when it starts, and the main thread is the same."""

    def started():
        thread = threading.Thread(target=functions)
        thread.start()
        thread.join()

    def main_thread(events):
        inside = [
            (masked(event.name), [masked(entry) for entry in event.stack])
            for event in events
            if any(entry.endswith("): started") for entry in event.stack)
        ]
        return [
            (name, stack[: next(i for i, e in enumerate(stack) if e.endswith("started"))]) for name, stack in inside
        ]

    theirs, ours = _theirs(started).events(), _run(profile(with_stack=True, all_threads=True), started).events()
    assert main_thread(ours) == main_thread(theirs)
    assert not any(event.name.endswith("): functions") for event in theirs)
    alone = _ours(functions).events()
    assert described(ours, functions) == described(alone, functions)


def _own_part(line, program):
    """A line of export_stacks from the program inwards, without the figure; None for others."""
    entries = line.rsplit(" ", 1)[0].split(";")
    start = [i for i, entry in enumerate(entries) if entry.endswith(f"):_{program.__name__}")]
    return tuple(re.sub(r"_at_0x[0-9a-f]+", "", entry) for entry in entries[start[0] :]) if start else None


def _lines(events, path):
    """What export_stacks writes."""
    events.export_stacks(str(path), "self_cpu_time_total")
    return path.read_text().splitlines()


@pytest.mark.parametrize("program", PROGRAMS)
def test_stacks_file_has_torchs_lines(program, tmp_path):
    """export_stacks writes torch's lines: the stack of each event whose self time is not below 1 us, and that time."""
    theirs, ours = _theirs(program).events(), _ours(program).events()
    lines = _lines(ours, tmp_path / "ours")
    expected = [
        ";".join(entry.translate(str.maketrans(" ;", "__")) for entry in reversed(event.stack))
        + f" {int(event.self_cpu_time_total)}"
        for event in ours
        if event.stack and int(event.self_cpu_time_total) > 0
    ]
    assert lines == expected
    own = {_own_part(line, program) for line in lines}
    # Which events take a microsecond is not the same in two runs, but many of a program do in both.
    assert len(own & {_own_part(line, program) for line in _lines(theirs, tmp_path / "theirs")} - {None}) > 5


FILTERS = {
    "modules alone": ({"modules_only": True}, lambda event: event.name.startswith("nn.Module: ")),
    "files alone": (
        {"include": ["tests/torch"], "c_functions": False},
        lambda event: event.name.startswith(("nn.Module: ", "frame_programs.py", "test_frames_parity.py")),
    ),
}


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_leaves_out_nothing_else(name):
    """A step of training has with a filter the modules, operators, optimizer and functions that it has without, and their nesting."""
    options, is_kept = FILTERS[name]

    def shown(prof, is_kept):
        found, depths = [], {}
        for event in prof.events():
            kept = not event.is_python_function or is_kept(event) or event.name.endswith("_optimizer_step_code")
            depths[event.id] = (depths[event.cpu_parent.id] if event.cpu_parent else 0) + kept
            if kept:
                found.append((depths[event.id], masked(event.name)))
        first = next(at for at, (_, text) in enumerate(found) if text == "step")
        return [(depth - found[first][0], text) for depth, text in found[first:]]

    alone = _run(profile(with_stack=True, frames=otp.FrameFilter(**options)), training)
    expected = shown(_ours(training), is_kept)
    assert shown(alone, lambda _: True) == expected
    assert sum("nn.Module: " in text for _, text in expected) > 5


@pytest.mark.parametrize("entries", [1, 3])
def test_same_groups_by_stack_as_torch(entries):
    """key_averages by the innermost entries has torch's groups, with torch's counts."""

    def groups(averages):
        own = collections.Counter()
        for average in averages:
            if any("frame_programs.py" in entry for entry in average.stack):
                stack = (re.sub(r"test_frames_parity.py.*", "this file", masked(entry)) for entry in average.stack)
                own[masked(average.key), tuple(stack)] += average.count
        return own

    theirs = groups(_theirs(training).key_averages(group_by_stack_n=entries))
    ours = groups(_ours(training).key_averages(group_by_stack_n=entries))
    assert ours == theirs
    assert len(ours) > 5  # of operators alone from torch 2.14 on


def test_chrome_trace_has_torchs_python_functions(tmp_path):
    """Calls are in the trace with torch's category and arguments."""
    traces = []
    for prof, name in ((_theirs(modules), "theirs.json"), (_ours(modules), "ours.json")):
        prof.export_chrome_trace(str(tmp_path / name))
        events = json.loads((tmp_path / name).read_text())["traceEvents"]
        calls = {event["args"]["Python id"]: event for event in events if event.get("cat") == "python_function"}
        start = next(number for number, call in calls.items() if call["name"].endswith("): modules"))
        places, found = {start: 0}, []  # counted here, since calls of other threads, if one wakes, take numbers too
        for number, call in sorted(calls.items()):
            caller = call["args"].get("Python parent id")  # torch 2.14: not of what has no caller
            if caller in places:
                places[number] = len(places)
                found.append((masked(call["name"]), places[caller], call["args"].get("Python module id")))
        assert len(found) > 50
        traces.append(found)
    assert traces[1] == traces[0]


def test_thread_that_exists_at_the_start_is_traced_as_by_torch():
    """Calls on another thread that was there are torch's, though its operators are not recorded."""

    def calls(make):
        go, done, ended = threading.Event(), threading.Event(), threading.Event()

        def work():
            go.wait(60)
            functions()
            done.set()
            ended.wait(60)

        thread = threading.Thread(target=work)
        thread.start()
        functions()
        with make() as prof:
            go.set()
            done.wait(60)
        ended.set()
        thread.join()
        return described([event for event in prof.events() if event.is_python_function], functions)

    verbose = _ExperimentalConfig(verbose=True)
    theirs = calls(
        lambda: torch.profiler.profile(activities=[ProfilerActivity.CPU], with_stack=True, experimental_config=verbose)
    )
    assert calls(lambda: profile(with_stack=True)) == theirs
    assert len(theirs) > 20


def _names_inside(prof):
    """Names and depths inside modules(); torch calls the methods of one name, of whatever class, after the first it met."""
    return [
        (re.sub(r"<built-in method (\w+) of .*>", r"<built-in method \1>", event[0]), len(event[1]))
        for event in described(prof.events(), modules)
    ]


DISPLACES = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="from 3.12 on calls are recorded through sys.monitoring, which displaces nobody"
)


@DISPLACES
def test_torchs_tracer_is_not_displaced():
    """Inside torch.profiler with stacks ours goes without, says so, and torch's events are as without it."""
    expected = _names_inside(_theirs(modules))
    modules()
    verbose = _ExperimentalConfig(verbose=True)
    with (
        torch.profiler.profile(
            activities=[ProfilerActivity.CPU], with_stack=True, experimental_config=verbose
        ) as theirs,
        profile(with_stack=True) as ours,
    ):
        modules()
    assert _names_inside(theirs) == expected
    refusal = "frames off: There is already an active Python tracer. Refusing to register profile functions."
    assert f"{refusal} sys.setprofile is in use by torch.profiler" in ours.health.notes
    assert all(event.stack == [] for event in ours.events())
    assert "aten::relu" in {event.name for event in ours.events()}


@DISPLACES
def test_torchs_tracer_inside_ours():
    """Where torch.profiler with stacks starts inside ours, it has its calls; ours goes without from then on and says so."""
    expected = _names_inside(_theirs(modules))
    modules()
    verbose = _ExperimentalConfig(verbose=True)
    with (
        profile(with_stack=True) as ours,
        torch.profiler.profile(
            activities=[ProfilerActivity.CPU], with_stack=True, experimental_config=verbose
        ) as theirs,
    ):
        modules()
    assert _names_inside(theirs) == expected
    assert any("another tool profiled them" in note for note in ours.health.notes)
    relu = next(event for event in ours.events() if event.name == "aten::relu")
    assert relu.stack == []
