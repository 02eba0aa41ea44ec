"""Profiles with modules: which there are, which modules each operator ran in, how they end, and that nothing is left of them."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import queue
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry.sdk.trace import TracerProvider

torch = pytest.importorskip("torch", minversion="2.6")

from instrumented import instrumented  # noqa: E402
from module_events import NET, Block, Net, installed, lines, recorded, way_to_call  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof._columns.schema import Kind  # noqa: E402
from otel_torchprof._native import module_names  # noqa: E402
from otel_torchprof._native.ffi import python_sources  # noqa: E402

X = torch.ones(2, 4)


def profiled(body, **options):
    """The profile of a body, with its modules."""
    with otp.profile(with_modules=True, **options) as prof:
        body()
    return prof


def ran(body, **options):
    """The outermost operators of a body and the modules that each ran in."""
    events = profiled(body, **options).events()
    return [(event.name, event.module_hierarchy) for event in events if event.cpu_parent is None]


# ---- names ----


def test_nested_modules():
    """Modules have their full names in the tree of the calls; operators the root's class and the path, and so has all inside them."""
    model = Net()
    prof = profiled(lambda: [model(X).sin() for _ in range(3)])
    assert lines(prof) == NET * 3
    tops = [(event.name, event.module_hierarchy) for event in prof.events() if event.cpu_parent is None]
    assert (
        tops
        == [
            ("aten::linear", "Net.encoder.layers.0"),
            ("aten::relu", "Net.encoder.layers.1"),
            ("aten::linear", "Net.head.0"),
            ("aten::sin", ""),
        ]
        * 3
    )
    inner = [event for event in prof.events() if event.cpu_parent is not None]
    assert all(event.module_hierarchy == event.cpu_parent.module_hierarchy for event in inner)


def test_names_are_those_of_named_modules():
    """For a transformer every name is one that named_modules() gives, behind the class of the model where an operator has it."""
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    prof = profiled(lambda: model(torch.ones(1, 3, 8), torch.ones(1, 2, 8)))
    expected = {name or "Transformer" for name, _ in model.named_modules()}
    called_by_no_call = {"encoder.layers", "decoder.layers"} | {name for name in expected if name.endswith("out_proj")}
    assert {line.strip() for line in lines(prof)} == expected - called_by_no_call
    names = {event.module_hierarchy for event in prof.events() if event.module_hierarchy}
    assert names <= {f"Transformer.{name}" if name else "Transformer" for name, _ in model.named_modules()}
    assert "Transformer.encoder.layers.0.linear1" in names


def test_modules_between_operators_and_labels():
    """Modules, labels and operators are one tree."""
    with otp.profile(with_modules=True) as prof, otp.record_function("label"):
        Block()(X)
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


def test_a_module_that_calls_itself():
    """A module that calls itself is an event per call, each inside the one before; for operators it is the same module."""
    prof = profiled(lambda: Recursive()(X, 2))
    assert lines(prof) == ["Recursive", "  Recursive", "    Recursive"]
    assert [event.module_hierarchy for event in prof.events()] == ["Recursive"]


def test_parts_of_models():
    """A part has its name in the model that it is called in, the first where it is there twice, and alone the one it has got; so have new parts."""
    model, shared = Net(), nn.Linear(4, 4)
    assert recorded(lambda: model.head(X)) == ["Sequential", "  0", "  1"]
    for _ in range(2):
        assert recorded(lambda: model(X)) == NET
        assert ran(lambda: (model(X), model.encoder(X)))[-2:] == [
            ("aten::linear", "encoder.layers.0"),
            ("aten::relu", "encoder.layers.1"),
        ]
        assert recorded(lambda: model.head(X)) == ["Sequential", "  0", "  1"]
    model.head[1] = nn.Sequential(nn.Tanh())
    assert recorded(lambda: model(X)) == [*NET[:-1], "    head.1", "      head.1.0"]
    first, second = nn.Sequential(shared, nn.ReLU(), shared), nn.ModuleDict({"trunk": shared, "head": nn.ReLU()})
    second.forward = lambda x: second["head"](second["trunk"](x))
    for _ in range(2):
        assert recorded(lambda: first(X)) == ["Sequential", "  0", "  1", "  0"]
        assert recorded(lambda: second(X)) == ["ModuleDict", "  trunk", "  head"]


class MakesModules(nn.Module):
    """Makes a module for every call, as many a forward does, and calls one that it has not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = [Block()]

    def forward(self, x):
        return nn.Softmax(dim=-1)(self.hidden[0](x))


def test_modules_outside_of_the_tree():
    """A module that is called in a model but is no part of it is named by its class, its parts by their path in it."""
    model = nn.Sequential(MakesModules())
    prof = profiled(lambda: [model(X) for _ in range(3)])
    tree = ["Sequential", "  0", "    Block", "      layers.0", "      layers.1", "    Softmax"]
    assert lines(prof) == tree * 3
    tops = [(event.name, event.module_hierarchy) for event in prof.events() if event.cpu_parent is None]
    assert tops[:3] == [
        ("aten::linear", "Sequential.0.Block.layers.0"),
        ("aten::relu", "Sequential.0.Block.layers.1"),
        ("aten::softmax", "Sequential.0.Softmax"),
    ]


def test_a_new_module_at_an_old_address():
    """A module that comes to stand where another one was has its own name."""
    kinds = (nn.ReLU, nn.Tanh, nn.Sigmoid)
    found = recorded(lambda: [kinds[i % 3]()(X) for i in range(300)])
    assert found == [kind.__name__ for kind in kinds] * 100


def test_modules_that_come_and_go_cost_no_walk_and_leave_nothing(monkeypatch):
    """The model is not walked over for each of them, names of what has gone go too, and nobody's are kept while nobody records."""
    walked, shared = [], nn.Linear(4, 4)
    named = module_names._named
    monkeypatch.setattr(module_names, "_named", lambda root: walked.append(type(root)) or named(root))
    with installed() as every:
        Net()(X)
        assert every.names.size == 0
        model = MakesModules()
        assert len(recorded(lambda: [model(X) for _ in range(100)])) == 500
        assert walked.count(MakesModules) < 10
        assert walked.count(nn.Softmax) == 100
        assert every.names.size == 1 + 4  # the list of layers too
        model = None
        gc.collect()
        assert every.names.size == 0
        recorded(lambda: [nn.Sequential(shared, nn.ReLU())(X) for _ in range(50)])
        gc.collect()
        assert every.names.size == 1
        assert len(every.names._members[id(shared)][1]) <= 2


# ---- errors ----


class ReturnsNone(nn.Module):
    def forward(self, _):
        return None


class Broken(nn.Module):
    """Raises an exception whose class is in a module."""

    def forward(self, _):
        raise queue.Empty


def test_a_module_that_raises():
    """Modules that an exception leaves are marked with its class; the next call is as if nothing had been, and outside of them."""
    model = Net()
    model.encoder.layers[1].forward = lambda _: (_ for _ in ()).throw(ZeroDivisionError)

    def body():
        with pytest.raises(ZeroDivisionError):
            model(X)
        X.sin()
        del model.encoder.layers[1].forward
        model(X)

    prof = profiled(body)
    failed = [f"{line} !ZeroDivisionError" for line in ("Net", "  encoder", "    encoder.layers.1")]
    assert lines(prof) == [*failed[:2], NET[2], failed[2], *NET]
    (sin,) = (event for event in prof.events() if event.name == "aten::sin")
    assert sin.module_hierarchy == ""


def test_the_class_of_an_exception_is_qualified():
    """The class has its module, as error.type wants it; a module that returns None has none, though one is being handled or just was."""

    def body():
        ReturnsNone()(X)
        try:
            {}["missing"]
        except KeyError:
            ReturnsNone()(X)
            with pytest.raises(queue.Empty):
                Broken()(X)
        ReturnsNone()(X)

    assert recorded(body) == ["ReturnsNone", "ReturnsNone", "Broken !_queue.Empty", "ReturnsNone"]


class Interrupted(nn.Module):
    """Is left by what is no Exception."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Module()
        self.inner.forward = self.interrupt
        self.interrupted = True

    def interrupt(self, x):
        if self.interrupted:
            raise KeyboardInterrupt
        return x.neg()

    def forward(self, x):
        return self.inner(x)


class Catches(nn.Module):
    """Calls another module when one was interrupted."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Interrupted(), nn.ReLU()

    def forward(self, x):
        try:
            self.first(x)
        except KeyboardInterrupt:
            return self.second(x)


def test_an_interrupt():
    """A module that an interrupt leaves is unfinished; the next one is not inside it, be it deeper in the stack, or its caller's child."""
    model = Interrupted()
    deeper = torch.no_grad()(lambda function: max([X], key=lambda x: function(x).sum()))

    def body():
        with pytest.raises(KeyboardInterrupt):
            model(X)
        model.interrupted = False
        deeper(model)
        Catches()(X)

    tree = ["Catches", "  first ...", "    first.inner ...", "  second"]
    assert recorded(body) == ["Interrupted ...", "  inner ...", "Interrupted", "  inner", *tree]


def test_hooks_of_the_program():
    """Hooks of the program's own run as ever, inside the event; what one of them raises is the error of its module."""
    model, seen = Net(), []
    model.register_forward_pre_hook(lambda *_: seen.append("before"))
    handle = model.register_forward_hook(lambda *_: seen.append("after"))

    def fail(*_):
        raise ValueError("a hook's")

    def body():
        with pytest.raises(ValueError, match="a hook's"):
            model(X)
        nn.Identity()(X)

    assert recorded(lambda: model(X)) == NET
    assert seen == ["before", "after"]
    handle.remove()
    model.encoder.register_forward_hook(fail)
    assert recorded(body) == ["Net !ValueError", "  encoder !ValueError", *NET[2:4], "Identity"]


def test_a_model_that_cannot_be_walked_over():
    """A model whose children cannot be listed runs as ever and is no event; that is counted."""

    class Refusing:
        def items(self):
            raise RuntimeError("none of your business")

    class Opaque(nn.Module):
        def __init__(self):
            super().__init__()
            self.__dict__["_modules"] = Refusing()

        def forward(self, x):
            return x + 1

    before, model = python_sources.errors(), Opaque()
    assert recorded(lambda: torch.testing.assert_close(model(X), X + 1)) == []
    assert python_sources.errors() == before + 1


# ---- the backward pass ----


def test_the_backward_pass():
    """A backward function and all that it calls have the modules of the forward operator; what has none there has none."""
    model = Net()
    found = dict(ran(lambda: (model(X) * 2).sum().backward()))
    engine = "autograd::engine::evaluate_function: "
    assert found[f"{engine}ReluBackward0"] == "Net.encoder.layers.1"
    assert found[f"{engine}MulBackward0"] == found[f"{engine}SumBackward0"] == ""
    events = profiled(lambda: model(X).sum().backward()).events()
    weights = [event.module_hierarchy for event in events if event.name == "AddmmBackward0"]
    assert weights == ["Net.head.0", "Net.encoder.layers.0"]
    assert {event.module_hierarchy for event in events if event.name == "aten::mm"} == set(weights)


def test_checkpointed_modules():
    """What runs again in a checkpoint's backward pass has modules of its own."""
    model = Net()
    inputs = torch.ones(2, 4, requires_grad=True)
    found = ran(lambda: checkpoint(model, inputs, use_reentrant=False).sum().backward())
    assert ("aten::linear", "Net.head.0") in found


# ---- what is made of them ----


def test_lists_are_those_of_a_profile_without_modules():
    """Modules are in no list: names, parents and averages are those of the same program without them, which has none."""

    def listed(with_modules):
        model = Net()
        with (
            otp.profile(with_modules=True),
            otp.profile(with_modules=with_modules) as prof,
            otp.record_function("label"),
        ):
            model(X).sum().backward()
        assert (prof.columns["kind"] == Kind.MODULE).any() == with_modules
        assert {event.module_hierarchy for event in prof.events()} != {""} or not with_modules
        events = [(event.name, event.cpu_parent and event.cpu_parent.name) for event in prof.events()]
        return events, [(average.key, average.count) for average in prof.key_averages()]

    assert listed(True) == listed(False)


def test_copies_pickles_traces_and_spans(tmp_path):
    """A copied and a pickled event have the modules too, operators in Chrome JSON torch's "Module Hierarchy"; modules are spans around them."""
    prof = profiled(lambda: Net()(X).sum())
    event = next(event for event in prof.events() if event.name == "aten::relu")
    for other in (copy.copy(event), pickle.loads(pickle.dumps(event))):  # noqa: S301 - our own
        assert other.module_hierarchy == "Net.encoder.layers.1"
    prof.export_chrome_trace(tmp_path / "trace.json")
    slices = [each for each in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if each["ph"] == "X"]
    found = {each["name"]: each["args"].get("Module Hierarchy") for each in slices}
    names = ("aten::relu", "aten::sum", "encoder.layers.1")
    assert [found[name] for name in names] == ["Net.encoder.layers.1", None, None]
    spans = list(prof.spans())
    (relu,) = (span for span in spans if span.name == "aten::relu")
    (enclosing,) = (span for span in spans if span.context.span_id == relu.parent.span_id)
    assert enclosing.attributes["torch.module"] == "encoder.layers.1"


# ---- threads and lifetimes ----


def test_each_thread_has_its_own_root():
    """The outermost module of a thread is its root, with that thread's operators, although another thread is inside a module at the time."""
    model, entered, done = Net(), threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            entered.set()
            assert done.wait(60)
            return x.tanh()

    thread = threading.Thread(target=lambda: Waits()(X))

    def body():
        thread.start()
        assert entered.wait(60)
        model(X)
        done.set()
        thread.join()

    prof = profiled(body, all_threads=True)
    assert sorted(lines(prof)) == sorted([*NET, "Waits"])
    assert {event.module_hierarchy for event in prof.events() if event.name == "aten::tanh"} == {"Waits"}


def test_requests_of_several_threads():
    """Modules that run in many threads, each within the span of its request, are under that span, whole and in order."""
    model = Net()
    tracer = TracerProvider().get_tracer("application")

    def request(number):
        with tracer.start_as_current_span(f"request {number}") as span:
            model(X)
        return span.get_span_context().trace_id

    with instrumented(detail="modules") as service, ThreadPoolExecutor(8) as pool:
        numbers = list(pool.map(request, range(50)))
    trees = {}
    for span in service.spans():
        if not span.name.startswith("torch."):
            trees.setdefault(span.context.trace_id, []).append(span)
    assert sorted(trees) == sorted(numbers)
    for spans in trees.values():
        spans.sort(key=lambda span: span.start_time)
        assert [span.name for span in spans] == [line.strip() for line in NET]


def test_profiles_that_start_or_stop_within_a_module():
    """What is open at the start is not in a profile; what is open at the stop is unfinished in it, and nobody's parent later."""
    early, late = otp.profile(with_modules=True), otp.profile(with_modules=True)

    class Changes(nn.Module):
        def __init__(self, change):
            super().__init__()
            self.block, self.change = Block(), change

        def forward(self, x):
            x = x.neg()
            self.change()
            return self.block(x)

    Changes(late.start)(X)
    late.stop()
    assert lines(late) == ["Block", "  layers.0", "  layers.1"]
    model = Changes(early.stop)
    early.start()
    model(X)
    assert lines(early) == ["Changes ..."]
    assert [(event.name, event.module_hierarchy) for event in early.events()] == [("aten::neg", "Changes")]
    assert recorded(lambda: Net()(X)) == NET


def test_torch_is_as_before():
    """Followed or not, in each other or failed, classes, hooks, filters of warnings and torch's way to call a module are the same, 200 times."""
    from torch.nn.modules import module as torch_modules

    def state():
        hooked = [value for name, value in vars(torch_modules).items() if name.startswith("_global_")]
        copies = [dict(value) if isinstance(value, dict) else value for value in hooked]
        kept = list(warnings.filters), dict(vars(nn.Module)), dict(model.__dict__)
        return copies, kept, torch_modules._has_any_global_hook()

    model = Net()
    before, way = state(), way_to_call()
    for i in range(200):
        with otp.profile(with_modules=True):
            if i % 3 == 0:
                with otp.profile(with_modules=True):
                    model(X)
            if i % 50 == 0:
                with pytest.raises(ZeroDivisionError), otp.profile(with_modules=True):
                    1 / 0  # noqa: B018
            assert state() == before
            assert way_to_call() != way
        assert (state(), way_to_call()) == (before, way)
    prof = otp.profile(with_modules=True)
    prof.start()
    assert way_to_call() != way
    del prof  # dropped while it runs
    gc.collect()
    assert way_to_call() == way


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_follows_none():
    """A child that was forked from a profile calls modules as before."""
    before = way_to_call()
    with otp.profile(with_modules=True):
        pid = os.fork()
        if pid == 0:
            os._exit(way_to_call() != before)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


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
    assert lines(prof) == NET
    names = [line.strip() for line in NET]
    found = [span.name for span in service.spans()]
    assert sorted(name for name in found if name != "torch.phase.forward") == sorted(names * 2)
    assert found.count("torch.phase.forward") == 2


def test_an_instrumentor_of_phases():
    """An instrumentor that wants no modules gets each call of the root module as a phase, while a profile gets all modules, and after."""
    model = Net()
    with instrumented(detail="steps") as service:
        model(X)
        prof = profiled(lambda: model(X))
        model(X)
    assert lines(prof) == NET
    assert [span.name for span in service.spans()] == ["torch.phase.forward"] * 3
