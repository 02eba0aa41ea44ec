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

# ---- The process groups of a rank, from torch.distributed ----

_MOST_GROUPS = 32
"""Most groups in a resource."""
_LONGEST = 200
"""Most characters of the list of a group's ranks."""
_NO_NAME = {"", "undefined", "default_pg"}


class Groups:
    """Process groups, read from small dictionaries of torch at every call. Thread-safe.

    Args:
        c10d: ``torch.distributed.distributed_c10d``; None: there are no groups.
        rank: rank of this process.
    """

    def __init__(self, c10d: Any = None, rank: int = -1) -> None:
        self._c10d = c10d
        self._rank = rank
        self._ranks: dict[str, tuple[int, ...]] = {}
        self._texts: tuple[str, ...] = ()
        self._names: tuple[str, ...] = ()

    def texts(self) -> tuple[str, ...]:
        """All groups but that of all ranks as ``name:ranks``, such as ``mesh_tp:0-3``, at most 32."""
        self._read()
        return self._texts

    def _read(self) -> None:
        """Adds new groups. Keeps destroyed groups, since their events may be drained later."""
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
                is_whole = is_whole and bool(ranks)  # torch adds a group to one dictionary after the other
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
        ):  # another thread creates groups, or this torch has other dictionaries
            self._names = ()


def _displayed(group: Any, name: str) -> str:
    """The program's name of a group, such as the dimension of a device mesh; else torch's own name."""
    description = str(getattr(group, "group_desc", ""))
    return name if description in _NO_NAME else description


def ranges(ranks: tuple[int, ...]) -> str:
    """``0-3,8``; evenly spaced ranks as ``0-12/4``: from 0 to 12, every fourth. Cut if too long."""
    steps = {following - rank for rank, following in itertools.pairwise(ranks)}
    if len(ranks) > 2 and len(steps) == 1 and (step := steps.pop()) > 1:  # noqa: PLR2004 - two are written out
        return f"{ranks[0]}-{ranks[-1]}/{step}"
    parts: list[str] = []
    for _, run in itertools.groupby(enumerate(sorted(ranks)), key=lambda pair: pair[1] - pair[0]):
        members = [rank for _, rank in run]
        parts.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    text = ",".join(parts)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


# ---- Agreement of ranks through the store of their process group, without waiting ----
# Uses one operation of the store: it returns the value of a key and, if there is none, first sets the offered one.

_KEY = "otel_torchprof/run"
_MOST_GENERATIONS = 1000
"""Most earlier processes of one rank in the store."""

_own_words: dict[int, str] = {}
"""A random word by process id: a forked child has another one."""


def shared_run_id(store: Any) -> str:
    """Returns the run id in the store; sets a new one if there is none. A store may outlive a restart of the processes."""
    while hasattr(store, "underlying_store"):  # without its prefixes, which may differ per attempt
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
    """Returns the random word of this process."""
    return _own_words.setdefault(os.getpid(), os.urandom(8).hex())


_NEMO_LENS = {
    "torch.distributed.rank": "nv.dl.rank",
    "torch.distributed.world_size": "nv.dl.world_size",
    "torch.distributed.local_rank": "nv.dl.local_rank",
}
"""By our name, the name in NVIDIA's NeMo Lens (docs/design/semconv.mdx of NVIDIA-NeMo/Lens): integers in resources there too."""


def with_aliases(attributes: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    """Attributes of a resource with those that ``OTEL_TORCHPROF_RANKS`` asks for."""
    if config.ALIASES.read() is None:
        return attributes
    return attributes | {_NEMO_LENS[key]: value for key, value in attributes.items() if key in _NEMO_LENS}


_logger = logging.getLogger("otel_torchprof")

_C10D = "torch.distributed.distributed_c10d"
_SOURCE = "ranks"


class _Agreement(NamedTuple):
    """The run that the ranks agreed on, and this process's place in it."""

    run: Run
    place: Place


class Ranks:
    """The ranks of a run, seen from this process. Thread-safe; all but :meth:`look` and :meth:`start` cost microseconds at most.

    Args:
        choice: selects the ranks that export.
        layout: a trace per step and rank, or one per step for all ranks: ``apart`` or ``together``.
        environ: environment variables of the launcher.
        session: number of the recording in this process, from 1: steps of each are counted from 0 and need other ids.
        on_not_exporting: called once, on the thread that creates the process group, if that shows that this rank does not
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

    # ---- start and stop ----

    def start(self) -> None:
        """Reads the process group now or when it is created. Call it once."""
        self._call_off = when_imported(_C10D, self._watch)
        self.look()

    def stop(self) -> None:
        """Removes the hook of :meth:`start` from torch; keeps what is known."""
        if self._call_off is not None:
            self._call_off()
        with self._lock:
            if self._unwatch is not None:
                self._unwatch()
            self._unwatch = None

    def look(self) -> None:
        """Looks for torch's process group, if it was not found before; then agrees with the other ranks, by a round trip to its store."""
        if not self._has_asked and not self._in_child and (c10d := sys.modules.get(_C10D)) is not None:
            self._join(c10d)

    def after_fork(self) -> None:
        """Resets a forked child, which is no rank until it creates a process group: its steps would have the parent's ids."""
        self._lock = threads.RLock()
        self._link, self._in_child = None, True
        self._unlinked = "this is a forked child of a rank"
        self._groups = Groups()
        self._merged = None

    # ---- queries ----

    @property
    def place(self) -> Place | None:
        """Rank and sizes, from torch.distributed, else from the launcher."""
        link = self._link
        return self._place if link is None else link.place

    @property
    def run(self) -> Run | None:
        """Seed of the ids; None before the ranks have agreed on it, and with one rank."""
        link = self._link
        return None if link is None else link.run

    @property
    def exporting(self) -> Exporting | None:
        """Selection of the exporting ranks; None if this process is not known to be one of several."""
        place = self.place
        if place is None or place.world_size <= 1:
            return None
        # A name that is known before the ranks agree on a run: the selection must not change then.
        seed = self._name.text if self._name is not None and self._name.is_same else ""
        return exporting(self._choice, place, seed)

    @property
    def not_exporting_reason(self) -> str | None:
        """Why this rank does not export; None if it does."""
        selection, place = self.exporting, self.place
        if selection is None or selection.own or place is None:
            return None
        return f"rank {place.rank} of {place.world_size} does not export: export_ranks is {self._choice!r}"

    @property
    def budget_share(self) -> int:
        """Number of ranks that share one trace's size limit: the exporting ranks if they share a trace, else 1."""
        selection = self.exporting
        return selection.total if selection is not None and self._link is not None and self._layout == TOGETHER else 1

    def state(self) -> dict[str, str]:
        """State for health: ``ranks`` is on if ids are derived; empty with one rank."""
        if self._link is not None:
            return {_SOURCE: ON}
        place = self.place
        return {} if place is None or place.world_size <= 1 else {_SOURCE: f"off: {self._unlinked}"}

    # ---- ids ----

    def step_ids(self, step: int) -> StepIds | None:
        """The ids of a step of this rank; None if the provider generates them."""
        link = self._link
        return None if link is None else self._ids(link, step, link.place.rank)

    def step_context(self, rank: int, step: int) -> SpanContext | None:
        """The context of any rank's step span; None before the ranks have agreed on their run."""
        link = self._link
        if link is None or not 0 <= rank < link.place.world_size:
            return None
        ids = self._ids(link, step, rank)
        return SpanContext(ids.trace_id, ids.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def collective_span(
        self, group: str, sequence: int, rank: int, step: int, operation: str = ""
    ) -> tuple[int, int] | None:
        """Trace and span id of any rank's span in a collective, the ``sequence``-th of its group; None as for steps."""
        link = self._link
        if link is None:
            return None
        return self._ids(link, step, rank).trace_id, collective_span_id(link.run, rank, group, sequence, operation)

    def linked_ranks(self, ranks: Sequence[int], most: int = MOST_LINKED) -> tuple[int, ...]:
        """The ranks of a group to which this rank's span in a collective links: others that export."""
        link = self._link
        if link is None:
            return ()
        chosen = linked_peers(ranks, link.place.rank, most)
        if self._choice == "all":
            return chosen
        return tuple(rank for rank in chosen if self._exports(link.place, rank))

    def _ids(self, link: _Agreement, step: int, rank: int) -> StepIds:
        selection = self.exporting
        return step_ids(link.run, step, rank, layout=self._layout, first=0 if selection is None else selection.first)

    def _exports(self, place: Place, rank: int) -> bool:
        local = place.local_world_size
        # Local ranks of other processes are derived: launchers number ranks node by node.
        other = place._replace(rank=rank, local_rank=rank % local if local and place.local_rank is not None else None)
        seed = self._name.text if self._name is not None and self._name.is_same else ""
        return exporting(self._choice, other, seed).own

    # ---- resource ----

    def attributes(self) -> dict[str, AttributeValue]:
        """Resource attributes of the rank; empty if this is not known to be a rank."""
        place, run = self.place, self.run
        if place is None:
            return {}
        attributes: dict[str, AttributeValue] = {
            "torch.distributed.rank": place.rank,
            "torch.distributed.world_size": place.world_size,
        }
        more = {
            "local_rank": place.local_rank,
            "local_world_size": place.local_world_size,
            "node_rank": place.node_rank,
        }
        attributes |= {f"torch.distributed.{key}": value for key, value in more.items() if value is not None}
        name = run.run_id if run is not None else self._name.text if self._name is not None else None
        if name is not None:
            attributes["torch.run.id"] = name
            attributes["torch.run.restart"] = self._restart if run is None else run.restart
            if not self._in_child:
                attributes["service.instance.id"] = f"{name}/{place.rank}"
        if run is not None and run.attempt:
            attributes["torch.run.attempt"] = run.attempt
        if groups := self._groups.texts():
            attributes["torch.distributed.groups"] = groups
        return with_aliases(attributes)

    def resource(self, own: Resource) -> Resource:
        """A resource with :meth:`attributes`, over which its own have precedence. The same object until something changes."""
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
            if c10d._update_default_pg is updated:  # noqa: SLF001 - else the program has wrapped it again
                c10d._update_default_pg = original  # noqa: SLF001

        with self._lock:
            c10d._update_default_pg, self._unwatch = updated, unwatch  # noqa: SLF001

    def _join(self, c10d: Any) -> None:
        """Reads torch's process group and agrees with the other ranks; errors are logged."""
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
        """The run, the same for all ranks: that of the first rank that wrote it. None without a usable store or name."""
        name = self._name
        try:
            store = c10d._get_default_store()  # noqa: SLF001 - there is no public one
            offered = name.text if name is not None else shared_run_id(store)
            restart = self._restart if self._outlives else None
            return agree_on_run(store, Run(offered, self._restart), rank, session=self._session, restart=restart)
        except Exception as error:  # noqa: BLE001 - MPI has no store, and some stores cannot do this
            _logger.info("the ranks cannot agree by a store: %s: %s", type(error).__name__, error)
        is_enough = name is not None and name.is_same and name.is_unique
        return Run(name.text, self._restart) if name is not None and is_enough else None


# ---- environment variables of launchers: torchrun, SLURM, MPI, Kubernetes ----


_TORCHRUN_NO_ID = "none"
"""torchrun's default run id."""
_TORCHRUN_NO_ROLE = "default"
"""torchrun's default role."""
_SLURM_NO_STEP = 0xFFFFFFF0
"""First step number with a special meaning: the batch script, the prolog."""
_POD = r"(.+)-(?:master|worker|chief|launcher|node)-\d+"
"""Host names of the pods of a Kubeflow job."""


class RunName(NamedTuple):
    """The launcher's name of the run."""

    text: str
    is_same: bool
    """Whether it is the same on all ranks."""
    is_unique: bool
    """Whether no other run has it, unless a user reuses it."""


def place_in(environ: Mapping[str, str]) -> Place | None:
    """Rank and sizes from the variables of the innermost launcher; None without one."""
    for read in (_torchrun_place, _slurm_place, _open_mpi_place, _hydra_place):
        place = read(environ)
        if place is not None and 0 <= place.rank < place.world_size:
            return place
    return None


def run_name_in(environ: Mapping[str, str], host: str | None = None) -> RunName | None:
    """The run's name; None without one. ``host``: the host's name, if not the system's."""
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
    """Identity of a process in its run: place, role, restart, run id and master, which tells runs without an id apart."""
    place, name = place_in(environ), run_name_in(environ)
    master = [environ.get(variable, "").strip() for variable in ("MASTER_ADDR", "MASTER_PORT")]
    return {
        **({} if place is None else place._asdict()),
        "role": role_in(environ) or None,
        "restart": restart_in(environ) or None,
        "run_id": None if name is None else name.text,
        "master": ":".join(master) if all(master) else None,
    }


def restart_in(environ: Mapping[str, str]) -> int:
    """Returns the number of restarts of the run by torchrun or SLURM."""
    for variable in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if restarts := _number(environ, variable):
            return restarts
    return 0


def role_in(environ: Mapping[str, str]) -> str:
    """The role from torchrun's ``--role``; empty without one."""
    role = environ.get("ROLE_NAME", "").strip() if "TORCHELASTIC_RUN_ID" in environ else ""
    return "" if role == _TORCHRUN_NO_ROLE else role


def store_outlives_processes(environ: Mapping[str, str]) -> bool:
    """Whether the ranks use torchrun's own store, which outlives a restart of the processes."""
    return environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _kubernetes_name(environ: Mapping[str, str], host: str) -> RunName | None:
    # A pod of an indexed job, such as one of a JobSet, is named <job>-<index>; the pods of a JobSet may belong to several jobs.
    index = environ.get("JOB_COMPLETION_INDEX", "")
    if index.isdecimal() and host.endswith(f"-{index}"):
        return RunName(host[: -len(index) - 1], False, False)
    match = re.fullmatch(_POD, host)
    return RunName(match.group(1), False, False) if match else None


def _torchrun_place(environ: Mapping[str, str]) -> Place | None:
    node = "GROUP_RANK" if "GROUP_RANK" in environ else "NODE_RANK"
    return _place(environ, ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", node))


def _slurm_place(environ: Mapping[str, str]) -> Place | None:
    # A batch script has such variables too, outside of srun, where they describe no process.
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
    """The number of the process's ``srun``; None in the batch script itself."""
    step = _number(environ, "SLURM_STEP_ID")
    return None if step is None or step >= _SLURM_NO_STEP else step


def _open_mpi_place(environ: Mapping[str, str]) -> Place | None:
    name = "OMPI_COMM_WORLD_"
    return _place(environ, (f"{name}RANK", f"{name}SIZE", f"{name}LOCAL_RANK", f"{name}LOCAL_SIZE", ""))


def _hydra_place(environ: Mapping[str, str]) -> Place | None:
    return _place(environ, ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", ""))


def _place(environ: Mapping[str, str], variables: tuple[str, str, str, str, str]) -> Place | None:
    """A place from variables, in the order of its fields."""
    rank, size, local_rank, local_size, node = (_number(environ, name) for name in variables)
    return None if rank is None or not size else Place(rank, size, local_rank, local_size or None, node)


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    return int(text) if text.isascii() and text.isdecimal() else None


def _tasks_per_node(text: str) -> list[int]:
    """SLURM's ``4(x2),3`` as one number per node; empty for any other text."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            return []
        tasks += [int(match.group(1))] * int(match.group(2) or 1)
    return tasks


# ---- Selection of the exporting ranks: all, the first of each node, one, or a share ----


Choice = str | float
"""One of ``all``, ``node`` and ``one``, or a share of the ranks, above 0 and below 1."""


class Place(NamedTuple):
    """Rank and sizes of a process in its run; None for unknown numbers."""

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node_rank: int | None = None


class Exporting(NamedTuple):
    """Selection of the exporting ranks."""

    own: bool
    """Whether this rank exports."""
    total: int
    """Number of exporting ranks."""
    first: int
    """Lowest exporting rank."""


def exporting(choice: Choice, place: Place, seed: str = "") -> Exporting:
    """Selects the exporting ranks; every rank computes the same result.

    If local ranks are unknown, ``node`` selects all ranks. ``seed``, the same on all ranks, varies the sampled ranks from run to
    run.
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
    """A share of the ranks, at least one: those with the lowest hashes."""
    import hashlib  # as in rank_ids

    def order(rank: int) -> bytes:
        return hashlib.blake2b(f"{seed}\0{rank}".encode(), digest_size=8).digest()

    return frozenset(sorted(range(world), key=order)[: max(1, round(share * world))])


# ---- worker processes of a DataLoader, which do not train ----


def is_loader_worker() -> bool:
    """Whether this process is a worker of a DataLoader of torch or torchdata; valid from the start of the process on.

    A spawned worker imports the program before this is known. Costs a microsecond.
    """
    return _is_for_a_loader(current_process())


def starts_loader_worker() -> bool:
    """Whether the current fork creates a DataLoader's worker; for fork handlers in the parent."""
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
