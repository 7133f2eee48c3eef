"""What the story's training pods run: the SDK's own storage and event bus, without a model. Then they wait.

Rank 0 of the first start leaves two checkpoints, of which the newer lies in the suspect window, removes a third, and
breaks one upload off: everything that `truestep` ever asks of a bucket.
"""

from __future__ import annotations

import hashlib
import os
import time
from datetime import UTC, datetime
from typing import IO

from truestep.checkpoints import s3
from truestep.contract import (
    CheckpointEvent,
    CheckpointManifest,
    CheckpointRef,
    DetailType,
    RunRef,
    Step,
    TrustMark,
    canonical_bytes,
    to_json,
)
from truestep.report.event_bus import EventBus
from truestep.report.outbox import OutboxEntry

RUN_ID = "run-story"
BUCKET, PREFIX = "truestep-story-checkpoints", "runs/gpt"
ROOT = f"s3://{BUCKET}/{PREFIX}"
TRUSTED_STEP, SUSPECT_STEP = 19, 39


class _BrokenOffError(Exception):
    """The save that never ends."""


def main() -> None:
    """Work as rank 0 of the first start; as any other, only wait."""
    if os.environ["RANK"] == "0" and os.environ["JOB_RESTART_COUNT"] == "0":
        keep_checkpoints(s3.S3Storage(BUCKET, PREFIX))
    time.sleep(900)


def keep_checkpoints(storage: s3.S3Storage) -> None:
    """Save, read, list, remove, and report what was saved."""
    refs = {step: save(storage, step) for step in (9, TRUSTED_STEP, SUSPECT_STEP)}
    trusted = refs[TRUSTED_STEP]
    mark = TrustMark(manifest_sha256=trusted.manifest_sha256, step=trusted.step, clean_through=trusted.step)
    storage.write_once(f"{_folder(TRUSTED_STEP)}/trusted.json", canonical_bytes(mark))
    break_off(storage)
    storage.remove_directory(_folder(9))
    storage.replace("tombstone.json", b"{}")
    storage.remove_file("tombstone.json")
    assert storage.directories("step-") == [_folder(TRUSTED_STEP), _folder(SUSPECT_STEP)]
    assert storage.read(f"{_folder(TRUSTED_STEP)}/manifest.json")
    results = EventBus(os.environ["TRUESTEP_EVENT_BUS"]).send([_trusted_event(trusted)])
    assert [result.outcome for result in results] == ["accepted"], results


def save(storage: s3.S3Storage, step: int) -> CheckpointRef:
    """One complete checkpoint."""
    entry = storage.write_stream(f"{_folder(step)}/model.pt", lambda file: _write(file, b"weights"))
    manifest = canonical_bytes(
        CheckpointManifest(
            run_id=RUN_ID,
            attempt_id="first",
            step=Step(step),
            world_size=3,
            weights_fingerprint="v1:0",
            files=(type(entry)(path="model.pt", bytes=entry.bytes, sha256=entry.sha256),),
        )
    )
    storage.write_once(f"{_folder(step)}/manifest.json", manifest)
    return CheckpointRef(
        uri=f"{ROOT}/{_folder(step)}", step=Step(step), manifest_sha256=hashlib.sha256(manifest).hexdigest()
    )


def break_off(storage: s3.S3Storage) -> None:
    """A save in parts that fails half-way: the upload is aborted."""
    whole, s3.PART_BYTES = s3.PART_BYTES, 1 << 10

    def write(file: IO[bytes]) -> None:
        _write(file, b"x" * 3000)
        raise _BrokenOffError

    try:
        storage.write_stream("step-00000049/model.pt", write)
    except _BrokenOffError:
        return
    finally:
        s3.PART_BYTES = whole


def _write(file: IO[bytes], content: bytes) -> None:
    file.write(memoryview(content))


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _trusted_event(ref: CheckpointRef) -> OutboxEntry:
    run = RunRef(
        run_id=RUN_ID,
        attempt_id="first",
        world_size=3,
        cluster_arn=os.environ["TRUESTEP_CLUSTER_ARN"],
        region=os.environ["AWS_REGION"],
        namespace=os.environ["POD_NAMESPACE"],
        job_name=os.environ["TRUESTEP_JOB_NAME"],
        job_kind="HyperPodPyTorchJob",
        checkpoint_root=ROOT,
    )
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    event = CheckpointEvent(run=run, checkpoint=ref, weights_fingerprint="v1:0", clean_through=ref.step, at=at)
    return OutboxEntry(
        event_id="trusted", detail_type=DetailType.CHECKPOINT_TRUSTED, detail=to_json(event), created_at=""
    )


if __name__ == "__main__":
    main()
