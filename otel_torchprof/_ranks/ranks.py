"""The ranks of a distributed run: the rank of this process, which ranks export, and the ids of the spans of all ranks' steps.

Rank and world size are known from the launcher's environment variables. Ids that every rank can compute also need one id of the run that
all ranks share, even if a run id is used twice, the launcher restarts processes, or no id was given. The ranks agree on it when torch's
process group is created, by one key of its store: the first rank that writes the key sets the value. No rank waits for another, and the
store is not used later.
"""

from __future__ import annotations

import functools
import itertools
import logging
import os
import re
import socket
import sys
from multiprocessing import current_process
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry.trace import SpanContext, TraceFlags

from otel_torchprof import config
from otel_torchprof._process import threads
from otel_torchprof._process.after_import import when_imported
from otel_torchprof.health import ON

from .rank_ids import MOST_LINKED, TOGETHER, Run, collective_span_id, linked_peers, step_ids

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.util.types import AttributeValue

    from .rank_ids import StepIds

# ---- The process groups that a rank is in, as torch.distributed knows them ----

_MOST_GROUPS = 32
"""Groups that a resource names."""
_LONGEST = 200
"""Characters of the list of a group's ranks."""
_NO_NAME = {"", "undefined", "default_pg"}


class Groups:
    """Looked up in torch's own books, which are small dictionaries; cheap to ask again. Thread-safe.

    Args:
        c10d: ``torch.distributed.distributed_c10d``; None: there are none.
        rank: this process's.
    """

    def __init__(self, c10d: Any = None, rank: int = -1) -> None:
        self._c10d = c10d
        self._rank = rank
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._texts: tuple[str, ...] = ()
        self._names: tuple[str, ...] = ()

    def texts(self) -> tuple[str, ...]:
        """Each group but that of the whole world, once: ``name:ranks``, such as ``mesh_tp:0-3``, at most 32."""
        self._read()
        return self._texts

    def _read(self) -> None:
        """Takes up groups that are new; those that the program has destroyed are remembered: their work may be drained later."""
        if self._c10d is None:
            return
        try:
            world = self._c10d._world  # noqa: SLF001 - nothing public names the groups
            names = dict(world.pg_names)
            if tuple(names.values()) == self._names:
                return
            every = self._c10d.get_world_size() if self._c10d.is_initialized() else 0
            texts, is_whole = list(self._texts), True
            for group, name in names.items():
                ranks = tuple(world.pg_group_ranks.get(group, ()))
                is_whole = is_whole and bool(ranks)  # torch enters a group into one book after the other
                if name not in self._ranks and self._rank in ranks:
                    self._ranks[name] = ranks
                    if len(ranks) != every:
                        texts.append(f"{_displayed(group, name)}:{ranges(ranks)}")
            self._texts = tuple(texts[:_MOST_GROUPS])
            self._names = tuple(names.values()) if is_whole else ()
        except (
            AttributeError,
            RuntimeError,
            ValueError,
        ):  # another thread makes groups, or this torch keeps other books
            self._names = ()


def _displayed(group: Any, name: str) -> str:
    """What the program calls it, such as the dimension of a device mesh; else torch's own name of it."""
    description = str(getattr(group, "group_desc", ""))
    return name if description in _NO_NAME else description


def ranges(ranks: tuple[int, ...]) -> str:
    """``0-3,8``; of evenly spaced ones ``0-12/4``: from 0 to 12, every fourth. Cut where it gets too long."""
    steps = {following - one for one, following in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and (step := steps.pop()) > 1:  # noqa: PLR2004 - two are written out
        return f"{ranks[0]}-{ranks[-1]}/{step}"
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    text = ",".join(parts)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


# ---- How ranks agree on something by the store of their process group, without waiting for each other ----
# Everything is one operation of the store: what it holds under a key, or, where it holds nothing, what is offered.

_KEY = "otel_torchprof/run"
_MOST_GENERATIONS = 1000
"""Processes of one rank that have started and ended, as far as they are looked through."""

_own_words: dict[int, str] = {}
"""By the id of a process, a word that is its own: a forked child has another."""


def made_id(store: Any) -> str:
    """A new run id, or the one that was made before the launcher began the processes anew, if its store has lived on."""
    while hasattr(store, "underlying_store"):  # around it are prefixes, which may be those of one attempt
        store = store.underlying_store
    return _held(store, f"{_KEY}/id", os.urandom(16).hex())


def agree_on_run(store: Any, offered: Run, rank: int, *, session: int, restart: int | None) -> Run:
    """Returns the run that the first rank wrote to the store, with a random attempt id.

    A store may outlive the processes, and still hold the run of earlier ones. So each rank claims its slot of a generation; if an
    earlier process has claimed that, the rank tries the next generation. ``restart`` is part of the key: it keeps the ranks in one
    generation even if one of them ended before it had claimed a slot. None if every start has a new store.

    Raises:
        Exception: whatever the store raises.
        ValueError: the store holds another kind of value, or no generation is left.
    """
    key = f"{_KEY}/{session}" if restart is None else f"{_KEY}/{session}/{restart}"
    own = _own_word()
    for generation in range(_MOST_GENERATIONS):
        if _held(store, f"{key}/{generation}/{rank}", own) == own:
            text = "\n".join((offered.run_id, str(offered.restart), os.urandom(8).hex()))
            run_id, restarts, attempt = _held(store, f"{key}/{generation}", text).split("\n")
            return Run(run_id, int(restarts), attempt)
    raise ValueError(f"the store holds {_MOST_GENERATIONS} earlier processes of rank {rank}")


def _held(store: Any, key: str, offered: str) -> str:
    held: bytes = store.compare_set(key, "", offered)
    return held.decode()


def _own_word() -> str:
    """The same whenever this process asks; a forked child has another."""
    return _own_words.setdefault(os.getpid(), os.urandom(8).hex())


_logger = logging.getLogger("otel_torchprof")

_C10D = "torch.distributed.distributed_c10d"
_SOURCE = "ranks"


class _Agreement(NamedTuple):
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
        on_not_exporting: called once, in the thread that makes the process group, where only that tells that this rank does not
            export.
    """

    def __init__(
        self,
        choice: Choice = "all",
        layout: str = "apart",
        *,
        environ: Mapping[str, str] = os.environ,
        session: int = 1,
        on_not_exporting: Callable[[], None] | None = None,
    ) -> None:
        self._choice = choice
        self._layout = layout
        self._name = run_name_in(environ)
        self._restart = restart_in(environ)
        self._outlives = store_outlives_processes(environ)
        self._place = place_in(environ)
        self._session = session
        self._on_not_exporting = on_not_exporting
        self._lock = threads.RLock()
        self._link: _Agreement | None = None
        self._unlinked = "no process group of torch.distributed was made yet"
        self._has_asked = self._in_child = False
        self._groups = Groups()
        self._merged: tuple[Resource, Mapping[str, Any], Resource] | None = None
        self._call_off: Callable[[], None] | None = None
        self._unwatch: Callable[[], None] | None = None

    # ---- from when to when ----

    def start(self) -> None:
        """Learns of the process group when it is made, or of the one that is there. Once."""
        self._call_off = when_imported(_C10D, self._watch)
        self.look()

    def stop(self) -> None:
        """Takes back what :meth:`start` has put into torch; what is known stays."""
        if self._call_off is not None:
            self._call_off()
        with self._lock:
            if self._unwatch is not None:
                self._unwatch()
            self._unwatch = None

    def look(self) -> None:
        """Looks for torch's process group, until there is one; then agrees with the other ranks, by a round trip to its store."""
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
    def not_exporting_reason(self) -> str | None:
        """Why this rank exports nothing, where it does not."""
        found, place = self.exporting, self.place
        if found is None or found.own or place is None:
            return None
        return f"rank {place.rank} of {place.world_size} does not export: export_ranks is {self._choice!r}"

    @property
    def budget_share(self) -> int:
        """Number of ranks that share one trace's size limit: the exporting ranks if they share a trace, else 1."""
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

    def _ids(self, link: _Agreement, step: int, rank: int) -> StepIds:
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
        """Wraps torch's setter of the default process group: that also works if the program imported ``init_process_group`` by name."""
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
                was_silent = self.not_exporting_reason is not None
                self._take_up(c10d)
        except Exception as error:  # noqa: BLE001 - this may be the middle of the program's init_process_group
            self._unlinked = f"the process group could not be asked: {type(error).__name__}: {error}"
            _logger.warning("ranks are not linked: %s", self._unlinked)
            return
        if self.not_exporting_reason is not None and not was_silent and self._on_not_exporting is not None:
            self._on_not_exporting()

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
            self._link, self._in_child = _Agreement(run, self._place or Place(rank, size)), False

    def _agreed(self, c10d: Any, rank: int) -> Run | None:
        """The same for all ranks: what the first of them has offered."""
        name = self._name
        try:
            store = c10d._get_default_store()  # noqa: SLF001 - there is no public one
            offered = name.text if name is not None else made_id(store)
            restart = self._restart if self._outlives else None
            return agree_on_run(store, Run(offered, self._restart), rank, session=self._session, restart=restart)
        except Exception as error:  # noqa: BLE001 - MPI has no store, and some stores cannot do this
            _logger.info("the ranks cannot agree by a store: %s: %s", type(error).__name__, error)
        is_enough = name is not None and name.is_same and name.is_unique
        return Run(name.text, self._restart) if name is not None and is_enough else None


# ---- what launchers tell a process of its run, by environment variables: torchrun, SLURM, MPI, Kubernetes ----


_TORCHRUN_NO_ID = "none"
"""What torchrun says where nobody gave the run an id."""
_TORCHRUN_NO_ROLE = "default"
"""Likewise of the role."""
_SLURM_NO_STEP = 0xFFFFFFF0
"""From here on numbers of steps have meanings of their own: the batch script, the prolog."""
_POD = r"(.+)-(?:master|worker|chief|launcher|node)-\d+"
"""Host names of the pods of a Kubeflow job."""


class RunName(NamedTuple):
    """What a launcher calls the run."""

    text: str
    is_same: bool
    """Whether all ranks are told the same."""
    is_unique: bool
    """Whether no other run has it, as long as nobody makes it so."""


def place_in(environ: Mapping[str, str]) -> Place | None:
    """Rank and the like, as the launcher nearest to the process tells them; None where none does."""
    for read in (_torchrun_place, _slurm_place, _open_mpi_place, _hydra_place):
        place = read(environ)
        if place is not None and 0 <= place.rank < place.world_size:
            return place
    return None


def run_name_in(environ: Mapping[str, str], host: str | None = None) -> RunName | None:
    """The run's name; None where nobody gave it one. ``host``: the host's name, if not as the system says."""
    if own := config.RUN_ID.text(environ):
        return RunName(own, True, True)
    elastic = environ.get("TORCHELASTIC_RUN_ID", "").strip()
    if elastic and elastic.lower() != _TORCHRUN_NO_ID:
        return RunName(elastic, True, False)
    if job := environ.get("SLURM_JOB_ID", "").strip():
        step = _slurm_step(environ)
        return RunName(job if step is None else f"{job}.{step}", True, step is not None)
    if "KUBERNETES_SERVICE_HOST" in environ:
        return _kubernetes_name(environ, host or socket.gethostname())
    return None


def identity_in(environ: Mapping[str, str]) -> dict[str, str | int | None]:
    """What is said of a process where it is to be told from the others of its run: its place, role, restart and run."""
    place, name = place_in(environ), run_name_in(environ)
    return {
        **({} if place is None else place._asdict()),
        "role": role_in(environ) or None,
        "restart": restart_in(environ) or None,
        "run_id": None if name is None else name.text,
    }


def restart_in(environ: Mapping[str, str]) -> int:
    """How often the run was begun anew, by torchrun or by SLURM."""
    for variable in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if found := _number(environ, variable):
            return found
    return 0


def role_in(environ: Mapping[str, str]) -> str:
    """The role that torchrun's ``--role`` gave the process; empty where nobody gave one."""
    role = environ.get("ROLE_NAME", "").strip() if "TORCHELASTIC_RUN_ID" in environ else ""
    return "" if role == _TORCHRUN_NO_ROLE else role


def store_outlives_processes(environ: Mapping[str, str]) -> bool:
    """Whether the store by which ranks find each other is torchrun's own, which it keeps when it begins them anew."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _kubernetes_name(environ: Mapping[str, str], host: str) -> RunName | None:
    # A pod of an indexed job, a JobSet's for one, is called <job>-<index>; the pods of one JobSet may belong to several jobs.
    index = environ.get("JOB_COMPLETION_INDEX", "")
    if index.isdecimal() and host.endswith(f"-{index}"):
        return RunName(host[: -len(index) - 1], False, False)
    found = re.fullmatch(_POD, host)
    return RunName(found.group(1), False, False) if found else None


def _torchrun_place(environ: Mapping[str, str]) -> Place | None:
    node = "GROUP_RANK" if "GROUP_RANK" in environ else "NODE_RANK"
    return _place(environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", node))


def _slurm_place(environ: Mapping[str, str]) -> Place | None:
    # Outside of srun, in a batch script, there are such variables too, and they name no process that runs.
    if _slurm_step(environ) is None:
        return None
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    place = _place(environ, ("SLURM_PROCID", size, "SLURM_LOCALID", "", "SLURM_NODEID"))
    if place is None or place.node_rank is None:
        return place
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    known = place.node_rank < len(tasks)
    return place._replace(local_world_size=tasks[place.node_rank]) if known else place


def _slurm_step(environ: Mapping[str, str]) -> int | None:
    """The number of the ``srun`` that the process is of; None in the batch script itself."""
    step = _number(environ, "SLURM_STEP_ID")
    return None if step is None or step >= _SLURM_NO_STEP else step


def _open_mpi_place(environ: Mapping[str, str]) -> Place | None:
    name = "OMPI_COMM_WORLD_"
    return _place(environ, (f"{name}RANK", f"{name}SIZE", f"{name}LOCAL_RANK", f"{name}LOCAL_SIZE", ""))


def _hydra_place(environ: Mapping[str, str]) -> Place | None:
    return _place(environ, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""))


def _place(environ: Mapping[str, str], variables: tuple[str, str, str, str, str]) -> Place | None:
    """What variables say, in the order of the fields."""
    rank, size, local_rank, local_size, node = (_number(environ, name) for name in variables)
    return None if rank is None or not size else Place(rank, size, local_rank, local_size or None, node)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _tasks_per_node(text: str) -> list[int]:
    """SLURM's ``4(x2),3`` as one number per node; nothing where it is not that."""
    tasks: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if found is None:
            return []
        tasks += [int(found.group(1))] * int(found.group(2) or 1)
    return tasks


# ---- which ranks of a run export: all, the first of each node, one, or a share ----


Choice = str | float
"""One of ``all``, ``node`` and ``one``, or a share of the ranks, above 0 and below 1."""


class Place(NamedTuple):
    """Where a process stands among those of its run; None where that is not known."""

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None


class Exporting(NamedTuple):
    """Which ranks export."""

    own: bool
    """Whether this rank exports."""
    total: int
    """Number of exporting ranks."""
    first: int
    """Lowest exporting rank."""


def exporting(choice: Choice, place: Place, seed: str = "") -> Exporting:
    """Who exports, as every rank finds it for itself.

    Where it is not known which process is the first of its node, every one exports. ``seed`` varies which ranks are sampled
    from run to run; it has to be the same on all of them.
    """
    rank, world = place.rank, place.world_size
    if choice == "one":
        return Exporting(rank == 0, 1, 0)
    if choice == "node" and place.local_rank is not None:
        nodes = -(-world // place.local_world_size) if place.local_world_size else world
        return Exporting(place.local_rank == 0, nodes, 0)
    if isinstance(choice, float):
        chosen = _sampled(choice, world, seed)
        return Exporting(rank in chosen, len(chosen), min(chosen))
    return Exporting(True, world, 0)


@functools.lru_cache(maxsize=8)
def _sampled(share: float, world: int, seed: str) -> frozenset[int]:
    """So many ranks as the share says, at least one: those whose hashes are the lowest."""
    import hashlib  # as in rank_ids

    def order(rank: int) -> bytes:
        return hashlib.blake2b(f"{seed}\0{rank}".encode(), digest_size=8).digest()

    return frozenset(sorted(range(world), key=order)[: max(1, round(share * world))])


# ---- worker processes of a DataLoader, which are not to be taken for processes that train ----


def is_loader_worker() -> bool:
    """Whether this process is a worker of a DataLoader, of torch or torchdata: known before anything of it runs but its start.

    One that is started anew (``spawn``) imports the program before it knows what it is for. A microsecond.
    """
    return _is_for_a_loader(current_process())


def starts_loader_worker() -> bool:
    """Whether the fork in whose handlers this is called makes such a worker: in the parent."""
    frame = sys._getframe()  # noqa: SLF001 - the only way to the callers, and documented
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_name == "start" and frame.f_globals.get("__name__") == "multiprocessing.process":
            return _is_for_a_loader(frame.f_locals.get("self"))
    return False


def _is_for_a_loader(process: object) -> bool:
    target = getattr(process, "_target", None)
    package = getattr(target, "__module__", None) or ""
    return getattr(target, "__name__", "") == "_worker_loop" and package.partition(".")[0] in {"torch", "torchdata"}
