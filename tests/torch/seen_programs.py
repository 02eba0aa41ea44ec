"""Programs that say all that they see: for ``test_seen.py``."""

from __future__ import annotations

import copy
import faulthandler
import gc
import io
import logging
import multiprocessing
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch._dynamo
import torch.ao.quantization
import torch.distributed
import torch.export
import torch.nn.utils.prune
from opentelemetry import context as otel_context
from seen_data import Table
from seen_values import attributes, raised_by, randomness, saved
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules import module as torch_modules
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizers
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from collections.abc import Callable

    See = Callable[[str, Any], None]

X = torch.arange(24.0).reshape(6, 4) / 24


class Net(nn.Module):
    """A model of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 8), nn.Linear(8, 2), nn.Dropout(0.25)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(torch.relu(self.a(x))))


def train(model: nn.Module, optimizer: Any, call: Any = None, steps: int = 3) -> list[Any]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model if call is None else call)(X).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss)
    return losses


def training(see: See) -> None:
    """A plain loop, with each kind of optimizer."""
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop):
        model = Net()
        optimizer = kind(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        see("losses", train(model, optimizer))
        schedule.step()
        see("gradients", [each.grad for each in model.parameters()])
        see("model", [attributes(model), model.state_dict(), *saved(model)])
        see("optimizer", [optimizer.state_dict(), *saved(optimizer), schedule.state_dict(), sorted(vars(optimizer))])


def second_order(see: See) -> None:
    """A closure, an average of weights, and gradients of gradients."""
    model = Net().eval()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(X).square().mean()
        loss.backward()
        return loss

    see("losses", [optimizer.step(closure) for _ in range(2)])
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    see("average", [averaged(X), averaged.state_dict(), *saved(averaged.module)])
    x = X.clone().requires_grad_()
    (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    see("second", torch.autograd.grad(first.sum(), x))


def serving(see: See) -> None:
    """Requests, some of them wrong, and the fast path of torch's own transformer."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).eval()
    with torch.inference_mode():
        see("answers", [model(torch.rand(1, length, 8)) for length in (1, 3, 5)])
        see("exception of a forward pass", raised_by(lambda: model(torch.rand(1, 3, 7))))
    see("model", attributes(model))


def compiled(see: See) -> None:
    """Graphs and compilations."""
    graphs: list[str] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph.print_readable(print_output=False))
        return graph.forward

    def whole(model: nn.Module) -> Any:
        return torch.compile(model, backend=backend)

    def in_place(model: nn.Module) -> Any:
        model.compile(backend=backend)
        return model

    def function(model: nn.Module) -> Any:
        return torch.compile(lambda x: model(x).sum(), backend=backend, fullgraph=True)

    for way in (whole, in_place, function):
        model = Net()
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.a.register_forward_hook(lambda *_: None)
        call = way(model)
        see("losses", train(model, torch.optim.SGD(model.parameters(), lr=0.1), call))
        with torch.no_grad():
            see("answers", [call(X[:rows]) for rows in (2, 3, 4)])
    see("graphs", graphs)
    counters = {kind: dict(found) for kind, found in torch._dynamo.utils.counters.items()}
    # Breaks by number, since their texts name what is around.
    see("counters", {kind: found for kind, found in counters.items() if kind != "graph_break"})
    see("breaks", sum(counters.get("graph_break", {}).values()))


def ahead_of_time(see: See) -> None:
    """A whole step, compiled with AOTAutograd, which traces the backward pass too."""
    model = Net().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(lambda: optimizer.step(), backend="aot_eager")  # noqa: PLW0108 - as programs do
    see("losses", train(model, optimizer, torch.compile(model, backend="aot_eager")))
    compiled()
    see("model", model.state_dict())
    see("counters", {kind: dict(found) for kind, found in torch._dynamo.utils.counters.items() if kind == "stats"})


def exported(see: See) -> None:
    """Exported, strictly and not."""
    model = Net().eval()
    model(X)
    for strict in (False, True):
        program = torch.export.export(model, (X,), strict=strict)
        see("graph", [str(program.graph), str(program.graph_signature), program.state_dict])
        see("answer", program.module()(X))
    see("symbolic", torch.fx.symbolic_trace(model).code)


def scripted(see: See) -> None:
    """Scripted and traced."""
    model = Net().eval()
    model(X)
    for made in (torch.jit.script(model), torch.jit.trace(model, X)):
        buffer = io.BytesIO()
        torch.jit.save(made, buffer)
        see("code", [made.code, str(made.graph)])
        see("bytes", sorted({name.decode() for name in re.findall(rb"[\w/.-]+[.]py", buffer.getvalue())}))
        see("size", len(buffer.getvalue()))
        buffer.seek(0)
        see("answers", [made(X), torch.jit.load(buffer)(X)])
        see("exception of a script", raised_by(lambda made=made: made(torch.ones(2, 3)))[:200])


def copied(see: See) -> None:
    """Copies, and what was pickled and loaded."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)):  # noqa: S301 - its own
        see("copy", [attributes(again), *saved(again)])
        see("answer", again.eval()(X))
    see("optimizer", [copy.deepcopy(optimizer).state_dict(), *saved(copy.deepcopy(optimizer))])
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    with torch.serialization.safe_globals([Net, nn.Linear, nn.Dropout]):
        see("safe", attributes(torch.load(buffer, weights_only=True)))


def hooked(see: See) -> None:
    """Hooks of the program's own: their order, their numbers, what they raise."""
    model, order = Net().eval(), []
    handles = [
        model.register_forward_pre_hook(lambda *_: order.append("pre")),
        model.a.register_forward_hook(lambda *_: order.append("a"), always_call=True),
        model.b.register_full_backward_hook(lambda *_: order.append("backward")),
        torch_modules.register_module_forward_hook(lambda module, *_: order.append(type(module).__name__)),
    ]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handles.append(optimizer.register_step_post_hook(lambda *_: order.append("step")))
    train(model, optimizer, steps=2)
    see("order", order)
    first = handles[0].id
    see("numbers", [handle.id - first for handle in handles])
    see("number", first)
    see("model", [list(each._forward_hooks) for each in model.modules()])
    for handle in handles:
        handle.remove()
    model.b.register_forward_hook(lambda *_: 1 / 0)
    see("exception of a hook", raised_by(lambda: model(X)))
    see("global hooks of modules", torch_modules._has_any_global_hook())


def loaded(see: See) -> None:
    """Data, in this process and in workers."""
    for settings in ({}, {"num_workers": 1, "multiprocessing_context": "fork"}):
        loader = DataLoader(
            Table(), batch_size=2, shuffle=False, generator=torch.Generator().manual_seed(1), **settings
        )
        rows = iter(loader)
        see("rows", [next(rows) for _ in range(5)])
        see(
            "exception of a loader" if not settings else "exception of a worker",
            raised_by(lambda rows=rows: next(rows)),
        )
    see("too many", [list(rows) for rows in DataLoader(Short(), batch_size=1)])


class Short(IterableDataset):
    """Says that it is shorter than it is, of which torch warns."""

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Any:
        return iter((X, X, X))


def loaded_elsewhere(see: See) -> None:
    """Data, in workers that are no forks: with all that there is and once without us, since each imports torch."""
    for method in ("spawn", "forkserver"):
        loader = DataLoader(Table(), batch_size=2, num_workers=1, multiprocessing_context=method)
        rows = iter(loader)
        see("rows", [next(rows) for _ in range(5)])


def in_half_precision(see: See) -> None:
    """Autocast and a scaler."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        see("loss", loss)
    see("scaler", [scaler.state_dict(), model.state_dict()])


def recomputed(see: See) -> None:
    """Checkpoints of both kinds."""
    model, x = Net(), X.clone().requires_grad_()
    for use_reentrant in (False, True):
        model.zero_grad()
        checkpoint(model, x, use_reentrant=use_reentrant).square().sum().backward()
        see("gradients", [each.grad for each in model.parameters()])
    see("random", randomness())


def distributed(see: See) -> None:
    """DDP and FSDP2, of a group with one member."""
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            model = DistributedDataParallel(Net())
            see("losses", train(model, torch.optim.SGD(model.parameters(), lr=0.1)))
            see("model", [attributes(model.module), model.state_dict(), *saved(model.module)])
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
            sharded = fully_shard(Net(), mesh=mesh)
            optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
            for _ in range(2):
                sharded(X).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            see("sharded", {name: each.full_tensor() for name, each in sharded.state_dict().items()})
            see("kinds", [type(each).__mro__ for each in sharded.modules()])
        finally:
            torch.distributed.destroy_process_group()


def quantised(see: See) -> None:
    """Quantised, pruned and parametrised."""
    model = torch.ao.quantization.quantize_dynamic(Net().eval(), {nn.Linear}, dtype=torch.qint8)
    see("answers", model(X))
    see("model", saved(model))
    pruned = nn.utils.prune.l1_unstructured(nn.Linear(4, 2), "weight", amount=0.5)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 2))
    lazy = nn.LazyLinear(2)
    see("others", [pruned(X), normed(X), lazy(X), attributes(pruned), pickle.dumps(lazy, 2)])


def transformed(see: See) -> None:
    """Function transforms, and functional calls."""
    model = Net().eval()
    parameters = dict(model.named_parameters())

    def loss(parameters: Any, x: Any) -> Any:
        return torch.func.functional_call(model, parameters, (x,)).square().sum()

    see("answers", [torch.func.vmap(model)(X.reshape(3, 2, 4)), torch.func.grad(loss)(parameters, X)])
    see("more", torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, X))


class Fails(torch.autograd.Function):
    """Has a backward pass that raises."""

    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, *_gradients: Any) -> Any:
        raise RuntimeError("in the backward pass")


def failing(see: See) -> None:
    """Exceptions, with their tracebacks, and what is left after them."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    see("exception of a forward pass", raised_by(lambda: model(torch.ones(2, 3))))
    see("exception of a backward pass", raised_by(lambda: Fails.apply(model(X)).sum().backward()))
    optimizer.param_groups[0]["lr"] = "much"
    model(X).sum().backward()
    see("exception of an optimizer", raised_by(optimizer.step))
    model.drop.forward = lambda _: (_ for _ in ()).throw(KeyboardInterrupt)
    see("exception of a forward pass", raised_by(lambda: model(X)))
    see("exception of a save", raised_by(lambda: torch.save(lambda: 0, io.BytesIO())))
    see("handled", repr(sys.exc_info()))


def warned(see: See) -> None:
    """What torch warns of, and where it says that it is."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    schedule.step()
    x = X.clone().requires_grad_() * 1
    model(x).sum().backward()
    see("gradient", repr(x.grad))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.register_full_backward_hook(lambda *_: None)
        model(X).sum().backward()
    assert caught
    see("line of a warning in a backward pass", [f"{Path(each.filename).name}:{each.lineno}" for each in caught])
    checkpoint(model, X)
    nn.Softmax()(X)
    nn.functional.mse_loss(X, X[:1])


class Deep(nn.Module):
    """Calls itself until Python has no more room."""

    def forward(self, depth: int) -> int:
        try:
            return self(depth + 1)
        except RecursionError:
            return depth


def living(see: See) -> None:
    """How long objects live, who refers to them, and how deep calls may be."""
    model = Net()
    train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gc.collect()
    see("references", [sys.getrefcount(model), sys.getrefcount(model.a)])
    see("weakref.getweakrefcount(module)", weakref.getweakrefcount(model))
    gone = weakref.ref(model)
    del model
    see("alive", gone() is not None)
    see("depth", Deep()(0))


class Threads:
    """Names of those of the process."""

    def __call__(self) -> list[str]:
        return sorted(thread.name for thread in threading.enumerate())


def children(see: See) -> None:
    """Processes that are started, forked, and how they end."""
    program = "import os, sys; print(sorted(os.environ.items()), sys.flags, sys.path); sys.exit(7)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    see("started", [ended.returncode, ended.stdout, ended.stderr])
    for end in (lambda: sys.exit(3), lambda: os.kill(os.getpid(), signal.SIGKILL), lambda: None):
        process = multiprocessing.get_context("fork").Process(target=end)
        process.start()
        process.join()
        see("forked", process.exitcode)


def surroundings(see: See) -> None:
    """What is of the process."""
    see("signal.getsignal(SIGTERM)", signal.getsignal(signal.SIGTERM))
    see(
        "signals", {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals() - {signal.SIGTERM}}
    )
    see("signal mask", sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    see("os.environ", dict(os.environ))
    see(
        "hooks of sys",
        [repr(getattr(sys, f"{name}hook")) for name in ("except", "unraisable", "display", "breakpoint")],
    )
    see("threading.excepthook", threading.excepthook)
    see("sys.getprofile()", sys.getprofile())
    see("sys.gettrace()", sys.gettrace())
    see("threading.getprofile()", getattr(threading, "getprofile", threading._profile_hook and str)())  # type: ignore[attr-defined]
    see("threading.enumerate()", Threads()())
    see("gc.callbacks", [repr(each) for each in gc.callbacks])
    see("attach of OpenTelemetry's runtime context", repr(otel_context._RUNTIME_CONTEXT.attach))
    see("gc.get_threshold()", [gc.get_threshold(), gc.isenabled(), gc.get_freeze_count() > 0])
    see("warnings.filters", [repr(each) for each in warnings.filters])
    see("limits of Python", [sys.getrecursionlimit(), sys.getswitchinterval(), faulthandler.is_enabled()])
    see("logging", [logging.root.handlers, logging.root.level, logging.raiseExceptions])
    see("sys.meta_path", [repr(each) for each in sys.meta_path])
    see("sys.path", [*sys.path, sys.argv])
    see("folder", [*sorted(map(str, Path.cwd().iterdir()))])
    see(
        "sys.modules without ours", sorted(set(sys.modules) & {"torch.profiler", "torch._inductor", "triton", "pynvml"})
    )
    see(
        "torch.autograd.profiler",
        [torch.autograd.profiler._is_profiler_enabled, torch._C._autograd._profiler_enabled()],
    )
    see("threads of torch", [torch.get_num_threads(), torch.get_num_interop_threads(), torch.get_default_dtype()])
    hooks = {name: repr(found) for name, found in vars(torch_modules).items() if name.startswith("_global_")}
    see("global hooks of modules", hooks)
    see(
        "global hooks of optimizers",
        [
            repr(each)
            for each in (torch_optimizers._global_optimizer_pre_hooks, torch_optimizers._global_optimizer_post_hooks)
        ],
    )
    see("nn.Module", {name: repr(each) for name, each in vars(nn.Module).items()})
    see("random", randomness())


PROGRAMS: tuple[Callable[[See], None], ...] = (
    training,
    second_order,
    serving,
    compiled,
    ahead_of_time,
    exported,
    scripted,
    copied,
    hooked,
    loaded,
    loaded_elsewhere,
    in_half_precision,
    recomputed,
    distributed,
    quantised,
    transformed,
    failing,
    warned,
    living,
    children,
    surroundings,
)
