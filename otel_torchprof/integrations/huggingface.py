"""``HuggingFaceCallback``: the steps of Hugging Face's Trainer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from otel_torchprof._columns.phases import BATCHES, EPOCH, LEARNING_RATE, LOSS, Segment

from .loop import Loop, number, trainer_calls

if TYPE_CHECKING:
    from otel_torchprof._profile.profile import profile as Profile  # noqa: N812 - the class, where its name is an argument's


class HuggingFaceCallback(TrainerCallback):
    """Reports the steps of a ``transformers.Trainer``: ``Trainer(..., callbacks=[HuggingFaceCallback()])``.

    A running :class:`~otel_torchprof.TorchInstrumentor` or :class:`~otel_torchprof.stream` then has the Trainer's
    steps: one per optimizer step, with any gradient accumulation, from the end of the previous step and including the
    fetch of its batches. Evaluations and checkpoints are segments between steps. Step spans have ``torch.step.epoch``,
    ``torch.step.learning_rate``, ``torch.step.batches`` and, if the Trainer logs it after the step (``logging_steps``),
    ``torch.step.loss``. ``opentelemetry-instrument`` and ``otel-torchprof run`` do the same without the callback.

    For the thread of the Trainer. Never synchronizes with a device. Costs about 10 us per step.

    Args:
        profile: a :class:`~otel_torchprof.profile` whose ``step()`` is called too. If it is not running, it is started
            and stopped with the training, even if that raises. Default: None.

    Raises:
        TypeError: ``profile`` is not a profile of this package.

    Examples:
        >>> from otel_torchprof.integrations import HuggingFaceCallback
        >>> prof = otp.profile()
        >>> callbacks = [HuggingFaceCallback(profile=prof)]  # of transformers.Trainer(...)
    """

    def __init__(self, profile: Profile | None = None) -> None:
        self._loop = Loop(profile)
        if profile is not None:  # a training that raises does not notify its callbacks, and the profile has to stop
            user = object()
            weakref.finalize(self, trainer_calls.remove, user).atexit = False  # first: the next call may be interrupted
            trainer_calls.install(user)
        self._is_inside = False
        """Whether a step has its batches, and has not ended."""
        self._rate: float | None = None
        self._batches = 0
        self._ended: dict[str, Any] | None = None
        """Attributes of a step that has ended and of which the Trainer is about to log the loss."""

    def on_train_begin(self, args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Begins the first step, or an evaluation before it."""
        self._is_inside, self._ended = False, None
        self._loop.begin()
        self._loop.change(Segment.EVALUATION if getattr(args, "eval_on_start", False) else Segment.STEP)

    def on_step_begin(self, _args: Any, _state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        """Notes that the step has its batches."""
        self._end_step(control)
        self._is_inside, self._batches = True, 1
        groups = getattr(optimizer, "param_groups", None)
        self._rate = number(groups[0].get("lr")) if groups else None

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        """Counts an accumulated batch."""
        self._batches += 1

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the step, now or when its loss is logged."""
        self._is_inside = False
        self._ended = {BATCHES: self._batches or None, LEARNING_RATE: self._rate, EPOCH: number(state.epoch)}
        self._batches, self._rate = 0, None  # a Trainer with its own loop may not report the next begin
        if not control.should_log:
            self._end_step(control)

    def on_log(self, _args: Any, _state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Adds the loss and ends the step."""
        if self._ended is not None:
            self._ended[LOSS] = number((logs or {}).get("loss"))
            self._end_step(control)

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Begins an evaluation or a checkpoint, if the Trainer makes these once per epoch."""
        self._end_step(control)
        if (following := _following(control)) is not Segment.STEP:
            self._turns_out(following)

    def on_prediction_step(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Begins an evaluation that another callback requested, or of a further data set."""
        self._end_step(control)
        self._turns_out(Segment.EVALUATION)

    def on_evaluate(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Ends an evaluation."""
        self._end_step(control)
        if self._loop.current is Segment.EVALUATION:
            self._loop.change(Segment.STEP)

    def on_save(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Ends a checkpoint."""
        self._end_step(control)
        self._turns_out(Segment.CHECKPOINT)
        if self._loop.current is Segment.CHECKPOINT:
            self._loop.change(Segment.STEP)

    def on_train_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        """Ends the loop; the segment after the last step is not a step."""
        self._end_step(control)
        self._loop.change(None, replaces_step=not self._is_inside)
        self._loop.end()

    def _end_step(self, control: Any) -> None:
        if self._ended is None:
            return
        attributes = {key: value for key, value in self._ended.items() if value is not None}
        self._ended = None
        self._loop.change(_following(control), ends_step=True, attributes=attributes)

    def _turns_out(self, segment: Segment) -> None:
        """Corrects the segment after the last step: it is not a step, which would have reported its batches."""
        if self._loop.current is Segment.STEP and not self._is_inside:
            self._loop.change(segment, replaces_step=True)


class AutomaticCallback(HuggingFaceCallback):
    """Callback that a Trainer gets without a change of code; silent if the program has added its own callback.

    Args:
        handler: the Trainer's callback handler.
    """

    def __init__(self, handler: Any) -> None:
        super().__init__()
        self._handler = weakref.ref(handler)

    def __reduce__(self) -> tuple[type[TrainerCallback], tuple[()]]:
        """Replaces the callback by one without effect in a copied or pickled Trainer."""
        return TrainerCallback, ()

    def on_train_begin(self, args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Checks for a callback of the program."""
        callbacks = getattr(self._handler(), "callbacks", ())
        self._loop.is_silent = any(
            isinstance(callback, HuggingFaceCallback) and callback is not self for callback in callbacks
        )
        super().on_train_begin(args, _state, _control)


def _following(control: Any) -> Segment:
    """Returns the Trainer's next segment."""
    if control.should_evaluate:
        return Segment.EVALUATION
    return Segment.CHECKPOINT if control.should_save else Segment.STEP
