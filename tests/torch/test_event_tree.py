"""``kineto_results``: the tree and the list of all that was recorded, and what torch's own analyses make of them."""

from __future__ import annotations

import _thread
import contextlib
import gc
import inspect
import io
import re
import threading

import pytest

from examples import one_in

torch = pytest.importorskip("torch", minversion="2.6")

import memory_programs  # noqa: E402
from observed import torchs  # noqa: E402
from torch._C import _profiler as native  # noqa: E402
from torch.profiler import _utils  # noqa: E402
from torch.profiler._memory_profiler import MemoryProfile  # noqa: E402

import otel_torchprof as otp  # noqa: E402

WHOLE = {"record_shapes": True, "profile_memory": True, "with_stack": True}
TAGS = native._EventType


def make_torchs():
    return torchs(shapes=True, profile_memory=True, with_stack=True)


def make_ours():
    return otp.profile(**WHOLE)


def profiled(make, factory):
    """A profile of a program that is made anew."""
    torch.manual_seed(0)
    steps = factory()
    gc.collect()
    gc.disable()
    try:
        with make() as prof:
            steps()
    finally:
        gc.enable()
    return prof


def walk(events, depth=0):
    """Every event with its depth among operators, memory and modules, parents before children."""
    for event in events:
        if is_compared(event):
            yield depth, event
        yield from walk(event.children, depth + is_compared(event))


def is_compared(event):
    """Not calls of functions: some of the names that torch's tree has for these were freed before they are read."""
    kind, fields = event.typed
    return kind in (TAGS.TorchOp, TAGS.Allocation) or (kind == TAGS.PyCall and bool(fields.module or fields.optimizer))


def told(value):
    """What a tensor's metadata say, but for addresses and for what has no memory, whose numbers torch gives to others too."""
    if isinstance(value, (list, tuple)):
        return [told(one) for one in value]
    if not isinstance(value, native._TensorMetadata):
        return value
    ids = (value.id, value.allocation_id) if value.storage_data_ptr else None
    return ids, value.sizes, value.strides, value.dtype, value.device, value.layout, value.dim


def facts(event, first_number):
    """All that an event tells, but for times and addresses."""
    kind, fields = event.typed
    if kind == TAGS.Allocation:
        return fields.id, fields.allocation_id, fields.alloc_size, fields.total_reserved, fields.device
    if kind == TAGS.PyCall:
        module, optimizer = fields.module, fields.optimizer
        found = [module.cls_name, told(module.parameters)] if module else told(optimizer.parameters)
        return [event.name if module else "", found]
    number = fields.sequence_number - first_number if fields.sequence_number >= 0 else -1
    # Torch tells a function's own of its inputs that are no tensors only where its profiler is on.
    inputs = told(fields.inputs) if fields.name != "CheckpointFunction" else []
    return fields.name, event.name, number, fields.scope, fields.allow_tf32_cublas, inputs


def lines(prof):
    """The tree as a list."""
    found = list(walk(prof.profiler.kineto_results.experimental_event_tree()))
    numbers = [event.typed[1].sequence_number for _, event in found if event.tag == TAGS.TorchOp]
    first = min(number for number in [*numbers, 1 << 60] if number >= 0)
    return [(depth, event.tag, *facts(event, first)) for depth, event in found]


def reuses_tensors_without_memory(factory):
    """Whether tensors are made without memory, which torch gives one number however many get some later."""
    return factory.__name__ in {"embeddings", "transformer", "checkpoints"}


@pytest.mark.parametrize(
    "factory",
    one_in(4, [one for one in memory_programs.PROGRAMS if not reuses_tensors_without_memory(one)]),
    ids=lambda factory: factory.__name__,
)
def test_the_tree_is_torchs(factory):
    """Operators, memory and modules: the same ones, in the same places, with the same inputs, parameters and numbers."""
    assert lines(profiled(make_ours, factory)) == lines(profiled(make_torchs, factory))


@pytest.mark.parametrize("factory", one_in(4, memory_programs.PROGRAMS), ids=lambda factory: factory.__name__)
def test_torchs_memory_profile(factory):
    """Torch's own analysis of memory finds the same in our profile as in torch's: actions, sizes and categories in order."""
    found = []
    for make in (make_torchs, make_ours):
        prof = profiled(make, factory)
        memory = prof._memory_profile()
        assert isinstance(memory, MemoryProfile)
        categories = memory._categories
        found.append(
            [
                (action.name, size, version, categories.get(key, version))
                for _, action, (key, version), size in memory.timeline
            ]
        )
    assert found[1] == found[0]


def layers():
    """A program with all that torch's patterns warn of on a CPU."""
    nn = torch.nn
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)
    loader = torch.utils.data.DataLoader([torch.randn(3, 8, 8) for _ in range(8)], batch_size=4)

    def steps():
        for batch in loader:
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    return steps


def report(matcher, prof):
    """What torch's patterns say of a profile, without the lines of the code."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        matcher.report_all_anti_patterns(prof)
    return re.sub(r"\.py:\d+", ".py", text.getvalue())


def test_torchs_patterns():
    """They match in our profile as often as in torch's, and name the same files."""
    matcher = pytest.importorskip("torch.profiler._pattern_matcher", reason="this torch has no such module any more")
    ours, theirs = (report(matcher, profiled(make, layers)) for make in (make_ours, make_torchs))
    assert ours == theirs
    assert "Synchronized DataLoader Pattern: 1 events matched." in ours
    assert "Enabling Bias in Conv2d Followed By BatchNorm Pattern: 2 events matched." in ours


def test_torchs_basic_evaluation():
    """It takes every event once, and its times of their own add up to the time of what nothing is around."""
    if not hasattr(_utils, "BasicEvaluation"):
        pytest.skip("this torch has no such class any more")
    prof = profiled(make_ours, layers)
    found = _utils.BasicEvaluation(prof.profiler)
    roots = prof.kineto_results.experimental_event_tree()
    assert len(found.events) == len(prof.kineto_results.events())
    assert sum(one.self_time_ns for one in found.metrics.values()) == sum(root.duration_time_ns for root in roots)


@contextlib.contextmanager
def waiting_threads():
    """One of ``threading``'s and one without, in both of which torch never runs."""
    ended, started = threading.Event(), threading.Barrier(3)

    def wait():
        started.wait()
        ended.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    _thread.start_new_thread(wait, ())
    started.wait()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("around", [contextlib.nullcontext, waiting_threads])
def test_torchs_reader_of_events(around):
    """What torch reads out of our list of events are the averages that we give, to the tenth of a microsecond, of all threads."""
    with around():
        check_torchs_reader()


def check_torchs_reader():
    prof = profiled(lambda: otp.profile(with_flops=True, **WHOLE), layers)
    torchs_own = torch.autograd.profiler
    read = torchs_own.profile(with_flops=True)._parse_kineto_results(prof.kineto_results)
    events = torchs_own.EventList(read, use_device=None, profile_memory=True, with_flops=True)
    events._build_tree()

    def rows(averages):
        return {
            (row.key, str(row.input_shapes)): (row.count, row.cpu_time_total, row.self_cpu_time_total, row.flops)
            for row in averages
            if row.key != "[memory]"
        }

    # Up to 2.13 torch adds up whatever is in the list.
    is_asked = "include_python_functions" in inspect.signature(events.key_averages).parameters
    options = {} if is_asked else {"include_python_functions": True}
    theirs, ours = rows(events.key_averages(True)), rows(prof.key_averages(True, **options))
    assert theirs.keys() == ours.keys()
    for key, row in ours.items():
        assert theirs[key] == pytest.approx(row, abs=0.2), key


def test_events_are_the_same_objects():
    """An event is one object however it is come by, of torch's class by isinstance, with an id of its own."""
    result = profiled(make_ours, layers).kineto_results
    seen = {}
    for _, event in walk(result.experimental_event_tree()):
        assert isinstance(event, native._ProfilerEvent)
        assert isinstance(event.extra_fields, getattr(native, f"_ExtraFields_{event.tag.name}"))
        assert event.extra_fields is event.typed[1]
        assert all(child.parent is event for child in event.children)
        assert event.start_time_ns <= event.end_time_ns
        seen[event.id] = event
    again = {event.id: event for _, event in walk(result.experimental_event_tree())}
    assert again == seen
    assert len(seen) == sum(1 for _ in walk(result.experimental_event_tree()))


def test_without_inputs_and_stacks(tmp_path):
    """Of a profile with nothing but operators there are those; where tensors lie is then not known. It can be saved as torch's."""
    with otp.profile() as bare:
        assert bare.kineto_results is None
        torch.ones(2).add(1)
    roots = bare.kineto_results.experimental_event_tree()
    assert [root.name for root in roots] == ["aten::ones", "aten::add"]
    assert roots[1].typed[1].inputs == []
    with otp.profile(record_shapes=True) as prof:
        torch.ones(2).add(1)
    (add,) = [root for root in prof.kineto_results.experimental_event_tree() if root.name == "aten::add"]
    tensor = add.typed[1].inputs[0]
    assert (tensor.sizes, tensor.dtype, tensor.layout) == ([2], torch.float32, torch.strided)
    assert (tensor.id, tensor.allocation_id, tensor.storage_data_ptr, tensor.device) == (None,) * 4
    with pytest.raises(ValueError, match="profile_memory=True, with_stack=True required"):
        prof._memory_profile()
    prof.kineto_results.save(str(tmp_path / "trace.json"))
    assert "aten::add" in (tmp_path / "trace.json").read_text()
