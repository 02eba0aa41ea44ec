"""``export_memory_timeline``: what memory is used for, under torch's profiler and under ours."""

from __future__ import annotations

import gc
import gzip
import itertools
import json

import numpy as np
import pytest

from examples import one_in

torch = pytest.importorskip("torch", minversion="2.6")

import memory_programs  # noqa: E402
from observed import torchs  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._model.inputs import InputKind, storages  # noqa: E402
from otel_torchprof._model.memory import Category, MemoryAction  # noqa: E402
from otel_torchprof._profile.memory_timeline import written_inputs  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:`export_memory_timeline` is deprecated:FutureWarning")

WHOLE = {"profile_memory": True, "record_shapes": True, "with_stack": True}


def written(prof, folder, name):
    """The points of a timeline: (time, action, bytes, category)."""
    prof.export_memory_timeline(str(folder / name), "cpu")
    data = (folder / name).read_bytes()
    return json.loads(gzip.decompress(data) if name.endswith(".gz") and data[:2] == b"\x1f\x8b" else data)


def at_once(points):
    """What happened, by time; in order of what happened within one moment, where torch's order says nothing."""
    groups = itertools.groupby(points, key=lambda point: (point[0], point[1]))
    return [
        sorted((action, Category(category).name, size) for _, action, size, category in group) for _, group in groups
    ]


def both(factory, folder):
    """The points of torch's timeline and of ours, of the same program made twice."""
    found = []
    for make, name in (
        (lambda: torchs(shapes=True, profile_memory=True, with_stack=True), "torch"),
        (lambda: otp.profile(**WHOLE), "ours"),
    ):
        torch.manual_seed(0)
        steps = factory()
        gc.collect()
        with make() as prof:
            steps()
        found.append(written(prof, folder, f"{name}.raw.json.gz"))
        del steps
    return found


def by_category(points):
    """Bytes that came to each category with a block."""
    found = dict.fromkeys(Category.__members__, 0)
    for _, action, size, category in points:
        if action in {MemoryAction.PREEXISTING, MemoryAction.CREATE}:
            found[Category(category).name] += size
    return found


@pytest.mark.parametrize("factory", one_in(2, memory_programs.PROGRAMS), ids=lambda factory: factory.__name__)
def test_the_timeline_is_torchs(tmp_path, factory):
    """Every block comes and goes with torch's size and category, and changes with it, in torch's order."""
    theirs, ours = both(factory, tmp_path)
    assert by_category(ours) == by_category(theirs)
    assert at_once(ours) == at_once(theirs)


def test_sizes_by_category_are_torchs(tmp_path):
    """The sums over time are torch's as well: after each change the same bytes in each category."""
    found = []
    for make in (lambda: torchs(shapes=True, profile_memory=True, with_stack=True), lambda: otp.profile(**WHOLE)):
        torch.manual_seed(0)
        steps = memory_programs.adam()
        with make() as prof:
            steps()
        times, sizes = written(prof, tmp_path, "t.json")
        assert len(times) == len(sizes)
        assert times == sorted(times)
        found.append((sizes[0], sizes[-1], np.array(sizes).max(axis=0).tolist()))
    assert found[0][:2] == found[1][:2]
    assert found[0][2][1] == found[1][2][1] > 0


def test_reused_addresses(tmp_path):
    """Gradients from before the profile, freed unseen by the CPU's allocator, hand their use to nobody.

    Torch takes what is allocated at their places for gradients, and fails where that is seen twice.
    """
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.ReLU(), torch.nn.Linear(40, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batches = [torch.randn(16, 24) for _ in range(3)]

    def steps():
        for batch in batches:
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    steps()
    with otp.profile(**WHOLE) as prof:
        steps()
    points = written(prof, tmp_path, "t.raw.json.gz")
    gradients = [(action, size) for _, action, size, category in points if category == Category.GRADIENT]
    # Not by size: the CPU's allocator remembers those of blocks that are gone, from profiles before this one.
    assert [action for action, _ in gradients].count(MemoryAction.PREEXISTING) == len(list(model.parameters()))
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert sum(size for action, size in gradients if action == MemoryAction.CREATE) == 3 * whole


def test_tensors_that_get_another_storage(tmp_path):
    """A parameter whose storage is replaced is another block from then on; torch fails with these."""
    model = torch.nn.Linear(24, 10)
    with otp.profile(**WHOLE) as prof:
        for _ in range(2):
            model(torch.randn(16, 24)).sum().backward()
            for parameter in model.parameters():
                parameter.data = parameter.data.clone()
                parameter.grad = None
    points = written(prof, tmp_path, "t.raw.json.gz")
    assert by_category(points)["PARAMETER"] >= (24 * 10 + 10) * 4
    assert by_category(points)["GRADIENT"] == 2 * (24 * 10 + 10) * 4


def test_cycles(tmp_path):
    """Several cycles of a schedule in one timeline: nothing that is used is ever below nothing."""
    torch.manual_seed(0)
    steps = memory_programs.adam()
    schedule = otp.schedule(wait=0, warmup=1, active=1, repeat=2)
    with otp.profile(schedule=schedule, acc_events=True, **WHOLE) as prof:
        for _ in range(4):
            steps()
            prof.step()
    _, sizes = written(prof, tmp_path, "t.json")
    assert np.array(sizes).min() >= 0
    found = by_category(written(prof, tmp_path, "t.raw.json.gz"))
    assert min(found[name] for name in ("PARAMETER", "GRADIENT", "OPTIMIZER_STATE", "ACTIVATION", "INPUT")) > 0


# ---- what is recorded for it ----


def storages_of(prof, name):
    """The storages of the inputs of the only event with a name."""
    batch = prof._batch()
    (row,) = (row for row in range(len(batch)) if batch.names[batch["name"][row]] == name)
    found = storages(batch)
    return [tuple(one) for one in found[found["row"] == row][["input", "address", "bytes", "device_type"]].tolist()]


def test_where_tensors_lie():
    """Each tensor among the inputs, one in a list too, has the address and the size of its storage, whatever part it shows."""
    whole, other = torch.ones(4, 6), torch.ones(3)
    with otp.profile(**WHOLE) as prof:
        torch.cat([whole[1:, 2], other])
        torch.addmv(other, whole[:3, :2], whole[0, :2])
    place = whole.untyped_storage().data_ptr()
    assert storages_of(prof, "aten::cat") == [(0, place, 96, 0), (0, other.data_ptr(), 12, 0)]
    assert storages_of(prof, "aten::addmv") == [(0, other.data_ptr(), 12, 0), (1, place, 96, 0), (2, place, 96, 0)]


def test_tensors_without_memory():
    """Empty, meta, fake and sparse tensors lie nowhere, and are no trouble."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    sparse = torch.eye(3).to_sparse()
    with otp.profile(**WHOLE) as prof:
        torch.sin(torch.empty(0))
        torch.cos(torch.empty(3, device="meta"))
        torch.abs(sparse)
        with FakeTensorMode():
            torch.exp(torch.empty(3))
    addresses = {address for name in ("aten::sin", "aten::cos") for _, address, *_ in storages_of(prof, name)}
    assert addresses <= {0}
    assert "aten::abs" in {event.name for event in prof.events()}


@pytest.mark.parametrize("missing", sorted(WHOLE))
def test_storages_only_for_the_timeline(missing):
    """Where tensors lie is recorded with shapes, memory and stacks together, and not with any two of these."""
    with otp.profile(**{**WHOLE, missing: False}) as prof:
        torch.ones(3).add_(1)
    assert not len(storages(prof._batch()))


def test_profiles_beside_each_other():
    """A profile of shapes alone has the inputs that it would have alone, while another one wants to know of storages."""

    def inputs(prof):
        return [(event.name, event.input_shapes, event.concrete_inputs) for event in prof.events()]

    with otp.profile(record_shapes=True) as alone:
        torch.addmm(torch.ones(3), torch.ones(2, 4), torch.ones(4, 3).t().t())
        torch.cat([torch.ones(2), torch.ones(3)])
    with otp.profile(**WHOLE) as whole, otp.profile(record_shapes=True) as plain:
        torch.addmm(torch.ones(3), torch.ones(2, 4), torch.ones(4, 3).t().t())
        torch.cat([torch.ones(2), torch.ones(3)])
    assert inputs(plain) == inputs(alone)
    assert not len(storages(plain._batch()))
    shapes = [event.input_shapes for event in plain.events()]
    assert [event.input_shapes for event in whole.events() if not event.is_python_function] == shapes


def test_schemas():
    """Which inputs are written to, by name and inputs; nothing is known of other names or of inputs that fit no overload."""
    tensor, number, nothing = InputKind.TENSOR, InputKind.INT, InputKind.OTHER
    assert written_inputs("aten::add_", [tensor, tensor, number]) == (True, False, False)
    assert written_inputs("aten::add", [tensor, tensor, number]) == (False, False, False)
    assert written_inputs("aten::add", [tensor, tensor, number, tensor]) == (False, False, False, True)
    assert written_inputs("aten::cat", [InputKind.TENSOR_LIST, number]) == (False, False)
    assert written_inputs("aten::view", [tensor, InputKind.SCALAR_LIST]) == (False, False)
    assert written_inputs("aten::sum", [tensor, nothing]) == (False, False)
    assert written_inputs("aten::add", [tensor]) is None
    assert written_inputs("no such::operator", []) is None
    assert written_inputs("a label", []) is None
    assert written_inputs("aten::", []) is None


def test_when_a_gradient_was_noted():
    """A parameter's gradient is late where there was none at the module's first call, and the end of the recording knows one."""
    old, new = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    old(torch.ones(1, 2)).sum().backward()
    with otp.profile(with_stack=True) as prof:
        new(old(torch.ones(1, 2))).sum().backward()
    late = {
        parameter.tensor.storage_data_ptr: parameter.has_late_gradient
        for module in prof.modules
        for parameter in module.parameters
    }
    assert late[old.weight.data_ptr()] is False
    assert late[new.weight.data_ptr()] is True
