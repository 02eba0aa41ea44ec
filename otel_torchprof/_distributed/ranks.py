"""The ranks of a run, as this process knows them: where it stands, what it exports, which ids its steps and those of others have.

What launchers say is known from the start. The ids need more: that all ranks mean the same run, also where a run id is used
a second time, a launcher began some processes anew, or nobody gave an id. That is agreed on when torch's process group is
made, by one entry in the store by which the ranks have found each other: the first to offer one has given it. Nothing waits for
another rank, and nothing is asked of the store later.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.trace import SpanContext, TraceFlags

from otel_torchprof._process import threads
from otel_torchprof._process.after_import import when_imported
from otel_torchprof.health import ON

from . import rank_store
from .rank_choice import Exporting, Place, exporting
from .rank_environment import place_in, restart_in, run_name_in, store_outlives_processes
from .rank_groups import Groups
from .rank_ids import MOST_LINKED, TOGETHER, Run, collective_span_id, linked_peers, step_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.util.types import AttributeValue

    from .rank_choice import Choice
    from .rank_ids import StepIds

_logger = logging.getLogger("otel_torchprof")

_C10D = "torch.distributed.distributed_c10d"
_SOURCE = "ranks"


class _Link(NamedTuple):
    """What the ranks agreed on."""

    run: Run
    place: Place


class Ranks:
    """A process among the ranks of its run. Thread-safe; all but :meth:`look` and :meth:`start` cost microseconds at most.

    Args:
        choice: which ranks export.
        layout: a trace per step and rank, or one for all ranks: ``apart`` or ``together``.
        environ: what the launcher said.
        session: which recording of this process it is, from 1: steps are counted anew, and must not have the same ids again.
        on_silence: called once, in the thread that makes the process group, where only that tells that this rank does not
            export.
    """

    def __init__(
        self,
        choice: Choice = "all",
        layout: str = "apart",
        *,
        environ: Mapping[str, str] = os.environ,
        session: int = 1,
        on_silence: Callable[[], None] | None = None,
    ) -> None:
        self._choice = choice
        self._layout = layout
        self._name = run_name_in(environ)
        self._restart = restart_in(environ)
        self._outlives = store_outlives_processes(environ)
        self._place = place_in(environ)
        self._session = session
        self._on_silence = on_silence
        self._lock = threads.RLock()
        self._link: _Link | None = None
        self._unlinked = "no process group of torch.distributed was made yet"
        self._has_asked = self._in_child = False
        self._groups = Groups()
        self._merged: tuple[Resource, Mapping[str, Any], Resource] | None = None
        self._call_off: Callable[[], None] = _nothing
        self._unwatch: Callable[[], None] = _nothing

    # ---- from when to when ----

    def start(self) -> None:
        """Learns of the process group when it is made, or of the one that is there. Once."""
        self._call_off = when_imported(_C10D, self._watch)
        self.look()

    def stop(self) -> None:
        """Takes back what :meth:`start` has put into torch; what is known stays."""
        self._call_off()
        with self._lock:
            self._unwatch()
            self._unwatch = _nothing

    def look(self) -> None:
        """Asks torch whether there is a process group, until there was one: then with a round trip to its store."""
        if not self._has_asked and not self._in_child and (c10d := sys.modules.get(_C10D)) is not None:
            self._join(c10d)

    def after_fork(self) -> None:
        """A forked child is no rank, until it makes a process group of its own: its steps would have the parent's ids."""
        self._lock = threads.RLock()
        self._link, self._in_child = None, True
        self._unlinked = "this is a forked child of a rank"
        self._groups = Groups()
        self._merged = None

    # ---- what is known ----

    @property
    def place(self) -> Place | None:
        """Rank and the like: torch.distributed's word, else the launcher's."""
        link = self._link
        return self._place if link is None else link.place

    @property
    def run(self) -> Run | None:
        """What ids are derived from; None as long as the ranks have not agreed on it, or where there is one rank only."""
        link = self._link
        return None if link is None else link.run

    @property
    def exporting(self) -> Exporting | None:
        """Which ranks export; None where this process is not known to be one of several."""
        place = self.place
        if place is None or place.world_size <= 1:
            return None
        # The name in a form that the ranks knew before they agreed on anything: the choice must not change then.
        seed = self._name.text if self._name is not None and self._name.is_same else ""
        return exporting(self._choice, place, seed)

    @property
    def silence(self) -> str | None:
        """Why this rank exports nothing, where it does not."""
        found, place = self.exporting, self.place
        if found is None or found.own or place is None:
            return None
        return f"rank {place.rank} of {place.world_size} does not export: export_ranks is {self._choice!r}"

    @property
    def budget_share(self) -> int:
        """Among how many ranks the budget of a trace is divided: those that export, where they share a trace, else 1."""
        found = self.exporting
        return found.total if found is not None and self._link is not None and self._layout == TOGETHER else 1

    def state(self) -> dict[str, str]:
        """For health: ``ranks`` is on where ids are derived; nothing where there is one rank only."""
        if self._link is not None:
            return {_SOURCE: ON}
        place = self.place
        return {} if place is None or place.world_size <= 1 else {_SOURCE: f"off: {self._unlinked}"}

    # ---- ids ----

    def step_ids(self, step: int) -> StepIds | None:
        """The ids of a step of this rank; None where they are the provider's affair."""
        link = self._link
        return None if link is None else self._ids(link, step, link.place.rank)

    def step_context(self, rank: int, step: int) -> SpanContext | None:
        """The span of any rank's step; None as long as the ranks have not agreed on their run."""
        link = self._link
        if link is None or not 0 <= rank < link.place.world_size:
            return None
        ids = self._ids(link, step, rank)
        return SpanContext(ids.trace_id, ids.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def collective_span(
        self, group: str, sequence: int, rank: int, step: int, operation: str = ""
    ) -> tuple[int, int] | None:
        """Trace and span id of any rank's part in a collective, the ``sequence``-th of its group; None as for steps."""
        link = self._link
        if link is None:
            return None
        return self._ids(link, step, rank).trace_id, collective_span_id(link.run, rank, group, sequence, operation)

    def linked_ranks(self, ranks: Sequence[int], most: int = MOST_LINKED) -> tuple[int, ...]:
        """To which of a group's ranks this one's part in a collective links: to those that export, and not to itself."""
        link = self._link
        if link is None:
            return ()
        chosen = linked_peers(ranks, link.place.rank, most)
        if self._choice == "all":
            return chosen
        return tuple(rank for rank in chosen if self._exports(link.place, rank))

    def _ids(self, link: _Link, step: int, rank: int) -> StepIds:
        found = self.exporting
        return step_ids(link.run, step, rank, layout=self._layout, first=0 if found is None else found.first)

    def _exports(self, place: Place, rank: int) -> bool:
        local = place.local_world_size
        # Of others it is known only by this how they stand in their nodes: launchers number them node by node.
        other = place._replace(rank=rank, local_rank=rank % local if local and place.local_rank is not None else None)
        seed = self._name.text if self._name is not None and self._name.is_same else ""
        return exporting(self._choice, other, seed).own

    # ---- resource ----

    def attributes(self) -> dict[str, AttributeValue]:
        """What a resource has of the rank: nothing where this is not known to be a rank."""
        place, run = self.place, self.run
        if place is None:
            return {}
        found: dict[str, AttributeValue] = {
            "torch.distributed.rank": place.rank,
            "torch.distributed.world_size": place.world_size,
        }
        more = {
            "local_rank": place.local_rank,
            "local_world_size": place.local_world_size,
            "node_rank": place.node_rank,
        }
        found |= {f"torch.distributed.{key}": value for key, value in more.items() if value is not None}
        name = run.run_id if run is not None else self._name.text if self._name is not None else None
        if name is not None:
            found["torch.run.id"] = name
            found["torch.run.restart"] = self._restart if run is None else run.restart
            if not self._in_child:
                found["service.instance.id"] = f"{name}/{place.rank}"
        if run is not None and run.attempt:
            found["torch.run.attempt"] = run.attempt
        if groups := self._groups.texts():
            found["torch.distributed.groups"] = groups
        return found

    def resource(self, own: Resource) -> Resource:
        """A resource with :meth:`attributes`, of which its own come first. The same object as long as nothing changes."""
        attributes, merged = self.attributes(), self._merged
        if not attributes:
            return own
        if merged is None or merged[0] is not own or merged[1] != attributes:
            # Imported late: the SDK's resources are what ask the detector below.
            from opentelemetry.sdk.resources import Resource

            merged = self._merged = (own, attributes, Resource(attributes).merge(own))
        return merged[2]

    # ---- the process group ----

    def _watch(self, c10d: Any) -> None:
        """Hears of new process groups where torch sets the default one, whoever has imported ``init_process_group`` by name."""
        original = getattr(c10d, "_update_default_pg", None)
        if original is None:  # some later torch: then they are found when steps are drained
            return

        def updated(group: Any) -> None:
            original(group)
            if group is not None and self._unwatch is unwatch:
                self._join(c10d)

        def unwatch() -> None:
            if c10d._update_default_pg is updated:  # noqa: SLF001 - else somebody has put something over it
                c10d._update_default_pg = original  # noqa: SLF001

        with self._lock:
            c10d._update_default_pg, self._unwatch = updated, unwatch  # noqa: SLF001

    def _join(self, c10d: Any) -> None:
        """Takes up what torch says, and agrees with the others; whatever that raises, the program continues."""
        try:
            with self._lock:
                if not c10d.is_initialized():
                    return
                self._has_asked = True
                was_silent = self.silence is not None
                self._take_up(c10d)
        except Exception as error:  # noqa: BLE001 - this may be the middle of the program's init_process_group
            self._unlinked = f"the process group could not be asked: {type(error).__name__}: {error}"
            _logger.warning("ranks are not linked: %s", self._unlinked)
            return
        if self.silence is not None and not was_silent and self._on_silence is not None:
            self._on_silence()

    def _take_up(self, c10d: Any) -> None:
        rank, size = c10d.get_rank(), c10d.get_world_size()
        if rank < 0:
            return
        reported = self._place
        if reported is None or (reported.rank, reported.world_size) != (rank, size):
            self._place = Place(rank, size)
        self._groups = Groups(c10d, rank)
        if size <= 1:
            return
        run = self._agreed(c10d, rank)
        if run is None:
            self._unlinked = "the process group has no store by which its ranks could agree on a run id"
        else:
            self._link, self._in_child = _Link(run, self._place or Place(rank, size)), False

    def _agreed(self, c10d: Any, rank: int) -> Run | None:
        """The same for all ranks: what the first of them has offered."""
        name = self._name
        try:
            store = c10d._get_default_store()  # noqa: SLF001 - there is no public one
            offered = name.text if name is not None else rank_store.made_id(store)
            restart = self._restart if self._outlives else None
            return rank_store.agreed(store, Run(offered, self._restart), rank, session=self._session, restart=restart)
        except Exception as error:  # noqa: BLE001 - MPI has no store, and some stores cannot do this
            _logger.info("the ranks cannot agree by a store: %s: %s", type(error).__name__, error)
        is_enough = name is not None and name.is_same and name.is_unique
        return Run(name.text, self._restart) if name is not None and is_enough else None


def _nothing() -> None:
    """What there is to take back before anything was done."""
