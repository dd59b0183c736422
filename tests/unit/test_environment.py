"""Which rank a launcher's environment variables make of a process."""

from __future__ import annotations

import pytest

from fsdpcore.core.errors import ConfigError
from fsdpcore.launch.environment import detect, launched_threads

OURS = {
    "FSDPCORE_RANK": "2",
    "FSDPCORE_WORLD_SIZE": "4",
    "FSDPCORE_LOCAL_RANK": "2",
    "FSDPCORE_LOCAL_WORLD_SIZE": "4",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
PMI = {"PMI_RANK": "3", "PMI_SIZE": "6", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
TORCH = {
    "RANK": "6",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "2",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_PROCID": "4",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}


def ranks(environ):
    place = detect(environ)
    return (place.rank, place.world_size, place.local_rank, place.local_world_size)


@pytest.mark.parametrize(
    ("environ", "expected", "launcher"),
    [
        (OURS, (2, 4, 2, 4), "fsdpcore run"),
        (OPEN_MPI, (5, 8, 1, 4), "Open MPI"),
        (PMI, (3, 6, 1, 2), "PMI"),
        (TORCH, (6, 8, 2, 4), "torchrun"),
        (SRUN, (4, 5, 0, 1), "srun"),
    ],
)
def test_each_launcher_is_read(environ, expected, launcher):
    assert ranks(environ) == expected
    assert launcher in detect(environ).launcher


def test_nothing_set_is_no_launcher():
    assert detect({}) is None
    assert detect({"RANK": "3", "PATH": "/bin"}) is None


def test_a_batch_script_is_no_rank():
    batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}
    assert detect(batch) is None
    assert detect({**batch, "SLURM_STEP_NUM_TASKS": "1"}) is None


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "x"},
    ],
)
def test_a_job_of_one_rank_counts_as_none(environ):
    assert detect(environ) is None


def test_fsdpcore_run_with_one_rank_counts():
    assert ranks({"FSDPCORE_RANK": "0", "FSDPCORE_WORLD_SIZE": "1"}) == (0, 1, 0, 1)


def test_the_innermost_launcher_counts():
    assert ranks({**SRUN, **TORCH}) == (6, 8, 2, 4), "srun torchrun"
    assert ranks({**SRUN, **OPEN_MPI}) == (5, 8, 1, 4), "mpirun in an allocation"
    assert ranks({**OPEN_MPI, **TORCH, "TORCHELASTIC_RUN_ID": "7"}) == (6, 8, 2, 4)
    assert ranks({**OPEN_MPI, **TORCH, **SRUN, **OURS}) == (2, 4, 2, 4)


def test_left_over_torch_variables_do_not_hide_mpi():
    assert ranks({**OPEN_MPI, **TORCH}) == (5, 8, 1, 4)


def test_what_is_not_set_is_filled_in_as_hosts_are():
    bare = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}
    assert ranks(bare) == (5, 8, 5, 8)
    assert ranks({**bare, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}) == (5, 8, 1, 4)
    slurm_pmi = {**SRUN, "PMI_RANK": "4", "PMI_SIZE": "5"}
    assert ranks(slurm_pmi) == (4, 5, 0, 1)


@pytest.mark.parametrize("listed", ["", "many", "2(x", "2"])
def test_a_strange_list_of_slurm_tasks_is_no_error(listed):
    environ = {**SRUN, "SLURM_STEP_TASKS_PER_NODE": listed}
    assert ranks(environ) == (4, 5, 0, 5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"FSDPCORE_RANK": "4"}, ["FSDPCORE_RANK=4", "FSDPCORE_WORLD_SIZE=4"]),
        ({"FSDPCORE_RANK": "-1"}, ["FSDPCORE_RANK=-1"]),
        ({"FSDPCORE_RANK": "two"}, ["FSDPCORE_RANK", "'two'", "integer"]),
        ({"FSDPCORE_WORLD_SIZE": ""}, ["FSDPCORE_WORLD_SIZE", "integer"]),
        ({"FSDPCORE_LOCAL_RANK": "4"}, ["contradict", "FSDPCORE_LOCAL_RANK"]),
        ({"FSDPCORE_LOCAL_WORLD_SIZE": "5"}, ["contradict", "FSDPCORE_LOCAL_WORLD_SIZE"]),
        ({"FSDPCORE_LOCAL_WORLD_SIZE": "0"}, ["contradict"]),
        ({"FSDPCORE_RENDEZVOUS_FD": "x", "FSDPCORE_RANK": "0"}, ["FSDPCORE_RENDEZVOUS_FD"]),
    ],
)
def test_values_that_make_no_sense_are_named(change, words):
    with pytest.raises(ConfigError) as caught:
        detect({**OURS, **change})
    for word in words:
        assert word in str(caught.value)


def test_a_rank_without_a_world_size_is_an_error():
    with pytest.raises(ConfigError, match="FSDPCORE_WORLD_SIZE is not"):
        detect({"FSDPCORE_RANK": "0"})


def test_where_the_ranks_meet():
    assert detect(OPEN_MPI).rendezvous is None
    assert detect(TORCH).rendezvous == "node0:29501", "the port itself is torchrun's"
    assert detect({**OPEN_MPI, **TORCH}).rendezvous == "node0:29501"
    assert detect({**TORCH, "MASTER_ADDR": "fe80::1"}).rendezvous == "[fe80::1]:29501"
    assert detect({**TORCH, "FSDPCORE_RENDEZVOUS": "a:1"}).rendezvous == "a:1"
    without_port = {name: value for name, value in TORCH.items() if name != "MASTER_PORT"}
    assert detect(without_port).rendezvous is None
    with pytest.raises(ConfigError, match="MASTER_PORT=65535"):
        detect({**TORCH, "MASTER_PORT": "65535"})


def test_the_listener_belongs_to_rank_0_of_our_own_launcher():
    fd = {"FSDPCORE_RENDEZVOUS_FD": "7"}
    assert detect({**OURS, **fd}).listener_fd is None
    assert detect({**OURS, **fd, "FSDPCORE_RANK": "0"}).listener_fd == 7
    first = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert detect({**first, **fd}).listener_fd is None


def test_the_token_is_passed_on():
    assert detect(OURS).token == ""
    assert detect({**OURS, "FSDPCORE_TOKEN": "secret"}).token == "secret"


def test_ranks_as_threads():
    assert launched_threads({}) == 0
    assert launched_threads({"FSDPCORE_THREADS": "3"}) == 3
    assert detect({**OPEN_MPI, "FSDPCORE_THREADS": "3"}) is None
    for wrong in ("0", "-2", "x", ""):
        with pytest.raises(ConfigError, match="FSDPCORE_THREADS"):
            launched_threads({"FSDPCORE_THREADS": wrong})
