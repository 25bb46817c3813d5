"""Options and variables of the roles of a run."""

from pathlib import Path

import shoal
from shoal.slurm._allocation import Allocation
from shoal.slurm._options import member_flags, role_environment
from shoal.slurm._run_folder import RunFolder, RunPlan

PLAN = RunPlan(job=shoal.Job("digits:Digits", name="digits"), servers=1, workers=1, path=("/programs",))
PLACE = Allocation(run="7", attempt="7.0", rank=1, tasks=3, host="GPU_07.cluster", in_slurm=True)


def test_the_node_is_the_zone_of_a_server() -> None:
    flags = member_flags("server", "server-0", PLAN, PLACE, RunFolder("/run"), "head:1")
    assert flags[flags.index("--zone") + 1] == "gpu-07.cluster"
    assert flags[flags.index("--advertise") + 1] == "GPU_07.cluster"
    assert "--zone" not in member_flags("worker", "worker-0", PLAN, PLACE, RunFolder("/run"), "head:1")


def test_a_role_has_its_certificate_and_no_token_of_the_user() -> None:
    inherited = {"SHOAL_TOKEN_FILE": "/home/token", "SHOAL_COORDINATOR": "other:1", "SHOAL_TLS_CERT": "/home/ann.pem"}
    found = role_environment("server", inherited, RunFolder("/run"), "/state")
    assert found == {
        "SHOAL_TLS_CA": "/run/certificates/ca.pem",
        "SHOAL_TLS_CERT": "/run/certificates/server.pem",
        "SHOAL_TLS_KEY": "/run/certificates/server-key.pem",
        "XDG_STATE_HOME": str(Path("/state")),
    }


def test_libraries_get_the_cores_of_the_task_unless_the_user_says_more() -> None:
    folder = RunFolder("/run")
    assert role_environment("worker", {"SLURM_CPUS_PER_TASK": "4"}, folder, "/state")["OMP_NUM_THREADS"] == "4"
    given = {"SLURM_CPUS_PER_TASK": "4", "MKL_NUM_THREADS": "2"}
    found = role_environment("worker", given, folder, "/state")
    assert "OMP_NUM_THREADS" not in found
    assert found["MKL_NUM_THREADS"] == "2"
