"""Unmodified Dockerfile and compose file on a real Docker engine: the commands of the docs, crashes, Prometheus.

The tests build on each other and run in order. They use a cluster that the docs' commands build and start, and a
second one.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

import shoal
from shoal._numerics import kernels
from shoal._security import NO_CREDENTIALS, Credentials
from shoal.events import MetricsReported, StateChanged
from shoal.status import MemberStatus, SavedCheckpoint
from support.deployment import docker_engine
from support.deployment.compose_stack import COMPOSE_FILE, Stack, compose_file
from support.deployment.docker_engine import ROOT, Engine
from support.deployment.needed_programs import without
from support.deployment.stack_pages import PageVisitor, metrics_of
from support.waiting import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1500)]

FIRST_STEP_S = 20.0
# To load them takes under a second of a core, and here seven processes start at once. To compile them takes 7 s.
KERNELS_S = 5.0
ACCURACY = 0.97
ROLES = ["coordinator", "server-0", "server-1", "worker"]
MEMBERS = 4
# Large enough that its values go through shared memory, where it is.
JOB = shoal.Job(
    "digits:Digits",
    name="digits",
    settings={"hidden": 2048},
    workers=2,
    consistency=shoal.BoundedStaleness(4),
    epochs=30,
    evaluation=shoal.EvaluationPolicy(every_steps=100, metric="accuracy"),
)
CHECKPOINTS = shoal.CheckpointPolicy(every_steps=200)
# It lasts until the cluster is told to stop.
LONG = dataclasses.replace(
    JOB,
    name="long",
    settings={"hidden": 512},
    consistency=shoal.Synchronous(),  # so a step is one of each worker
    epochs=100_000,
    checkpoints=CHECKPOINTS,
)
GOES_ON = re.compile(rf"^continues from {LONG.name}/(\d+)")
KEPT = CHECKPOINTS.keep_last
# What a dashboard's panel may have nothing of, on a CPU, where nothing fails.
MAY_BE_EMPTY = {"GPU memory"}
FILES_OF_BUILDING = ["/src", "/opt/build", "/root/.cache", "/tmp/*", "/var/cache/apt/*/*.deb", "/var/lib/apt/lists/*"]
READ_FILES = "import glob, sys; print(sorted(found for path in sys.argv[1:] for found in glob.glob(path)))"
READ_STATUS = "print(open('/proc/1/status').read())"
READ_MAPS = """
import glob
for path in glob.glob('/proc/[0-9]*/maps'):
    try:
        print(open(path).read())
    except OSError:
        pass
"""
# What each container may see in its folder of certificates, beside the role's own certificate.
FILES_OF_TLS = ["ca.pem", "cert.pem", "key.pem"]
READ_TLS = """
import pathlib
from cryptography import x509
folder = pathlib.Path('/etc/shoal/tls')
names = x509.load_pem_x509_certificate((folder / 'cert.pem').read_bytes()).extensions
alternatives = names.get_extension_for_class(x509.SubjectAlternativeName).value
print(*sorted(file.name for file in folder.iterdir()))
print(*alternatives.get_values_for_type(x509.UniformResourceIdentifier))
"""


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if reason := docker_engine.obstacle():
        without(reason)
    with Engine() as engine:
        docker_engine.import_base(engine)
        docker_engine.import_prometheus(engine, compose_file()["services"]["prometheus"]["image"])
        yield engine


def block(document: str, heading: str, number: int = 0) -> str:
    """Returns a block of code below a heading, by default the first one."""
    _, _, below = (ROOT / document).read_text().partition(f"\n{heading}")
    return below.split("```\n")[2 * number + 1]


@dataclasses.dataclass(frozen=True)
class Shown:
    """The output of the docs' three commands.

    Attributes:
        commands: the commands as they were typed.
        said: what they printed.
        page: the link that the second command would open in a browser.
        expected: the URL of the page.
        html: the contents of that page.
        losses: the job's curve.
    """

    commands: str
    said: str
    page: str
    expected: str
    html: str
    losses: list[float]


@pytest.fixture(scope="module")
def shown(engine: Engine) -> Shown:
    """Runs the docs' three commands unchanged. No cluster is left."""
    stack = Stack(engine)
    commands = block("docs/how-to/compose.md", "## From nothing to a trained model")
    with tempfile.TemporaryDirectory(prefix="e2e-") as folder:
        browser, opened = Path(folder, "browser"), Path(folder, "opened")
        browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {opened}\n')
        browser.chmod(0o700)
        began = time.monotonic()
        try:
            said = stack.terminal(commands, ROOT, BROWSER=f"{browser} %s")
            print(f"\nthe docs' three commands took {time.monotonic() - began:.0f} s, the image's build included")
            wait_until(lambda: opened.exists() and opened.read_text() != "", what="the page that the browser opens")
            page = opened.read_text()
            with stack.client() as client:
                [job] = client.jobs()
            person = PageVisitor(page, stack.tls(certificate=False))
            curve = person.get(f"/api/jobs/{job.name}/events")  # to its end, as the job has ended
            losses = [float(loss) for loss in re.findall(r'"loss": ?(\d[^,}]*)', curve)]
            found = Shown(commands, said, page, stack.page, person.get("/"), losses)
        finally:
            stack.compose("down", "--volumes", "--timeout", "5")
    return found


@pytest.fixture(scope="module")
def image(shown: Shown) -> str:
    """The name of the image that was built."""
    name: str = compose_file()["services"]["coordinator"]["image"]
    return name


class Story(NamedTuple):
    """A running cluster with a job that has taken its first step.

    Attributes:
        stack: the cluster's containers.
        client: a client of the cluster.
        job: the job.
        first_step_s: seconds from the start of the containers to the job's first step.
    """

    stack: Stack
    client: shoal.Client
    job: shoal.JobHandle
    first_step_s: float


@pytest.fixture(scope="module")
def story(engine: Engine, image: str) -> Iterator[Story]:
    """Yields the running cluster, with a job that has taken its first step and the time until then."""
    stack = Stack(engine)
    began = time.monotonic()
    stack.compose("up", "--detach", "--no-build")
    up_s = time.monotonic() - began
    try:
        with stack.client() as client:
            job = client.submit(JOB)
            wait_until(lambda: job.status().progress.steps > 0, timeout_s=120, what="the first training step")
            first_step_s = time.monotonic() - began
            print(
                f"\ndocker-compose up took {up_s:.1f} s, the first training step was there after {first_step_s:.1f} s"
            )
            yield Story(stack, client, job, first_step_s)
    finally:
        stack.compose("down", "--volumes", "--timeout", "5")


@pytest.fixture(scope="module")
def long_job(story: Story) -> shoal.JobHandle:
    """Returns a job that trains as long as the cluster runs."""
    job = story.client.submit(LONG)
    wait_until(lambda: job.status().checkpoint is not None, timeout_s=120, what="the long job's first checkpoint")
    return job


@pytest.fixture
def stack(story: Story, request: pytest.FixtureRequest) -> Iterator[Stack]:
    """Yields the cluster. If a test fails, prints its log."""
    failed = request.session.testsfailed
    yield story.stack
    if request.session.testsfailed > failed:
        print(story.stack.compose("logs", "--no-color", "--tail", "60"))


@pytest.fixture
def client(story: Story) -> shoal.Client:
    return story.client


@pytest.fixture
def job(story: Story) -> shoal.JobHandle:
    return story.job


def newest_checkpoint(job: shoal.JobHandle) -> SavedCheckpoint:
    found = job.status().checkpoint
    assert found, f"{job.name} has no checkpoint"
    return found


def states(job: shoal.JobHandle) -> list[StateChanged]:
    return [event for event in job.events(follow=False) if isinstance(event, StateChanged)]


def segments(stack: Stack, service: str) -> set[str]:
    """Returns the inodes of the shared memory that a service's first container maps. Its names are removed early."""
    maps = stack.inside(stack.containers(service)[0], "python3", "-c", READ_MAPS)
    return set(re.findall(r"(\d+) +/dev/shm/\S+", maps))


def alive(client: shoal.Client) -> list[MemberStatus]:
    return [member for member in client.status().members if member.alive]


def test_the_three_commands_of_the_readme_train_a_model_and_show_its_curve(shown: Shown) -> None:
    assert len(shown.commands.replace("\\\n", "").splitlines()) == 3
    assert float(re.findall(r"accuracy (0\.\d+|1)", shown.said)[-1]) >= ACCURACY
    assert re.fullmatch(rf"{re.escape(shown.expected)}/#login=\S+", shown.page)
    assert "<title>" in shown.html
    assert len(shown.losses) > 10
    assert min(shown.losses) < shown.losses[0] / 4


def test_image_has_no_build_files(engine: Engine, image: str) -> None:
    def says(*command: str) -> str:
        return engine.docker("run", "--rm", "--network", "none", "--entrypoint", command[0], image, *command[1:])

    compilers = "import shutil; print([*filter(shutil.which, ('cc', 'gcc', 'g++', 'clang', 'make'))])"
    assert says("python3", "-c", compilers).strip() == "[]"
    with pytest.raises(RuntimeError, match="No module named pip"):
        says("/opt/shoal/bin/python3", "-m", "pip")
    assert says("python3", "-c", READ_FILES, *FILES_OF_BUILDING).strip() == "[]"


def test_image_lists_its_packages(engine: Engine, image: str) -> None:
    shown = engine.docker("run", "--rm", "--network", "none", "--entrypoint", "cat", image, "/opt/shoal/sbom.cdx.json")
    sbom = json.loads(shown)
    assert sbom["metadata"]["component"]["name"] == "shoal"
    names = {each["name"] for each in sbom["components"]}
    assert names >= {"grpcio", "numpy", "pyarrow"}
    assert not names & {"pip", "cyclonedx-bom"}


def test_image_has_its_labels(engine: Engine, image: str) -> None:
    [found] = json.loads(engine.docker("image", "inspect", image))
    print(f"\nthe image has {found['Size'] / 1e6:.0f} MB")
    labels = found["Config"]["Labels"]
    name = "org.opencontainers.image."
    assert (labels[f"{name}title"], labels[f"{name}version"]) == ("shoal", image.partition(":")[2])
    assert labels[f"{name}base.name"] == docker_engine.base_of()


def heeds(pid: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal."""
    [caught] = re.findall(r"^SigCgt:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("when", ["while it loads", "while it waits for its coordinator"])
def test_container_that_is_not_ready_ends_on_sigterm(engine: Engine, image: str, when: str) -> None:
    """The process has process id 1 in the container, so a signal without a handler would have no effect."""
    server = ["server", "--advertise", "here", "--coordinator", "127.0.0.1:1", "--retry-for", "600", "--insecure"]
    container = engine.docker("run", "--detach", "--network", "none", image, *server).strip()
    try:
        [found] = json.loads(engine.docker("inspect", container))
        wait_until(lambda: heeds(found["State"]["Pid"], signal.SIGTERM), what="its having a handler")
        if when != "while it loads":
            wait_until(lambda: "kernels are ready" in engine.docker("logs", container, errors=True), what="its kernels")
        engine.docker("stop", "--time", "60", container)
        [found] = json.loads(engine.docker("inspect", container))
        told = {0} if when != "while it loads" else {0, 128 + signal.SIGTERM}
        assert found["State"]["ExitCode"] in told, engine.docker("logs", container, errors=True)
    finally:
        engine.docker("rm", "--force", container)


def test_the_first_step_is_there_within_20_s(story: Story) -> None:
    assert story.first_step_s < FIRST_STEP_S


@pytest.mark.parametrize("server", ["server-0", "server-1"])
def test_server_uses_the_kernels_of_the_image(stack: Stack, server: str) -> None:
    [line] = [line for line in stack.logs(stack.containers(server)[0]).splitlines() if "kernels are ready" in line]
    logged = json.loads(line)
    print(f"\n{server}: kernels for {logged['processor']} were there after {logged['seconds']} s")
    assert logged["processor"] in kernels.levels()
    assert logged["seconds"] < KERNELS_S


def test_servers_and_workers_share_memory(stack: Stack, job: shoal.JobHandle) -> None:
    # One server has the one large variable of the job. What the other has is too little for shared memory.
    wait_until(
        lambda: (segments(stack, "server-0") | segments(stack, "server-1")) & segments(stack, "worker"),
        timeout_s=60,
        what="memory that a worker shares with a server",
    )


def test_a_job_outlives_a_worker_and_the_coordinator(stack: Stack, client: shoal.Client, job: shoal.JobHandle) -> None:
    steps = job.status().progress.steps
    stack.kill(stack.containers("worker")[0])
    wait_until(lambda: len(alive(client)) == MEMBERS - 1, timeout_s=60, what="the worker's death")
    wait_until(lambda: job.status().progress.steps > steps, timeout_s=60, what="steps without the worker")

    [coordinator] = stack.containers("coordinator")
    assert job.status().state is shoal.JobState.RUNNING
    stack.kill(coordinator)
    assert not stack.inspect(coordinator)["State"]["Running"]
    stack.start(coordinator)

    result = job.wait(timeout_s=300)
    assert job.status().restarts == 0
    assert result.evaluation
    assert result.evaluation.values["accuracy"] >= ACCURACY


def test_restarted_worker_takes_part_again(stack: Stack, client: shoal.Client) -> None:
    [dead] = [worker for worker in stack.containers("worker") if not stack.inspect(worker)["State"]["Running"]]
    stack.start(dead)
    wait_until(lambda: len(alive(client)) == MEMBERS, timeout_s=60, what="the worker")


def test_command_of_the_compose_guide_pulls_a_model(stack: Stack, job: shoal.JobHandle, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "compose.md").read_text()
    [line] = re.findall(r"^docker-compose .*shoal pull .*$", page, re.MULTILINE)
    file = tmp_path / "weights.npz"
    said = stack.terminal(line.replace("JOB", job.name).replace("weights.npz", str(file)), COMPOSE_FILE.parent)
    assert f"{JOB.settings['hidden']}" not in said  # only the sentence, and no part of the file
    with np.load(file, allow_pickle=False) as weights:
        assert weights["hidden/w"].shape == (64, JOB.settings["hidden"])


def test_command_of_the_compose_guide_runs_a_session(stack: Stack, client: shoal.Client) -> None:
    page = (ROOT / "docs" / "how-to" / "compose.md").read_text()
    [line] = re.findall(r"^docker-compose run .* python3 plain_session\.py", page, re.MULTILINE)
    assert "worker 0: loss" in stack.terminal(line, COMPOSE_FILE.parent)
    [session] = [job for job in client.jobs() if job.name == "line"]
    assert session.state is shoal.JobState.SUCCEEDED


@pytest.mark.parametrize("service", ["server-0", "worker", "coordinator"])
def test_crashed_container_is_restarted(stack: Stack, client: shoal.Client, service: str) -> None:
    container = stack.containers(service)[0]
    before = stack.inspect(container)
    os.kill(before["State"]["Pid"], signal.SIGKILL)
    wait_until(lambda: stack.inspect(container)["RestartCount"] == 1, timeout_s=60, what=f"a restart of {service}")
    wait_until(
        lambda: stack.inspect(container)["State"].get("Health", {}).get("Status") == "healthy",
        timeout_s=60,
        what=f"the health of {service}",
    )
    assert stack.inspect(container)["State"]["Pid"] != before["State"]["Pid"]
    wait_until(lambda: len(alive(client)) == MEMBERS, timeout_s=60, what=f"{service} among the members")


def test_more_workers_by_scale(stack: Stack, client: shoal.Client) -> None:
    stack.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "worker=4")
    wait_until(lambda: len(alive(client)) == MEMBERS + 2, timeout_s=60, what="two more workers")


def test_prometheus_finds_every_container(stack: Stack) -> None:
    stack.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "worker=4", "prometheus")
    addresses = {
        f"{network['IPAddress']}:7090"
        for container in stack.containers(*ROLES)
        for network in stack.inspect(container)["NetworkSettings"]["Networks"].values()
    }
    assert len(addresses) == len(ROLES) + 3

    def found() -> bool:
        targets = stack.targets()
        scraped = {target["discoveredLabels"]["__address__"] for target in targets}
        return addresses <= scraped and all(target["health"] == "up" for target in targets)

    wait_until(found, timeout_s=90, what="every target, up, in Prometheus")
    [prometheus] = stack.containers("prometheus")
    wait_until(
        lambda: stack.inspect(prometheus)["State"]["Health"]["Status"] == "healthy",
        timeout_s=60,
        what="Prometheus's health",
    )


@pytest.mark.parametrize(
    "expression",
    [
        "sum(shoal_worker_samples_total) > 0",
        'sum(rate(shoal_server_updates_total{instance="server-0"}[1m])) + '
        'sum(rate(shoal_server_updates_total{instance="server-1"}[1m])) > 0',
        'shoal_coordinator_jobs{instance="coordinator", state="running"} == 1',
        "max(shoal_coordinator_checkpoint_bytes) > 0",
    ],
)
def test_prometheus_has_the_metrics_of_a_job_that_trains(
    stack: Stack, long_job: shoal.JobHandle, expression: str
) -> None:
    wait_until(lambda: bool(stack.query(expression)), timeout_s=90, what=expression)


def test_every_rule_evaluates_without_error(stack: Stack, long_job: shoal.JobHandle) -> None:
    def evaluated() -> bool:
        return all(rule["health"] != "unknown" for rule in stack.rules())

    wait_until(evaluated, timeout_s=60, what="an evaluation of every rule")
    assert len(stack.rules()) > 20
    assert [(rule["name"], rule.get("lastError")) for rule in stack.rules() if rule["health"] != "ok"] == []


def test_every_panel_of_the_dashboard_shows_something(stack: Stack, long_job: shoal.JobHandle) -> None:
    dashboard = json.loads((ROOT / "deploy" / "grafana" / "dashboards" / "shoal.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    expressions = {
        target["expr"].replace("$__rate_interval", "1m").replace("$__range", "5m"): panel["title"]
        for panel in panels
        for target in panel["targets"]
    }
    assert len(expressions) > 40
    empty: set[tuple[str, str]] = set()

    def full() -> bool:
        empty.clear()
        empty.update(
            (title, expression)
            for expression, title in expressions.items()
            if title not in MAY_BE_EMPTY and not stack.query(expression)
        )
        return not empty

    try:
        wait_until(full, timeout_s=90, what="a value for every expression")
    except AssertionError:
        assert empty == set()


def test_promtool_finds_no_problem(stack: Stack) -> None:
    for service in ROLES:
        page = metrics_of(stack, stack.containers(service)[0], stack.tls())
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stdout + checked.stderr) == (0, ""), service


def test_every_container_is_confined(stack: Stack) -> None:
    containers = stack.containers()
    assert len(containers) == len(ROLES) + 5  # a server is twice there, and two more workers, certs and Prometheus
    for container in containers:
        found = stack.inspect(container)
        host, name = found["HostConfig"], found["Name"]
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", found["Config"]["User"]), name
        assert host["ReadonlyRootfs"], name
        assert (host["CapDrop"], host["CapAdd"], host["Privileged"]) == (["ALL"], None, False), name
        assert host["SecurityOpt"] == ["no-new-privileges:true"], name
        published = [bound for port in host["PortBindings"].values() for bound in port]
        assert all(bound["HostIp"] == "127.0.0.1" for bound in published), name
    for container in stack.containers(*ROLES):
        status = dict(re.findall(r"^(\w+):\s+(.*)$", stack.inside(container, "python3", "-c", READ_STATUS), re.M))
        assert set(status["Uid"].split()) == {"65532"}
        assert (int(status["CapEff"], 16), int(status["CapBnd"], 16), status["NoNewPrivs"]) == (0, 0, "1")


@pytest.mark.parametrize("service", ROLES)
def test_a_container_has_the_key_of_its_role_alone(stack: Stack, service: str) -> None:
    shown = stack.inside(stack.containers(service)[0], "/opt/shoal/bin/python3", "-c", READ_TLS).splitlines()
    files = [*FILES_OF_TLS, "trainer-key.pem", "trainer.pem"] if service == "worker" else FILES_OF_TLS
    assert shown == [" ".join(files), f"spiffe://shoal/{service.partition('-')[0]}"]


@pytest.mark.parametrize("service", ROLES)
def test_metrics_are_for_readers_alone(stack: Stack, service: str) -> None:
    container = stack.containers(service)[0]
    with pytest.raises(urllib.error.HTTPError, match="401"):
        metrics_of(stack, container, stack.tls(certificate=False))
    with pytest.raises(OSError):  # without TLS
        urllib.request.urlopen(f"http://{stack.address(container)}:7090/metrics", timeout=10)


def test_a_client_without_a_certificate_is_refused(stack: Stack) -> None:
    address = f"127.0.0.1:{stack.ports['SHOAL_PORT']}"
    ca = Credentials.find(str(stack.certificates / "ca.pem"))
    for presented in (ca, NO_CREDENTIALS):
        client = shoal.Client(address, retry_for_s=0, credentials=presented)
        with closing(client), pytest.raises(shoal.errors.Unauthenticated):
            client.status()


def test_a_second_start_keeps_the_certificates(stack: Stack) -> None:
    [coordinator], [certs] = stack.containers("coordinator"), stack.containers("certs")
    before = stack.inside(coordinator, "cat", "/etc/shoal/tls/cert.pem")
    stack.start(certs)
    wait_until(lambda: not stack.inspect(certs)["State"]["Running"], what="the end of certs")
    assert stack.inspect(certs)["State"]["ExitCode"] == 0
    assert stack.inside(coordinator, "cat", "/etc/shoal/tls/cert.pem") == before


def test_every_role_is_healthy(stack: Stack) -> None:
    for container in stack.containers(*ROLES):
        wait_until(
            lambda: stack.inspect(container)["State"]["Health"]["Status"] == "healthy",  # noqa: B023
            timeout_s=60,
            what=f"the health of {stack.inspect(container)['Name']}",
        )


def test_job_continues_after_the_cluster_is_stopped(
    stack: Stack, client: shoal.Client, long_job: shoal.JobHandle
) -> None:
    containers = stack.containers(*ROLES)
    before = long_job.status()
    assert before.state is shoal.JobState.RUNNING
    began = time.monotonic()
    stack.compose("stop")
    print(f"\ndocker-compose stop took {time.monotonic() - began:.1f} s, while a job trained")
    assert {stack.inspect(container)["State"]["ExitCode"] for container in containers} == {0}

    stack.compose("up", "--detach", "--no-build", "--no-recreate", "--scale", "worker=4")
    saved = newest_checkpoint(long_job)
    assert saved.step * LONG.workers >= before.progress.steps, "it was saved when it was told to stop"
    told = [event.sequence for event in states(long_job) if f"continues from checkpoint {saved.number}" in event.reason]
    assert len(told) == 1

    def steps() -> list[int]:
        """Returns the steps that workers have reported since then."""
        reports = long_job.events(after=told[0], follow=False)
        return [event.step for event in reports if isinstance(event, MetricsReported)]

    wait_until(lambda: len(steps()) > 2, timeout_s=120, what="further steps")
    assert min(steps()) >= saved.step
    assert long_job.status().restarts == before.restarts + 1


def test_commands_of_the_backup_guide_restore_a_backup(
    stack: Stack, client: shoal.Client, long_job: shoal.JobHandle, tmp_path: Path
) -> None:
    def type_in(number: int) -> str:
        lines = block("docs/how-to/backup.md", "## With Compose", number)
        return stack.terminal(re.sub(r"(?<=[<>] )(\w+\.tar)", rf"{tmp_path}/\1", lines), COMPOSE_FILE.parent)

    def went_on() -> dict[int, int]:
        """Returns the checkpoints from which the job continued, by the numbers of their events."""
        found = {event.sequence: GOES_ON.search(event.reason) for event in states(long_job)}
        return {sequence: int(match[1]) for sequence, match in found.items() if match}

    before = went_on()
    pid = stack.inspect(stack.containers("coordinator")[0])["State"]["Pid"]
    type_in(0)
    kept = newest_checkpoint(long_job).number
    assert stack.inspect(stack.containers("coordinator")[0])["State"]["Pid"] == pid  # it has not been away
    later = client.submit(dataclasses.replace(JOB, name="later"))
    wait_until(lambda: later.status().progress.steps > 0, timeout_s=120, what="a step of a job that no backup knows")
    wait_until(lambda: newest_checkpoint(long_job).number >= kept + KEPT, timeout_s=120, what="newer checkpoints")

    type_in(1)
    assert "later" not in {job.name for job in client.jobs()}

    def check_reports() -> list[MetricsReported]:
        """Returns the workers' reports since the job continued from the backup."""
        begun = {sequence: number for sequence, number in went_on().items() if sequence not in before}
        assert max(begun.values(), default=0) <= kept
        events = long_job.events(after=min(begun), follow=False) if begun else []
        return [event for event in events if isinstance(event, MetricsReported)]

    wait_until(lambda: len(check_reports()) > 0, timeout_s=120, what="steps after the backup was put back")
    [coordinator] = stack.containers("coordinator")
    owners = stack.inside(coordinator, "find", "/var/lib/shoal", "-mindepth", "1", "-not", "-uid", "65532")
    assert owners == ""


def test_down_leaves_nothing(stack: Stack) -> None:
    assert all(stack.left().values())
    stack.compose("--profile", "monitoring", "down", "--volumes")
    assert stack.left() == {"containers": [], "volumes": [], "networks": []}
