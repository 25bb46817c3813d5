"""Lists in pages, and hostile fields of registrations and jobs, over real gRPC."""

from collections.abc import Iterator

import pytest

import shoal
from shoal import errors
from shoal.status import DataAccount, HeldRange, JobState
from shoal.v1 import coordinator_pb2 as members
from shoal.v1 import job_pb2 as jobs
from shoal.v1 import state_pb2
from shoal_coordinator.api.codecs import data_message
from shoal_coordinator.cluster import Member
from support.clusters.coordinator_rig import Rig, job

HUGE = "x" * 5_000_000


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = Rig()
    try:
        yield rig
    finally:
        rig.stop()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"device": HUGE}, "device of 'w8' has 5000000 bytes; the limit FIELD_BYTES is 256"),
        ({"process": HUGE}, "process of 'w8' has 5000000 bytes"),
        ({"metrics_address": HUGE}, "metrics_address of 'w8' has 5000000 bytes"),
        ({"device": "cpu\x1b[2J"}, "device of 'w8' is .* control characters"),
        ({"address": "unix:80"}, "address of 'w8' is 'unix:80'; give host:port without a scheme"),
        ({"address": "dns:///evil:80"}, "give host:port without a scheme"),
        ({"metrics_address": "http://w8:80"}, "give host:port without a scheme"),
        ({"name": HUGE, "process": "p"}, "member id 'xxx"),
        (
            {"zone": "Rack 4"},
            "zone 'Rack 4' of server w8 is not valid; give at most 253 characters .* --zone or SHOAL_ZONE",
        ),
        ({"zone": HUGE}, "zone 'xxx"),
    ],
    ids=["device", "process", "metrics", "controls", "unix", "scheme", "url", "name", "zone", "long zone"],
)
def test_a_registration_is_refused_and_everybody_still_sees_the_cluster(
    rig: Rig, fields: dict[str, str], said: str
) -> None:
    with pytest.raises(errors.BadRequest, match=said):
        rig.register(members.WORKER, fields.pop("name", "w8"), **fields)
    assert {"s0", "s1"} <= rig.member_status().keys()
    assert "w8" not in rig.member_status()


def test_a_record_of_an_earlier_version_with_long_fields_still_loads() -> None:
    registration = members.RegisterRequest(
        role=members.WORKER, member="w9", process="p", address="unix:/x", device=HUGE, metrics_address=HUGE
    )
    member = Member.from_proto(state_pb2.MemberRecord(registration=registration, incarnation=3))
    status = member.status(0.0, "")
    assert (len(status.device), len(status.metrics_address), status.address) == (256, 256, "unix:/x")


def test_submissions_with_hostile_fields_are_refused(rig: Rig) -> None:
    known = rig.job("List").jobs
    spec = job("hostile").to_proto()
    for change, kind, said in (
        ({"program": "m." + "x" * 300 + ":f"}, errors.BadRequest, "program of job hostile has 304 bytes"),
        ({"program": "subprocess:run"}, errors.ProgramNotAllowed, "standard library, which has no programs"),
        ({"program": "os:system"}, errors.ProgramNotAllowed, "standard library"),
        ({"program": "builtins:eval"}, errors.ProgramNotAllowed, "standard library"),
        ({"program": "digits.py:Digits"}, errors.InvalidJob, "drop .py: digits:Digits"),
        ({"program": "__main__:Digits"}, errors.InvalidJob, "%%writefile"),
        ({"program": "m\n:f"}, errors.InvalidJob, "does not name a factory"),
        ({"name": "a\nb"}, errors.InvalidJob, "job name"),
        ({"max_steps": 1 << 53}, errors.InvalidJob, "the limit MAX_STEP"),
        ({"settings_json": HUGE}, errors.InvalidJob, "settings_json"),
    ):
        request = jobs.JobSpec()
        request.CopyFrom(spec)
        for field, value in change.items():
            setattr(request, field, value)
        with pytest.raises(kind, match=said):
            rig.client.call(rig.client.jobs.Submit, jobs.SubmitRequest(spec=request))
    with pytest.raises(errors.BadRequest, match="token of job hostile has 5000000 bytes; the limit FIELD_BYTES"):
        rig.client.call(rig.client.jobs.Submit, jobs.SubmitRequest(spec=spec, token=HUGE))
    patterns = shoal.optim.SGD(0.1, decay_exclude=tuple(f"v{number}" for number in range(1_001)))
    with pytest.raises(errors.LimitExceeded, match="has 1001 patterns; the limit DECAY_PATTERNS is 1000"):
        rig.submit(job("hostile", optimizer=patterns))
    assert rig.job("List").jobs == known


def test_lists_come_in_pages_without_settings(rig: Rig) -> None:
    names = [f"listed-{number}" for number in range(12)]
    for name in names:
        rig.submit(job(name, settings={"large": "x" * 900_000}))  # 10 MB in all, more than a message may have
    try:
        whole = rig.job("List")
        assert [it.spec.name for it in whole.jobs][:12] == names[::-1]
        assert not any(it.spec.settings_json for it in whole.jobs)
        assert len(rig.job("Get", job="listed-0").status.spec.settings_json) > 900_000
        first = rig.job("List", page_size=5)
        assert [it.spec.name for it in first.jobs] == names[:-6:-1]
        second = rig.job("List", page_size=5, page_token=first.next_page_token)
        assert [it.spec.name for it in second.jobs] == names[-6:-11:-1]
        with shoal.Client(rig.process.address) as client:
            assert [it.name for it in client.jobs()][:12] == names[::-1]
            assert client.jobs()[0].job.settings == {}
            for name in names[:3]:
                client.job(name).cancel()
            assert [it.name for it in client.jobs(ended=0)] == names[:2:-1]
            assert [it.name for it in client.jobs(ended=1)] == names[:1:-1]
            with pytest.raises(errors.BadRequest, match="ended is 1001; the limit PAGE_SIZE is 1000"):
                client.jobs(ended=1_001)
    finally:
        for name in names:
            rig.job("Cancel", job=name)


def test_a_long_reason_is_short_in_a_list_and_whole_by_itself(rig: Rig) -> None:
    rig.register(members.WORKER, "w0")
    rig.submit(job("long", workers=1))
    rig.job("Finish", job="long", worker="w0", error="begin" + "é" * 20_000 + "end")
    [listed] = [it for it in rig.job("List").jobs if it.spec.name == "long"]
    whole = rig.job("Get", job="long").status
    assert JobState.from_proto(whole.state) is JobState.FAILED
    assert len(whole.reason) > 20_000
    assert len(listed.reason.encode()) < 4_200
    assert (whole.reason[:20], whole.reason[-20:]) == (listed.reason[:20], listed.reason[-20:])


def test_an_account_of_data_names_a_bounded_number_of_ranges() -> None:
    held = HeldRange("w" * 63, rank=1, epoch=0, start=0, stop=1)
    message = data_message(DataAccount(held=(held,) * 100_000))
    assert len(message.held) == 10_000
    assert message.ByteSize() < 1 << 20


def test_members_come_in_pages(rig: Rig) -> None:
    names = [f"page-{number:03}" for number in range(210)]
    rig.silent.update(names)
    for name in names:
        rig.register(members.WORKER, name, device="d" * 256)
    first = rig.client.call(rig.client.members.GetStatus, members.GetStatusRequest())
    assert len(first.members) == 200
    request = members.GetStatusRequest(page_token=first.next_page_token)
    second = rig.client.call(rig.client.members.GetStatus, request)
    assert second.next_page_token == ""
    ids = [it.member for it in (*first.members, *second.members)]
    assert ids == sorted(set(ids))
    with shoal.Client(rig.process.address) as client:
        assert [it.member for it in client.status().members] == ids
        assert client.status().cluster == first.cluster


@pytest.mark.parametrize("token", ["nonsense", "bWVtYmVyOi4u", HUGE], ids=["text", "base64", "huge"])
def test_a_page_token_that_is_not_one_is_refused(rig: Rig, token: str) -> None:
    with pytest.raises(errors.BadRequest, match=r"page_token is .* which is not the next_page_token of a list of jobs"):
        rig.job("List", page_token=token)
    with pytest.raises(errors.BadRequest, match="which is not the next_page_token of a list of members"):
        rig.client.call(rig.client.members.GetStatus, members.GetStatusRequest(page_token=token))


def test_a_page_that_is_too_large_is_refused(rig: Rig) -> None:
    with pytest.raises(errors.BadRequest, match="page_size is 4294967295; the limit PAGE_SIZE is 1000"):
        rig.job("List", page_size=2**32 - 1)
    with pytest.raises(errors.BadRequest, match="page_size is 1001; the limit PAGE_SIZE is 1000"):
        rig.client.call(rig.client.members.GetStatus, members.GetStatusRequest(page_size=1_001))
