"""What a profile recorded, as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_torchprof._columns.batch import Array, Batch, Names, Thread
    from otel_torchprof._columns.frame_info import ModuleInfo, OptimizerInfo


class RecordedColumns:
    """The part of :class:`profile` that hands out what was recorded as it is. Thread-safe once the recording has stopped."""

    def _batch(self) -> Batch:
        raise NotImplementedError

    @property
    def columns(self) -> Mapping[str, Array]:
        """Every recorded event as numpy arrays by name, without an object per event.

        ``id``, ``start`` and ``end`` (Unix ns), ``name`` (index into :attr:`names`), ``parent`` (row or -1), ``thread`` (index into :attr:`threads`),
        ``sequence_nr``, ``scope`` and the others of ``docs/columns.md``. Read-only; valid as long as they are held.
        """
        return self._batch().columns

    @property
    def names(self) -> Names:
        """The names that :attr:`columns` points to."""
        return self._batch().names

    @property
    def threads(self) -> Sequence[Thread]:
        """The threads that :attr:`columns` points to."""
        return self._batch().threads

    @property
    def memory(self) -> Mapping[str, Array] | None:
        """What was allocated and freed, as numpy arrays by name: see ``docs/columns.md``. None without ``profile_memory``."""
        return self._batch().memory

    @property
    def devices(self) -> Mapping[str, Array] | None:
        """How long devices worked for events, as numpy arrays by name: see ``docs/columns.md``. None where none was timed."""
        return self._batch().devices

    @property
    def energy(self) -> Mapping[str, Array] | None:
        """Readings of GPUs' energy counters, as numpy arrays by name: see ``docs/columns.md``. None where there are none."""
        return self._batch().energy

    @property
    def collectives(self) -> Mapping[str, Array] | None:
        """Groups, numbers and sizes of collectives, as numpy arrays by name: see ``docs/columns.md``. None without operators."""
        return self._batch().collectives

    @property
    def modules(self) -> tuple[ModuleInfo, ...]:
        """The modules that were called, by first call: names, classes, parameters. Of ``with_stack``; empty without it."""
        info = self._batch().frame_info
        return () if info is None else info.all_modules()

    @property
    def optimizers(self) -> tuple[OptimizerInfo, ...]:
        """The optimizers that made steps, by first step: groups of parameters, state. Of ``with_stack``; empty without it."""
        info = self._batch().frame_info
        return () if info is None else info.all_optimizers()
