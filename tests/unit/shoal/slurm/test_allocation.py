"""The place of a task: variables of Slurm and of submitit, roles of ranks, lists of nodes."""

import pytest

from shoal import errors
from shoal.slurm._allocation import Allocation, check_size, expand_nodes, role_of

TASK = {
    "SLURM_JOB_ID": "417",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "5",
    "SLURM_STEP_ID": "0",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURMD_NODENAME": "gpu08",
}


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("", ()),
        ("login", ("login",)),
        ("a1,b2", ("a1", "b2")),
        ("gpu[01-03,7],login", ("gpu01", "gpu02", "gpu03", "gpu7", "login")),
        ("gpu[098-101]", ("gpu098", "gpu099", "gpu100", "gpu101")),
        ("r[1-2]n[1-2]-ib", ("r1n1-ib", "r1n2-ib", "r2n1-ib", "r2n2-ib")),
    ],
)
def test_expands_lists_of_nodes(text: str, nodes: tuple[str, ...]) -> None:
    assert expand_nodes(text) == nodes


@pytest.mark.parametrize(
    "text", ["gpu[", "gpu]1[", "gpu[a-b]", "gpu[3-1]", "gpu[1-]", "gpu[]", "a[1-900000000]", "[[1]]"]
)
def test_refuses_what_is_no_list_of_nodes(text: str) -> None:
    with pytest.raises(errors.BadRequest, match="SLURM_JOB_NODELIST"):
        expand_nodes(text)


def test_ranks_have_roles() -> None:
    roles = [role_of(rank, servers=2) for rank in range(5)]
    assert roles == [("coordinator", 0), ("server", 0), ("server", 1), ("worker", 0), ("worker", 1)]


def test_an_allocation_that_is_too_small_says_what_is_missing() -> None:
    check_size(5, servers=2, workers=2)
    check_size(9, servers=2, workers=2)
    with pytest.raises(
        errors.BadRequest, match=r"has 3 tasks.*2 servers and 2 workers need 5: 2 tasks more.*--ntasks=5"
    ):
        check_size(3, servers=2, workers=2)


def test_the_place_comes_from_slurm() -> None:
    place = Allocation.find(TASK)
    assert (place.rank, place.tasks, place.run, place.attempt) == (3, 5, "417", "417.0.0.0")
    assert (place.host, place.nodes, place.listen) == ("gpu08", ("gpu07", "gpu08"), "0.0.0.0:0")
    assert place.in_slurm
    assert (place.job, place.step) == ("417", "0")
    assert place.gpu is None


def test_each_start_is_another_attempt_of_the_same_run() -> None:
    starts = [
        Allocation.find({**TASK, "SLURM_RESTART_COUNT": "1"}),
        Allocation.find(TASK),
        Allocation.find(TASK, restarts=1),
    ]
    assert {place.run for place in starts} == {"417"}
    assert len({place.attempt for place in starts}) == 3


def test_tasks_take_the_gpus_that_they_see_in_turn() -> None:
    assert Allocation.find({**TASK, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}).gpu == 1
    assert Allocation.find({**TASK, "CUDA_VISIBLE_DEVICES": "2"}).gpu == 0
    assert Allocation.find({**TASK, "CUDA_VISIBLE_DEVICES": "2,-1,3"}).gpu == 0  # CUDA ignores what follows -1


@pytest.mark.parametrize("visible", ["", "-1", "NoDevFiles"])
def test_a_task_that_sees_no_gpu_has_none(visible: str) -> None:
    assert Allocation.find({**TASK, "CUDA_VISIBLE_DEVICES": visible}).gpu is None


def test_submitits_local_executor_comes_before_the_allocation_that_it_runs_in() -> None:
    local = {"SUBMITIT_EXECUTOR": "local", "SUBMITIT_LOCAL_GLOBALID": "1", "SUBMITIT_LOCAL_NTASKS": "4"}
    place = Allocation.find({**TASK, **local}, run="abc", restarts=2)
    assert (place.rank, place.tasks, place.run, place.attempt) == (1, 4, "abc", "abc.2")
    assert place.listen == "127.0.0.1:0"
    assert not place.in_slurm


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_NTASKS"])
def test_a_process_that_srun_did_not_start_is_told(missing: str) -> None:
    with pytest.raises(errors.BadRequest, match=f"{missing} is ''.*srun"):
        Allocation.find({name: value for name, value in TASK.items() if name != missing})
