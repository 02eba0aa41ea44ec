"""Corners of torch where a profiler that looks at inputs and stacks goes wrong: as torch's own, with shapes."""

from __future__ import annotations

import contextlib

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from observed import info, recorded_names, run, torchs  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # noqa: E402

import otel_torchprof as otp  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, of features in beta
X = torch.randn(3, 3)


def symbolic_shapes():
    """Sizes that are no numbers."""
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        y = mode.from_tensor(torch.ones(3, 4), static_shapes=False)
        torch.cat([y + y, y])


def jagged():
    """Nested tensors of both layouts."""
    for layout in (torch.strided, torch.jagged):
        nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)], layout=layout)
        nested.clone().sin()


def optional_tensors():
    """Tensors that are not there, alone and in lists."""
    torch.nn.functional.layer_norm(X, (3,), None, None)
    X[:, None][torch.tensor([0, 1]), :, torch.tensor([0, 1])].sum()


def failing_operator():
    """An operator that raises."""
    with contextlib.suppress(RuntimeError):
        X @ torch.ones(5)


def failing_hook():
    """A hook of Python's that raises in the backward pass."""

    def hook(gradient):
        raise ValueError("in the hook")

    y = torch.ones(3, requires_grad=True) * 2
    y.register_hook(hook)
    with contextlib.suppress(ValueError):
        y.sum().backward()


def second_derivatives():
    """Backward within forward within backward."""
    torch.autograd.functional.hessian(lambda v: (v**3).sum(), torch.ones(3))


def empty_and_scalar():
    """Tensors without elements and without dimensions."""
    torch.zeros(0, 3).sum() + torch.tensor(1.0)


@torch.library.custom_op("otel_torchprof_tests::negative", mutates_args=())
def custom_operator(x: torch.Tensor) -> torch.Tensor:
    """An operator that is written in Python."""
    return x.neg()


def sparse():
    """Sparse layouts."""
    return X.to_sparse() + X.to_sparse(), X.to_sparse_csr() @ X


def fused_optimizer():
    """The longest lists of tensors that torch hands to one operator."""
    parameters = [torch.nn.Parameter(torch.ones(2, 3)) for _ in range(500)]
    for parameter in parameters:
        parameter.grad = torch.ones(2, 3)
    torch.optim.AdamW(parameters, fused=True).step()


BODIES = [
    symbolic_shapes,
    jagged,
    optional_tensors,
    failing_operator,
    failing_hook,
    second_derivatives,
    empty_and_scalar,
    lambda: custom_operator(X),
    sparse,
    fused_optimizer,
]


@pytest.mark.parametrize("body", BODIES)
def test_as_torch(body):
    """The same tree with the same shapes as torch's profiler, and nothing raised."""
    body()
    with otp.profile(record_shapes=True) as ours, torchs(shapes=True) as theirs:
        run(body)
    assert info(ours.events(), shapes=True) == info(theirs.events(), shapes=True)
    assert len(recorded_names(ours)) > 1


def test_more_inputs_than_a_record_holds():
    """Of a list of tensors that fits no record the shapes are left out, the event is flagged, and nothing else suffers."""
    tensors = [torch.ones(1, 1) for _ in range(3000)]
    with otp.profile(record_shapes=True) as prof:
        torch._foreach_neg(tensors)
        X.neg()
    rows = {prof.names[name]: row for row, name in enumerate(prof.columns["name"].tolist())}
    flags = prof.columns["flags"].tolist()
    assert flags[rows["aten::_foreach_neg"]] == 16
    events = {event.name: event for event in prof.events()}
    assert events["aten::_foreach_neg"].input_shapes == []
    assert flags.count(16) == 1


def test_reused_operator_names():
    """Operators that come and go, whose names may lie at the same address, keep their own names."""
    found = []
    with otp.profile() as prof:
        for number in range(30):
            library = torch.library.Library(f"otp_gone_{number:02}", "DEF")
            library.define("f(Tensor x) -> Tensor")
            library.impl("f", torch.neg, "CPU")
            getattr(torch.ops, f"otp_gone_{number:02}").f(X)
            found.append(f"otp_gone_{number:02}::f")
            library._destroy()
    assert [name for name in recorded_names(prof) if name.startswith("otp_gone")] == found
