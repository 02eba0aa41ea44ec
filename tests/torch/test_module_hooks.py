"""Calls of modules as events: names, trees, errors, threads."""

from __future__ import annotations

import gc
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry.sdk.trace import TracerProvider

torch = pytest.importorskip("torch", minversion="2.6")

from module_events import NET, Block, Net, installed, lines, recorded, way_to_call  # noqa: E402
from torch import nn  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._columns.schema import Kind  # noqa: E402
from otel_torchprof._native import module_names  # noqa: E402
from otel_torchprof._native.recorder import Session  # noqa: E402
from otel_torchprof._record.contexts import ContextTable  # noqa: E402

X = torch.ones(2, 4)


@pytest.fixture
def hooks():
    """Calls of every module are followed."""
    with installed() as every:
        yield every


@pytest.mark.golden
@pytest.mark.parametrize("_", range(3))
def test_full_names(_, hooks):
    """Every module has its full name in the model, the model that of its class, in the tree of the calls; also three times over."""
    model = Net()
    assert recorded(lambda: [model(X) for _ in range(3)]) == NET * 3


def test_names_are_those_of_torch(hooks):
    """The names are those that named_modules() gives."""
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    names = {line.strip() for line in recorded(lambda: model(torch.ones(1, 3, 8), torch.ones(1, 2, 8)))}
    expected = {name or "Transformer" for name, _ in model.named_modules()}
    called_by_no_call = {"encoder.layers", "decoder.layers"} | {name for name in expected if name.endswith("out_proj")}
    assert names == expected - called_by_no_call


def test_modules_between_operators_and_labels(hooks):
    """Modules, labels and operators are one tree."""
    model = Block()
    with otp.profile(with_modules=True) as prof, otp.record_function("label"):
        model(X)
    names, columns = prof.names, prof.columns
    paths = []
    for name, parent in zip(columns["name"].tolist(), columns["parent"].tolist(), strict=True):
        paths.append(f"{paths[parent]}/{names[name]}" if parent >= 0 else names[name])
    assert "label/Block/layers.0/aten::linear/aten::addmm" in paths
    assert "label/Block/layers.1/aten::relu" in paths


class Recursive(nn.Module):
    """Calls itself."""

    def forward(self, x, times):
        return self(x, times - 1) if times else x.neg()


def test_a_module_that_calls_itself(hooks):
    """A module that calls itself is an event per call, each inside the one before."""
    assert recorded(lambda: Recursive()(X, 2)) == ["Recursive", "  Recursive", "    Recursive"]


def test_a_part_called_on_its_own(hooks):
    """A part of a model that is called on its own keeps the name that it has got in the model, and so do its own parts."""
    model = Net()
    assert recorded(lambda: model.head(X)) == ["Sequential", "  0", "  1"]
    assert recorded(lambda: model(X)) == NET
    assert recorded(lambda: model.encoder(X)) == ["encoder", "  encoder.layers.0", "  encoder.layers.1"]
    assert recorded(lambda: model.head(X)) == ["Sequential", "  0", "  1"]
    assert recorded(lambda: model(X)) == NET


def test_a_part_of_two_models(hooks):
    """A module in two models has in each its name there."""
    shared = nn.Linear(4, 4)
    first, second = nn.Sequential(shared, nn.ReLU()), nn.ModuleDict({"trunk": shared, "head": nn.ReLU()})
    second.forward = lambda x: second["head"](second["trunk"](x))
    for _ in range(2):
        assert recorded(lambda: first(X)) == ["Sequential", "  0", "  1"]
        assert recorded(lambda: second(X)) == ["ModuleDict", "  trunk", "  head"]


def test_a_module_put_in_later(hooks):
    """A module that is put into a model after its first call gets its full name there."""
    model = Net()
    assert recorded(lambda: model(X)) == NET
    model.head[1] = nn.Sequential(nn.Tanh())
    assert recorded(lambda: model(X)) == [*NET[:-1], "    head.1", "      head.1.0"]


class MakesModules(nn.Module):
    """Makes a module for every call, as many a forward does, and calls one that it has not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Block()]

    def forward(self, x):
        return nn.Softmax(dim=-1)(self.hidden[0](x))


def test_modules_outside_of_the_tree(hooks):
    """A module that is called in a model but is no part of it is named by its class, its parts by their path in it."""
    model = MakesModules()
    tree = ["MakesModules", "  Block", "    layers.0", "    layers.1", "  Softmax"]
    assert recorded(lambda: [model(X) for _ in range(3)]) == tree * 3


def test_modules_made_in_every_call_cost_no_walk_each(hooks, monkeypatch):
    """Modules that come and go do not have the model walked over each time, and leave nothing behind."""
    walked = []
    named = module_names._named
    monkeypatch.setattr(module_names, "_named", lambda root: walked.append(type(root)) or named(root))
    model = MakesModules()
    assert len(recorded(lambda: [model(X) for _ in range(100)])) == 500
    assert walked.count(MakesModules) < 10
    assert walked.count(nn.Softmax) == 100
    assert hooks.names.size == 1 + 4  # the list of layers too
    model = None
    gc.collect()
    assert hooks.names.size == 0


def test_models_made_around_one_leave_nothing_behind(hooks):
    """Tables of models that have gone go with them, although a part of theirs lives on."""
    shared = nn.Linear(4, 4)
    recorded(lambda: [nn.Sequential(shared, nn.ReLU())(X) for _ in range(50)])
    gc.collect()
    assert hooks.names.size == 1
    assert len(hooks.names._members[id(shared)][1]) <= 2


def test_a_new_module_at_an_old_address(hooks):
    """A module that comes to stand where another one was has its own name."""
    kinds = (nn.ReLU, nn.Tanh, nn.Sigmoid)

    def body():
        for i in range(300):
            kinds[i % 3]()(X)

    assert recorded(body) == [kind.__name__ for kind in kinds] * 100


def test_each_thread_has_its_own_root(hooks):
    """The outermost module of a thread is its root, although another thread is inside a module at the time."""
    model, entered, done = Net(), threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            entered.set()
            assert done.wait(60)
            return x

    thread = threading.Thread(target=lambda: Waits()(X))

    def body():
        thread.start()
        assert entered.wait(60)
        model(X)
        done.set()
        thread.join()

    assert sorted(recorded(body)) == sorted([*NET, "Waits"])


def test_a_session_that_starts_within_a_module(hooks):
    """What is open when a session starts is not in it; what begins then is, and ends."""
    session = Session(1 << 20, all_threads=True)

    class Starts(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = Block()

        def forward(self, x):
            session.start()
            return self.block(x)

    Starts()(X)
    session.stop()
    assert lines(session.final_batch()) == ["Block", "  layers.0", "  layers.1"]


def test_a_session_that_stops_within_a_module(hooks):
    """What is open when a session stops is unfinished in it, and is nobody's parent later."""
    session = Session(1 << 20, all_threads=True)

    class Stops(nn.Module):
        def forward(self, x):
            session.stop()
            return x

    session.start()
    Stops()(X)
    assert lines(session.final_batch()) == ["Stops ..."]
    assert recorded(lambda: Net()(X)) == NET


def test_requests_of_several_threads(hooks):
    """Modules that run in many threads, each within the span of its request, are under that span, whole and in order."""
    model, table = Net(), ContextTable()
    tracer = TracerProvider().get_tracer("test")

    def request(name):
        with tracer.start_as_current_span(name):
            model(X)
            return table.resolve()

    table.follow()
    session = Session(1 << 24, all_threads=True, kinds=[Kind.MODULE], contexts=True)
    session.start()
    with ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(request, [f"request {i}" for i in range(50)]))
    session.stop()
    table.unfollow()
    batch, trees = session.final_batch(), {}
    for name, context in zip(batch["name"], batch["context"].tolist(), strict=True):
        trees.setdefault(context, []).append(batch.names[name])
    assert sorted(trees) == sorted(numbers)
    assert all(tree == [line.strip() for line in NET] for tree in trees.values())


def test_torch_is_as_before():
    """Followed or not, classes, hooks, filters of warnings and torch's way to call a module are the same, a hundred times."""
    from torch.nn.modules import module as torch_modules

    def state():
        hooked = [value for name, value in vars(torch_modules).items() if name.startswith("_global_")]
        copies = [dict(value) if isinstance(value, dict) else value for value in hooked]
        return (
            copies,
            list(warnings.filters),
            dict(vars(nn.Module)),
            dict(model.__dict__),
            torch_modules._has_any_global_hook(),
        )

    model = Net()
    before, way = state(), way_to_call()
    for _ in range(100):
        with installed(), installed():
            model(X)
            assert state() == before
            assert way_to_call() != way
        assert (state(), way_to_call()) == (before, way)


def test_without_a_session_nothing_is_kept(hooks):
    """While nobody records modules, names are not even looked up."""
    Net()(X)
    assert hooks.names.size == 0
