"""What launchers tell."""

from __future__ import annotations

import pytest

from otel_torchprof._ranks.ranks import Place, RunName, place_in, restart_in, role_in, run_name_in

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_RESTART_COUNT": "1",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
KUBERNETES = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, Place(5, 8, 1, 4, 1)),
        (SLURM, Place(9, 11, 1, 3, 2)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "odd"}, Place(9, 11, 1, None, 2)),
        (SLURM | TORCHRUN, Place(5, 8, 1, 4, 1)),
        (OPEN_MPI, Place(3, 4, 1, 2)),
        (HYDRA, Place(3, 4, 1, 2)),
        ({"RANK": "1", "WORLD_SIZE": "2", "NODE_RANK": "1"}, Place(1, 2, node_rank=1)),
        ({"RANK": "1"}, None),
        ({"RANK": "2", "WORLD_SIZE": "2"}, None),
        ({"RANK": "first", "WORLD_SIZE": "two"}, None),
        ({}, None),
    ],
)
def test_places(environ, expected):
    """Every launcher's variables are understood, the one nearest to the process counts, and what makes no sense is nothing."""
    assert place_in(environ) == expected


@pytest.mark.parametrize("step", [None, "4294967291"])
def test_a_batch_script_is_no_rank(step):
    """Outside of srun SLURM's variables tell of what could run, not of this process."""
    batch = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert place_in(batch if step is None else batch | {"SLURM_STEP_ID": step}) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"OTEL_TORCHPROF_RANKS": "together, run_id= mine "} | SLURM, RunName("mine", True, True)),
        (TORCHRUN, None),
        (TORCHRUN | {"TORCHELASTIC_RUN_ID": "exp-4"}, RunName("exp-4", True, False)),
        (TORCHRUN | {"SLURM_JOB_ID": "77"}, RunName("77", True, False)),
        (SLURM, RunName("1234.0", True, True)),
        (KUBERNETES, None),
        ({}, None),
    ],
)
def test_run_names(environ, expected):
    """The user's word comes first, then the launcher's; torchrun's ``none`` is no id, and one that is used again is not unique."""
    assert run_name_in(environ, host="node1") == expected


@pytest.mark.parametrize(
    ("host", "index", "expected"),
    [
        ("train-workers-0-3", "3", "train-workers-0"),
        ("train-worker-12", None, "train"),
        ("train-master-0", None, "train"),
        ("train-x7k2p", None, None),
        ("train-3", "4", None),
    ],
)
def test_run_names_of_kubernetes(host, index, expected):
    """A pod is called after its job; pods of one run may be of several."""
    environ = KUBERNETES | ({} if index is None else {"JOB_COMPLETION_INDEX": index})
    assert run_name_in(environ, host) == (None if expected is None else RunName(expected, False, False))


@pytest.mark.parametrize(("environ", "expected"), [(TORCHRUN, 2), (SLURM, 1), (SLURM | TORCHRUN, 2), ({}, 0)])
def test_restarts(environ, expected):
    """How often the launcher began the run anew."""
    assert restart_in(environ) == expected


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN | {"ROLE_NAME": "actor"}, "actor"),
        (TORCHRUN | {"ROLE_NAME": "default"}, ""),
        (TORCHRUN, ""),
        ({"ROLE_NAME": "of something else"}, ""),
    ],
)
def test_roles(environ, expected):
    """The role that somebody gave torchrun; a variable of that name is nothing where there is no torchrun."""
    assert role_in(environ) == expected
