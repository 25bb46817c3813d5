"""The page in a real browser, with a cluster of real processes: what it shows, and its use by keyboard alone."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import optim
from shoal._rpc import CoordinatorClient
from shoal.v1 import token_pb2
from support.clusters.local import ROOT, local_cluster
from support.clusters.presented import as_admin, login_link
from support.deployment.browser import browser
from support.programs.page import HOSTILE

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

IMAGES = ROOT / "docs" / "images"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as chromium:
        yield chromium


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Yields a checkpoint folder whose name may be seen in a picture."""
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[shoal.LocalCluster]:
    """Yields a cluster with the default heartbeat timeout, 5 s. The page must show a death without waiting for it."""
    (folder / "checkpoints").mkdir()
    with local_cluster(2, 3, flags={}, checkpoints=folder / "checkpoints") as cluster:
        yield cluster


@pytest.fixture
def page(chromium: Any, cluster: shoal.LocalCluster) -> Iterator[Any]:
    context = chromium.new_context(
        base_url=cluster.page, reduced_motion="reduce", viewport={"width": 1280, "height": 900}
    )
    context.set_default_timeout(20_000)
    page = context.new_page()
    page.goto(login_link(as_admin(cluster.address), cluster.address))
    page.wait_for_selector("h1:text('Cluster')")
    page.problems = []
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
    page.on("dialog", lambda dialog: page.problems.append(f"a dialog: {dialog.message}"))
    yield page
    context.close()
    assert page.problems == []


@pytest.fixture
def job(cluster: shoal.LocalCluster) -> Iterator[shoal.JobHandle]:
    """Yields a job that trains until the test or this fixture cancels it."""
    with cluster.client() as client:
        job = client.submit(watched())
        yield job
        if not job.status().state.finished:
            job.cancel()


def watched(**options: Any) -> shoal.Job:
    return shoal.Job(
        "support.programs.page:Watched",
        workers=2,
        consistency=shoal.BoundedStaleness(4),
        optimizer=optim.SGD(0.002),
        evaluation=shoal.EvaluationPolicy(every_steps=40, metric="accuracy", mode="max"),
        epochs=1_000,
        batch_size=8,
        **options,
    )


def test_login_by_token_as_a_reader_and_logout(
    chromium: Any, cluster: shoal.LocalCluster, job: shoal.JobHandle
) -> None:
    with closing(CoordinatorClient(cluster.address, credentials=as_admin(cluster.address))) as client:
        request = token_pb2.CreateTokenRequest(name="reader", role="reader", valid_s=600)
        token = client.call(client.tokens.CreateToken, request).secret
    with closing(chromium.new_context(base_url=cluster.page)) as context:
        context.set_default_timeout(20_000)
        page = context.new_page()
        page.goto(f"/jobs/{job.name}")
        page.fill("#token", "guess")
        page.click("button:text('Log in')")
        assert "did not make the token" in page.wait_for_selector("[role=alert]").inner_text()
        page.fill("#token", token)
        page.click("button:text('Log in')")
        page.wait_for_selector(".state")
        assert text_of(page, ".caller").split() == ["reader", "(reader)", "Log", "out"]
        assert page.locator("button:text('Take a checkpoint')").count() == 0
        assert token not in page.content()
        assert "#" not in page.url
        page.click("button:text('Log out')")
        page.wait_for_selector("#token")


def text_of(page: Any, what: str) -> str:
    return str(page.locator(what).inner_text())


def points(page: Any, name: str) -> int:
    return int(page.locator(f'figure[data-chart="{name}"]').get_attribute("data-points"))


def picture(page: Any, name: str) -> bytes:
    """Returns the pixels of a chart."""
    read = """(it) => {
      const { width, height } = it;
      return [...it.getContext("2d").getImageData(0, 0, width, height).data];
    }"""
    return bytes(page.locator(f'figure[data-chart="{name}"] canvas').evaluate(read))


def wait_for_points(page: Any, name: str, most: int) -> None:
    page.wait_for_function(
        "([name, most]) => Number(document.querySelector(`figure[data-chart='${name}']`)?.dataset.points ?? 0) > most",
        arg=[name, most],
        timeout=60_000,
    )


def test_curves_move(page: Any, job: shoal.JobHandle) -> None:
    page.goto("/")
    page.get_by_role("link", name=job.name).first.click()
    wait_for_points(page, "loss", 3)
    before = points(page, "loss")
    wait_for_points(page, "loss", before + 3)
    wait_for_points(page, "accuracy", 2)
    assert "accuracy" in text_of(page, ".tiles")
    assert page.locator(".plot canvas").count() >= 2
    drawn = picture(page, "loss")
    assert len(set(drawn)) > 1, "something is on it"
    wait_for_points(page, "loss", points(page, "loss") + 3)
    assert picture(page, "loss") != drawn, "and it moves"
    assert page.get_by_role("img", name="loss by step").count() == 1, "a chart says in words what it shows"
    page.get_by_text("loss as a table").click()
    page.get_by_role("cell").first.wait_for()
    page.get_by_label("Each worker").check()
    page.locator(".legend", has_text="worker-").first.wait_for()


def test_a_killed_worker_shows_within_5_s(page: Any, cluster: shoal.LocalCluster, job: shoal.JobHandle) -> None:
    index = next(int(name.removeprefix("worker-")) for name in wait_for_workers(job))
    page.goto("/")
    row = page.locator(f'[data-member="worker-{index}"]')
    row.get_by_text("alive").wait_for()
    killed = time.monotonic()
    cluster.process("worker", index).send_signal(signal.SIGKILL)
    row.get_by_text("late, silent for").wait_for(timeout=5_000)
    seconds = time.monotonic() - killed
    print(f"a killed worker was shown as late after {seconds:.1f} s")
    assert seconds < 5
    row.get_by_text("lost, silent since").wait_for(timeout=15_000)
    cluster.restart("worker", index)
    row.get_by_text("alive").wait_for()


def wait_for_workers(job: shoal.JobHandle) -> tuple[str, ...]:
    for event in job.events():
        if isinstance(event, shoal.events.MetricsReported):
            break
    return job.status().workers


def test_keyboard_alone_confirms_and_cancels_a_job(page: Any, job: shoal.JobHandle) -> None:
    wait_for_workers(job)
    page.goto("/")
    page.get_by_role("link", name=job.name).first.wait_for()
    check_reached_by_tab(page, "Skip to the content")
    check_reached_by_tab(page, job.name)
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Cancel the job").wait_for()
    check_reached_by_tab(page, "Cancel the job …")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    dialog.wait_for()
    assert focused(page) == "Let it run", "the careful choice comes first"
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    assert focused(page) == "Cancel the job …", "the focus is where it was"
    assert not job.status().state.finished
    page.keyboard.press("Enter")
    for _ in range(5):
        page.keyboard.press("Tab")
        assert focused(page) in {"Let it run", "Cancel the job", ""}, "the focus stays in the dialog"
        if focused(page) == "Cancel the job":
            break
    page.keyboard.press("Enter")
    page.locator(".title .state", has_text="cancelled").wait_for()
    assert job.status().state is shoal.JobState.CANCELLED
    page.get_by_role("button", name="Cancel the job").wait_for(state="detached")


def check_reached_by_tab(page: Any, name: str) -> None:
    for _ in range(40):
        page.keyboard.press("Tab")
        if focused(page) == name:
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", "it is not visible"
            return
    raise AssertionError(f"the keyboard does not get to {name!r}")


def focused(page: Any) -> str:
    text: str = page.evaluate(
        "document.activeElement === document.body ? '' : document.activeElement.textContent.trim()"
    )
    return text


def test_a_checkpoint_by_its_button(page: Any, job: shoal.JobHandle) -> None:
    wait_for_workers(job)
    page.goto(f"/jobs/{job.name}")
    page.get_by_role("button", name="Take a checkpoint").click()
    page.get_by_text("attempt 1 has started").wait_for()
    page.locator("section", has=page.get_by_role("heading", name="Checkpoints")).locator("tbody tr").first.wait_for()


def test_the_straggler_is_named(page: Any, cluster: shoal.LocalCluster, tmp_path: Path) -> None:
    """The page names it in words, as soon as there are enough steps."""
    with cluster.client() as client:
        job = client.submit(watched(settings={"slow": str(tmp_path / "slow")}))
        page.goto(f"/jobs/{job.name}")
        page.get_by_text("is the straggler").wait_for(timeout=60_000)
        said = text_of(page, ".verdict")
        assert "most of it in compute" in said
        assert said.split()[0] in job.status().workers
        assert page.locator(".steps .straggler").count() > 0, "and marked in its steps"
        job.cancel()


def test_hostile_text_is_escaped(page: Any, cluster: shoal.LocalCluster, job: shoal.JobHandle) -> None:
    job.cancel()
    with cluster.client() as client:
        hostile = client.submit(watched(settings={"hostile": True}))
        check_hostile_text(page, hostile)
        hostile.cancel()


def check_hostile_text(page: Any, job: shoal.JobHandle) -> None:
    wait_for_workers(job)
    page.goto(f"/jobs/{job.name}")
    page.get_by_role("log").get_by_text(HOSTILE).first.wait_for()
    assert page.locator("main script, main img").count() == 0
    assert "hacked" not in page.title()
    page.get_by_label("Worker", exact=True).select_option(index=1)
    page.get_by_role("button", name="Pause").click()
    held = page.locator(".log p").all_inner_texts()
    page.get_by_role("button", name="new line").wait_for(timeout=60_000)
    assert page.locator(".log p").all_inner_texts() == held, "what is held does not move"
    assert page.problems == []
    page.goto("/jobs/%3Cimg%20src%3Dx%20onerror%3Dalert(1)%3E")
    page.get_by_role("heading", name="Unknown job <img src=x onerror=alert(1)>").wait_for()
    page.problems.clear()  # the browser notes the 404s


def test_an_unknown_job_has_a_way_back(page: Any) -> None:
    assert page.goto("/jobs/nobody").status == 200, "without the key of the login, the answer says nothing of the job"
    page.get_by_role("heading", name="Unknown job nobody").wait_for()
    page.get_by_role("link", name="Go to the cluster").click()
    page.get_by_role("heading", name="Cluster", exact=True).wait_for()
    page.problems.clear()  # the browser notes the 404s


@pytest.mark.parametrize(
    ("status", "code", "says"), [(503, "OVERLOADED", "Trying again"), (403, "FORBIDDEN", "Reload the page")]
)
def test_refusal_is_not_shown_as_absence(page: Any, status: int, code: str, says: str) -> None:
    refusal = {"code": code, "message": "as many watch as may"}
    page.route("**/api/events", lambda route: route.fulfill(status=status, json=refusal))
    page.goto("/")
    banner = page.get_by_role("alert")
    banner.get_by_text("as many watch as may").wait_for()
    assert says in banner.inner_text()
    assert "away" not in page.locator("body").inner_text()
    page.problems.clear()  # the browser notes the refusal


def test_page_recovers_with_the_coordinator(page: Any, cluster: shoal.LocalCluster, job: shoal.JobHandle) -> None:
    page.goto(f"/jobs/{job.name}")
    wait_for_points(page, "loss", 2)
    cluster.kill("coordinator")
    page.get_by_role("alert").get_by_text("The coordinator is away").wait_for()
    before = points(page, "loss")
    cluster.restart("coordinator")
    page.get_by_role("heading", name="Log in").wait_for()  # the restart has ended all logins
    page.goto(login_link(as_admin(cluster.address), cluster.address))
    page.get_by_role("heading", name="Cluster", exact=True).wait_for()
    page.goto(f"/jobs/{job.name}")
    wait_for_points(page, "loss", before + 2)
    page.problems.clear()  # the browser notes connections that were refused


def test_it_has_landmarks_names_and_no_sideways_scrolling(page: Any, job: shoal.JobHandle) -> None:
    wait_for_workers(job)
    for path in ("/", f"/jobs/{job.name}"):
        page.set_viewport_size({"width": 360, "height": 800})
        page.goto(path)
        page.get_by_role("table").first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "a narrow screen fits it"
        assert page.get_by_role("main").count() == page.get_by_role("banner").count() == 1
        assert page.get_by_role("heading", level=1).count() == 1
        unnamed = "[...document.querySelectorAll('button, a, select, input, [role=img], [role=region]')]"
        unnamed += ".filter((it) => !(it.textContent.trim() || it.ariaLabel || it.labels?.length || it.alt)).length"
        assert page.evaluate(unnamed) == 0
        assert page.evaluate("[...document.querySelectorAll('th')].every((it) => it.scope)"), "headers say of what"


@pytest.fixture(scope="module")
def shown(cluster: shoal.LocalCluster, folder: Path) -> Iterator[shoal.JobHandle]:
    """Yields the job of the pictures."""
    settings = {"slow": str(folder / "slow")}
    with cluster.client() as client:
        job = client.submit(watched(name="watched", settings=settings, checkpoints=shoal.CheckpointPolicy(every_s=5)))
        yield job
        job.cancel()


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Returns the folder for pictures. It is that of the docs only on request, because no two pictures are equal."""
    return IMAGES if os.environ.get("SHOAL_PICTURES") else tmp_path


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pictures_for_the_docs(page: Any, shown: shoal.JobHandle, scheme: str, images: Path) -> None:
    """Takes the pictures of docs/images, and measures the contrast of each text with its background."""
    page.emulate_media(color_scheme=scheme)
    page.goto(f"/jobs/{shown.name}")
    wait_for_points(page, "loss", 60)
    wait_for_points(page, "accuracy", 5)
    page.get_by_text("is the straggler").wait_for(timeout=60_000)
    assert lowest_contrast(page) >= 4.5
    page.screenshot(path=images / f"page-job-{scheme}.png", full_page=True)
    page.goto("/")
    page.get_by_role("table").nth(2).wait_for()
    page.wait_for_function("() => document.body.textContent.includes('B/s')")
    assert lowest_contrast(page) >= 4.5
    page.screenshot(path=images / f"page-cluster-{scheme}.png", full_page=True)
    for kept in (images / f"page-job-{scheme}.png", images / f"page-cluster-{scheme}.png"):
        assert 0 < kept.stat().st_size < 400_000


def lowest_contrast(page: Any) -> float:
    """Returns the lowest contrast of all text of the page with its background, by WCAG's formula."""
    lowest: float = page.evaluate(
        """() => {
          const rgb = (text) => text.match(/[0-9.]+/g).map(Number);
          const light = ([r, g, b]) => [r, g, b].map((it) => it / 255)
            .map((it) => (it <= 0.04045 ? it / 12.92 : ((it + 0.055) / 1.055) ** 2.4))
            .reduce((sum, it, index) => sum + it * [0.2126, 0.7152, 0.0722][index], 0);
          const ground = (it) => {
            for (; it; it = it.parentElement) {
              const found = rgb(getComputedStyle(it).backgroundColor);
              if (found.length < 4 || found[3] === 1) return found;
            }
            return [255, 255, 255];
          };
          const written = (it) => [...it.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
          const texts = [...document.querySelectorAll('body *')]
            .filter((it) => it.offsetParent && !it.closest('.skip') && written(it));
          return Math.min(...texts.map((it) => {
            const [a, b] = [light(rgb(getComputedStyle(it).color)), light(ground(it))].sort((x, y) => y - x);
            return (a + 0.05) / (b + 0.05);
          }));
        }"""
    )
    return lowest
