"""Hostile names of jobs, variables, checkpoints and members: each is refused or harmless; no file leaves the root."""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal._checkpoint import Catalogue, FileEntry, LocalStorage, Manifest, open_shared_storage
from shoal._transport import Segment, SegmentUnavailable
from shoal.checkpoint_policy import CheckpointChoice
from shoal.checkpoints import Checkpoints
from shoal.job import Job
from shoal.v1 import coordinator_pb2, job_pb2
from shoal.variables import Variable, from_protos
from shoal_coordinator.messages import Registration

_STEPS = (
    "..",
    ".",
    "../",
    "./",
    "/",
    "//",
    "..\\",
    "\\",
    "%2e%2e%2f",
    "%2f",
    "..%00/",
    "..;/",
    "....//",
    "\uff0e\uff0e/",
)
_GOALS = ("outside", "etc/passwd", "proc/self/environ", "link/x", "root/../outside")
_ALONE = (
    *("", ".", "..", "...", " ", "~", "~root", "-", "-rf", "*", "?", "a b", "a\tb", "a\nb", "a\rb", "\0", "a\0", "\0a"),
    *("CON", "NUL.txt", "a:b", "C:\\x", "\\\\host\\share", "a|b", "$HOME", "${HOME}", "$(id)", "`id`", "a;b", "a&b"),
    *(".tmp-x", ".hidden", "manifest.json/..", "a/", "/a", "a//b", "a/./b", "a/../b", "link/../../outside", "link/"),
    # Look-alikes and other texts that are not what they seem.
    *(
        "j\u043eb",
        "job\u200b",
        "\u202ebof",
        "\uff4a\uff4f\uff42",
        "job\u0301",
        "\u2044etc",
        "\u2215etc",
        "\u29f8etc",
        "a\u2028b",
    ),
    *(
        "\ufeffjob",
        "J\u0130B",
        "\u0131",
        "\x7f",
        "\x1b[2J",
        "\x9b2J",
        "\u00ad",
        "job\ufe0f",
        "\U000e0041",
        "é",
        "ß",
        "日本",
    ),
    *("x" * 64, "x" * 256, "x" * 100_000, "../" * 1000, "a/" * 5000, "%s%n%x", "{0}", "{}", "'; DROP TABLE jobs;--"),
    *("<script>", "a,b", 'a"b', "a'b", "s3://bucket/x", "file:///etc/passwd", "http://169.254.169.254/", "job/best/x"),
    *("job/0", "job/-1", "job/1e3", "job/99999999999999999999", "job/1/2", "job/\uff11", "0job", "JOB", "job_", "job."),
)
NAMES = (*_ALONE, *(step * times + goal for step, goal, times in itertools.product(_STEPS, _GOALS, (1, 8))))
assert len({*NAMES}) >= 200


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A root of checkpoints with links that lead outside it. Whatever happens, nothing outside changes."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    (root / "link").symlink_to(outside)
    (root / "linked-file").symlink_to(outside / "file")
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*") if root not in (path, *path.parents)}
    yield root
    after = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*") if root not in (path, *path.parents)}
    assert after == before
    assert (outside / "file").read_bytes() == b"secret"


def is_refused(use: Callable[[], Any]) -> bool:
    try:
        use()
    except (errors.ShoalError, SegmentUnavailable):
        return True
    except UnicodeEncodeError:  # protobuf has no such text, so no message carries it
        return True
    return False


def registration(name: str) -> Registration:
    request = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member=name, process="p")
    return Registration.from_proto(request)


@pytest.mark.parametrize("use", [registration, lambda name: Job("a:b", name=name or "\0"), CheckpointChoice.parse])
def test_names_of_members_jobs_and_checkpoints_are_refused(use: Callable[[str], Any]) -> None:
    # An id may begin with a digit or a dash. No file has its name.
    harmless = {"-", "-rf", "0job"} if use is registration else set()
    assert {name for name in NAMES if not is_refused(lambda: use(name))} == harmless  # noqa: B023


def test_job_names_in_messages_are_refused() -> None:
    spec = Job("a:b", name="a").to_proto()
    for name in NAMES:
        message = job_pb2.JobSpec.FromString(spec.SerializeToString())
        message.name = name
        assert is_refused(lambda: Job.from_proto(message)), name  # noqa: B023


def test_checkpoints_of_such_names_are_neither_read_nor_written(root: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(root)
    file = tmp_path / "import.safetensors"
    calls: list[Callable[[str], Any]] = [
        checkpoints.show,
        checkpoints.verify,
        checkpoints.read,
        checkpoints.remove,
        checkpoints.remove_all,
        lambda name: [*checkpoints.list(name or "\0")],
        lambda name: [*checkpoints.incomplete(name or "\0")],
        lambda name: checkpoints.import_file(file, name),
    ]
    for name, call in itertools.product(NAMES, calls):
        assert is_refused(lambda: call(name)), (name, call)  # noqa: B023


def test_no_path_in_storage_leaves_the_root(root: Path) -> None:
    storage = LocalStorage(root)
    harmless = set()
    for name in (*NAMES, "link", "linked-file"):
        for path in ((name,), (name, "x"), ("job", name)):
            for use in (
                storage.remove,
                storage.names,
                lambda it: storage.write(it, [b"x"]),
                lambda it: open_file(storage, it),
            ):
                if not is_refused(lambda: use(path)):  # noqa: B023
                    harmless.add(name)
    # These names are files of the root. The links themselves may be replaced or removed, but are not followed.
    assert all(name.isascii() and "/" not in name and "\0" not in name for name in harmless)
    assert harmless <= {"CON", "NUL.txt", "0job", "JOB", "job_", "job.", "x" * 64, "link", "linked-file"}


def open_file(storage: LocalStorage, path: tuple[str, ...]) -> bytes:
    with storage.open(path) as file:
        target = bytearray(file.nbytes)
        file.read_into(0, [memoryview(target)])
        assert bytes(target) != b"secret"
    return bytes(target)


def test_a_manifest_that_names_files_elsewhere_reads_none(root: Path, tmp_path: Path) -> None:
    catalogue = Catalogue(LocalStorage(root))
    for name in (*NAMES, "../../../outside/file", str(tmp_path / "outside" / "file")):
        entry = FileEntry(name, 6, ("0" * 16,))
        manifest = Manifest("job", 1, 1.0, 0, 0, {}, (), (entry,))
        assert is_refused(lambda: catalogue.verify(manifest)), name  # noqa: B023


def test_variables_have_names_that_terminals_and_files_survive(root: Path) -> None:
    for name in NAMES:
        message = Variable(np.zeros(2).shape).to_proto("w")
        message.name = name
        if is_refused(lambda: from_protos([message])):  # noqa: B023
            continue
        assert name.isprintable()  # such a name is a key in a file, never a path
        assert 0 < len(name) <= 255


def test_segments_and_urls(root: Path) -> None:
    for name in NAMES:
        assert is_refused(lambda: Segment.open(name, 4096, bytes(16), directory=root))  # noqa: B023
        url = f"memory://{name}"
        assert is_refused(lambda: open_shared_storage(url))  # noqa: B023
