"""Lightning's actions, from its profiler interface: labels, phases, and the ends of steps."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any, NamedTuple

from otel_torchprof._columns.phases import BATCHES, EPOCH, LEARNING_RATE, LOSS, Part, Segment
from otel_torchprof._native import python_sources
from otel_torchprof._native.module_names import declare_root
from otel_torchprof._record.labels import record_function
from otel_torchprof._record.phases import name_root

from .loop import Loop, number

if TYPE_CHECKING:
    from otel_torchprof._profile.profile import profile as Profile  # noqa: N812 - the class, where its name is an argument's

_logger = logging.getLogger("otel_torchprof")

_PARTS = {
    "train_dataloader_next": Part.NEXT,
    "val_next": Part.NEXT,
    "test_next": Part.NEXT,
    "predict_next": Part.NEXT,
    "training_step": Part.FORWARD,
    "validation_step": Part.EVALUATION,
    "test_step": Part.EVALUATION,
    "predict_step": Part.INFERENCE,
    "backward": Part.BACKWARD,
    "optimizer_step": Part.STEP,
    "save_checkpoint": Part.SAVE,
}
"""Actions that are phases, by the last word of their name: exactly those that Lightning's own profilers time. A loss
is computed outside of any module, a loader need not be torch's, a checkpoint is more than its file. Zeroing and
clipping are torch's own phases, inside the optimizer's."""
_EPOCH = "run_training_epoch"
_EVALUATION_BEGINS = frozenset({"on_validation_model_eval", "on_test_model_eval"})
_EVALUATION_ENDS = frozenset({"on_validation_end", "on_test_end"})
_BEFORE = frozenset({*_PARTS, _EPOCH, *_EVALUATION_BEGINS})
"""Hooks that are a phase, or before which a segment may begin: a Trainer has about twenty others per batch."""
_AFTER = frozenset({"save_checkpoint", _EPOCH, *_EVALUATION_ENDS})
"""Hooks after which a segment may end."""
_OF_MODULE = frozenset({Part.FORWARD, Part.EVALUATION, Part.INFERENCE})
_LOSSES = ("loss", "train_loss", "train/loss", "train_loss_step", "loss_step")
"""Names under which programs log the loss of a step."""


class Action(NamedTuple):
    """A parsed action name."""

    owner: str
    """``Strategy``, ``LightningModule``, ``Callback``; empty if the name has none."""
    hook: str
    part: Part | None
    """Its phase; None for most actions."""
    is_before: bool
    """Whether its begin needs more than a label."""
    is_after: bool
    """Whether its end needs more than a label."""


@functools.lru_cache(maxsize=4096)
def parsed(name: str) -> Action:
    """Parses a name: ``[Strategy]SingleDeviceStrategy.training_step`` is a hook of the strategy."""
    owner, _, path = name.rpartition("]")
    owner, hook = owner.removeprefix("["), path.rpartition(".")[2]
    if owner in {"Callback", "LightningDataModule"}:
        return Action(owner, hook, None, is_before=False, is_after=False)
    return Action(owner, hook, _PARTS.get(hook), hook in _BEFORE, hook in _AFTER)


class Actions:
    """Forwards the actions of a Lightning profiler to recordings. For the thread of the Trainer; can be pickled.

    Each action is a label of its name, which ends early if a segment begins in it; the epoch, which contains all steps,
    has none. Actions that are phases are recorded as phases too. The LightningModule is the root of those that call it,
    since programs call its children and not the module itself. While the Trainer fits, a step lasts from the fetch of
    its first batch to that of the next step's, or to an evaluation or a checkpoint; these are segments between steps,
    except during gradient accumulation. An action costs some microseconds.

    Args:
        profile: as for :class:`~.loop.Loop`.
    """

    def __init__(self, profile: Profile | None = None) -> None:
        self.loop = Loop(profile)
        self._open: dict[str, tuple[Part | None, Any]] = {}
        self._labels: dict[str, record_function] = {}
        self._named = 0
        """``id()`` of the LightningModule whose names are known."""
        self._global_step = self._batches = 0
        self._rate: float | None = None
        self._has_failed = False

    def start(self, name: str, profiler: Any) -> None:
        """Begins an action. Errors are logged once, and the training continues."""
        try:
            action = parsed(name)
            trainer = _trainer_of(profiler) if action.is_before else None
            if trainer is not None:
                self._name_modules(trainer, action)
                self._before(action, trainer)
            if action.hook != _EPOCH:
                self._labels[name] = label = record_function(name)
                label.__enter__()
            owner = trainer.lightning_module if trainer is not None and action.part in _OF_MODULE else None
            self._open[name] = action.part, owner
            if action.part is not None:
                python_sources.phase_begin(action.part, owner)
        except Exception as error:  # noqa: BLE001 - a Trainer that is not as this one knows it
            self._fail(name, error)

    def stop(self, name: str, profiler: Any) -> None:
        """Ends an action; no effect if it has not begun."""
        try:
            if name not in self._open:
                return
            part, owner = self._open.pop(name)
            if part is not None:
                python_sources.phase_end(part, owner, None)
            self._end_label(name)
            action = parsed(name)
            if action.is_after and (trainer := _trainer_of(profiler)) is not None:
                self._after(action, trainer)
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(name, error)

    def _end_label(self, name: str) -> None:
        label = self._labels.pop(name, None)
        if label is not None:
            label.__exit__(None, None, None)

    def _name_modules(self, trainer: Any, action: Action) -> None:
        """Names the modules, once and again before every epoch: a hook may have replaced them."""
        module = trainer.lightning_module
        if id(module) != self._named or action.hook == _EPOCH:
            self._named = id(module)
            declare_root(module)
            name_root(module)

    def _before(self, action: Action, trainer: Any) -> None:
        if trainer.state.fn not in {"fit", "validate", "test"}:
            return
        if trainer.sanity_checking:
            if action.hook in _EVALUATION_BEGINS:  # it belongs to no segment and is none
                self.loop.change(None)
            return
        if action.hook == "train_dataloader_next":
            if self.loop.current is not Segment.STEP or self._has_stepped(trainer):
                self._leave(Segment.STEP, trainer)
                self._global_step, self._batches, self._rate = trainer.global_step, 0, _rate_of(trainer)
            self._batches += 1
        elif action.hook in _EVALUATION_BEGINS and action.owner == "LightningModule":
            self._interrupt(Segment.EVALUATION, trainer)
        elif action.hook == "save_checkpoint":
            self._interrupt(Segment.CHECKPOINT, trainer)

    def _after(self, action: Action, trainer: Any) -> None:
        current = self.loop.current
        is_checkpoint = action.hook == "save_checkpoint" and current is Segment.CHECKPOINT
        # Checkpoints are written at the end of an evaluation; its rest is not another evaluation.
        if is_checkpoint or (
            action.hook in _EVALUATION_ENDS and action.owner == "Strategy" and current is Segment.EVALUATION
        ):
            self._change(None)
        elif action.hook == _EPOCH and current is Segment.STEP and self._has_stepped(trainer):
            self._leave(None, trainer)

    def _interrupt(self, segment: Segment, trainer: Any) -> None:
        """Begins a segment, unless gradients are being accumulated or a phase is open; then it is part of the step."""
        if any(part is not None for part, _ in self._open.values()):
            return
        current = self.loop.current
        if current is not Segment.STEP or self._has_stepped(trainer):
            self._leave(segment, trainer)

    def _leave(self, segment: Segment | None, trainer: Any) -> None:
        ends_step = self.loop.current is Segment.STEP
        values: dict[str, float | None] = {}
        if ends_step:
            epoch, loss = number(trainer.current_epoch), _loss_of(trainer)
            values = {BATCHES: self._batches, LEARNING_RATE: self._rate, EPOCH: epoch, LOSS: loss}
        attributes = {key: value for key, value in values.items() if value is not None}
        is_alone = trainer.state.fn in {"validate", "test"}
        self._change(segment, ends_step=ends_step, is_evaluation=is_alone, attributes=attributes)

    def _change(self, segment: Segment | None, **how: Any) -> None:
        """Changes the segment and ends all labels first: a span beyond the end of its segment would extend it."""
        for name in reversed(list(self._labels)):
            self._end_label(name)
        self.loop.change(segment, **how)

    def _has_stepped(self, trainer: Any) -> bool:
        """Whether the current step is over; with manual optimization a step ends after each batch."""
        is_manual = not trainer.lightning_module.automatic_optimization
        return bool(is_manual or trainer.global_step != self._global_step)

    def _fail(self, name: str, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            _logger.warning("the action %r of Lightning's Trainer was not recorded as it should", name, exc_info=error)


def _trainer_of(profiler: Any) -> Any:
    """Returns the Trainer that has set up the profiler; None if there is none (any more)."""
    try:
        return profiler._lightning_module.trainer  # noqa: SLF001 - set by Lightning for its own profilers
    except (AttributeError, ReferenceError, RuntimeError):
        return None


def _rate_of(trainer: Any) -> float | None:
    return number(trainer.optimizers[0].param_groups[0].get("lr")) if trainer.optimizers else None


def _loss_of(trainer: Any) -> float | None:
    """Returns the logged loss.

    None if reading it would synchronize with a device, and in steps that the Trainer does not log. Lightning takes 40
    us to return the logged values.
    """
    every = trainer.log_every_n_steps
    if not every or trainer.global_step % every:
        return None
    metrics = trainer.callback_metrics
    value = next((metrics[name] for name in _LOSSES if name in metrics), None)
    if value is None or value.device.type != "cpu" or value.numel() != 1:
        return None
    return float(value)
