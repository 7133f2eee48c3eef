"""A bucket that throttles, fails, loses answers, hangs or lists what was: nothing is lost, nothing wrongly trusted."""

from __future__ import annotations

import types
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.custody.faulty_s3 import FaultyS3, faulty_s3
from truestep.checkpoints import CheckpointError, Trust, list_checkpoints
from truestep.checkpoints.storage import open_storage
from truestep.contract import ResumeDirective, Step
from truestep.resumption import resume


@pytest.fixture
def bucket(aws: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyS3]:
    """The faulty server, as every client of this test sees it. Waits between retries are skipped."""
    import boto3

    monkeypatch.setattr("botocore.endpoint.time", types.SimpleNamespace(sleep=lambda _seconds: None))
    monkeypatch.setattr("truestep.checkpoints.s3.PART_BYTES", 5 << 20)
    name = f"checkpoints-{uuid.uuid4().hex[:12]}"
    boto3.client("s3").create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": "eu-central-1"})
    with faulty_s3(aws) as faulty:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faulty.url)
        faulty.root_uri = f"s3://{name}/run"  # type: ignore[attr-defined]
        yield faulty


def root_of(bucket: FaultyS3) -> str:
    return str(bucket.root_uri)  # type: ignore[attr-defined]


def trust_of(bucket: FaultyS3) -> dict[int, str]:
    return {record.ref.step: str(record.trust) for record in list_checkpoints(root_of(bucket))}


@pytest.mark.parametrize(
    ("pattern", "action", "times"),
    [(".", "503", 1), (".", "500", 1), ("PUT|DELETE", "lost", 1), ("GET .*step-", "cut", 2)],
)
def test_a_bucket_that_recovers_costs_time_only(
    start: Any, bucket: FaultyS3, pattern: str, action: str, times: int
) -> None:
    rule = bucket.add(pattern, action, times)
    run = start(root_of(bucket))
    run.train(1)
    ref = run.save(4)
    assert run.checkpoints.promote(Step(4)) == ref
    again = start(root_of(bucket), seed=5)
    assert resume(again.attachment, again.checkpoints).checkpoint == ref
    assert again.fingerprint() == run.fingerprint()
    assert trust_of(bucket) == {4: Trust.TRUSTED}
    assert rule.fired > times


def test_a_request_without_an_answer_is_sent_again(
    start: Any, bucket: FaultyS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("truestep.checkpoints.s3.READ_TIMEOUT_SECONDS", 1.0)
    rule = bucket.add(r"PUT .*/(optimizer\.pt|manifest\.json)", "hang", 1)
    ref = start(root_of(bucket)).save(4)
    assert [record.ref for record in list_checkpoints(root_of(bucket))] == [ref]
    assert rule.fired >= 4


@pytest.mark.parametrize("name", ["model.pt", "rng-00000.pt", "manifest.json"])
def test_a_save_that_the_bucket_refuses_for_good_does_not_exist_and_the_next_one_does(
    start: Any, bucket: FaultyS3, name: str
) -> None:
    run = start(root_of(bucket))
    older = run.save(4)
    run.checkpoints.promote(Step(4))
    bucket.add(f"PUT .*{name}", "503")
    with pytest.raises(CheckpointError, match=f"step-00000009/{name}.*SlowDown"):
        run.save(9)
    assert trust_of(bucket) == {4: Trust.TRUSTED}
    assert run.checkpoints.promote(Step(9)) == older
    bucket.rules.clear()
    newer = run.save(9)
    assert run.checkpoints.promote(Step(9)) == newer
    assert trust_of(bucket) == {9: Trust.TRUSTED, 4: Trust.TRUSTED}


def test_a_mark_that_the_bucket_refuses_leaves_the_checkpoint_written_and_is_tried_again(
    start: Any, bucket: FaultyS3
) -> None:
    run = start(root_of(bucket))
    ref = run.save(4)
    bucket.add("PUT .*trusted.json", "500")
    assert run.checkpoints.promote(Step(4)) is None
    assert trust_of(bucket) == {4: Trust.WRITTEN}
    bucket.rules.clear()
    assert run.checkpoints.promote(Step(9)) == ref
    assert trust_of(bucket) == {4: Trust.TRUSTED}


def _stream(megabytes: int) -> Any:
    return lambda target: [target.write(bytes([number]) * (1 << 20)) for number in range(megabytes)]


def test_an_upload_in_parts_whose_last_answer_is_lost_is_there(bucket: FaultyS3) -> None:
    rule = bucket.add("POST .*uploadId", "lost", 1)
    storage = open_storage(root_of(bucket))
    entry = storage.write_stream("step-00000001/model.pt", _stream(12))
    assert rule.fired == 2
    with storage.open_verified("step-00000001/model.pt", entry) as file:
        assert len(file.read()) == 12 << 20


def test_an_upload_that_fails_at_a_part_leaves_nothing_not_even_its_first_parts(bucket: FaultyS3) -> None:
    import boto3

    bucket.add("PUT .*partNumber=2", "500")
    storage = open_storage(root_of(bucket))
    with pytest.raises(CheckpointError, match="cannot write s3://"):
        storage.write_stream("step-00000001/model.pt", _stream(12))
    assert storage.read("step-00000001/model.pt") is None
    name = root_of(bucket).split("/")[2]
    assert "Uploads" not in boto3.client("s3").list_multipart_uploads(Bucket=name)


def test_a_download_that_always_breaks_off_is_refused_by_name_and_the_older_one_used(
    start: Any, bucket: FaultyS3
) -> None:
    run = start(root_of(bucket))
    older = run.save(4)
    run.save(9)
    run.checkpoints.promote(Step(9))
    bucket.add("GET .*step-00000009/model.pt", "cut")
    again = start(root_of(bucket), seed=5)
    point = resume(again.attachment, again.checkpoints)
    assert point.checkpoint == older
    assert "cannot read" in point.skipped[0]
    assert "step-00000009/model.pt" in point.skipped[0]


def test_a_listing_that_lags_behind_costs_steps_never_trust_and_an_ordered_checkpoint_is_found(
    start: Any, bucket: FaultyS3
) -> None:
    run = start(root_of(bucket))
    older = run.save(4)
    newer = run.save(9)
    run.checkpoints.promote(Step(9))
    open_storage(root_of(bucket)).replace("step-00000014/model.pt", b"listed, but no manifest is there")
    rule = bucket.add("GET .*list-type=2", "hide step-00000009")
    again = start(root_of(bucket), seed=5)
    assert resume(again.attachment, again.checkpoints).checkpoint == older
    directive = ResumeDirective(
        incident_id="inc-1", checkpoint_uri=newer.uri, manifest_sha256=newer.manifest_sha256, max_step=Step(9)
    )
    ordered = start(root_of(bucket), seed=6)
    assert resume(ordered.attachment, ordered.checkpoints, directive=directive).checkpoint == newer
    assert rule.fired


def test_a_root_that_refuses_to_be_written_to_is_said_before_training(start: Any, bucket: FaultyS3) -> None:
    bucket.add("PUT .*probe-", "500")
    with pytest.raises(CheckpointError, match=r"cannot be written below s3://.*every rank: .*nothing was trained"):
        start(root_of(bucket))
