"""What the tracer notes of modules and optimizers when it meets them: names, tensors, gradients, state; and what it must not touch."""

import functools
import threading
import warnings
from typing import ClassVar

import pytest
from threaded import in_threads

torch = pytest.importorskip("torch", minversion="2.6")

from torch import nn  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from otel_torchprof._columns.frame_info import TensorInfo  # noqa: E402
from otel_torchprof._native.object_notes import ObjectNotes  # noqa: E402

PARAMETER = "torch.nn.parameter.Parameter"


def info_of(tensor):
    """The facts of an ordinary tensor, as torch tells them."""
    return TensorInfo(
        tuple(tensor.shape),
        tensor.stride(),
        str(tensor.dtype),
        str(tensor.layout),
        str(tensor.device),
        tensor.untyped_storage().data_ptr(),
        tensor._cdata,
    )


def noted(*modules):
    """What is known of modules that were called in that order, by the end."""
    notes = ObjectNotes()
    for number, module in enumerate(modules, 1):
        notes.add_module(number, module)
    return list(notes.finish().modules.values())


def only(module):
    """The parameters of a module, by name."""
    (info,) = noted(module)
    return {parameter.name: parameter for parameter in info.parameters}


class Net(nn.Module):
    """A model with a list of layers, one of which it has twice."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.ReLU()])
        self.again = self.layers[0]
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)


def test_two_roots_and_a_module_put_in_later():
    """A module outside of the first root is a root of its own; one that was put into a root since has its path there."""
    net, other = Net(), nn.Sequential(nn.ReLU())
    notes = ObjectNotes()
    notes.add_module(1, net)
    net.late = nn.Linear(1, 1)
    notes.add_module(2, net.late)
    notes.add_module(3, other)
    notes.add_module(4, other[0])
    found = [(info.qualified_name, info.root) for info in notes.finish().modules.values()]
    assert found == [("Net", "Net"), ("late", "Net"), ("Sequential", "Sequential"), ("0", "Sequential")]


def test_wrappers_have_the_names_of_what_they_wrap():
    """The model inside a DataParallel is the root by name, and its parts have their paths in it."""
    net = Net()
    wrapped = nn.DataParallel(net)
    found = [(info.qualified_name, info.root) for info in noted(wrapped, net, net.layers[0])]
    assert found == [("Net", "Net"), ("Net", "Net"), ("layers.0", "Net")]


def test_parameters():
    """Own parameters with all that torch knows of their tensors; not those that are None, nor those of modules inside."""
    layer = nn.Linear(3, 2, bias=False)
    layer.weight = nn.Parameter(torch.arange(8.0, dtype=torch.float64).view(4, 2)[1:].t(), requires_grad=False)
    found = only(layer)
    assert list(found) == ["weight"]
    weight = found["weight"]
    assert (weight.type, weight.requires_grad, weight.gradient, dict(weight.state)) == (PARAMETER, False, None, {})
    assert weight.tensor == info_of(layer.weight)
    assert (weight.tensor.shape, weight.tensor.strides, weight.tensor.dtype) == ((2, 3), (1, 2), "torch.float64")
    assert weight.tensor.storage_data_ptr == layer.weight.data_ptr() - 2 * 8
    assert list(only(Net())) == ["scale"]


def test_gradients_of_the_first_call_and_of_the_end():
    """A gradient that is there at the first call is told of as it was then; else the one at the end is."""
    early, late = nn.Linear(2, 2), nn.Linear(2, 2)
    early(torch.ones(1, 2)).sum().backward()
    first = {name: info_of(p.grad) for name, p in early.named_parameters()}
    notes = ObjectNotes()
    notes.add_module(1, early)
    notes.add_module(2, late)
    early.zero_grad()
    late(torch.ones(1, 2)).sum().backward()
    before = notes.info().modules
    info = notes.finish().modules
    assert {p.name: p.gradient for p in info[1].parameters} == first
    assert [p.gradient for p in before[2].parameters] == [None, None]  # what was told once stays
    assert {p.name: p.gradient for p in info[2].parameters} == {
        name: info_of(p.grad) for name, p in late.named_parameters()
    }


def test_gradients_of_what_another_thread_calls_are_left_alone():
    """A stop does not read the gradients of a thread that may be in its backward pass, which torch would not survive."""
    notes, net = ObjectNotes(), nn.Linear(2, 2)

    def train():
        notes.add_module(1, net)
        net(torch.ones(1, 2)).sum().backward()

    in_threads(train)
    assert [parameter.gradient for parameter in notes.finish().modules[1].parameters] == [None, None]


def test_gradients_are_of_the_parameter_that_was_noted():
    """Where a program puts another parameter in the place of one, its gradient is not taken for the first one's."""
    layer = nn.Linear(2, 2, bias=False)
    before = info_of(layer.weight)
    notes = ObjectNotes()
    notes.add_module(1, layer)
    first = layer.weight
    layer.weight = nn.Parameter(torch.ones(5, 2))
    layer(torch.ones(1, 2)).sum().backward()
    (weight,) = notes.finish().modules[1].parameters
    assert (weight.tensor, weight.gradient) == (before, None)
    assert first.grad is None


def test_a_lazy_module_is_known_once_it_has_seen_an_input():
    """Parameters without a shape have no facts at the first call, and those that they came to have at the end."""
    layer = nn.LazyLinear(2)
    notes = ObjectNotes()
    notes.add_module(1, layer)
    weight, _ = notes.info().modules[1].parameters
    assert (weight.type, weight.tensor) == ("torch.nn.parameter.UninitializedParameter", None)
    layer(torch.ones(1, 3))
    weight, _ = notes.finish().modules[1].parameters
    assert weight.tensor == info_of(layer.weight)


class Loud(torch.Tensor):
    """A tensor that says when its code runs."""

    ran: ClassVar = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.ran.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})

    @property
    def shape(self):
        self.ran.append("shape")
        return super().shape


def test_tensors_of_other_classes_are_not_asked():
    """Of a parameter whose class has code of its own the name, class and requires_grad are told, and none of it runs."""
    layer = nn.Linear(2, 2, bias=False)
    layer.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Loud), requires_grad=False)
    layer.loud_gradient = nn.Parameter(torch.ones(2))
    layer.loud_gradient.grad = torch.ones(2).as_subclass(Loud)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    Loud.ran.clear()
    found = only(layer)
    notes = ObjectNotes()
    notes.add_optimizer(1, optimizer)
    assert len(notes.finish().optimizers[1].groups[0].parameters) == 2
    assert Loud.ran == []
    weight = found["weight"]
    assert (weight.type, weight.requires_grad, weight.tensor) == (f"{__name__}.Loud", False, None)
    assert found["loud_gradient"].tensor == info_of(layer.loud_gradient)
    assert found["loud_gradient"].gradient is None


def test_modes_see_nothing():
    """Modes of the program's, which see every attribute and operator, see nothing of what is noted."""
    seen = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    optimizer = torch.optim.Adam(layer.parameters())
    optimizer.step()
    notes = ObjectNotes()
    with Functions(), Dispatches():
        notes.add_module(1, layer)
        notes.add_optimizer(1, optimizer)
        info = notes.finish()
        assert layer.weight.shape == (2, 2)
    assert len(seen) == 1
    assert len(info.optimizers[1].groups[0].parameters) == len(info.modules[1].parameters) == 2


class Guarded(nn.Module):
    """A module that lets nobody look at it from outside."""

    def __getattribute__(self, name):
        if not name.startswith("__"):
            raise AssertionError(name)
        return super().__getattribute__(name)

    def __eq__(self, other):
        raise AssertionError("compared")

    def __hash__(self):
        raise AssertionError("hashed")


def test_no_code_of_a_module_runs():
    """Attributes, comparison and hash of a module can be a program's code, and none of it is needed."""
    layer = nn.Linear(2, 2)
    layer.inner = nn.ReLU()
    layer.__class__ = type("Shy", (Guarded, nn.Linear), {})
    (info,) = noted(layer)
    assert info.qualified_name == "Shy"
    assert info.parameters[0].tensor.shape == (2, 2)


def test_odd_tensors():
    """Of sparse tensors there are no strides and no storage; of nested ones and of those on meta what there is; no warning."""
    layer = nn.Module()
    layer.sparse = nn.Parameter(torch.eye(2).to_sparse())
    layer.meta = nn.Parameter(torch.ones(2, device="meta"))
    layer.empty = nn.Parameter(torch.ones(0, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer.nested = nn.Parameter(torch.nested.nested_tensor([torch.ones(1, 2), torch.ones(2, 2)]))
    layer.register_parameter("inner", None)
    layer._parameters["inner"] = nn.Parameter(torch.ones(2)) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = only(layer)
    sparse, meta = found["sparse"].tensor, found["meta"].tensor
    assert (sparse.shape, sparse.strides, sparse.layout, sparse.storage_data_ptr) == ((2, 2), (), "torch.sparse_coo", 0)
    assert (meta.device, meta.storage_data_ptr) == ("meta", 0)
    assert found["empty"].tensor.shape == (0, 3)
    assert found["nested"].tensor is None
    assert (found["inner"].type, found["inner"].gradient) == ("torch.Tensor", None)


def test_parameters_inside_vmap():
    """The batched tensors that functional_call puts into a module have no storage; the step goes on."""
    layer, notes = nn.Linear(2, 2, bias=False), ObjectNotes()
    layer.register_forward_hook(lambda module, *_: notes.add_module(1, module))
    weights = torch.ones(3, 2, 2)
    torch.vmap(lambda w: torch.func.functional_call(layer, {"weight": w}, torch.ones(2)))(weights)
    (weight,) = notes.finish().modules[1].parameters
    assert (weight.tensor.shape, weight.tensor.storage_data_ptr) == ((2, 2), 0)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_is_traced_stays_as_it_is():
    """Inside torch.jit.trace, which records every look at a shape, nothing is looked at; at the end what lives is known."""
    notes, layer, during = ObjectNotes(), nn.Linear(2, 2), []

    def noted_inside(x):
        notes.add_module(1, layer)
        during.append(notes.info().modules[1].parameters[0])
        during.append(str(torch._C._get_tracing_state().graph))
        return x + 1

    torch.jit.trace(noted_inside, torch.ones(1, 2), check_trace=False)
    weight, graph = during
    assert (weight.name, weight.tensor, "aten::size" in graph) == ("weight", None, False)
    assert notes.finish().modules[1].parameters[0].tensor == info_of(layer.weight)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_scripted_modules():
    """TorchScript's modules, which hold their parts in objects of their own, have names and parameters."""
    scripted = torch.jit.script(nn.Sequential(nn.Linear(2, 3), nn.ReLU()))
    outer, inner = noted(scripted, dict(scripted.named_children())["0"])
    assert (outer.qualified_name, inner.qualified_name, inner.root) == ("Sequential", "0", "Sequential")
    assert [(p.name, p.tensor.shape) for p in inner.parameters] == [("weight", (3, 2)), ("bias", (3,))]


def test_copy_on_write_stays():
    """To look at a tensor that shares its memory until it is written does not copy it."""
    layer = nn.Module()
    layer.weight = nn.Parameter(torch._lazy_clone(torch.ones(4)))
    only(layer)
    assert torch._C._is_cow_tensor(layer.weight)


def _trained(make):
    net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = make(net)
    net(torch.ones(2, 2)).sum().backward()
    optimizer.step()
    return net, optimizer


def test_optimizer():
    """An optimizer's class, groups, plain hyperparameters, parameters with full names, gradients and state."""
    net, optimizer = _trained(
        lambda net: torch.optim.Adam(
            [{"params": net[0].parameters(), "lr": 0.5}, {"params": net[2].parameters(), "lr": torch.tensor(0.25)}]
        )
    )
    notes = ObjectNotes()
    for number, module in enumerate(net.modules(), 1):
        notes.add_module(number, module)
    notes.add_optimizer(9, optimizer)
    info = notes.finish().optimizers[9]
    assert info.class_name == "torch.optim.adam.Adam"
    first, second = info.groups
    assert (first.hyperparameters["lr"], first.hyperparameters["betas"]) == (0.5, (0.9, 0.999))
    assert (first.hyperparameters["foreach"], "params" in first.hyperparameters) == (None, False)
    assert "lr" not in second.hyperparameters
    assert [[p.name for p in group.parameters] for group in info.groups] == [
        ["0.weight", "0.bias"],
        ["2.weight", "2.bias"],
    ]
    (noted_weight, _), weight = first.parameters, net[0].weight
    assert (noted_weight.tensor, noted_weight.gradient) == (info_of(weight), info_of(weight.grad))
    assert noted_weight.state == {name: info_of(value) for name, value in optimizer.state[weight].items()}
    assert list(noted_weight.state) == ["step", "exp_avg", "exp_avg_sq"]


def test_names_that_an_optimizer_was_given():
    """Parameters that were given with names have those; those of no known module have none."""
    net = nn.Linear(2, 2)
    notes = ObjectNotes()
    notes.add_optimizer(1, torch.optim.SGD([(f"my.{name}", p) for name, p in net.named_parameters()]))
    notes.add_optimizer(2, torch.optim.SGD(net.parameters()))
    names = [[p.name for p in info.groups[0].parameters] for info in notes.finish().optimizers.values()]
    assert names == [["my.weight", "my.bias"], ["", ""]]


def test_optimizer_is_completed_at_the_end():
    """What an optimizer did not have at first sight, state, gradients and groups, is there at the end."""
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9)
    notes = ObjectNotes()
    notes.add_optimizer(1, optimizer)
    optimizer.param_groups[0]["lr"] = 0.2
    optimizer.add_param_group({"params": net[1].parameters()})
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    notes.add_module(1, net)
    notes.add_module(2, net[0])
    first, second = notes.finish().optimizers[1].groups
    assert (first.hyperparameters["lr"], second.hyperparameters["lr"]) == (0.1, 0.1)
    (parameter,) = first.parameters
    assert parameter.name == "0.weight"
    assert parameter.gradient == info_of(net[0].weight.grad)
    assert parameter.state == {"momentum_buffer": info_of(optimizer.state[net[0].weight]["momentum_buffer"])}
    assert list(second.parameters[0].state) == ["momentum_buffer"]


def test_several_threads():
    """Threads that call models of their own at the same time lose nothing, and each part has its own root's name."""
    notes, begin = ObjectNotes(), threading.Barrier(4)
    nets = [nn.Sequential(*(nn.Linear(1, 1) for _ in range(50))) for _ in range(4)]

    def note(place):
        begin.wait(60)
        for number, module in enumerate(nets[place].modules()):
            notes.add_module(100 * place + number, module)

    in_threads(*(functools.partial(note, place) for place in range(4)))
    modules = notes.finish().modules
    assert len(modules) == 4 * 51
    for number, info in modules.items():
        assert info.qualified_name == (str(number % 100 - 1) if number % 100 else "Sequential")
