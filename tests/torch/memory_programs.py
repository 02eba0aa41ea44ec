"""Programs whose memory is told apart by what it is used for; each factory returns a function that runs some steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    Steps = Callable[[], None]


def train() -> None:
    """Two steps of a small model with an optimizer: forward, backward, update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 64)).sum().backward()
        optimizer.step()


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 36), nn.Tanh(), nn.Linear(36, 10))


def _batch() -> torch.Tensor:
    return torch.randn(16, 24)


def _squares(found: torch.Tensor) -> torch.Tensor:
    return found.square().mean()


def _training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Callable[[], torch.Tensor] = _batch,
    loss: Callable[[Any], torch.Tensor] = _squares,
    *,
    batches: int = 1,
    set_to_none: bool = True,
) -> Steps:
    def steps() -> None:
        for _ in range(2):
            for _ in range(batches):
                loss(model(batch())).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)

    return steps


def _once_before(steps: Steps) -> Steps:
    steps()
    return steps


def sgd() -> Steps:
    model = _mlp()
    return _training(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


def sgd_that_keeps_gradients() -> Steps:
    model = _mlp()
    return _training(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), set_to_none=False)


def sgd_that_is_under_way() -> Steps:
    model = _mlp()
    return _once_before(_training(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), set_to_none=False))


def adam() -> Steps:
    model = _mlp()
    return _training(model, torch.optim.Adam(model.parameters()))


def adam_that_is_under_way() -> Steps:
    model = _mlp()
    return _once_before(_training(model, torch.optim.Adam(model.parameters())))


def adamw_over_lists() -> Steps:
    model = _mlp()
    return _training(model, torch.optim.AdamW(model.parameters(), foreach=True))


def accumulated_gradients() -> Steps:
    model = _mlp()
    return _training(model, torch.optim.Adam(model.parameters()), batches=3)


def clipped_gradients() -> Steps:
    model = _mlp()

    def loss(found: torch.Tensor) -> torch.Tensor:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return found.square().mean()

    return _training(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, batches=2)


def convolutions() -> Steps:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 10),
    )
    right = torch.randint(0, 10, (4,))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return _training(
        model, optimizer, lambda: torch.randn(4, 3, 16, 16), lambda found: functional.cross_entropy(found, right)
    )


def transformer() -> Steps:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return _training(model, torch.optim.AdamW(model.parameters()), lambda: torch.randn(2, 8, 32))


def recurrence() -> Steps:
    model = nn.LSTM(16, 24, batch_first=True)
    optimizer = torch.optim.RMSprop(model.parameters())
    return _training(model, optimizer, lambda: torch.randn(4, 6, 16), lambda found: found[0].sum())


def embeddings() -> Steps:
    model = nn.Sequential(nn.Embedding(50, 16), nn.LayerNorm(16), nn.GELU(), nn.Flatten(), nn.Linear(160, 5))
    return _training(model, torch.optim.Adagrad(model.parameters()), lambda: torch.arange(20).view(2, 10))


def inference() -> Steps:
    model = _mlp().eval()

    def steps() -> None:
        with torch.no_grad():
            for _ in range(2):
                model(_batch()).softmax(-1)

    return steps


def _checkpointed(use_reentrant: bool) -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = _mlp(), nn.Linear(10, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(checkpoint(self.first, x, use_reentrant=use_reentrant))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return _training(model, optimizer, lambda: _batch().requires_grad_(use_reentrant))


def checkpoints() -> Steps:
    return _checkpointed(False)


def checkpoints_that_reenter() -> Steps:
    return _checkpointed(True)


def changes_in_place() -> Steps:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(24, 40), nn.ReLU(inplace=True), nn.Linear(40, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.mul_(2.0)).add_(1.0)

    model = Model()
    return _training(model, torch.optim.SGD(model.parameters(), 0.1))


def two_backward_passes() -> Steps:
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def steps() -> None:
        for _ in range(2):
            loss = model(_batch()).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return steps


def gradients_of_gradients() -> Steps:
    model = _mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def steps() -> None:
        for _ in range(2):
            x = _batch().requires_grad_()
            found = model(x).sum()
            (gradient,) = torch.autograd.grad(found, x, create_graph=True)
            (gradient.square().sum() + found).backward()
            optimizer.step()
            optimizer.zero_grad()

    return steps


def own_function() -> Steps:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            context.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            return gradient * context.saved_tensors[0].exp()

    model = _mlp()
    return _training(model, torch.optim.SGD(model.parameters(), 0.1), loss=lambda found: Exp.apply(found).sum())


def parameters_of_no_module() -> Steps:
    weight, bias = torch.randn(24, 32, requires_grad=True), torch.randn(32, requires_grad=True)

    def steps() -> None:
        for _ in range(2):
            (_batch() @ weight + bias).relu().sum().backward()
            with torch.no_grad():
                for parameter in (weight, bias):
                    parameter.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None

    return steps


def slices_of_data() -> Steps:
    model, data = _mlp(), torch.randn(64, 24)
    optimizer, begins = torch.optim.SGD(model.parameters(), 0.1), iter(range(0, 64, 16))

    def batch() -> torch.Tensor:
        begin = next(begins)
        return data[begin : begin + 16]

    return _training(model, optimizer, batch)


def two_models() -> Steps:
    maker, judge = _mlp(), nn.Linear(10, 1)
    makes, judges = torch.optim.Adam(maker.parameters()), torch.optim.SGD(judge.parameters(), 0.1)

    def steps() -> None:
        for _ in range(2):
            made = maker(_batch())
            judges.zero_grad()
            (judge(made.detach()).mean() - judge(torch.randn(16, 10)).mean()).backward()
            judges.step()
            makes.zero_grad()
            (-judge(made).mean()).backward()
            makes.step()

    return steps


PROGRAMS: tuple[Callable[[], Steps], ...] = (
    sgd,
    sgd_that_keeps_gradients,
    sgd_that_is_under_way,
    adam,
    adam_that_is_under_way,
    adamw_over_lists,
    accumulated_gradients,
    clipped_gradients,
    convolutions,
    transformer,
    recurrence,
    embeddings,
    inference,
    checkpoints,
    checkpoints_that_reenter,
    changes_in_place,
    two_backward_passes,
    gradients_of_gradients,
    own_function,
    parameters_of_no_module,
    slices_of_data,
    two_models,
)
"""Those whose timelines are as torch's."""
