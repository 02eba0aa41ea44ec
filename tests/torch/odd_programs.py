"""Labels, tensors and work elsewhere that a profiler trips over."""

from __future__ import annotations

import warnings

import torch
from threaded import in_threads

X = torch.ones(3)


def ended_by_future():
    """A label of torch that ends when a future does, which another thread completes."""
    future = torch.futures.Future()
    with torch.profiler.record_function("until the future") as label:
        X.neg()
        label._call_end_callbacks_on_future(future)
    X.tan()
    in_threads(lambda: future.set_result(X))
    X.sin()


def left_elsewhere():
    """A label of torch that another thread leaves."""
    record = torch.ops.profiler._record_function_enter_new("left elsewhere", None)
    X.neg()
    in_threads(lambda: torch.ops.profiler._record_function_exit._RecordFunction(record))
    X.tan()


def misnested():
    """Labels that end in the order in which they began."""
    first, second = (torch.profiler.record_function(name) for name in ("first", "second"))
    first.__enter__()
    second.__enter__()
    X.neg()
    first.__exit__(None, None, None)
    X.tan()
    second.__exit__(None, None, None)
    X.sin()


def scripted_fork(function):
    """A TorchScript function that runs this one on a thread of torch's, and waits for it; where that was quick, it has ended by then."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of TorchScript
        forked = torch.jit.script(function)

        @torch.jit.script
        def forking(x: torch.Tensor) -> torch.Tensor:
            return torch.jit.wait(torch.jit.fork(forked, x))

    return forking


class Nested(torch.autograd.Function):
    """Its backward pass runs another one inside, ``depth`` times: from the 60th on, the engine takes a thread of its own."""

    @staticmethod
    def forward(ctx, x, depth):
        """Counts down."""
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        """The next one."""
        if ctx.depth > 0:
            with torch.enable_grad():
                x = torch.ones_like(grad, requires_grad=True)
                Nested.apply(x, ctx.depth - 1).sum().backward()
        return grad.cos(), None


class Elsewhere(torch.Tensor):
    """A tensor whose sizes only Python knows."""

    asked = 0

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dispatch_sizes_strides_policy="sizes")

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.neg.default:
            return func(args[0].inner)
        cls.asked += 1
        return args[0].inner.size()
