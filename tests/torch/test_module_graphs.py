"""Calls of modules and what takes models apart: torch.compile, TorchScript, export, vmap, and the wrappers for several devices."""

from __future__ import annotations

import warnings

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from module_events import NET, Block, Net, installed, recorded  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402

X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Graphs of other tests are forgotten."""
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture
def hooks():
    with installed() as every:
        yield every


def graphs():
    """How many graphs were made."""
    return counters["stats"]["unique_graphs"]


def compiled_module(model, backend="eager"):
    return torch.compile(model, fullgraph=True, backend=backend)


def compiled_in_place(model, backend="eager"):
    model.compile(fullgraph=True, backend=backend)
    return model


def compiled_function(model, backend="eager"):
    return torch.compile(lambda x: model(x).neg(), fullgraph=True, backend=backend)


WAYS = {
    compiled_module: ["Net"],
    compiled_in_place: ["Net"],
    compiled_function: [],
}
"""Ways to compile a model, and what is left of its modules as events."""


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("hooked_first", [True, False], ids=["hooked first", "compiled first"])
def test_one_graph(way, hooked_first):
    """A model compiles to one whole graph while its calls are followed, and keeps the one it has when that begins later."""
    plain = Net()
    model = Net()
    model.load_state_dict(plain.state_dict())
    compiled = way(model)
    expected = plain(X).neg() if way is compiled_function else plain(X)
    if not hooked_first:
        compiled(X)
    with installed():
        compiled(X)
        for _ in range(3):
            assert recorded(lambda: torch.testing.assert_close(compiled(X), expected)) == WAYS[way]
        assert graphs() == 1


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_installed_and_removed_around_calls(way):
    """A model is compiled once, whether its calls are followed or not, in turns."""
    for is_first in (True, False):
        torch._dynamo.reset()
        counters.clear()
        compiled = way(Net())
        for _ in range(12):
            if is_first:
                with installed():
                    compiled(X)
            compiled(X)
            with installed():
                compiled(X)
        assert graphs() == 1


def test_gradients_of_a_compiled_model(hooks):
    """A compiled model that is trained is an event and has the gradients of one that is not compiled."""
    plain, model = Net(), Net()
    model.load_state_dict(plain.state_dict())
    compiled = compiled_module(model, "aot_eager")
    plain(X).sum().backward()
    assert recorded(lambda: compiled(X).sum().backward())[0] == "Net"
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


class Breaks(nn.Module):
    """Breaks the graph between its two parts."""

    def __init__(self):
        super().__init__()
        self.before, self.after = Block(), Block()

    def forward(self, x):
        x = self.before(x)
        torch._dynamo.graph_break()
        return self.after(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # dynamo's own, where a graph breaks
def test_a_graph_that_breaks(hooks):
    """Where the graph breaks, no module is left open."""
    model = torch.compile(Breaks(), backend="eager")
    for _ in range(2):
        tree = recorded(lambda: model(X))
        assert tree[0] == "Breaks"
        assert not [line for line in tree if line.endswith("...")]


def test_an_exception_in_a_compiled_model(hooks):
    """A compiled model that raises is marked with the error, and the next call is as if nothing had been."""

    class Fails(nn.Module):
        def forward(self, x):
            if x.shape[0] == 3:
                raise ValueError("three")
            return x.neg()

    compiled = torch.compile(Fails(), backend="eager")

    def body():
        with pytest.raises(ValueError, match="three"):
            compiled(torch.ones(3))
        compiled(X)

    assert recorded(body) == ["Fails !ValueError", "Fails"]


def test_torch_does_not_warn_of_hooks(hooks):
    """Torch has no global hooks to warn of where a model is compiled."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled_module(Net())(X)
    assert not [each for each in caught if "hooks" in str(each.message)]


def test_a_compiled_part(hooks):
    """A compiled part of a model has the name of the part, and what is called in the model around it has its full name."""
    model = Net()
    model.encoder = torch.compile(model.encoder, backend="eager")
    assert recorded(lambda: model(X)) == [*NET[:2], *NET[4:]]
    model.encoder = model.encoder._orig_mod
    assert recorded(lambda: model(X)) == NET


def test_a_compiled_model_and_the_plain_one(hooks):
    """A model that is called both ways has the same name both ways, its parts their full names."""
    model = Net()
    compiled = torch.compile(model, backend="eager")
    assert recorded(lambda: [compiled(X), model(X)]) == ["Net", *NET]


def test_data_parallel(hooks):
    """DataParallel and the model in it are one module, and its parts are named as if it were not there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.DataParallel(Net())
    assert recorded(lambda: [model(X), model.module(X)]) == NET * 2


def test_distributed_data_parallel(hooks, tmp_path):
    """DistributedDataParallel and the model in it are one module, compiled or not."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Net())
        assert recorded(lambda: model(X).sum().backward()) == NET
        compiled = torch.compile(model, backend="eager")
        assert recorded(lambda: compiled(X))[0] == "Net"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript(hooks):
    """A scripted model is one event with the name of its class, a traced one too; tracing sees the model's operators only."""
    scripted = torch.jit.script(Net())
    assert recorded(lambda: scripted(X)) == ["Net"]
    plain = Net()
    traced = torch.jit.trace(plain, X)
    assert recorded(lambda: traced(X)) == ["Net"]
    torch.testing.assert_close(traced(X), plain(X))
    assert "otel" not in str(traced.graph)


def test_export_and_fx(hooks):
    """A model is exported, strictly too, and traced symbolically while its calls are followed."""
    model = Net()
    expected = model(X)
    for strict in (False, True):
        program = torch.export.export(model, (X,), strict=strict)
        torch.testing.assert_close(program.module()(X), expected)
    torch.testing.assert_close(torch.fx.symbolic_trace(model)(X), expected)


def test_function_transforms(hooks):
    """Modules inside vmap and grad are events like others."""
    model = Net()
    parameters = dict(model.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(model, parameters, (x,)).sum()

    assert recorded(lambda: torch.func.vmap(model)(torch.ones(3, 2, 4))) == NET
    assert recorded(lambda: torch.func.grad(loss)(parameters, X)) == NET


def test_checkpointing(hooks):
    """A checkpointed part runs a second time in the backward pass, under its full name, outside of the model.

    Where torch leaves it, having all that it needs, by an exception of its own, that is no error.
    """
    model = Net()
    encoder = model.encoder.forward
    model.encoder.forward = lambda x: torch.utils.checkpoint.checkpoint(encoder, x, use_reentrant=False)
    tree = recorded(lambda: model(X).sum().backward())
    assert tree == [*NET, "encoder.layers.0", "encoder.layers.1"]
