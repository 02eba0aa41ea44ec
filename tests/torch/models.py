"""Small programs that touch the corners of torch; each factory returns a function that runs one step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

Step = "Callable[[], Any]"


def gpt2() -> Callable[[], Any]:
    """Hugging Face's GPT-2 with random weights: forward, backward, AdamW."""
    import pytest

    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=97, n_positions=32, n_embd=16, n_layer=2, n_head=2)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(0, 97, (2, 12))

    def step() -> None:
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()

    return step


def lstm() -> Callable[[], Any]:
    model, x = nn.LSTM(4, 5, num_layers=2, bidirectional=True), torch.randn(3, 2, 4)
    return lambda: model(x)[0].sum().backward()


def convnet() -> Callable[[], Any]:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(18, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def torchscript() -> Callable[[], Any]:
    @torch.jit.script
    def function(x: torch.Tensor, n: int) -> torch.Tensor:
        for _ in range(n):
            x = torch.relu(x @ x) + 1
        return x

    x = torch.randn(3, 3, requires_grad=True)
    for _ in range(4):  # until the profiling executor has made up its mind
        function(x, 2).sum().backward()
    return lambda: function(x, 2).sum().backward()


def indexing() -> Callable[[], Any]:
    table, rows = nn.Embedding(10, 4, sparse=True), torch.tensor([[1, 2], [3, 9]])

    def step() -> None:
        found = table(rows)
        found[0, :, 1:3].sum().backward()
        torch.index_select(table.weight, 0, rows[0]).gather(1, rows[:, :1])

    return step


class _Cube(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (x,) = context.saved_tensors
        return gradients[0] * 3 * x**2


def custom_function() -> Callable[[], Any]:
    x = torch.randn(3, requires_grad=True)
    return lambda: _Cube.apply(x).sum().backward()


def checkpointed() -> Callable[[], Any]:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    return lambda: checkpoint(lambda y: layer(y).relu(), x, use_reentrant=False).sum().backward()


def reentrant_backward() -> Callable[[], Any]:
    layer, x = nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True)
    return lambda: checkpoint(lambda y: layer(y).relu(), x, use_reentrant=True).sum().backward()


def labelled() -> Callable[[], Any]:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)

    def step() -> None:
        with torch.profiler.record_function("outer"), torch.profiler.record_function("inner", "some args"):
            y = model(x)
        with torch.autograd.profiler.record_function("ProfilerStep#7"):
            y.sum().backward()

    return step


def transformer_layer() -> Callable[[], Any]:
    layer, x = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)
    layer.eval()

    def step() -> None:
        with torch.inference_mode():
            layer(x)

    return step


def vmapped() -> Callable[[], Any]:
    weights, x = torch.randn(3, 4, 4), torch.randn(3, 4)

    def step() -> None:
        torch.vmap(torch.func.grad(lambda w, v: (w @ v).tanh().sum()))(weights, x)
        torch.func.jacrev(torch.sin)(x[0])

    return step


def sparse_nested_quantized() -> Callable[[], Any]:
    dense = torch.eye(3)
    quantized = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(1, 3)])

    def step() -> None:
        torch.sparse.mm(dense.to_sparse(), dense)
        quantized.dequantize()
        nested.to_padded_tensor(0.0)
        torch.ones(2, device="meta") + 1

    return step


def many_parameters(count: int = 500) -> Callable[[], Any]:
    parameters = [nn.Parameter(torch.randn(2, 3)) for _ in range(count)]
    for parameter in parameters:
        parameter.grad = torch.ones(2, 3)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    optimizer.step()
    return optimizer.step


def modes() -> Callable[[], Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    def step() -> None:
        with Functions(), Dispatches():
            torch.ones(2).add_(1)
        with FakeTensorMode() as mode:
            mode.from_tensor(torch.ones(2, 3)).relu()
        with torch.device("meta"):
            nn.Linear(2, 2)

    return step


ALL = (
    gpt2,
    lstm,
    convnet,
    torchscript,
    indexing,
    custom_function,
    checkpointed,
    reentrant_backward,
    labelled,
    transformer_layer,
    vmapped,
    sparse_nested_quantized,
    many_parameters,
    modes,
)
