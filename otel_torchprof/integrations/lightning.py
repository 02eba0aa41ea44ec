"""``LightningProfiler``: the actions and steps of Lightning's Trainer."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from otel_torchprof._process.finders import is_there

from .actions import Actions

if TYPE_CHECKING:
    import os

    from otel_torchprof._profile.profile import profile as Profile  # noqa: N812 - the class, where its name is an argument's

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _simple_profiler() -> Any:
    """Of the package that is imported, else of one that is installed: a Trainer of either takes both."""
    for name in sorted(_PACKAGES, key=lambda each: each not in sys.modules):
        if is_there(name.partition(".")[0]):
            return importlib.import_module(f"{name}.profilers").SimpleProfiler
    raise ModuleNotFoundError("No module named 'lightning'", name="lightning")


_SimpleProfiler: Any = _simple_profiler()


class LightningProfiler(_SimpleProfiler):
    """Lightning's actions as labels and phases, and its steps: ``Trainer(profiler=LightningProfiler())``.

    A running :class:`~otel_torchprof.TorchInstrumentor` or :class:`~otel_torchprof.stream` then has a label for every action, phases of Lightning's
    own loop (all of ``training_step`` is ``forward``), and modules by their names in the LightningModule (``encoder.layers.2``). Steps
    are those of the optimizer, each with the fetch of its batches and whatever is accumulated; evaluations and checkpoints are segments
    between them. Spans of steps have ``torch.step.epoch``, ``torch.step.learning_rate``, ``torch.step.batches`` and, where the program logs it as ``loss`` or
    ``train_loss`` from the CPU and the Trainer sends it to loggers (``log_every_n_steps``), ``torch.step.loss``.

    It is Lightning's ``SimpleProfiler`` too: ``summary()``, which the Trainer prints at the end, lists what each action took.
    ``opentelemetry-instrument`` and ``otel-torchprof run`` record the same without it. An action costs some microseconds.

    Args:
        profile: a :class:`~otel_torchprof.profile` that gets the labels and the steps. Where it does not run, it is started and stopped with the Trainer.
            ``summary()`` has its averages too.
        dirpath: where ``filename`` is written, as for ``SimpleProfiler``.
        filename: of the summary, which is logged else.
        row_limit: how many rows of averages the summary has at most.

    Raises:
        TypeError: ``profile`` is none.
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
        """The Trainer begins a stage: ``fit``, ``validate``, ``test`` or ``predict``."""
        super().setup(stage, local_rank, log_dir)
        self._torchprof_actions.loop.begin()

    def start(self, action_name: str) -> None:
        """An action begins."""
        self._torchprof_actions.start(action_name, self)
        super().start(action_name)

    def stop(self, action_name: str) -> None:
        """It ends."""
        super().stop(action_name)
        self._torchprof_actions.stop(action_name, self)

    def summary(self) -> str:
        """What each action took; with a profile, its averages too. Ends what was begun with the stage."""
        self._torchprof_actions.loop.end()
        found = str(super().summary())
        if self._given is None or self._given.is_running:
            return found
        table = self._given.key_averages().table(sort_by="self_cpu_time_total", row_limit=self._row_limit)
        return f"{found}\n{table}\n"

    def teardown(self, stage: str | None) -> None:
        """The stage has ended, also where an exception has ended it."""
        if actions := getattr(
            self, "_torchprof_actions", None
        ):  # Lightning calls this in __del__, after a constructor that raised too
            actions.loop.end()
        super().teardown(stage)
