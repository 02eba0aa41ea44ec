"""Facts of functions, modules and optimizers in a profile: torch's own, the right recording's, and nothing kept alive."""

import copy
import gc
import pickle
import re
import sys
import threading
import weakref

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from torch import nn  # noqa: E402
from torch._C._profiler import _ExperimentalConfig  # noqa: E402
from torch.profiler import ProfilerActivity  # noqa: E402

import otel_torchprof as otp  # noqa: E402
from otel_torchprof import profile  # noqa: E402
from otel_torchprof._columns.schema import Kind  # noqa: E402
from otel_torchprof._native import frames  # noqa: E402


class Residual(nn.Module):
    """A layer around another."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        """Adds what the inner layer makes of it."""
        return x + self.scale * self.inner(x).relu()


class Net(nn.Module):
    """Layers in a list."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual()])
        self.head = nn.Linear(4, 1, bias=False)

    def forward(self, x):
        """Runs all of them."""
        for block in self.blocks:
            x = block(x)
        return self.head(x)


OPTIMIZERS = {
    "sgd": lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
    "adam": lambda net: torch.optim.Adam(
        [{"params": net.blocks.parameters()}, {"params": net.head.parameters(), "lr": 0.5}]
    ),
}


def trainer(make, *, warm=2, set_to_none=False):
    """A step of training, a few of which were made."""
    net = Net()
    optimizer, x = make(net), torch.randn(3, 4)

    def step():
        optimizer.zero_grad(set_to_none=set_to_none)
        net(x).sum().backward()
        optimizer.step()

    for _ in range(warm):
        step()
    step.parts = net, optimizer
    return step


def recorded(program, **options):
    """The profile of a program, with its calls."""
    with profile(with_stack=True, **options) as prof:
        program()
    return prof


def torchs_calls(program):
    """The calls in torch's own tree."""
    verbose = _ExperimentalConfig(verbose=True)
    with torch.profiler.profile(
        activities=[ProfilerActivity.CPU],
        with_stack=True,
        record_shapes=True,
        profile_memory=True,
        experimental_config=verbose,
    ) as prof:
        program()
    waiting = list(prof.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop(0)
        waiting += event.children
        if event.tag.name == "PyCall":
            yield event


def torchs(tensor):
    """What torch tells of a tensor."""
    return tensor and (
        tuple(tensor.sizes),
        tuple(tensor.strides),
        str(tensor.dtype),
        str(tensor.layout),
        str(tensor.device),
        tensor.storage_data_ptr,
        tensor.impl_ptr,
    )


def ours(tensor):
    """What we tell of one, in the same order."""
    return tensor and (
        tensor.shape,
        tensor.strides,
        tensor.dtype,
        tensor.layout,
        tensor.device,
        tensor.storage_data_ptr,
        tensor.impl_ptr,
    )


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_same_modules_as_torch(make):
    """Every module that torch's tracer knows has torch's class, parameters and gradients, addresses included."""
    step = trainer(make)
    expected = {
        event.name: (
            event.extra_fields.module.cls_name,
            [(name, torchs(p), torchs(g)) for name, p, g in event.extra_fields.module.parameters],
        )
        for event in torchs_calls(step)
        if event.extra_fields.module
    }
    found = {
        event.name: (
            event.module.class_name.rpartition(".")[2],
            [(p.name, ours(p.tensor), ours(p.gradient)) for p in event.module.parameters],
        )
        for event in recorded(step).events()
        if event.module
    }
    assert found == expected
    assert len(found) == 6
    assert all(gradient for _, parameters in found.values() for _, _, gradient in parameters)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_same_optimizers_as_torch(make):
    """The optimizer that torch's tracer knows has torch's parameters, gradients and state, addresses included."""
    step = trainer(make)
    (expected,) = (
        [
            (torchs(p), torchs(g), [(key, torchs(s)) for key, s in state])
            for p, g, state in event.extra_fields.optimizer.parameters
        ]
        for event in torchs_calls(step)
        if event.extra_fields.optimizer
    )
    (event,) = (event for event in recorded(step).events() if event.optimizer)
    assert event.name.endswith("): _optimizer_step_code")
    found = [
        (ours(p.tensor), ours(p.gradient), [(key, ours(s)) for key, s in p.state.items()])
        for group in event.optimizer.groups
        for p in group.parameters
    ]
    assert found == expected
    assert len(found) == 7
    assert all(state for _, _, state in found)


def test_names_of_modules_and_parameters():
    """Modules have their paths in the model, and parameters of the optimizer the names that the model has for them."""
    step = trainer(OPTIMIZERS["adam"], warm=0, set_to_none=True)
    prof = recorded(step)
    names = ("Net", "blocks.0", "blocks.0.inner", "blocks.1", "blocks.1.inner", "head")
    assert [(m.qualified_name, m.root) for m in prof.modules] == [(name, "Net") for name in names]
    assert [m.class_name for m in prof.modules][:3:2] == [f"{__name__}.Net", "torch.nn.modules.linear.Linear"]
    (optimizer,) = prof.optimizers
    assert optimizer.class_name == "torch.optim.adam.Adam"
    net, _ = step.parts
    assert [p.name for group in optimizer.groups for p in group.parameters] == [n for n, _ in net.named_parameters()]
    assert [group.hyperparameters["lr"] for group in optimizer.groups] == [0.001, 0.5]
    # The gradients were not there when the modules were called, but at the end.
    assert all(p.gradient for m in prof.modules for p in m.parameters)


def test_functions():
    """Calls of Python functions say what they are of, in full; C functions, modules and operators are no Python functions."""
    events = recorded(trainer(OPTIMIZERS["sgd"])).events()
    found = {event.function.qualified_name: event.function for event in events if event.function}
    method = "Residual.forward" if sys.version_info >= (3, 11) else "forward"
    forward = found[f"{__name__}.{method}"]
    assert (forward.path, forward.line) == (__file__, Residual.forward.__code__.co_firstlineno)
    assert any(event.name.startswith("<built-in") for event in events)
    for event in events:
        is_function = event.is_python_function and re.search(r"\(\d+\): ", event.name) is not None
        assert (event.function is not None) is is_function, event.name
        assert (event.module is not None) is event.name.startswith("nn.Module: "), event.name


def test_a_generator_is_one_function():
    """A generator that goes on has the name of the line where it does, and is still the same function."""

    def numbers():
        yield 1
        yield 2

    events = recorded(lambda: list(numbers()), operators=False).events()
    found = [event for event in events if event.name.endswith("): numbers")]
    assert len({event.name for event in found}) == 3
    assert len({event.function for event in found}) == 1
    assert found[0].function.line == numbers.__code__.co_firstlineno


def test_without_stacks_there_are_no_info():
    """Without ``with_stack`` nothing is known, and nothing is an error."""
    with profile() as prof:
        trainer(OPTIMIZERS["sgd"], warm=0)()
    assert (prof.modules, prof.optimizers, prof._batch().frame_info) == ((), (), None)
    assert {(event.function, event.module, event.optimizer) for event in prof.events()} == {(None, None, None)}


def test_each_cycle_has_its_own_modules():
    """Where a profile is entered twice, a name that means another module the second time means that one for its calls."""
    first, second = nn.Sequential(nn.Linear(1, 2)), nn.ModuleDict({"layer": nn.Linear(3, 4)})
    second.forward = second["layer"].__call__
    prof = profile(with_stack=True)
    with prof:
        first(torch.ones(1))
    with prof:
        second(torch.ones(3))
    found = [
        (event.module.qualified_name, event.module.parameters[0].tensor.shape)
        for event in prof.events()
        if event.name == "nn.Module: Linear_0"
    ]
    assert found == [("0", (2, 1)), ("layer", (4, 3))]
    assert [m.qualified_name for m in prof.modules] == ["Sequential", "0", "ModuleDict", "layer"]


def test_profile_inside_another():
    """Of two profiles at a time each knows what was called in it, though only the outer one saw the first calls."""
    layer, other = nn.Linear(1, 1), nn.ReLU()
    x = torch.ones(1)
    with profile(with_stack=True) as outer:
        layer(x)
        other(x)
        with profile(with_stack=True) as inner:
            layer(x).sum().backward()
        layer(x)
    assert [m.class_name for m in inner.modules] == ["torch.nn.modules.linear.Linear"]
    assert [m.class_name.rpartition(".")[2] for m in outer.modules] == ["Linear", "ReLU"]
    for prof in (outer, inner):
        assert all(event.module for event in prof.events() if event.name == "nn.Module: Linear_0")
        assert all(p.gradient for p in prof.modules[0].parameters)


def test_info_of_a_schedule():
    """Cycles that are kept know the same modules and optimizers, which are listed once; each call has those of its cycle."""
    step, seen = trainer(OPTIMIZERS["sgd"]), []
    with profile(
        with_stack=True,
        acc_events=True,
        schedule=otp.schedule(wait=0, warmup=1, active=1, repeat=2),
        on_trace_ready=lambda prof: seen.append((len(prof.modules), len(prof.optimizers))),
    ) as prof:
        for _ in range(4):
            step()
            prof.step()
    assert seen == [(6, 1), (6, 1)]
    assert len([event for event in prof.events() if event.module]) == 12
    assert len([event for event in prof.events() if event.optimizer]) == 2


def test_copies_keep_the_info():
    """A copy of an event, which is an ordinary FunctionEvent, knows what was called; a pickle of the facts is the same."""
    events = recorded(trainer(OPTIMIZERS["adam"])).events()
    module, optimizer = (next(e for e in events if getattr(e, name)) for name in ("module", "optimizer"))
    assert (copy.copy(module).module, copy.copy(optimizer).optimizer) == (module.module, optimizer.optimizer)
    assert pickle.loads(pickle.dumps(optimizer.optimizer)) == optimizer.optimizer  # noqa: S301 - our own


def test_calls_on_other_threads():
    """Modules that another thread calls are known, too."""
    layer, go, done = nn.Linear(1, 1), threading.Event(), threading.Event()

    def work():
        go.wait(60)
        layer(torch.ones(1))
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    with profile(with_stack=True, all_threads=True) as prof:
        go.set()
        done.wait(60)
    thread.join()
    assert [m.qualified_name for m in prof.modules] == ["Linear"]


def test_nothing_is_kept_alive_by_profiles():
    """200 profiles, each of a model made anew: no module, tensor or optimizer outlives the program's use, nor does the book."""
    gone = []
    for _ in range(200):
        step = trainer(OPTIMIZERS["adam"], warm=0)
        prof = recorded(step)
        net, optimizer = step.parts
        gone += [weakref.ref(part) for part in (net, net.head, net.head.weight, net.head.weight.grad, optimizer)]
        del step, net, optimizer
    gc.collect()
    assert [reference() for reference in gone if reference() is not None] == []
    assert len(prof.modules) == 6
    assert frames._notes_of_run is not None
    assert frames._notes_of_run() is None


def test_info_hold_what_was_recorded_only():
    """A batch has the facts of the functions in it, of no others."""
    batch = recorded(trainer(OPTIMIZERS["sgd"]))._batch()
    names = set(batch["name"][batch["kind"] == Kind.FRAME].tolist())
    assert set(batch.frame_info.functions) | set(batch.frame_info.modules) <= names
    assert batch.frame_info.functions
