"""Root modules: which modules are phases, and that nothing of it is in them."""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import re
import threading
import weakref
from contextlib import nullcontext

import pytest
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

from module_events import installed  # noqa: E402
from phase_events import model_and, recorded  # noqa: E402
from torch import nn  # noqa: E402

X = torch.ones(2, 4)
pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_a_root_called_inside_another_is_a_part_of_it():
    """A module is a phase where the program calls it itself, and none inside of another that is."""
    inner = nn.Linear(4, 4)
    outer = nn.Sequential(inner, nn.ReLU())
    with recorded() as found:
        inner(X)
        outer(X)
        inner(X)
    assert [owner for _, _, owner, _ in found.rows()] == [id(inner), id(outer), id(inner)]
    assert found.lines() == ["FORWARD"] * 3


def test_recursion():
    """A module that calls itself is one phase."""

    class Recursive(nn.Module):
        def forward(self, depth):
            return depth if depth == 0 else self(depth - 1)

    model = Recursive()
    with recorded() as found:
        model(2)
        model(3)
    assert found.lines() == ["FORWARD"] * 2


def test_threads():
    """Each thread has its own phases, of roots that are found and called in any of them."""
    models = [model_and() for _ in range(4)]
    barrier = threading.Barrier(4)

    def train(model, optimizer):
        model(X)
        barrier.wait()
        for _ in range(24):
            optimizer.zero_grad()
            model(X).sum().backward()
            optimizer.step()

    with recorded() as found:
        in_threads(*(functools.partial(train, *each) for each in models))
    lines = found.lines()
    assert {name: lines.count(name) for name in set(lines)} == {
        "FORWARD": 100,
        "ZEROING": 96,
        "BACKWARD": 96,
        "STEP": 96,
    }
    assert found.objects()["FORWARD"] == {id(model) for model, _ in models}


def test_a_module_that_dies():
    """It is kept alive by nothing."""
    with recorded() as found:
        model = nn.Linear(4, 1)
        gone = weakref.ref(model)
        model(X)
        del model
        gc.collect()
        assert gone() is None
    assert found.lines() == ["FORWARD"]


def test_a_program_that_calls_its_layers_one_by_one():
    """Each is a phase, whichever is called first and how many there are."""
    layers = [nn.Identity() for _ in range(300)]
    with recorded() as found:
        for layer in layers * 2:
            layer(X)
    assert found.objects()["FORWARD"] == {id(layer) for layer in layers}


def test_scripted_modules():
    """TorchScript's are roots as any other."""
    scripted, plain = torch.jit.script(nn.Linear(4, 1)), nn.Linear(4, 1)
    with recorded() as found:
        for module in (scripted, plain, scripted):
            module(X)
        with pytest.raises(RuntimeError):
            scripted(torch.ones(2, 5))
    assert [owner for _, _, owner, _ in found.rows()] == [id(scripted), id(plain), id(scripted), id(scripted)]
    assert found.lines() == [*["FORWARD"] * 3, "FORWARD !RuntimeError"]


@pytest.mark.parametrize("with_modules", [False, True])
def test_names(with_modules):
    """Spans of a root's phases have its class, of a compiled or wrapped one that of what is in it."""
    model, other = nn.Sequential(nn.Linear(4, 1)), nn.Linear(4, 1)
    with installed() if with_modules else nullcontext(), recorded() as found:
        model(X).sum().backward()
        nn.DataParallel(other)(X)
    assert found.modules() == [("FORWARD", "Sequential"), ("BACKWARD", None), ("FORWARD", "Linear")]


def test_a_new_module_where_one_was():
    """Nothing is known of a module that has the address of one that was trained and is no more."""
    trained = nn.Linear(4, 1)
    with recorded() as found:
        trained(X)
        for _ in range(1000):
            key = id(trained)
            del trained
            trained = nn.Linear(4, 1)
            if id(trained) == key:
                break
        if id(trained) != key:
            pytest.skip("this allocator does not use an address again")
        with torch.no_grad():
            trained.eval()(X)
    assert found.lines() == ["FORWARD", "INFERENCE"]


def test_lazy_modules():
    """A module that takes its shape, and its class, from its first input is the same root before and after."""
    model = nn.LazyLinear(1)
    with recorded() as found:
        model(X)
        model(X)
    assert found.rows() == [(0, "FORWARD", id(model), "")] * 2
    assert type(model) is nn.Linear


class Wrapper(nn.Module):
    """As DataParallel and DistributedDataParallel do, calls a module in its place."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("wrapper", [Wrapper, nn.DataParallel, torch.optim.swa_utils.AveragedModel])
def test_wrappers(wrapper):
    """Of a wrapped module the wrapper is the phase, also where the module was one before."""
    model, _ = model_and()
    with recorded() as found:
        model(X)
        wrapped = wrapper(model)
        wrapped(X)
        wrapped(X)
    assert [owner for _, _, owner, _ in found.rows()] == [id(model), id(wrapped), id(wrapped)]


def saved(model):
    """What a program can see, copy or save of a model."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return (
        [{name: repr(value) for name, value in vars(part).items()} for part in model.modules()],
        {name: id(value) for kind in type(model).__mro__ for name, value in vars(kind).items()},
        [pickle.dumps(model, protocol) for protocol in range(2, 6)],
        re.sub(rb"\d{9,}", b"address", pickle.dumps(copy.deepcopy(model))),
        buffer.getvalue(),
    )


@pytest.mark.parametrize("as_events", [False, True])
def test_a_model_has_nothing_of_ours(as_events):
    """Running, raising and evaluated while its calls are recorded, a model is saved and copied to the same bytes as before."""
    model, _ = model_and()
    before = saved(model)
    with installed() if as_events else nullcontext(), recorded() as found:
        model(X)
        assert saved(model) == before
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 5))
        again = copy.deepcopy(model)
        with torch.no_grad():
            again.eval()(X)
        assert saved(model) == before
    assert saved(model) == before
    assert [line for line in found.lines() if "SAVE" not in line] == ["FORWARD", "FORWARD !RuntimeError", "INFERENCE"]


def test_explicit_calls():
    """A module whose class calls its own base, or that a program calls by name, is one phase."""

    class Calls(nn.Linear):
        def __call__(self, x):
            return super().__call__(x)

    model = Calls(4, 1)
    with recorded() as found:
        model(X)
        model.__call__(X)
        model._call_impl(X)
    assert found.rows()[:2] == [(0, "FORWARD", id(model), "")] * 2


def test_tracers_of_torch():
    """Scripted, traced, exported and symbolically traced while it is recorded, a root gives what it gives else."""
    model, _ = model_and()
    expected = model(X)
    plain_graph = torch.fx.symbolic_trace(model).code
    plain_script = torch.jit.script(model).code
    strict = torch.export.export(model, (X,), strict=True).graph_module.code
    loose = torch.export.export(model, (X,), strict=False).graph_module.code
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with recorded() as found:
        model(X)
        assert torch.fx.symbolic_trace(model).code == plain_graph
        assert torch.jit.script(model).code == plain_script
        torch.testing.assert_close(torch.jit.trace(model, X)(X), expected)
        assert torch.export.export(model, (X,), strict=False).graph_module.code == loose
        assert torch.export.export(model, (X,), strict=True).graph_module.code == strict
        model(X)
    assert found.lines()[-1] == "FORWARD"
