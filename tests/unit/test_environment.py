"""Which rank a launcher's environment variables make of a process."""

from __future__ import annotations

import os

import pytest

from fsdpcore.comm.place import RankPlace
from fsdpcore.core.errors import ConfigError
from fsdpcore.launch.config import resolve
from fsdpcore.launch.environment import detect, launched_threads, meeting_hint, unused
from fsdpcore.launch.launch import _warn_of_one
from fsdpcore.launch.rank import ranks_here

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
        ({"FSDPCORE_RENDEZVOUS": "head"}, ["FSDPCORE_RENDEZVOUS=head names no port", "HOST:PORT"]),
        ({"FSDPCORE_RENDEZVOUS": "head:0"}, ["FSDPCORE_RENDEZVOUS=head:0 names no port"]),
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


ELASTIC = {**TORCH, "TORCHELASTIC_RUN_ID": "7"}


def test_where_the_ranks_meet():
    assert detect(OPEN_MPI).rendezvous is None
    assert detect(TORCH).rendezvous == "node0:29500"
    assert detect({**OPEN_MPI, **TORCH}).rendezvous == "node0:29500"
    assert detect(ELASTIC).rendezvous == "node0:29501", "the port itself is torchrun's"
    assert detect({**TORCH, "MASTER_ADDR": "fe80::1"}).rendezvous == "[fe80::1]:29500"
    assert detect({**TORCH, "FSDPCORE_RENDEZVOUS": "a:1"}).rendezvous == "a:1"
    without_port = {name: value for name, value in TORCH.items() if name != "MASTER_PORT"}
    assert detect(without_port).rendezvous is None
    with pytest.raises(ConfigError, match="MASTER_PORT=65535"):
        detect({**ELASTIC, "MASTER_PORT": "65535"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("gpu[07-09,12]", "gpu07"),
        ("a-[3,5],b1", "a-3"),
        ("x.y,z", "x.y"),
        ("r[1-2,5]n[01-04]", "r1n01"),
        ("node[01,02]-ib,b", "node01-ib"),
    ],
)
def test_a_slurm_step_meets_on_its_first_node(nodes, first):
    step = {**SRUN, "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"}
    place = detect(step)
    host, _, port = place.rendezvous.rpartition(":")
    assert host == first
    assert 10_000 <= int(port) < 30_000, "systems give out others by themselves"
    assert detect({**step, "SLURM_STEP_ID": "3"}).rendezvous != place.rendezvous
    assert "srun" in meeting_hint(place, step)
    assert detect({**step, "SLURM_STEP_ID": ""}).rendezvous is None
    assert detect({**step, "PMI_RANK": "4", "PMI_SIZE": "5"}).rendezvous == place.rendezvous
    assert detect({**step, "PMI_RANK": "0", "PMI_SIZE": "5"}).rendezvous is None, "not srun's"
    assert detect({**step, **OPEN_MPI}).rendezvous is None


def test_an_error_of_the_meeting_says_how_its_address_came_about():
    assert "after MASTER_PORT" in meeting_hint(detect(ELASTIC), ELASTIC)
    for environ in (TORCH, OPEN_MPI, {**ELASTIC, "FSDPCORE_RENDEZVOUS": "node0:29501"}):
        assert meeting_hint(detect(environ), environ) == ""
    started = RankPlace(0, 2, 0, 2, "launch", "127.0.0.1:7")
    assert meeting_hint(started, ELASTIC) == "", "a job of its own"


def test_ranks_set_by_hand_count_with_and_without_an_address():
    by_hand = {"RANK": "0", "WORLD_SIZE": "2"}
    place = detect(by_hand)
    assert (place.rank, place.world_size, place.rendezvous) == (0, 2, None)
    assert "RANK and WORLD_SIZE" in place.launcher


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "0"}, ["RANK=0", "WORLD_SIZE"]),
        ({"WORLD_SIZE": "4"}, ["WORLD_SIZE=4", "RANK"]),
        ({"FSDPCORE_RENDEZVOUS": "a:1"}, ["FSDPCORE_RENDEZVOUS=a:1", "FSDPCORE_RANK"]),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, ["SLURM_NTASKS=8", "srun"]),
        ({"JOB_COMPLETION_INDEX": "1"}, ["JOB_COMPLETION_INDEX=1", "--node-rank"]),
        ({"PMI_RANK": "1"}, ["PMI_RANK=1", "mpiexec"]),
    ],
)
def test_variables_that_are_set_and_not_used_are_told(environ, words):
    assert detect(environ) is None
    told = unused(environ)
    for word in [*words, "single rank", "unset"]:
        assert word in told


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"PATH": "/bin"},
        {"RANK": "0", "WORLD_SIZE": "1"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "1"},
    ],
)
def test_a_job_of_one_that_was_meant_is_no_surprise(environ):
    assert unused(environ) == ""


def test_a_job_of_one_at_an_address_for_several_hosts_is_told(caplog):
    for transport, told in (("zmq://head:5558", 1), ("zmq://127.0.0.1:5558", 0), ("zmq", 0)):
        caplog.clear()
        _warn_of_one(1, resolve({"transport": transport}, {}), {})
        assert len(caplog.messages) == told
        assert all(f"'{transport}' names an address" in text for text in caplog.messages)
    _warn_of_one(2, resolve({"transport": "zmq://head:5558"}, {}), {"RANK": "0"})
    assert not caplog.messages


class SixRanksOnTwoHosts:
    """A backend, as far as its hosts go."""

    rank, hosts = 4, (0, 0, 0, 0, 1, 1)


def test_cores_are_shared_by_the_ranks_that_were_found_on_the_host():
    bare = {"FSDPCORE_RANK": "4", "FSDPCORE_WORLD_SIZE": "6"}
    assert ranks_here(detect(bare), SixRanksOnTwoHosts) == 2
    assert ranks_here(detect({**bare, "FSDPCORE_LOCAL_WORLD_SIZE": "5"}), SixRanksOnTwoHosts) == 5


def test_a_local_size_that_no_launcher_says_is_known_to_be_unknown():
    bare = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}
    assert not detect(bare).local_known
    for environ in (OURS, OPEN_MPI, PMI, TORCH, SRUN):
        assert detect(environ).local_known


def test_the_listener_belongs_to_rank_0_of_our_own_launcher():
    fd = {"FSDPCORE_RENDEZVOUS_FD": "7"}
    assert detect({**OURS, **fd}).listener_fd is None
    assert detect({**OURS, **fd, "FSDPCORE_RANK": "0"}).listener_fd == 7
    first = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    assert detect({**first, **fd}).listener_fd is None


def test_the_token_is_passed_on():
    assert detect(OURS).token == ""
    place = detect({**OURS, "FSDPCORE_TOKEN": " secret\n"})
    assert place.token == "secret", "as in a file, where editors end the line"
    assert "secret" not in repr(place)


def test_what_launchers_were_told_about_all_hosts_is_passed_on():
    told = {"FSDPCORE_RANKS_PER_HOST": "4,2"}
    assert [detect({**one, **told}).ranks_per_host for one in (OURS, TORCH)] == ["4,2", ""]


@pytest.mark.parametrize("environ", [OURS, OPEN_MPI, PMI, TORCH, SRUN])
def test_the_token_may_be_in_a_file(environ, tmp_path):
    path = tmp_path / "token"
    path.write_text("  of a file\n")
    path.chmod(0o600)
    assert detect({**environ, "FSDPCORE_TOKEN_FILE": str(path)}).token == "of a file"


def wrong_token(path, **more):
    with pytest.raises(ConfigError, match="FSDPCORE_TOKEN_FILE") as caught:
        detect({**OURS, "FSDPCORE_TOKEN_FILE": str(path), **more})
    assert "of a file" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602, 0o610])
def test_a_token_file_that_others_can_read_is_refused(tmp_path, mode):
    path = tmp_path / "token"
    path.write_text("of a file")
    path.chmod(mode)
    assert f"chmod 600 {path}" in wrong_token(path)


def test_token_files_that_make_no_sense_are_refused(tmp_path):
    path = tmp_path / "token"
    assert "cannot be read (No such file" in wrong_token(path)
    assert "is not a regular file" in wrong_token(tmp_path)
    os.mkfifo(path, 0o600)
    assert "is not a regular file" in wrong_token(path), "and nobody waits for who writes to it"
    path.unlink()
    path.touch(0o600)
    assert "is empty" in wrong_token(path)
    path.write_bytes(b"x" * 5000)
    assert "longer than 4096 bytes" in wrong_token(path)
    for binary in (b"\xff", b"of a\0 file"):
        path.write_bytes(binary)
        assert "is not text" in wrong_token(path)
        assert "openssl rand -hex 32" in wrong_token(path)
    path.write_text("fine")
    assert "both set" in wrong_token(path, FSDPCORE_TOKEN="x")


@pytest.mark.parametrize(
    ("environ", "job"),
    [
        (OURS, ""),
        (TORCH, ""),
        ({**ELASTIC, "TORCHELASTIC_RESTART_COUNT": "1"}, "torchrun:7"),
        ({**OPEN_MPI, "PMIX_NAMESPACE": "prterun-n-8@1", "SLURM_JOB_ID": "3"}, "mpi:prterun-n-8@1"),
        ({**SRUN, "SLURM_JOB_ID": "3", "SLURM_STEP_ID": "0"}, "slurm:3:0"),
        ({**SRUN, "SLURM_JOB_ID": "3", "FSDPCORE_JOB": "mine"}, "mine"),
    ],
)
def test_the_job_has_the_id_of_its_launcher(environ, job):
    assert detect(environ).job == job


def test_ranks_as_threads():
    assert launched_threads({}) == 0
    assert launched_threads({"FSDPCORE_THREADS": "3"}) == 3
    assert detect({**OPEN_MPI, "FSDPCORE_THREADS": "3"}) is None
    for wrong in ("0", "-2", "x", ""):
        with pytest.raises(ConfigError, match="FSDPCORE_THREADS"):
            launched_threads({"FSDPCORE_THREADS": wrong})
