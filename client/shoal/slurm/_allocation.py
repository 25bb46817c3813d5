"""The place of a task in its allocation, from the environment variables of Slurm or submitit (no I/O)."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal import errors
from shoal._display import counted

LOOPBACK = "127.0.0.1"
_GROUP = re.compile(r"(?P<prefix>[^\[\],]*)(\[(?P<ranges>[^\]]*)\])?")
_MOST_NODES = 100_000
_NO_GPU = ("", "-1", "NoDevFiles")


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The place of one task.

    Attributes:
        run: the id of what was submitted, which stays the same when it is requeued.
        attempt: the id of this start of all tasks. A requeued allocation has another one.
        rank: number of the task, from 0.
        tasks: number of tasks.
        host: the host by which other tasks reach this one.
        nodes: names of the nodes, in the order of the tasks.
        gpu: index of this task's GPU among those that it sees: tasks of a node take them in turn. None without GPUs.
        job: id of Slurm's job. Empty without Slurm.
        step: id of the job's step, which is the call of srun that started the tasks.
        in_slurm: whether Slurm started the task. Otherwise submitit did, on this machine.
    """

    run: str
    attempt: str
    rank: int
    tasks: int
    host: str = LOOPBACK
    nodes: tuple[str, ...] = (LOOPBACK,)
    gpu: int | None = None
    job: str = ""
    step: str = "0"
    in_slurm: bool = False

    @classmethod
    def find(cls, environment: Mapping[str, str], *, run: str = "", restarts: int = 0) -> "Allocation":
        """Returns the place of the task that has these environment variables.

        Args:
            environment: the environment variables.
            run: the id of what was submitted. "" means the id of Slurm's job.
            restarts: how often submitit has requeued the task. Slurm itself counts in a variable.

        Raises:
            BadRequest: a variable is missing or invalid.
        """
        if environment.get("SUBMITIT_EXECUTOR") == "local":
            run = run or environment.get("SUBMITIT_LOCAL_JOB_ID", "local")
            rank, tasks = (_number(environment, f"SUBMITIT_LOCAL_{name}") for name in ("GLOBALID", "NTASKS"))
            return cls(run=run, attempt=f"{run}.{restarts}", rank=rank, tasks=tasks, gpu=_gpu(environment, rank))
        rank, tasks = (_number(environment, name) for name in ("SLURM_PROCID", "SLURM_NTASKS"))
        job = environment.get("SLURM_JOB_ID", "0")
        start, step = (environment.get(name, "0") for name in ("SLURM_RESTART_COUNT", "SLURM_STEP_ID"))
        nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
        host = environment.get("SLURMD_NODENAME", "")
        return cls(
            run=run or job,
            attempt=".".join((run or job, start, step, str(restarts))),
            rank=rank,
            tasks=tasks,
            host=host or LOOPBACK,
            nodes=expand_nodes(nodes) or (host or LOOPBACK,),
            gpu=_gpu(environment, int(environment.get("SLURM_LOCALID", "0"))),
            job=environment.get("SLURM_JOB_ID", ""),
            step=step,
            in_slurm=True,
        )

    @property
    def zone(self) -> str:
        """The zone of a server of this task: its node, so that the two copies of a shard are on two nodes."""
        return re.sub(r"[^a-z0-9.-]", "-", self.host.lower())

    @property
    def listen(self) -> str:
        """The address at which a role of the task listens: all interfaces, or loopback if it has no name in Slurm."""
        return f"{LOOPBACK}:0" if self.host == LOOPBACK else "0.0.0.0:0"  # TLS is always on


def role_of(rank: int, servers: int) -> tuple[str, int]:
    """Returns the role of a task, and its number among those of its role, from 0.

    Task 0 runs the coordinator, the next ones run the servers, and all others run workers.
    """
    if rank == 0:
        return "coordinator", 0
    return ("server", rank - 1) if rank <= servers else ("worker", rank - 1 - servers)


def check_size(tasks: int, servers: int, workers: int) -> None:
    """Checks that an allocation has a task for each role.

    Raises:
        BadRequest: tasks are missing. The message says how many, and for what.
    """
    needed = 1 + servers + workers
    if tasks < needed:
        raise errors.BadRequest(
            f"the allocation has {counted(tasks, 'task')}, but a coordinator, {counted(servers, 'server')} and "
            f"{counted(workers, 'worker')} need {needed}: {counted(needed - tasks, 'task')} more; give "
            f"--ntasks={needed} to sbatch, or a larger tasks_per_node or nodes to shoal.slurm.submit, or ask for fewer "
            "workers",
            tasks=tasks,
        )


def expand_nodes(text: str) -> tuple[str, ...]:
    """Returns the names in a list of nodes of Slurm, such as "gpu[01-03,7],login".

    Raises:
        BadRequest: the text is not such a list.
    """
    names: list[str] = []
    for item in _split(text):
        expanded = [""]
        for found in _GROUP.finditer(item):
            ends = (
                [""]
                if found["ranges"] is None
                else [end for part in found["ranges"].split(",") for end in _range(part, text)]
            )
            expanded = [start + found["prefix"] + end for start in expanded for end in ends]
            if len(expanded) > _MOST_NODES:
                raise _invalid(text)
        names += expanded
    return tuple(names)


def _gpu(environment: Mapping[str, str], number: int) -> int | None:
    """Returns the index of the GPU of a task with this number among those of its node."""
    visible = [each.strip() for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    # CUDA ignores all devices from the first invalid one on. Slurm sets NoDevFiles for a task without GPUs.
    seen = list(itertools.takewhile(lambda each: each not in _NO_GPU, visible))
    return number % len(seen) if seen else None


def _split(text: str) -> list[str]:
    """Returns the items between the commas that are outside of brackets."""
    if any(text.count(bracket) != len(re.findall(r"\[[^\[\]]+\]", text)) for bracket in "[]"):
        raise _invalid(text)
    return [item for item in re.split(r",(?![^\[]*\])", text) if item]


def _range(part: str, text: str) -> list[str]:
    if not (found := re.fullmatch(r"(\d+)(?:-(\d+))?", part, re.ASCII)):
        raise _invalid(text)
    first, last = found[1], found[2] or found[1]
    numbers = range(int(first), int(last) + 1)
    if not 0 < len(numbers) <= _MOST_NODES:
        raise _invalid(text)
    return [f"{number:0{len(first)}}" for number in numbers]


def _invalid(text: str) -> errors.BadRequest:
    return errors.BadRequest(
        f"{text!r:.200} is not a list of nodes as Slurm writes it, such as 'gpu[01-03],login'; see SLURM_JOB_NODELIST"
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment.get(name, "")
    if not text.isdecimal():
        raise errors.BadRequest(
            f"{name} is {text!r:.80}, so the place of this task in its allocation is unknown; start the tasks with "
            "srun, as deploy/slurm/shoal.sbatch does, or with shoal.slurm.submit",
            variable=name,
        )
    return int(text)


__all__ = ["LOOPBACK", "Allocation", "check_size", "expand_nodes", "role_of"]
