"""``LightningProfiler``: the actions and steps of Lightning's Trainer."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from otel_torchprof._process.after_import import is_there

from .actions import Actions

if TYPE_CHECKING:
    import os

    from otel_torchprof._profile.profile import profile as Profile  # noqa: N812 - the class, where its name is an argument's

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _simple_profiler() -> Any:
    """Returns SimpleProfiler of the imported package, else of an installed one: a Trainer of either accepts both."""
    for name in sorted(_PACKAGES, key=lambda package: package not in sys.modules):
        if is_there(name.partition(".")[0]):
            return importlib.import_module(f"{name}.profilers").SimpleProfiler
    raise ModuleNotFoundError("No module named 'lightning'", name="lightning")


_SimpleProfiler: Any = _simple_profiler()


class LightningProfiler(_SimpleProfiler):
    """Reports Lightning's actions as labels and phases, and its steps: ``Trainer(profiler=LightningProfiler())``.

    A running :class:`~otel_torchprof.TorchInstrumentor` or :class:`~otel_torchprof.stream` then has a label for every
    action, phases of Lightning's own loop (all of ``training_step`` is ``forward``), and modules by their names in the
    LightningModule (``encoder.layers.2``). A step is an optimizer step, including the fetch of its batches and gradient
    accumulation; evaluations and checkpoints are segments between steps. Step spans have ``torch.step.epoch``,
    ``torch.step.learning_rate``, ``torch.step.batches`` and ``torch.step.loss``. The loss is present if the program
    logs it as ``loss`` or ``train_loss`` from the CPU and the Trainer sends it to loggers (``log_every_n_steps``).

    It is also Lightning's ``SimpleProfiler``: the Trainer prints ``summary()``, the time of each action, at the end.
    ``opentelemetry-instrument`` and ``otel-torchprof run`` record the same without it. For the thread of the Trainer.
    Costs some microseconds per action.

    Args:
        profile: a :class:`~otel_torchprof.profile` for the labels and steps, whose averages are in ``summary()``. If it
            is not running, it is started and stopped with the Trainer. Default: None.
        dirpath: folder of ``filename``, as for ``SimpleProfiler``.
        filename: file for the summary. Default: None, the summary is logged.
        row_limit: limit of the rows of averages in the summary. Default: 20.

    Raises:
        TypeError: ``profile`` is not a profile of this package.

    Examples:
        >>> from otel_torchprof.integrations import LightningProfiler
        >>> profiler = LightningProfiler()  # of lightning.Trainer(profiler=profiler)
        >>> with profiler.profile("training_step"):
        ...     y = torch.ones(3) + 1
        >>> "training_step" in profiler.summary()
        True
    """

    def __init__(
        self,
        profile: Profile | None = None,
        *,
        dirpath: str | os.PathLike[str] | None = None,
        filename: str | None = None,
        row_limit: int = 20,
    ) -> None:
        super().__init__(dirpath=dirpath, filename=filename)
        self._torchprof_actions = Actions(profile)
        self._given, self._row_limit = profile, row_limit

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """Begins a stage of the Trainer: ``fit``, ``validate``, ``test`` or ``predict``."""
        super().setup(stage, local_rank, log_dir)
        self._torchprof_actions.loop.begin()

    def start(self, action_name: str) -> None:
        """Begins an action."""
        self._torchprof_actions.start(action_name, self)
        super().start(action_name)

    def stop(self, action_name: str) -> None:
        """Ends an action."""
        super().stop(action_name)
        self._torchprof_actions.stop(action_name, self)

    def summary(self) -> str:
        """Returns the time of each action and, with a profile, its averages. Ends the stage."""
        self._torchprof_actions.loop.end()
        times = str(super().summary())
        if self._given is None or self._given.is_running:
            return times
        table = self._given.key_averages().table(sort_by="self_cpu_time_total", row_limit=self._row_limit)
        return f"{times}\n{table}\n"

    def teardown(self, stage: str | None) -> None:
        """Ends the stage, also after an exception."""
        if actions := getattr(
            self, "_torchprof_actions", None
        ):  # Lightning calls this in __del__, after a constructor that raised too
            actions.loop.end()
        super().teardown(stage)
