import os
import socket

import pytest

from haiku_template.cluster import asked, detection
from haiku_template.cluster.detection import detect, first_host, own_cards
from haiku_template.errors import ConfigError

HOST = socket.gethostname()
SLURM = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": f"{HOST},other",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
TORCH = {
    "MASTER_ADDR": "job-worker-0",
    "MASTER_PORT": "23456",
    "WORLD_SIZE": "4",
    "RANK": "3",
}
TORCHRUN = TORCH | {
    "TORCHELASTIC_RUN_ID": "none",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
}
FLAGS = dict.fromkeys(
    ("coordinator_address", "num_processes", "process_id", "local_device_ids")
)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-2,5],m3", "n1"),
        ("gpu-[003-010]", "gpu-003"),
        ("a[7,9]b,c", "a7b"),
        ("node-1-[2-3].cluster", "node-1-2.cluster"),
    ],
)
def test_the_first_node_of_a_list_of_slurms(nodes, first):
    assert first_host(nodes) == first


def test_a_task_of_srun_knows_its_place_and_the_others_address():
    found = detect(SLURM)
    assert found[2:] == (4, 3, None)
    host, port = found.address.split(":")
    assert host == HOST and 61_440 <= int(port) < 65_536
    # All tasks of a step agree, those of another step do not.
    assert detect(SLURM | {"SLURM_PROCID": "0"}).address == found.address
    assert detect(SLURM | {"SLURM_STEP_ID": "1"}).address != found.address


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"},  # The script.
        SLURM | {"SLURM_STEP_NUM_TASKS": "1"},
        MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        TORCHRUN | {"WORLD_SIZE": "1"},
        {"RANK": "0"},
        {"RANK": "0", "WORLD_SIZE": "2"},
        {"MASTER_ADDR": "a", "MASTER_PORT": "1"},
        # Started by an outer launcher's several.
        SLURM | MPI | {"OMPI_COMM_WORLD_SIZE": "1"},
        SLURM | TORCHRUN | {"WORLD_SIZE": "1"},
    ],
)
def test_a_process_on_its_own_is_none_of_several(environ):
    assert detect(environ) is None
    assert asked("auto", environ, **FLAGS) is None


@pytest.mark.parametrize(
    ("more", "ids"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "4,6"}, (1,)),
        # As --cpus-per-task=4 alone sets it.
        ({"CUDA_VISIBLE_DEVICES": "4,6", "SLURM_TRES_PER_TASK": "cpu=4"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, (1,)),
        # Its own alone: by a cgroup, or by --gpus-per-task.
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_GPUS_PER_TASK": "2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_TRES_PER_TASK": "gres:gpu:2"}, None),
        (
            {"CUDA_VISIBLE_DEVICES": "2,3", "SLURM_TRES_PER_TASK": "cpu=4,gres/gpu=2"},
            None,
        ),
        ({"CUDA_VISIBLE_DEVICES": ""}, None),
    ],
)
def test_tasks_that_see_all_cards_of_a_node_share_them(more, ids):
    assert detect(SLURM | more).local_device_ids == ids


def test_cards_that_do_not_go_round_are_named():
    with pytest.raises(
        ConfigError, match="2 processes on this node see 3 cards .*srun"
    ):
        own_cards({"CUDA_VISIBLE_DEVICES": "0,1,2"}, 0, 2)


@pytest.mark.parametrize(("local", "size"), [(0, 0), (2, 2), (0, -1)])
def test_a_place_on_a_node_that_cannot_be_is_one_sentence(local, size):
    places = {"OMPI_COMM_WORLD_LOCAL_RANK": local, "OMPI_COMM_WORLD_LOCAL_SIZE": size}
    environ = MPI | {"CUDA_VISIBLE_DEVICES": "0,1"}
    with pytest.raises(ConfigError, match=f"it is process {local} of {size} on its"):
        detect(environ | {k: str(x) for k, x in places.items()})


def test_a_process_of_mpirun_knows_its_place():
    found = detect(MPI)
    assert found.address.startswith("10.96.0.1:") and found[2:] == (4, 2, None)
    # On one machine Open MPI 5 suffices, too, which says nothing of where it runs.
    five = {k: x for k, x in MPI.items() if "hnp" not in k}
    here = five | {"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "prterun-7@1"}
    assert detect(here).address.startswith("127.0.0.1:")
    with pytest.raises(ConfigError, match="need --coordinator_address, which Open MPI"):
        asked("auto", five, **FLAGS)


def test_a_process_of_torchrun_or_of_kubeflow_knows_its_place():
    assert detect(TORCH)[1:] == ("job-worker-0:23456", 4, 3, None)
    assert detect({k: x for k, x in TORCH.items() if k != "MASTER_PORT"}).address == (
        "job-worker-0:29500"
    )
    found = detect(TORCHRUN)  # Which listens at its port itself.
    host, port = found.address.split(":")
    assert (host, found[2:]) == ("job-worker-0", (4, 3, (1,)))
    assert port != "23456" and found.address == detect(TORCHRUN | {"RANK": "0"}).address
    shared = detect(TORCHRUN | {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    assert shared.local_device_ids == (2, 3)
    assert detect(TORCH | {"MASTER_ADDR": "fd00::1"}).address == "[fd00::1]:23456"


@pytest.mark.parametrize(
    ("inner", "by"),
    [(MPI, "Open MPI"), (TORCHRUN, "torchrun"), (TORCH, "Slurm"), ({}, "Slurm")],
)
def test_the_inner_of_two_launchers_started_the_process(inner, by):
    found = detect(SLURM | inner)
    assert found.by == by
    own = detect(inner) if by != "Slurm" else detect(SLURM)
    assert found == own


@pytest.mark.parametrize(
    "alone", [SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, {"OMPI_COMM_WORLD_SIZE": "1"}]
)
def test_a_place_that_is_set_in_a_step_of_one_task_is_read(alone):
    assert detect(alone | TORCH) == detect(TORCH)
    with pytest.raises(ConfigError, match="^MASTER_ADDR is set, and .*: 'x'"):
        detect(alone | TORCH | {"RANK": "x"})


def test_flags_go_before_what_a_launcher_says():
    given = FLAGS | {"coordinator_address": "a:1", "process_id": 0}
    assert asked("auto", SLURM, **given) == ("a:1", 4, 0, None)
    assert asked("off", SLURM, **given) is None


def test_a_pod_of_an_indexed_job_knows_its_number_alone():
    environ = {"JOB_COMPLETION_INDEX": "1"}
    assert asked("auto", environ, **FLAGS) is None
    given = FLAGS | {"coordinator_address": "a:1", "num_processes": 2}
    assert asked("auto", environ, **given) == ("a:1", 2, 1, None)
    with pytest.raises(ConfigError, match="--num_processes, which Kubernetes, which"):
        asked("on", environ, **FLAGS)


@pytest.mark.parametrize("given", [{"num_processes": 2}, {"process_id": 1}])
def test_what_is_missing_is_named(given):
    with pytest.raises(ConfigError, match="need --coordinator_address, .* is another"):
        asked("auto", {}, **FLAGS | given)


def test_several_that_nobody_started_are_refused():
    words = "need --coordinator_address, --num_processes, --process_id, which this env"
    with pytest.raises(ConfigError, match=words):
        asked("on", {}, **FLAGS)


def test_what_flags_tell_is_not_asked_of_the_launcher():
    """An error that asks for a flag is none once it is given."""
    away = SLURM | {"SLURM_STEP_NODELIST": "no-such-node[1-2]", "PATH": ""}
    with pytest.raises(ConfigError, match="give --coordinator_address=HOST:PORT"):
        asked("auto", away)
    address, count, *_ = asked("auto", away, coordinator_address="here:1")
    assert (address, count) == ("here:1", detect(SLURM).count)
    uneven = MPI | {"CUDA_VISIBLE_DEVICES": "0,1,2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    uneven |= {"OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    with pytest.raises(ConfigError, match="cannot be shared evenly"):
        asked("auto", uneven, coordinator_address="here:1")
    assert asked("auto", uneven, coordinator_address="here:1", local_device_ids=[2])


@pytest.mark.slow
def test_slurm_may_be_slow_where_all_processes_ask_it_at_once(tmp_path, monkeypatch):
    answer = "NodeName=gone.invalid NodeAddr=10.0.0.7 State=IDLE"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\nsleep 25\necho {answer}\n")
    (tmp_path / "scontrol").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert detection._address_of("gone.invalid") == "10.0.0.7"
