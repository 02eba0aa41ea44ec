"""What a profile recorded, as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from otel_torchprof._columns.batch import Array, Batch, Names, RecordedThread
    from otel_torchprof._columns.frame_info import ModuleInfo, OptimizerInfo
    from otel_torchprof._columns.samples import Samples


class RecordedColumns:
    """Base of :class:`profile` with the raw columns. Thread-safe once the recording has stopped."""

    def _batch(self) -> Batch:
        raise NotImplementedError

    @property
    def columns(self) -> Mapping[str, Array]:
        """Every recorded event as numpy arrays by name, without an object per event.

        ``id``, ``start`` and ``end`` (Unix ns), ``name`` (index into :attr:`names`), ``parent`` (row or -1), ``thread``
        (index into :attr:`threads`), ``sequence_nr``, ``scope`` and others: see ``docs/columns.md``. The arrays are
        read-only and stay valid while they are referenced.
        """
        return self._batch().columns

    @property
    def names(self) -> Names:
        """Names by the index in :attr:`columns`."""
        return self._batch().names

    @property
    def threads(self) -> Sequence[RecordedThread]:
        """Threads by the index in :attr:`columns`."""
        return self._batch().threads

    @property
    def memory(self) -> Mapping[str, Array] | None:
        """Allocations and releases as numpy arrays by name: ``docs/columns.md``. None without ``profile_memory``."""
        return self._batch().memory

    @property
    def devices(self) -> Mapping[str, Array] | None:
        """Device times of events as numpy arrays by name: see ``docs/columns.md``. None if no device was timed."""
        return self._batch().devices

    @property
    def work(self) -> Mapping[str, Array] | None:
        """Kernels, copies and other work of devices as numpy arrays by name: see ``docs/columns.md``.

        None without any: profiles of this package have :attr:`devices`, traces of torch's profiler have work.
        """
        return self._batch().work

    @property
    def energy(self) -> Mapping[str, Array] | None:
        """Readings of GPU energy counters as numpy arrays by name: see ``docs/columns.md``. None if there are none."""
        return self._batch().energy

    @property
    def collectives(self) -> Mapping[str, Array] | None:
        """Groups, numbers and sizes of collectives by name: ``docs/columns.md``. None without operators."""
        return self._batch().collectives

    @property
    def samples(self) -> Samples | None:
        """Samples of Python stacks: see ``docs/columns.md``. None if none were taken."""
        return self._batch().samples

    @property
    def modules(self) -> tuple[ModuleInfo, ...]:
        """Called modules, by first call: names, classes, parameters. Empty without ``with_stack``."""
        info = self._batch().frame_info
        return () if info is None else info.all_modules()

    @property
    def optimizers(self) -> tuple[OptimizerInfo, ...]:
        """Optimizers that made steps, by first step: parameter groups and state. Empty without ``with_stack``."""
        info = self._batch().frame_info
        return () if info is None else info.all_optimizers()
