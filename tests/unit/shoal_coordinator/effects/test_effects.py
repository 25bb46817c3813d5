"""Effects for checkpoints: cuts, manifests and restores, with servers that give scripted answers."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from shoal import errors, optim
from shoal._checkpoint import CheckpointStorage
from shoal._checkpoint.catalogue import Catalogue, path_of
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import FILE, Manifest
from shoal._checkpoint.tensor_files import write_tensors
from shoal._wire.cursor import Cursor, PushCounts
from shoal._wire.placement import Placement
from shoal.checkpoint_policy import CheckpointChoice, CheckpointPolicy
from shoal.job import Job
from shoal.partitioners import FixedShards
from shoal.status import Evaluation
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import state_pb2
from shoal.variables import Variable
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards
from shoal_coordinator.effects import checkpoint_commit, checkpoint_cut, checkpoint_restore
from shoal_coordinator.effects.effect_runner import EffectReport, EffectRunner
from shoal_coordinator.effects.server_calls import ConcurrentCalls, ServerCalls
from shoal_coordinator.effects.storage_reads import StorageReads, TimedCatalogue
from shoal_coordinator.job import Ledger
from shoal_coordinator.messages import (
    CheckpointCommitted,
    CommitCheckpoint,
    CreateShards,
    CutTaken,
    HoldResult,
    JobRef,
    RestoredCheckpoint,
    ScanCheckpoints,
    ServerRef,
    TakeCut,
    events,
)
from shoal_coordinator.messages.events import RestoreDeferred
from shoal_coordinator.persistence.effect_codec import effect_from_proto, effect_to_proto

REF = JobRef("a", 1)
VARIABLES = {"w": Variable((8,), partitioner=FixedShards(2))}
SERVERS = (ServerRef("s0", "h:1"), ServerRef("s1", "h:2"))


class Servers(ServerCalls):
    """Calls to servers that have written their files, or say what a test wants."""

    def __init__(self, folder: CheckpointStorage) -> None:
        self.folder, self.wanted = folder, True
        self.calls: list[tuple[str, str]] = []
        self.answers: dict[str, Any] = {}
        self.sent: Message | None = None  # the last request that was sent without waiting for replies

    def call_all(
        self,
        servers: Sequence[ServerRef],
        method: str,
        request_for: Callable[[ServerRef], Any],
        *,
        timeout_s: float = 0.0,
        retry_for_s: float | None = None,
    ) -> list[Any]:
        return [self.call(server, method, request_for(server)) for server in servers]

    def call(self, server: ServerRef, method: str, request: Any, *, timeout_s: float = 0.0) -> Any:
        self.calls.append((method, server.member))
        answer = self.answers.get(method)
        if callable(answer):
            answer = answer(server, request)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @contextmanager
    def concurrently(self, servers: Sequence[ServerRef]) -> Iterator[ConcurrentCalls]:
        outer = self

        class SequentialCalls(ConcurrentCalls):
            def call(self, method: str, request: Any, *, timeout_s: float = 0.0) -> list[Any]:
                return [outer.call(server, method, request) for server in servers]

            def send(self, method: str, request: Any, *, timeout_s: float) -> None:
                outer.calls += [(method, server.member) for server in servers]
                outer.sent = request

        yield SequentialCalls([], lambda _: ())

    def unless_ended(self, is_live: Callable[[], bool]) -> ServerCalls:
        return self

    def check_wanted(self, server: ServerRef, why: str = "") -> None:
        if not self.wanted:
            raise errors.Cancelled(why)

    def written(self, server: ServerRef, request: pb.CollectFilesRequest) -> pb.CollectFilesReply:
        """Writes a server's file, and says so."""
        name = f"{server.member}.safetensors"
        values = np.arange(4, dtype=np.float32)
        tensors = [(f"value/{4 * SERVERS.index(server)}/w", values.dtype, values.shape)]
        path = (*path_of(request.job, request.number), name)
        entry = write_tensors(self.folder, path, tensors, [memoryview(values.view(np.uint8).data)], {})
        return pb.CollectFilesReply(done=True, files=[pb.SavedFile(name=name, bytes=entry.nbytes, sums=entry.sums)])


class FakeHost:
    """The coordinator, as far as performing needs it."""

    def __init__(self) -> None:
        self.outcomes: SimpleQueue[EffectReport] = SimpleQueue()

    def report(self, outcome: EffectReport) -> None:
        self.outcomes.put(outcome)

    def held(self, event: events.CutHeld) -> HoldResult:
        raise NotImplementedError

    def published(self, event: events.CheckpointPublished) -> bool:
        raise NotImplementedError

    def report_all(self, outcomes: Sequence[EffectReport]) -> None:
        for outcome in outcomes:
            self.report(outcome)

    def wanted(self, effect: int, server: ServerRef) -> bool:
        return True

    def is_live(self, job: JobRef) -> bool:
        return True

    def incarnation(self, server: ServerRef) -> int:
        return 1


@pytest.fixture
def catalogue(tmp_path: Path) -> Catalogue:
    return Catalogue(LocalStorage(tmp_path))


@pytest.fixture
def servers(catalogue: Catalogue) -> Servers:
    servers = Servers(catalogue.folder)
    servers.answers["CollectFiles"] = servers.written
    return servers


def spec(**options: Any) -> Job:
    return Job("m:f", name="a", **{"optimizer": optim.Adam(0.1), **options})


def placement(variables: dict[str, Variable] = VARIABLES) -> Placement:
    candidates = [Candidate(server.member, server.address, 0) for server in SERVERS]
    return Placement("a", 5, variables, assign_shards(plan_shards(variables, 2), candidates))


def cut(number: int, **fields: Any) -> CutTaken:
    known = {
        "step": 7,
        "version": 7,
        "time": 100.0 + number,
        "data": None,
        "progress_totals": state_pb2.ProgressRecord(),
    }
    return CutTaken(REF, number, **{**known, **fields})


def write(
    servers: Servers,
    catalogue: Catalogue,
    number: int,
    policy: CheckpointPolicy | None = None,
    *,
    best: Evaluation | None = None,
    keep: tuple[int, ...] = (),
    rate: optim.Schedule | None = None,
    plateau: optim.PlateauState | None = None,
    submitter: str = "",
    keeps_others: bool = False,
    published: Callable[[events.CheckpointPublished], bool] = lambda _: True,
    **fields: Any,
) -> CheckpointCommitted:
    made = cut(number, **fields)
    of_job = placement(), spec(checkpoints=policy), made
    effect = CommitCheckpoint(REF, *of_job, best, keep, rate, plateau, submitter, keeps_others, number=number)
    stored = effect_from_proto(number, effect_to_proto(effect))
    assert isinstance(stored, CommitCheckpoint)
    assert (stored.learning_rate, stored.plateau) == (rate, plateau)
    assert (stored.submitter, stored.keeps_others) == (submitter, keeps_others)
    return checkpoint_commit.commit(effect, servers, catalogue, published)


def restore(
    servers: Servers,
    catalogue: Catalogue,
    *sources: CheckpointChoice,
    create: Callable[[], None] = lambda: None,
    variables: dict[str, Variable] = VARIABLES,
    **options: Any,
) -> RestoredCheckpoint:
    effect = CreateShards(REF, placement(variables), spec(**options), sources, number=9)
    return checkpoint_restore.restore(effect, create, servers, catalogue)


@pytest.mark.parametrize("rate", [None, optim.PiecewiseLR(0.5, (3,), (0.25,))])
def test_a_learning_rate_set_at_run_time_is_in_the_checkpoint(
    servers: Servers, catalogue: Catalogue, rate: optim.Schedule | None
) -> None:
    write(servers, catalogue, 1, rate=rate)
    assert restore(servers, catalogue, CheckpointChoice("a", 1)).learning_rate == rate
    other = optim.Adam(0.125)
    assert restore(servers, catalogue, CheckpointChoice("a", 1), optimizer=other).learning_rate is None
    assert restore(servers, catalogue, CheckpointChoice("a", 1, partial=True)).learning_rate is None


def test_the_arguments_of_the_optimizer_that_differ_are_known(servers: Servers, catalogue: Catalogue) -> None:
    write(servers, catalogue, 1, rate=optim.ConstantLR(0.5))
    first, groups = CheckpointChoice("a", 1), [optim.VariableGroup(f"{number}.weight", 2) for number in range(99)]
    assert restore(servers, catalogue, first).optimizer_changes == ()
    other = optim.Adam(0.125, clip_norm=1.0, groups=groups)
    rate, listed, clip, kept = restore(servers, catalogue, first, optimizer=other).optimizer_changes
    assert rate == "learning_rate is 0.125, and was 0.1"
    assert clip == "clip_norm is 1.0, and was 0.0"
    assert listed.startswith("groups is (VariableGroup(")
    assert listed.endswith("…, and was ()")
    assert kept == "the learning rate that was set at run time is not kept"
    partial = CheckpointChoice("a", 1, partial=True)
    assert restore(servers, catalogue, partial, optimizer=other).optimizer_changes == ()


@pytest.mark.parametrize("plateau", [None, optim.PlateauState(), optim.PlateauState(-0.5, 2, 1)])
def test_the_state_of_a_plateau_is_in_the_checkpoint(
    servers: Servers, catalogue: Catalogue, plateau: optim.PlateauState | None
) -> None:
    write(servers, catalogue, 1, plateau=plateau)
    assert restore(servers, catalogue, CheckpointChoice("a", 1)).plateau == plateau
    assert restore(servers, catalogue, CheckpointChoice("a", 1), optimizer=optim.Adam(0.125)).plateau is None
    assert restore(servers, catalogue, CheckpointChoice("a", 1, partial=True)).plateau is None


@pytest.mark.parametrize("access", ["manifest", "file_bytes", "publish"])
def test_a_commit_fails_if_the_storage_hangs_and_lets_commits_go_on(
    servers: Servers, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch, access: str
) -> None:
    hangs, answers = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hangs.set()
        assert answers.wait(30)

    monkeypatch.setattr(catalogue, access, hang)
    reads = StorageReads(60.0, lambda: 60.0 if hangs.is_set() else 0.0)
    resumed: list[int] = []
    monkeypatch.setattr(checkpoint_cut, "resume_commits", lambda _servers, made, _calls: resumed.append(made.number))
    timed = TimedCatalogue(catalogue, reads, "a", lambda: True)
    verb = "write" if access == "publish" else "return"
    with pytest.raises(errors.StorageFailed, match=rf"the checkpoint storage did not {verb} .*/a/0+1.* within 60 s"):
        write(servers, timed, 1)
    assert resumed == [1]
    answers.set()


class TestTheCut:
    def answers(self, servers: Servers) -> list[Any]:
        progress = [
            pb.WorkerProgress(worker="w0", incarnation=3, committed=4, finished=5),
            pb.WorkerProgress(worker="w0", incarnation=3, committed=5, finished=4),
        ]
        servers.answers["HoldCommits"] = lambda server, _: pb.HoldCommitsReply(
            workers=[progress[SERVERS.index(server)]]
        )
        seen: list[pb.SaveRequest] = []

        def save(server: ServerRef, request: pb.SaveRequest) -> pb.SaveReply:
            seen.append(request)
            cursors = [pb.WorkerCursor(worker="w0", cursor=Cursor(1, 8 * (1 + SERVERS.index(server))).to_proto())]
            return pb.SaveReply(shards=[pb.SavedShard(shard=0, version=5, step=4, cursors=cursors)])

        servers.answers["Save"] = save
        return seen

    def test_covers_all_commits_and_the_data_that_belongs_to_them(self, servers: Servers) -> None:
        seen = self.answers(servers)
        ledger = Ledger(64, 1, 32)
        ledger.lease("w0", 0, 1)

        def check_held() -> HoldResult:
            assert [method for method, _ in servers.calls] == ["HoldCommits", "HoldCommits"], (
                "some server lets commits pass"
            )
            return HoldResult(ledger.to_proto(), {"w0": 0}, state_pb2.ProgressRecord(loss=0.5))

        made = checkpoint_cut.take_cut(TakeCut(REF, 5, SERVERS, 4, number=17), servers, check_held)
        assert made.data
        assert (made.number, made.step, made.version, made.progress_totals.loss) == (4, 4, 5, 0.5)
        assert {(request.cut, request.number, request.generation) for request in seen} == {(17, 4, 5)}
        [worker] = seen[0].workers
        assert (worker.committed, worker.finished) == (5, 5)
        data = Ledger.resumed(made.data, epochs=1, workers=1)
        assert data.account().total.done == 16
        assert [method for method, _ in servers.calls] == ["HoldCommits", "HoldCommits", "Save", "Save"]

    def test_has_no_ledger_for_a_job_without_data(self, servers: Servers) -> None:
        self.answers(servers)
        held = HoldResult(None, {}, state_pb2.ProgressRecord())
        assert checkpoint_cut.take_cut(TakeCut(REF, 5, SERVERS, 4, number=17), servers, lambda: held).data is None

    @pytest.mark.parametrize(("has_samples", "samples"), [(True, 320), (False, 300)])
    def test_progress_counts_what_servers_have_applied_instead_of_last_reports(
        self, servers: Servers, has_samples: bool, samples: int
    ) -> None:
        self.answers(servers)
        applied = {
            SERVERS[0]: [pb.WorkerPushes(worker="w0", incarnation=3, pushes=9, samples=90)],
            # One server has closed a step without w0; w1 is known as an earlier incarnation, w2 not at all.
            SERVERS[1]: [
                pb.WorkerPushes(worker="w0", incarnation=3, pushes=8, samples=80),
                pb.WorkerPushes(worker="w1", incarnation=1, pushes=50, samples=500),
            ],
        }
        servers.answers["Save"] = lambda server, _: pb.SaveReply(shards=[pb.SavedShard(pushes=applied[server])])
        totals = state_pb2.ProgressRecord(totals=state_pb2.Totals(accepted=30, rejected=2, samples=300))
        reported = {"w0": PushCounts(3, 7, 70), "w1": PushCounts(2, 4, 40), "w2": PushCounts(1, 1, 10)}
        held = HoldResult(None, {}, totals, reported, has_samples=has_samples)
        made = checkpoint_cut.take_cut(TakeCut(REF, 5, SERVERS, 4, number=17), servers, lambda: held)
        assert made.progress_totals.totals == state_pb2.Totals(accepted=32, rejected=2, samples=samples)
        assert totals.totals.accepted == 30, "the coordinator's own totals stay"

    @pytest.mark.parametrize(("last", "pause_s"), [(False, 0.0), (True, 20.0)])
    def test_is_the_last_one_only_where_the_job_goes_back_to_it(
        self, servers: Servers, last: bool, pause_s: float
    ) -> None:
        holds_s = []

        def save(_server: ServerRef, request: pb.SaveRequest) -> pb.SaveReply:
            holds_s.append(request.hold_s)
            return pb.SaveReply()

        servers.answers |= {"HoldCommits": pb.HoldCommitsReply(), "Save": save}
        effect = TakeCut(REF, 1, SERVERS, 7, last, number=5)
        made = checkpoint_cut.take_cut(effect, servers, lambda: HoldResult(None, {}, state_pb2.ProgressRecord()))
        assert (holds_s, made.held_by) == ([pause_s, pause_s], 5 if last else 0)

    @pytest.mark.parametrize("fails", ["HoldCommits", "Save", "held"])
    def test_resumes_commits_on_all_servers_after_a_failure(self, servers: Servers, fails: str) -> None:
        self.answers(servers)
        answer: Callable[..., Any] = servers.answers.get(fails, lambda _server, _request: None)
        servers.answers[fails] = lambda server, request: (
            errors.Unreachable("s1 is away") if server == SERVERS[1] else answer(server, request)
        )

        def held() -> HoldResult:
            if fails == "held":
                raise errors.Cancelled("job a is over")
            return HoldResult(None, {}, state_pb2.ProgressRecord())

        with pytest.raises((errors.Unreachable, errors.Cancelled)):
            checkpoint_cut.take_cut(TakeCut(REF, 5, SERVERS, 4, number=17), servers, held)
        assert servers.calls[-2:] == [("ResumeCommits", "s0"), ("ResumeCommits", "s1")]
        assert servers.sent == pb.ResumeCommitsRequest(job="a", cut=17)


def test_of_a_later_life_the_progress_counts_however_small() -> None:
    old = pb.WorkerProgress(worker="w0", incarnation=3, committed=9, finished=9)
    new = pb.WorkerProgress(worker="w0", incarnation=4, committed=1, finished=0)
    for order in ([old, new], [new, old]):
        assert checkpoint_cut.latest_progress(order) == [new]


def test_numbers_are_counted_torn_ones_included(catalogue: Catalogue) -> None:
    assert checkpoint_commit.scan(ScanCheckpoints(REF, number=3), catalogue).largest == 0
    catalogue.folder.write((*path_of("a", 8), "torn"), [b"x"])
    counted = checkpoint_commit.scan(ScanCheckpoints(REF, number=3), catalogue)
    assert (counted.job, counted.largest, counted.effect) == (REF, 8, 3)


class TestTheManifest:
    def test_is_there_when_all_files_are(self, servers: Servers, catalogue: Catalogue) -> None:
        written = write(servers, catalogue, 1)
        assert (written.saved.number, written.saved.step, written.removed) == (1, 7, ())
        manifest = catalogue.manifest("a", 1)
        catalogue.verify(manifest)
        assert manifest.nbytes == written.saved.nbytes
        assert [entry.name for entry in manifest.files] == ["s0.safetensors", "s1.safetensors"]

    def test_is_not_written_of_files_that_the_coordinator_does_not_see(
        self, servers: Servers, catalogue: Catalogue
    ) -> None:
        there = servers.written(SERVERS[0], pb.CollectFilesRequest(job="elsewhere", number=1))
        servers.answers["CollectFiles"] = there
        with pytest.raises(errors.StorageFailed, match="the same checkpoint storage"):
            write(servers, catalogue, 1)
        assert catalogue.numbers("a") == []

    def test_is_found_by_a_coordinator_that_comes_back_though_the_servers_are_gone(
        self, servers: Servers, catalogue: Catalogue
    ) -> None:
        first = write(servers, catalogue, 1)
        servers.answers["CollectFiles"] = errors.UnknownCheckpoint("not begun here")
        assert write(servers, catalogue, 1).saved == first.saved
        assert catalogue.numbers("a") == [1]

    @pytest.mark.parametrize("when", ["before", "meanwhile"])
    def test_does_not_take_the_place_of_an_import_with_its_number(
        self, servers: Servers, catalogue: Catalogue, when: str
    ) -> None:
        theirs = Manifest("a", 1, created_at=5.0, step=0, version=0, spec={}, variables=(), files=())

        def written(server: ServerRef, request: pb.CollectFilesRequest) -> pb.CollectFilesReply:
            catalogue.publish(theirs)
            return servers.written(server, request)

        if when == "before":
            catalogue.publish(theirs)
        servers.answers["CollectFiles"] = written
        with pytest.raises(errors.StorageFailed, match="already has another a/1"):
            write(servers, catalogue, 1)
        assert catalogue.manifest("a", 1) == theirs

    def test_makes_older_ones_superfluous_and_sweeps_no_newer_ones(
        self, servers: Servers, catalogue: Catalogue
    ) -> None:
        policy = CheckpointPolicy(keep_last=2)
        for number in (2, 6):
            catalogue.folder.write((*path_of("a", number), "torn"), [b"x"])
        for number in (1, 3, 4):
            last = write(servers, catalogue, number, policy)
        assert last.removed == (1,)
        assert catalogue.folder.names(("a",)) == ["00000003", "00000004", "00000006"]

    @pytest.mark.parametrize(("keeps_others", "left"), [(True, [1, 3]), (False, [3])])
    def test_of_a_submitter_removes_none_of_another_one(
        self, servers: Servers, catalogue: Catalogue, keeps_others: bool, left: list[int]
    ) -> None:
        policy = CheckpointPolicy(keep_last=1)
        write(servers, catalogue, 1, policy, submitter="ann")
        assert catalogue.manifest("a", 1).submitter == "ann"
        for number in (2, 3):
            write(servers, catalogue, number, policy, submitter="bob", keeps_others=keeps_others)
        assert catalogue.numbers("a") == left

    @pytest.mark.parametrize("counts", [True, False])
    def test_removes_older_ones_only_after_it_is_known_to_be_complete(
        self, servers: Servers, catalogue: Catalogue, counts: bool
    ) -> None:
        policy = CheckpointPolicy(keep_last=1)
        seen: list[tuple[int, list[int]]] = []
        write(servers, catalogue, 1, policy)

        def published(event: events.CheckpointPublished) -> bool:
            seen.append((event.saved.number, catalogue.numbers("a")))
            return counts

        last = write(servers, catalogue, 2, policy, published=published)
        assert seen == [(2, [1, 2])]
        assert last.removed == ((1,) if counts else ())
        assert catalogue.numbers("a") == ([2] if counts else [1, 2])

    def test_says_at_which_evaluation_it_was_taken_and_the_best_stays(
        self, servers: Servers, catalogue: Catalogue
    ) -> None:
        policy, best = CheckpointPolicy(keep_last=1), Evaluation(3, 20, {"auc": 0.5, "loss": float("nan")})
        written = write(servers, catalogue, 1, policy, best=best)
        assert written.best
        assert catalogue.manifest("a", 1).evaluation["values"] == {"auc": 0.5, "loss": "NaN"}
        for number in (2, 3):
            assert not write(servers, catalogue, number, policy, keep=(1,)).best
        assert catalogue.numbers("a") == [1, 3]
        assert write(servers, catalogue, 4, policy, best=best, keep=(1,)).removed == (1, 3), "a better one"

    def test_the_best_of_an_earlier_job_of_the_name_stays_until_there_is_a_newer_one(
        self, servers: Servers, catalogue: Catalogue
    ) -> None:
        policy, best = CheckpointPolicy(keep_last=1), Evaluation(3, 20, {"auc": 0.5})
        for number in (1, 2):
            write(servers, catalogue, number, policy, best=best)
        for number in (3, 4):
            write(servers, catalogue, number, policy)
        assert catalogue.numbers("a") == [2, 4], "the newest of them"
        assert write(servers, catalogue, 5, policy, best=best).removed == (2, 4)

    def test_nothing_goes_while_it_cannot_be_read_which_is_the_best(
        self, servers: Servers, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy, manifest = CheckpointPolicy(keep_last=1), catalogue.manifest
        write(servers, catalogue, 1, policy, best=Evaluation(3, 20, {"auc": 0.5}))

        def away(job: str, number: int) -> Manifest:
            if number == 1:
                raise errors.StorageFailed("the folder is away")
            return manifest(job, number)

        monkeypatch.setattr(catalogue, "manifest", away)
        assert write(servers, catalogue, 2, policy).removed == ()
        assert catalogue.numbers("a") == [1, 2]

    @pytest.mark.parametrize("held_by", [0, 5])
    def test_resumes_held_commits_if_it_cannot_be_written(
        self, servers: Servers, catalogue: Catalogue, held_by: int
    ) -> None:
        servers.answers["CollectFiles"] = errors.StorageFailed("the disk is full")
        with pytest.raises(errors.StorageFailed, match="the disk is full"):
            write(servers, catalogue, 1, held_by=held_by)
        told = [call for call in servers.calls if call[0] == "ResumeCommits"]
        assert told == ([("ResumeCommits", "s0"), ("ResumeCommits", "s1")] if held_by else [])
        assert not held_by or servers.sent == pb.ResumeCommitsRequest(job="a", cut=held_by)

    @pytest.mark.parametrize("held_by", [0, 5])
    def test_says_whether_the_job_restarts_from_it(self, servers: Servers, catalogue: Catalogue, held_by: int) -> None:
        assert write(servers, catalogue, 1, held_by=held_by).last == bool(held_by)

    def test_is_not_waited_for_in_vain(self, servers: Servers, catalogue: Catalogue) -> None:
        def collect(_server: ServerRef, _request: pb.CollectFilesRequest) -> pb.CollectFilesReply:
            servers.wanted = False
            return pb.CollectFilesReply()

        servers.answers["CollectFiles"] = collect
        with pytest.raises(errors.Cancelled):
            write(servers, catalogue, 1)


class TestTheWayBack:
    def test_takes_the_newest_readable_checkpoint_and_lists_skipped_ones(
        self, servers: Servers, catalogue: Catalogue
    ) -> None:
        for number in (1, 2, 3):
            write(servers, catalogue, number, step=10 * number)
        damaged = {3: errors.CorruptCheckpoint("a bit is another")}
        servers.answers["Restore"] = lambda _, request: damaged.get(request.number, pb.RestoreReply())
        created: list[bool] = []
        restored = restore(servers, catalogue, CheckpointChoice("a"), create=lambda: created.append(True))
        assert (restored.source, restored.step) == (CheckpointChoice("a", 2), 20)
        assert restored.variables == {"w"}
        assert restored.skipped == ("a/3: a bit is another",)
        assert len(created) == 2
        assert ("DropShards", "s0") in servers.calls, "what was read in part stays"

    def test_takes_the_best_on_request_and_lists_unreadable_newer_ones(
        self, servers: Servers, catalogue: Catalogue
    ) -> None:
        for number in (1, 2, 3, 4):
            best = Evaluation(number, 10 * number, {"auc": 0.5}) if number < 3 else None
            write(servers, catalogue, number, best=best)
        catalogue.folder.write((*path_of("a", 3), FILE), [b"not a manifest"])
        servers.answers["Restore"] = pb.RestoreReply()
        restored = restore(servers, catalogue, CheckpointChoice.parse("a/best"))
        assert restored.source == CheckpointChoice("a", 2)
        [skipped] = restored.skipped
        assert skipped.startswith("a/3: ")

    def test_ends_where_no_checkpoint_is_of_a_best_evaluation(self, servers: Servers, catalogue: Catalogue) -> None:
        write(servers, catalogue, 1)
        with pytest.raises(errors.CorruptCheckpoint, match="a: it has no checkpoint of its best evaluation"):
            restore(servers, catalogue, CheckpointChoice.parse("a/best"))

    def test_ends_where_nothing_can_be_read(self, servers: Servers, catalogue: Catalogue) -> None:
        with pytest.raises(errors.CorruptCheckpoint, match="b: it has no complete checkpoint"):
            restore(servers, catalogue, CheckpointChoice("b"))
        with pytest.raises(errors.CorruptCheckpoint, match="a/7: there is no"):
            restore(servers, catalogue, CheckpointChoice("a", 7))

    def test_passes_nothing_by_while_the_storage_is_away(self, servers: Servers, catalogue: Catalogue) -> None:
        for number in (1, 2):
            write(servers, catalogue, number)
        servers.answers["Restore"] = errors.StorageFailed("503")
        with pytest.raises(errors.StorageFailed, match="503"):
            restore(servers, catalogue, CheckpointChoice("a"))
        assert [method for method, _ in servers.calls].count("Restore") == 1
        assert "DropShards" not in [method for method, _ in servers.calls], "that is for the machine to say"

    def test_holds_no_thread_while_the_storage_is_away(
        self, catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away(*_: tuple[str, str, str]) -> None:
            raise errors.StorageFailed("503, slow down")

        monkeypatch.setattr(catalogue.folder, "open", away)
        machine = FakeHost()
        runner = EffectRunner(machine, storage=catalogue.folder)
        runner.submit([CreateShards(REF, placement(), spec(), (CheckpointChoice("a", 1),), number=9)])
        assert machine.outcomes.get(timeout=20) == RestoreDeferred(REF, "503, slow down", effect=9)
        runner.stop()

    def test_refuses_another_optimizer_unless_values_alone_are_asked_for(
        self, servers: Servers, catalogue: Catalogue
    ) -> None:
        write(servers, catalogue, 1)
        servers.answers["Restore"] = pb.RestoreReply()
        with pytest.raises(
            errors.IncompatibleCheckpoint, match=r"trained with adam, but a uses sgd.*slots; use the same"
        ):
            restore(servers, catalogue, CheckpointChoice("a", 1), optimizer=optim.SGD(0.1))
        partial = CheckpointChoice("a", 1, partial=True)
        restored = restore(servers, catalogue, partial, optimizer=optim.SGD(0.1))
        assert (restored.step, restored.data) == (0, None)

    def test_names_all_differences_together_with_another_optimizer(
        self, servers: Servers, catalogue: Catalogue
    ) -> None:
        write(servers, catalogue, 1)
        servers.calls.clear()
        others = {"w": Variable((3,)), "new": Variable((2,))}
        with pytest.raises(errors.IncompatibleCheckpoint) as refused:
            restore(servers, catalogue, CheckpointChoice("a", 1), variables=others, optimizer=optim.SGD(0.1))
        for said in ("trained with adam, but a uses sgd", "'w' was saved as float32[8], but is", "'new' was not saved"):
            assert said in refused.value.message
        assert servers.calls == [], "no shard is created for it"
