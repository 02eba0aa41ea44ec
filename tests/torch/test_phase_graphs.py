"""Phases and torch.compile: the graphs, breaks and recompilations that a program has are those that it has without us."""

from __future__ import annotations

import functools
import sys
import warnings
from contextlib import contextmanager, nullcontext

import pytest

torch = pytest.importorskip("torch", minversion="2.6")

from module_events import installed  # noqa: E402
from phase_events import recorded  # noqa: E402
from torch import nn  # noqa: E402
from torch._dynamo.testing import CompileCounter, CompileCounterWithBackend  # noqa: E402
from torch._dynamo.utils import counters  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from otel_torchprof._record.compile_events import CompileEvents  # noqa: E402

X = torch.ones(2, 4)


class Net(nn.Module):
    """A model of the program's own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def container():
    """A model of torch's own modules alone."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def trained(model, call=None, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        (model if call is None else call)(X).sum().backward()
        optimizer.step()


def module(backend):
    model = Net()
    trained(model, torch.compile(model, backend=backend))


def module_after_eager_steps(backend):
    model = Net()
    trained(model)
    trained(model, torch.compile(model, backend=backend))


def container_module(backend):
    model = container()
    trained(model, torch.compile(model, backend=backend))


def in_place(backend):
    model = Net()
    model.compile(backend=backend)
    trained(model)


def container_in_place(backend):
    model = container()
    model.compile(backend=backend)
    trained(model)


def in_place_after_eager_steps(backend):
    for model in (Net(), container()):
        trained(model)
        model.compile(backend=backend)
        trained(model)


def function(backend):
    model = container()
    trained(model, torch.compile(lambda x: model(x).sum(), backend=backend, fullgraph=True))


def function_of_a_root(backend):
    model = Net()
    trained(model)
    trained(model, torch.compile(lambda x: model(x).sum(), backend=backend, fullgraph=True))


def whole_step(backend):
    model = container()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @torch.compile(backend=backend)
    def step(x):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(4):
        step(X)


def optimizer_step(backend):
    model = container()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    step = torch.compile(lambda: optimizer.step(), backend=backend)  # noqa: PLW0108 - as programs do
    for _ in range(4):
        optimizer.zero_grad()
        model(X).sum().backward()
        step()


def clipping(backend):
    model = container()

    @torch.compile(backend=backend)
    def clip():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    for _ in range(4):
        model(X).sum().backward()
        clip()


def evaluations(backend):
    model = Net()
    call = torch.compile(model, backend=backend)
    for _ in range(3):
        trained(model.train(), call, 2)
        model.eval()
        with torch.no_grad():
            call(X)


def checkpointed(backend):
    model = container()
    trained(model, torch.compile(lambda x: checkpoint(model, x, use_reentrant=False).sum(), backend=backend))


def compiled_inside_a_checkpoint(backend):
    model = Net()
    call = torch.compile(model, backend=backend)
    trained(model, lambda x: checkpoint(call, x.clone().requires_grad_(), use_reentrant=False))


def gradients_inside(backend):
    model = container()

    @torch.compile(backend=backend)
    def call(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(model(x).sum(), x)[0]

    for _ in range(4):
        call(X)


def loaded(backend):
    model = Net()
    call = torch.compile(model, backend=backend)
    for (batch,) in DataLoader(TensorDataset(torch.ones(8, 4)), batch_size=2):
        call(batch).sum().backward()


def graph_break(backend):
    inner = Net()

    class Breaks(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            x = x + 1
            torch._dynamo.graph_break()
            return self.inner(x)

    model = Breaks()
    trained(inner)
    trained(model, torch.compile(model, backend=backend))


def new_shapes(backend):
    model = Net()
    call = torch.compile(model, backend=backend)
    for size in (2, 3, 4, 5):
        call(torch.ones(size, 4)).sum().backward()


PROGRAMS = [
    module,
    module_after_eager_steps,
    container_module,
    in_place,
    container_in_place,
    in_place_after_eager_steps,
    function,
    function_of_a_root,
    whole_step,
    optimizer_step,
    clipping,
    evaluations,
    checkpointed,
    compiled_inside_a_checkpoint,
    gradients_inside,
    loaded,
    graph_break,
    new_shapes,
]


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    """Graphs of other tests are forgotten."""
    forget()
    yield
    forget()


def forget():
    torch._dynamo.reset()
    counters.clear()


@contextmanager
def instrumented(detail):
    """As the instrumentation does at a detail."""
    events = CompileEvents()
    events.start()
    try:
        with installed() if detail == "ops" else nullcontext(), recorded() as found:
            yield found
    finally:
        events.stop()


def told(program):
    """Runs it; what dynamo says of it."""
    counter = CompileCounter()
    with warnings.catch_warnings(record=True) as warned:
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        program(counter)
    assert not [each for each in warned if "global hooks" in str(each.message)]
    # By numbers: their texts say what a decorator hides.
    breaks = sum(counters["graph_break"].values())
    recompiled = {kind: dict(counters[kind]) for kind in ("recompiles", "frames", "stats", "unimplemented")}
    return counter.frame_count, counter.op_count, breaks, recompiled


@functools.cache
def told_without_us(program):
    """The same of a run that nobody records."""
    found = told(program)
    forget()
    return found


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("detail", ["steps", "ops"])
def test_graphs(program, detail):
    """Recorded or not, a program has the same graphs and as many breaks and compilations."""
    expected = told_without_us(program)
    with instrumented(detail) as found:
        assert told(program) == expected
    assert "COMPILATION" in found.objects() or not expected[0]


@pytest.mark.parametrize("detail", ["steps", "ops"])
def test_compiled_before_and_after(detail):
    """What was compiled before a recording runs on in it, as a phase of its wrapper, and what was compiled in it after it."""
    model, other = Net(), container()
    counter = CompileCounter()
    before = torch.compile(model, backend=counter)
    trained(model, before)
    assert counter.frame_count == 1
    with instrumented(detail) as found:
        trained(model, before)
        in_between = torch.compile(other, backend=counter)
        trained(other, in_between)
    assert counter.frame_count == 2
    trained(model, before)
    trained(other, in_between)
    assert counter.frame_count == 2
    assert found.lines().count("BACKWARD") == found.lines().count("STEP") == 8


def test_a_model_that_is_first_called_after_a_compilation():
    """It is a phase as any other."""
    model, later = Net(), Net()
    with instrumented("steps") as found:
        trained(model, torch.compile(model, backend="eager"))
        trained(later)
    assert id(later) in found.objects()["FORWARD"]


def test_a_graph_compiled_ahead_of_time_has_no_phases_of_torchs_own():
    """What AOTAutograd traces while it compiles is in the phase of the compilation, and nothing is inside that."""
    model = Net()
    call = torch.compile(model, backend=CompileCounterWithBackend("aot_eager"))
    with instrumented("steps") as found:
        trained(model, call, 2)
    lines = found.lines()
    at = next(place for place, line in enumerate(lines) if line.strip() == "COMPILATION")
    depth = len(lines[at]) - len(lines[at].lstrip())
    after = lines[at + 1]
    assert len(after) - len(after.lstrip()) <= depth
    assert lines.count("BACKWARD") == 2


def test_a_compiled_module_is_the_root():
    """The wrapper that torch makes, and not the module in it."""
    model = Net()
    call = torch.compile(model, backend="eager")
    with instrumented("steps") as found:
        trained(model, call, 3)
    assert found.objects()["FORWARD"] == {id(call)}
    assert found.lines().count("FORWARD") == 3
    assert sys.modules["torch._dynamo.eval_frame"].OptimizedModule is type(call)
