"""Small training programs of frameworks, with accumulation, evaluation and checkpoints, and what spans say of them."""

from __future__ import annotations

import logging
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

pytest.register_assert_rewrite("own_counts")

from own_counts import segments  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from opentelemetry.sdk.trace import ReadableSpan


def kinds(spans: Iterable[ReadableSpan]) -> list[str | int]:
    """The segments of a job, in order: of steps their number, of others their kind, without what was before the loop."""
    return [
        segment.span.attributes.get("torch.step.number", segment.kind)
        for segment in segments(spans)
        if segment.kind != "setup"
    ]


def steps(spans: Iterable[ReadableSpan]) -> list[Any]:
    """The segments that are steps."""
    return [segment for segment in segments(spans) if segment.kind == "training"]


# ---- Hugging Face ----


def hugging_face(folder: Path, callbacks: Any = None, *, subclass: Any = None, data: Any = None, **options: Any) -> Any:
    """A Trainer of a tiny GPT-2 with two batches per step; 12 batches, so 6 steps, in an epoch."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 16, (24, 8))]
    shape = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 8, "vocab_size": 16}
    given = {
        "max_steps": 6,
        "eval_strategy": "steps",
        "eval_steps": 3,
        "save_strategy": "steps",
        "save_steps": 3,
        "logging_steps": 1,
        **options,
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **given,
    )
    return (subclass or transformers.Trainer)(
        transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)),
        arguments,
        train_dataset=rows,
        eval_dataset=rows[:4] if data is None else data(rows),
        callbacks=callbacks,
    )


# ---- Lightning ----


@contextmanager
def quiet() -> Iterator[None]:
    """Lightning says a lot, and warns of loaders without workers."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def lightning(folder: Path, profiler: Any = None, **options: Any) -> Any:
    """A Trainer with two batches per step, an evaluation and a checkpoint per epoch; two epochs of four steps."""
    pl = pytest.importorskip("pytorch_lightning")
    given = {"max_epochs": 2, "num_sanity_val_steps": 1, **options}
    with quiet():
        return pl.Trainer(
            profiler=profiler,
            accelerator="cpu",
            accumulate_grad_batches=2,
            log_every_n_steps=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[pl.callbacks.ModelCheckpoint(folder)],
            **given,
        )


def lightning_module() -> Any:
    """A module whose forward is never called, as programs write them: training_step calls what is in it."""
    import pytorch_lightning as pl

    class Classifier(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU())
            self.head = torch.nn.Linear(8, 2)

        def training_step(self, batch: Any, _index: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self.head(self.encoder(batch[0])), batch[1])
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("val_loss", torch.nn.functional.cross_entropy(self.head(self.encoder(batch[0])), batch[1]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Classifier()


def loader_of(size: int) -> Any:
    """A loader of 16 rows in batches of that size."""
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randint(0, 2, (16,)))
    return torch.utils.data.DataLoader(data, size)


def fit(trainer: Any, module: Any = None) -> Any:
    """Trains; returns the module."""
    module = lightning_module() if module is None else module
    with quiet():
        trainer.fit(module, loader_of(2), loader_of(8))
    return module


# ---- Without a framework ----


def own_loop(count: int) -> None:
    """A training loop that says nothing of its steps."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(count):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
