"""Profiles with modules: which modules each operator ran in, and that nothing is left of them."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import threading

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from instrumented import instrumented  # noqa: E402
from module_events import NET, Block, Net, lines, way_to_call  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._columns.schema import Kind  # noqa: E402

X = torch.ones(2, 4)


def ran(body, **options):
    """The outermost operators of a body and the modules that each ran in."""
    with otp.profile(with_modules=True, **options) as prof:
        body()
    return [(event.name, event.module_hierarchy) for event in prof.events() if event.cpu_parent is None]


class Foreign(nn.Module):
    """Calls what is no part of it."""

    def __init__(self, *others):
        super().__init__()
        self.own = nn.ReLU()
        self.__dict__["others"] = others

    def forward(self, x):
        x = self.own(x)
        for other in self.others:
            x = other(x)
        return x.neg()


def test_nested_modules():
    """An operator has the class of the root and the path of the nearest module; outside of modules it has nothing."""
    model = Net()
    assert ran(lambda: model(X).sin()) == [
        ("aten::linear", "Net.encoder.layers.0"),
        ("aten::relu", "Net.encoder.layers.1"),
        ("aten::linear", "Net.head.0"),
        ("aten::sin", ""),
    ]


def test_what_an_operator_calls_has_the_same_modules():
    """All operators below one have its modules."""
    with otp.profile(with_modules=True) as prof:
        Net()(X)
    for event in prof.events():
        if event.cpu_parent is not None:
            assert event.module_hierarchy == event.cpu_parent.module_hierarchy


def test_names_are_those_of_named_modules():
    """For a transformer every name is the class of the model and a name that named_modules() gives."""
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    inputs = torch.ones(1, 3, 8), torch.ones(1, 2, 8)
    names = {name for _, name in ran(lambda: model(*inputs))}
    assert names <= {f"Transformer.{name}" if name else "Transformer" for name, _ in model.named_modules()}
    assert "Transformer.encoder.layers.0.linear1" in names


def test_modules_that_are_no_parts():
    """A module that is no part of the one that calls it follows that one's name, and its parts follow it."""
    model = nn.Sequential(Foreign(Block()))
    assert ran(lambda: model(X)) == [
        ("aten::relu", "Sequential.0.own"),
        ("aten::linear", "Sequential.0.Block.layers.0"),
        ("aten::relu", "Sequential.0.Block.layers.1"),
        ("aten::neg", "Sequential.0"),
    ]


def test_a_shared_module():
    """A module in two models has in each its name there; one that is in a model twice has its first name."""
    shared = nn.ReLU()
    first, second = nn.Sequential(shared, nn.Tanh(), shared), nn.Sequential(nn.Sequential(nn.Sigmoid(), shared))
    assert [name for _, name in ran(lambda: (first(X), second(X)))] == [
        "Sequential.0",
        "Sequential.1",
        "Sequential.0",
        "Sequential.0.0",
        "Sequential.0.1",
    ]


def test_a_part_called_on_its_own():
    """A part that is called outside of its model keeps the names of that model, whose class is not known there."""
    model = Net()
    with otp.profile(with_modules=True) as prof:
        model(X)
        model.encoder(X)
    tops = [event for event in prof.events() if event.cpu_parent is None]
    assert [event.module_hierarchy for event in tops][-2:] == ["encoder.layers.0", "encoder.layers.1"]


class Recursive(nn.Module):
    """Calls itself."""

    def forward(self, x, times):
        return self(x, times - 1) if times else x.neg()


def test_a_module_that_calls_itself():
    """A module inside itself is the same module."""
    assert ran(lambda: Recursive()(X, 2)) == [("aten::neg", "Recursive")]


class Raising(nn.Module):
    """Fails after its part has run."""

    def __init__(self):
        super().__init__()
        self.part = nn.ReLU()

    def forward(self, x):
        self.part(x)
        raise ValueError("no")


def test_an_exception():
    """After an exception that left modules, operators are outside of them."""
    model = nn.Sequential(Raising())

    def body():
        with pytest.raises(ValueError, match="no"):
            model(X)
        X.sin()

    assert ran(body) == [("aten::relu", "Sequential.0.part"), ("aten::sin", "")]


def test_the_backward_pass():
    """A backward function and all that it calls have the modules of the forward operator; what has none there has none."""
    model = Net()
    found = dict(ran(lambda: (model(X) * 2).sum().backward()))
    engine = "autograd::engine::evaluate_function: "
    assert found[f"{engine}ReluBackward0"] == "Net.encoder.layers.1"
    assert found[f"{engine}MulBackward0"] == found[f"{engine}SumBackward0"] == ""
    with otp.profile(with_modules=True) as prof:
        model(X).sum().backward()
    weights = [event.module_hierarchy for event in prof.events() if event.name == "AddmmBackward0"]
    assert weights == ["Net.head.0", "Net.encoder.layers.0"]
    products = [event for event in prof.events() if event.name == "aten::mm"]
    assert {event.module_hierarchy for event in products} == set(weights)


def test_checkpointed_modules():
    """What runs again in a checkpoint's backward pass has modules of its own."""
    model = Net()
    inputs = torch.ones(2, 4, requires_grad=True)
    found = ran(lambda: checkpoint(model, inputs, use_reentrant=False).sum().backward())
    assert ("aten::linear", "Net.head.0") in found


def test_lists_are_those_of_a_profile_without_modules():
    """Modules are in no list: names, parents and averages are those of the same program without them."""

    def listed(with_modules):
        model = Net()
        with otp.profile(with_modules=with_modules) as prof, otp.record_function("label"):
            model(X).sum().backward()
        events = [(event.name, event.cpu_parent and event.cpu_parent.name) for event in prof.events()]
        return events, [(average.key, average.count) for average in prof.key_averages()]

    assert listed(True) == listed(False)


def test_without_modules_there_are_none():
    """A profile that did not ask for modules has none, and no operator has any, also beside one that asked."""
    with otp.profile(with_modules=True), otp.profile() as prof:
        Net()(X)
    assert not (prof.columns["kind"] == Kind.MODULE).any()
    assert {event.module_hierarchy for event in prof.events()} == {""}


def test_all_threads():
    """Modules of other threads are there with all_threads, each with the operators of its own thread."""
    models = [nn.ReLU(), nn.Tanh()]

    def body():
        threads = [threading.Thread(target=model, args=(X,)) for model in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert set(ran(body, all_threads=True)) == {("aten::relu", "ReLU"), ("aten::tanh", "Tanh")}


def test_copies_and_pickles_keep_the_name():
    """A copy of an event and one that was pickled have the modules too."""
    with otp.profile(with_modules=True) as prof:
        Net()(X)
    event = next(event for event in prof.events() if event.name == "aten::relu")
    for other in (copy.copy(event), pickle.loads(pickle.dumps(event))):  # noqa: S301 - our own
        assert other.module_hierarchy == "Net.encoder.layers.1"


def test_the_chrome_trace(tmp_path):
    """In Chrome JSON operators have torch's argument "Module Hierarchy", and modules are slices without it."""
    with otp.profile(with_modules=True) as prof:
        Net()(X).sum()
    prof.export_chrome_trace(tmp_path / "trace.json")
    slices = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    found = {event["name"]: event["args"].get("Module Hierarchy") for event in slices}
    assert found["aten::relu"] == "Net.encoder.layers.1"
    assert found["aten::sum"] is None
    assert found["encoder.layers.1"] is None


def test_spans():
    """Modules are spans, around those of their operators, with their names as an attribute."""
    with otp.profile(with_modules=True) as prof:
        Net()(X)
    spans = list(prof.spans())
    (relu,) = (span for span in spans if span.name == "aten::relu")
    (enclosing,) = (span for span in spans if span.context.span_id == relu.parent.span_id)
    assert enclosing.attributes["torch.module"] == "encoder.layers.1"


def test_nothing_stays():
    """After 200 profiles, some of them inside one another, some that failed, torch calls modules as before."""
    before, model = way_to_call(), Net()
    for i in range(200):
        with otp.profile(with_modules=True):
            if i % 3 == 0:
                with otp.profile(with_modules=True):
                    model(X)
            if i % 50 == 0:
                with pytest.raises(ZeroDivisionError), otp.profile(with_modules=True):
                    1 / 0  # noqa: B018
            assert way_to_call() != before
    assert way_to_call() == before


def test_a_profile_that_is_dropped_while_it_runs():
    """A profile that nobody refers to any more no longer follows calls."""
    before = way_to_call()
    prof = otp.profile(with_modules=True)
    prof.start()
    assert way_to_call() != before
    del prof
    gc.collect()
    assert way_to_call() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_follows_none():
    """A child that was forked from a profile calls modules as before."""
    before = way_to_call()
    with otp.profile(with_modules=True):
        pid = os.fork()
        if pid == 0:
            os._exit(way_to_call() != before)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_stopped_inside_a_module():
    """A profile that is stopped inside a module has that unfinished; the next one starts with none open."""
    prof = otp.profile(with_modules=True)

    class Stopping(nn.Module):
        def forward(self, x):
            x = x.neg()
            prof.stop()
            return x

    prof.start()
    Stopping()(X)
    assert [(event.name, event.module_hierarchy) for event in prof.events()] == [("aten::neg", "Stopping")]
    model = Net()
    assert ran(lambda: model(X))[0] == ("aten::linear", "Net.encoder.layers.0")


@pytest.mark.parametrize("first", ["profile", "instrumentor"])
def test_beside_an_instrumentor(first):
    """A profile and an instrumentor at the same time: each has its modules, and goes on when the other ends."""
    model, prof = Net(), otp.profile(with_modules=True)
    if first == "profile":
        prof.start()
    with instrumented(detail="modules") as service:
        if first == "instrumentor":
            prof.start()
        model(X)
        prof.stop()
        model(X)
    assert lines(prof._batch()) == NET
    names = [line.strip() for line in NET]
    found = [span.name for span in service.spans()]
    assert sorted(name for name in found if name != "torch.phase.forward") == sorted(names * 2)
    assert found.count("torch.phase.forward") == 2


def test_an_instrumentor_of_phases():
    """An instrumentor that wants no modules gets each call of the root module as a phase, while a profile gets all modules, and after."""
    model = Net()
    with instrumented(detail="steps") as service:
        model(X)
        with otp.profile(with_modules=True) as prof:
            model(X)
        model(X)
    assert lines(prof._batch()) == NET
    assert [span.name for span in service.spans()] == ["torch.phase.forward"] * 3
