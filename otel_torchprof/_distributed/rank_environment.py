"""What launchers tell a process of its run, by environment variables: torchrun, SLURM, MPI, Kubernetes."""

from __future__ import annotations

import re
import socket
from typing import TYPE_CHECKING, NamedTuple

from otel_torchprof import config

from .rank_choice import Place

if TYPE_CHECKING:
    from collections.abc import Mapping

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
