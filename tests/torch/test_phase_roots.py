"""Root modules: which modules are phases, how they are found, and what else is done with a model that has our hooks."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from module_events import installed  # noqa: E402
from observed import succeeds  # noqa: E402
from phase_events import model_and, recorded  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.modules import module as torch_modules  # noqa: E402

from otel_torchprof._sources import root_modules  # noqa: E402

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
    barrier, one_after_another = threading.Barrier(4), threading.Lock()

    def train(model, optimizer):
        with one_after_another:  # one that begins while another runs is found later
            model(X)
        barrier.wait()
        for _ in range(24):
            optimizer.zero_grad()
            model(X).sum().backward()
            optimizer.step()

    with recorded() as found:
        threads = [threading.Thread(target=train, args=each) for each in models]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    lines = found.lines()
    assert {name: lines.count(name) for name in set(lines)} == {
        "FORWARD": 100,
        "ZEROING": 96,
        "BACKWARD": 96,
        "STEP": 96,
    }
    assert found.objects()["FORWARD"] == {id(model) for model, _ in models}


def test_a_module_that_dies():
    """It is forgotten, and kept alive by nothing."""
    with recorded() as found:
        model = nn.Linear(4, 1)
        key = id(model)
        model(X)
        assert key in root_modules.shared._roots
        del model
        gc.collect()
        assert key not in root_modules.shared._roots
    assert found.lines() == ["FORWARD"]


def test_modules_are_found_later():
    """The search continues between the calls of roots; torch has no hook for all modules while one of them runs."""
    seen = []

    class Looks(nn.Module):
        def forward(self, x):
            seen.append(len(torch_modules._global_forward_pre_hooks))
            return x

    first, second = nn.Sequential(Looks(), Looks()), Looks()
    with recorded() as found:
        first(X)
        first(X)
        second(X)
        assert len(torch_modules._global_forward_pre_hooks) == 1
    assert seen == [0] * 5
    assert found.objects()["FORWARD"] == {id(first), id(second)}


def test_a_program_that_calls_its_layers_one_by_one(monkeypatch):
    """There are hooks for so many roots and no more."""
    monkeypatch.setattr(root_modules, "MOST_ROOTS", 3)
    layers = [nn.Identity() for _ in range(5)]
    with recorded() as found:
        for layer in layers * 2:
            layer(X)
    assert found.objects()["FORWARD"] == {id(layer) for layer in layers[:3]}
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)


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


def test_a_module_that_takes_no_hooks():
    """It runs as ever, and the search continues."""

    class Refuses(dict):
        def __setitem__(self, key, value):
            raise TypeError

    closed, plain = nn.Identity(), nn.Linear(4, 1)
    closed._forward_pre_hooks = Refuses()
    with recorded() as found:
        closed(X)
        plain(X)
    assert found.objects()["FORWARD"] == {id(plain)}


@pytest.mark.parametrize("with_modules", [False, True])
def test_names(with_modules):
    """Spans of a root's phases have its class, of a compiled or wrapped one that of what is in it."""
    model, other = nn.Sequential(nn.Linear(4, 1)), nn.Linear(4, 1)
    with installed() if with_modules else nullcontext(), recorded(with_modules=with_modules) as found:
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


def test_a_copy():
    """A copy of a root has its hooks and is a root of its own."""
    model, _ = model_and()
    with recorded() as found:
        model(X)
        again = copy.deepcopy(model)
        again(X)
    assert found.rows() == [(0, "FORWARD", id(model), ""), (0, "FORWARD", id(again), "")]
    assert not model._forward_hooks


def test_a_model_is_loaded_where_this_package_is_not(tmp_path):
    """Pickled or saved whole while its calls are recorded, it needs nothing of ours to be loaded and called."""
    model, _ = model_and()
    with recorded():
        model(X)
        assert model._forward_hooks
        torch.save(model, tmp_path / "saved.pt")
        (tmp_path / "pickled").write_bytes(pickle.dumps(model))
    script = f"""
import sys, pickle
sys.modules["otel_torchprof"] = None
import torch
for model in (torch.load({str(tmp_path / "saved.pt")!r}, weights_only=False), pickle.load(open({str(tmp_path / "pickled")!r}, "rb"))):
    assert model._forward_hooks and model._forward_pre_hooks
    assert model(torch.ones(2, 4)).shape == (2, 1)
    again = pickle.loads(pickle.dumps(model))
    try:
        model(torch.ones(2, 5))
    except RuntimeError:
        pass
assert not [name for name in sys.modules if name.startswith("otel_torchprof.")]
"""
    succeeds(script)


def test_the_first_hook_of_a_process_survives_a_compilation():
    """Torch numbers its hooks from 0; where modules are recorded that is one of ours, and a compiled model stays a phase."""
    script = """
import otel_torchprof as otp, torch
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from torch.nn.modules import module

model = torch.compile(torch.nn.Linear(4, 1), backend="aot_eager")
exporter = InMemorySpanExporter()
with otp.stream(exporter, detail="modules"):
    assert list(module._global_forward_pre_hooks) == [0], module._global_forward_pre_hooks
    for _ in range(3):
        model(torch.ones(2, 4))
    assert list(module._global_forward_pre_hooks) == [0]
print([span.name for span in exporter.get_finished_spans()].count("torch.phase.forward"))
"""
    assert succeeds(script, has_torch=True).split()[-1] == "3"


def test_tracers_of_torch():
    """Scripted, traced, exported and symbolically traced with our hooks, a root gives what it gives without them."""
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
