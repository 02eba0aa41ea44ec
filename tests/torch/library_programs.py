"""The training loops of libraries, told what to time: their own counters say where an iteration ends."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from own_counts import Own
    from step_programs import Sizes


class TimedLoader:
    """A loader whose batches are timed."""

    def __init__(self, own: Own, loader: Any) -> None:
        self._own = own
        self._loader = loader

    def __iter__(self) -> Any:
        return self._own.batches(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _timed(own: Own, function: Any, phase: str) -> Any:
    def call(*arguments: Any, **keywords: Any) -> Any:
        with own.phase(phase):
            return function(*arguments, **keywords)

    return call


# ---- Hugging Face ----


def trainer(own: Own, sizes: Sizes) -> None:
    """Hugging Face's Trainer: gradients of two batches, clipped; evaluations and checkpoints between steps."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate", reason="the Trainer needs it")
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (4 * sizes.batch, 16))]
    arguments = transformers.TrainingArguments(
        output_dir=str(sizes.folder),
        per_device_train_batch_size=sizes.batch // 2,
        gradient_accumulation_steps=2,
        max_steps=sizes.iterations,
        eval_strategy="steps",
        eval_steps=3,
        save_strategy="steps",
        save_steps=3,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    data = {"train_dataset": rows, "eval_dataset": rows[: sizes.batch]}
    made = _trainer(own, transformers)(_model(own, sizes, transformers), arguments, **data)
    made.add_callback(_counting(own, transformers))
    made.accelerator.backward = _timed(own, made.accelerator.backward, "backward")
    made.train()
    assert own.iterations == made.state.global_step


def _model(own: Own, sizes: Sizes, transformers: Any) -> Any:
    class Model(transformers.GPT2LMHeadModel):
        def __call__(self, *arguments: Any, **keywords: Any) -> Any:
            call = super().__call__
            return (_timed(own, call, "forward") if torch.is_grad_enabled() else call)(*arguments, **keywords)

    shape = {"n_embd": sizes.width, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 64}
    return Model(transformers.GPT2Config(**shape, bos_token_id=0, eos_token_id=0))


def _trainer(own: Own, transformers: Any) -> Any:
    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return TimedLoader(own, super().get_train_dataloader())

        def _clip_grad_norm(self, model: Any) -> Any:
            with own.phase("optimizer"):
                return super()._clip_grad_norm(model)

        def evaluate(self, *arguments: Any, **keywords: Any) -> Any:
            with own.segment("evaluation"):
                return super().evaluate(*arguments, **keywords)

        def _save_checkpoint(self, *arguments: Any, **keywords: Any) -> Any:
            with own.segment("checkpoint"):
                return super()._save_checkpoint(*arguments, **keywords)

    return Trainer


def _counting(own: Own, transformers: Any) -> Any:
    class Counting(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            optimizer.optimizer.step = _timed(own, optimizer.optimizer.step, "optimizer")

        def on_step_end(self, *_: Any, **__: Any) -> None:
            own.count()

    return Counting()


# ---- Lightning ----


def lightning(own: Own, sizes: Sizes) -> None:
    """Lightning: a sanity check, passes inside the optimizer's step, evaluations and checkpoints between steps."""
    pl = pytest.importorskip("pytorch_lightning")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = pl.Trainer(
            accelerator="cpu",
            max_steps=sizes.iterations,
            val_check_interval=3,
            check_val_every_n_epoch=None,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=_callbacks(own, sizes, pl),
        )
        run.fit(_module(own, sizes, pl), TimedLoader(own, sizes.loader(5)), sizes.loader(2))
    assert own.iterations == run.global_step


def _module(own: Own, sizes: Sizes, pl: Any) -> Any:
    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = sizes.network()

        def training_step(self, batch: Any, _index: int) -> Any:
            return (own.call(self.network, batch[0]) - batch[1]).square().mean()

        def validation_step(self, batch: Any, _index: int) -> None:
            self.network(batch[0])

        def backward(self, loss: Any) -> None:
            own.backward(loss)

        def optimizer_step(self, _epoch: int, _index: int, optimizer: Any, closure: Any = None) -> None:
            own.step(optimizer, closure)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), 1e-4)

    return Module()


def _callbacks(own: Own, sizes: Sizes, pl: Any) -> list[Any]:
    class Counting(pl.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            own.count()

        def on_validation_start(self, run: Any, _module: Any) -> None:
            if not run.sanity_checking:
                own.begin("evaluation")

        def on_validation_end(self, run: Any, _module: Any) -> None:
            if not run.sanity_checking:
                own.end()

    class Checkpoint(pl.callbacks.ModelCheckpoint):
        def _save_checkpoint(self, *arguments: Any) -> None:
            with own.segment("checkpoint"):
                super()._save_checkpoint(*arguments)

    return [Counting(), Checkpoint(sizes.folder, every_n_train_steps=4)]
