"""What torch documents of its profiler's lists and labels, as programs: the same under ours."""

from __future__ import annotations

import inspect
import re
import threading
import warnings

import pytest
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

from at_rest import wait_until_at_rest  # noqa: E402
from harness import ALWAYS, OPTIONS, Option, Order, both, masked, reported, sums, tables  # noqa: E402
from observed import run  # noqa: E402
from torch import nn  # noqa: E402
from torch.autograd.profiler_util import EventList  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import otel_torchprof as otp  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of features that are deprecated or in beta

ORDERS = pytest.mark.parametrize("order", Order, ids=lambda order: order.value)
NOTHING, SHAPES = OPTIONS[0], Option("shapes", {"record_shapes": True})
X = torch.ones(3, 3)


def same(ours, theirs, *names):
    """Asserts that both profiles tell the same of the step; returns the names of our events."""
    mine, expected = (reported(prof, (*ALWAYS, *names)) for prof in (ours, theirs))
    assert {name: mine[name] for name in mine if mine[name] != expected[name]} == {}
    assert sums(ours) == sums(theirs)
    assert tables(ours) == tables(theirs)
    return mine["name"]


@ORDERS
def test_shapes_tell_the_layers_of_an_lstm_apart(order):
    """Grouped by shapes, an LSTM's matrix products fall apart by layer size; their counts add up to those by name."""
    model, x = nn.LSTM(4, 6, num_layers=2), torch.randn(5, 3, 4)
    with torch.backends.mkldnn.flags(enabled=False):  # which would do a layer in one operator
        ours, theirs = both(lambda: model(x), order, SHAPES)
    same(ours, theirs, "input_shapes")
    by_name = {row.key: row.count for row in ours.key_averages()}
    by_shape = [row for row in ours.key_averages(group_by_input_shape=True) if row.key == "aten::linear"]
    assert [row.input_shapes for row in by_shape] == [
        row.input_shapes for row in theirs.key_averages(group_by_input_shape=True) if row.key == "aten::linear"
    ]
    assert len({str(row.input_shapes) for row in by_shape}) == len(by_shape) > 1
    assert sum(row.count for row in by_shape) == by_name["aten::linear"]
    assert {row.input_shapes for row in ours.key_averages()} == {""}


CROSSING = (
    # name, thread, begin, end: two threads at the same time, ranges that cross each other within and between them
    ("outer", 1, 0, 30),
    ("outer", 2, 5, 40),
    ("part", 1, 3, 12),
    ("part", 1, 10, 20),
    ("part", 2, 6, 25),
    ("late", 1, 25, 35),
    ("late", 2, 38, 40),
)


def test_crossing_ranges_of_two_threads_are_added_up_within_their_own():
    """Ranges nest within their thread only; of two that cross, neither holds the other, and both count as a whole."""
    from torch.autograd import profiler_util as torchs

    lists = []
    for util in (otp, torchs):
        events = util.EventList(
            util.FunctionEvent(i, *(name, thread, begin, end)) for i, (name, thread, begin, end) in enumerate(CROSSING)
        )
        for event in events:
            event.stack, event.overload_name = [], ""
        events._build_tree()
        lists.append(events)
    ours, theirs = lists
    parents = [event.cpu_parent and (event.cpu_parent.name, event.cpu_parent.thread) for event in ours]
    assert parents == [None, None, ("outer", 1), ("outer", 1), ("outer", 2), None, ("outer", 2)]
    totals = {row.key: (row.count, row.cpu_time_total, row.self_cpu_time_total) for row in ours.key_averages()}
    assert totals == {"outer": (2, 65, 25), "part": (3, 38, 38), "late": (2, 12, 12)}
    assert totals == {
        row.key: (row.count, row.cpu_time_total, row.self_cpu_time_total) for row in theirs.key_averages()
    }
    assert ours.table() == theirs.table()


@ORDERS
def test_averages_can_be_added_up(order):
    """Averages of a profile added to themselves double; all of them added up are the profile's total."""
    ours, theirs = both(lambda: X @ X + X, order, SHAPES)
    for prof in (ours, theirs):
        averages, total = prof.key_averages(), prof.events().total_average()
        before = [(row.count, row.cpu_time_total, row.self_cpu_time_total) for row in averages]
        for index in range(len(averages)):
            averages[index] += averages[index]
        assert [(row.count, row.cpu_time_total, row.self_cpu_time_total) for row in averages] == [
            tuple(2 * value for value in values) for values in before
        ]
        assert sum(count for count, _, _ in before) == total.count
        assert sum(own for _, _, own in before) == pytest.approx(total.self_cpu_time_total)
        assert total.key == "Total"


def _scripted(x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.profiler.record_function("within the fork"):
        return x.neg().add(1)


def _forks(inner):
    @torch.jit.script
    def forking(x: torch.Tensor) -> torch.Tensor:
        future = torch.jit.fork(inner, x)
        return torch.jit.wait(future).sin()

    return forking


@ORDERS
def test_a_fork_carries_the_profile_along(order):
    """What torch.jit.fork runs elsewhere is in the profile, labels in it too, with its own thread."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        forking = _forks(torch.jit.script(_scripted))
    for _ in range(3):
        forking(X)
    ours, theirs = both(lambda: (forking(X), wait_until_at_rest()), order, NOTHING)
    requested = ("within the fork", "aten::neg", "aten::sin")
    found = [
        sorted((e.name, e.scope, e.is_user_annotation) for e in prof.events() if e.name in requested)
        for prof in (ours, theirs)
    ]
    assert found[0] == found[1]
    assert {name for name, _, _ in found[0]} == set(requested)
    if order is not Order.ALONE:
        assert len({e.thread for e in ours.events()}) == len({e.thread for e in theirs.events()}) > 1


def misnested(label, go):
    """Labels of which the outer ends first."""
    first, second = label("first"), label("second")
    first.__enter__()
    second.__enter__()
    go.wait()
    X.neg()
    first.__exit__(None, None, None)
    X.sin()
    second.__exit__(None, None, None)


@pytest.mark.parametrize("label", [otp.record_function, torch.autograd.profiler.record_function])
def test_misnested_labels_on_several_threads(label):
    """Labels that end in the order of their begins, on threads that run at the same time, stay with their own thread."""
    go = threading.Barrier(3, timeout=60)
    with otp.profile(all_threads=True) as prof:
        in_threads(*[lambda: misnested(label, go)] * 3)
    events = [e for e in prof.events() if not e.name.startswith("profiler::")]
    of_threads = {}
    for event in events:
        of_threads.setdefault(event.thread, []).append((event.name, event.cpu_parent and event.cpu_parent.name))
    assert len(of_threads) == 3
    trees = list(of_threads.values())
    assert (
        trees[0]
        == trees[1]
        == trees[2]
        == [("first", None), ("second", None), ("aten::neg", "second"), ("aten::sin", "second")]
    )
    assert {row.key: row.count for row in prof.key_averages()} == {
        "first": 3,
        "second": 3,
        "aten::neg": 3,
        "aten::sin": 3,
    }


def training():
    """An epoch over three batches, one at a time."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(X), batch_size=1)

    def epoch():
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()

    return epoch


@ORDERS
def test_optimizers_and_loaders_label_themselves(order):
    """Steps of an optimizer and batches of a DataLoader are labels under torch's names, as often as they happen."""
    epoch = training()
    epoch()
    ours, theirs = both(epoch, order, NOTHING)
    names = same(ours, theirs)
    assert names.count("Optimizer.step#SGD.step") == names.count("Optimizer.zero_grad#SGD.zero_grad") == 3
    assert names.count("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__") == 4


@pytest.mark.skipif("time_unit" not in inspect.signature(EventList.table).parameters, reason="this torch has no units")
@ORDERS
@pytest.mark.parametrize("unit", ["s", "ms", "us"])
def test_time_units(order, unit):
    """With a unit every time of a table is in it, in both tables, and the texts are the same but for the figures."""
    ours, theirs = both(lambda: X @ X, order, NOTHING)
    for averaged in (False, True):
        texts = [(prof.key_averages() if averaged else prof.events()).table(time_unit=unit) for prof in (ours, theirs)]
        assert masked(texts[0]) == masked(texts[1])
        assert {found.group(1) for text in texts for found in re.finditer(r"\d\.\d{3}(us|ms|s)\b", text)} == {unit}


def pipes(label):
    """A data pipe that reads within a label, and makes batches."""
    from torch.utils.data.datapipes.iter import IterableWrapper

    def read(number):
        with label("read"):
            return torch.ones(3) * number

    return lambda: list(IterableWrapper(range(4)).map(read).batch(2))


@ORDERS
def test_labels_inside_data_pipes(order):
    """Data pipes label themselves, and labels within them hang under theirs."""
    ours, theirs = both(pipes(torch.profiler.record_function), order, NOTHING)
    names = same(ours, theirs)
    assert names.count("read") == 4
    assert any(name.startswith("IterableWrapper(") for name in names)
    reads = [event for event in ours.events() if event.name == "read"]
    assert all(event.cpu_parent.name.startswith("Mapper(") for event in reads)


def test_our_labels_inside_data_pipes():
    """Our own labels inside a data pipe are events with what they hold inside them."""
    with otp.profile() as prof:
        run(pipes(otp.record_function))
    inside = [e.name for e in prof.events() if e.cpu_parent and e.cpu_parent.name == "read"]
    assert inside == ["aten::ones", "aten::mul"] * 4


class Squares(torch.utils.data.Dataset):
    """Numbers that are squared inside a label, by whoever loads them."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        with otp.record_function("in the worker"), torch.profiler.record_function("torch's in the worker"):
            return torch.tensor(index) ** 2


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(
    "order",
    [Order.OURS_INSIDE, pytest.param(Order.ALONE, marks=pytest.mark.exhaustive)],
    ids=lambda order: order.value,
)
def test_labels_in_the_workers_of_a_loader(method, order):
    """Labels in a worker process harm nothing and are that process's own; here the loader's own labels are as torch's."""
    loader, batches = DataLoader(Squares(), batch_size=2, num_workers=1, multiprocessing_context=method), []
    ours, theirs = both(lambda: batches.extend(loader), order, NOTHING)
    found = [[e.name for e in prof.events() if "#" in e.name and e.name.startswith("enum")] for prof in (ours, theirs)]
    assert found[0] == found[1] == ["enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"] * 4
    assert not any("in the worker" in event.name for event in ours.events())
    assert torch.cat(batches[:3]).tolist() == [0, 1, 4, 9, 16, 25]


def nested():
    """Tensors of several lengths in one, in both layouts."""
    for layout in (torch.strided, torch.jagged):
        tensors = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=layout)
        (tensors * 2).cos()


def symbolic():
    """Sizes that are not known yet."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = mode.from_tensor(torch.ones(3, 4), static_shapes=False)
        torch.cat([x @ x.t(), x @ x.t()])


@ORDERS
@pytest.mark.parametrize("body", [nested, symbolic])
def test_tensors_without_plain_sizes(order, body):
    """Nested tensors and symbolic sizes are profiled with shapes on, and shown with the shapes that torch shows."""
    body()
    body()
    ours, theirs = both(body, order, SHAPES)
    assert len(same(ours, theirs, "input_shapes", "structured_input_shapes")) > 3
