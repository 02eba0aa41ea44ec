"""What programs do with torch: training steps, forks of TorchScript, threads, torch's own profiler."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from followed_calls import is_followed

import otel_torchprof as otp

if TYPE_CHECKING:
    from world import Worker, World

torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
_kineto = threading.Lock()


class Model(torch.nn.Module):
    """Small, with a module in a module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4))

    def forward(self, inputs: Any) -> Any:
        with otp.record_function("forward"):
            return self.body(inputs)


def training(worker: Worker) -> None:
    """A few steps."""
    # An interrupt in what torch's optimizer does at the end of its step leaves gradients off.
    torch.set_grad_enabled(True)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(worker.random.randint(1, 3)):
        optimizer.zero_grad()
        loss = model(torch.randn(2, 4)).sum()
        if worker.chance(0.3):
            worker.act()
        loss.backward()
        optimizer.step()


@torch.jit.script
def _work(inputs: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        inputs = inputs * 2 + 1
    return inputs


@torch.jit.script
def _forks(inputs: torch.Tensor) -> torch.Tensor:
    first = torch.jit.fork(_work, inputs)
    second = torch.jit.fork(_work, inputs)
    return torch.jit.wait(first) + torch.jit.wait(second)


def script_forks(worker: Worker) -> None:
    """Operators on the threads of TorchScript.

    Not where torch's own profiler runs on the thread: the forks carry its callbacks, which may still be at work when their futures are
    done. Torch alone, without this package, then ends in a destructor of Kineto's in ten of eighteen programs of 35 seconds, and in none
    of four without forks.
    """
    if not worker.is_profiled_by_torch:
        _forks(torch.ones(4))


def operators(worker: Worker) -> None:
    """Operators, labels of torch's, a failing one."""
    inputs = torch.ones(3, requires_grad=worker.chance(0.5))
    for _ in range(worker.random.randint(1, 20)):
        with torch.autograd.profiler.record_function("torch's"):
            inputs = inputs * 2
    if (
        worker.world.greenlets
    ):  # torch's errors walk the C stack, of which a greenlet has only the top: a crash, now and then
        return
    with contextlib.suppress(RuntimeError):
        torch.mm(torch.ones(2), torch.ones(2))


def kineto(worker: Worker) -> None:
    """Torch's own profiler, one at a time."""
    if not _kineto.acquire(blocking=False):
        return
    try:
        worker.is_profiled_by_torch = True
        with torch.autograd.profiler.profile(use_kineto=worker.chance(0.5)):
            worker.some(2)
    except RuntimeError as error:  # ours has the thread's memory, or an interrupt left torch's own half on
        if "already" not in str(error) and "Kineto profiler" not in str(error):
            raise
    finally:
        worker.is_profiled_by_torch = False
        _kineto.release()


def what_is_on(world: World) -> dict[str, object]:
    """What is registered with torch, on the calling thread."""
    torch.ones(2).add(1)  # callbacks that another thread has stopped go with the next operator
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    optimizers = sys.modules["torch.optim.optimizer"]
    found: dict[str, object] = {
        "calls of modules": is_followed(torch.nn.Module._call_impl),
        "hooks of optimizers": [*optimizers._global_optimizer_post_hooks],
    }
    if not world.done["kineto interrupted"]:  # an interrupt leaves torch's own profiler half on
        found["callback of torch's operators"] = library._ZN2at12hasCallbacksEv() & 0xFF
    return found


ACTIONS = {"training": training, "script forks": script_forks, "operators": operators, "kineto": kineto}
