"""What was hashed is what was written, although torch.save frees the memory that it hands over."""

from __future__ import annotations

import hashlib
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from truestep.checkpoints import list_checkpoints
from truestep.checkpoints.storage import HashingWriter
from truestep.contract import Step
from truestep.resumption import resume

SAVES = 8


def test_a_large_extra_state_without_tensors_is_hashed_as_it_was_written(start: Any, file_root: str) -> None:
    """Its pickle is one large piece, whose memory is gone as soon as torch.save goes on."""
    loaded: list[Any] = []
    extra = {"log": "".join(f"{number:07d} " for number in range(500_000))}
    run = start(file_root, extra_save=lambda: extra, extra_load=loaded.append)
    for step in range(SAVES):
        run.save(step)
    run.checkpoints.promote(Step(SAVES))
    records = list_checkpoints(file_root)
    assert len(records) == SAVES
    for record in records:
        assert record.manifest is not None
        for entry in record.manifest.files:
            content = Path(urlsplit(record.ref.uri).path, entry.path).read_bytes()
            assert hashlib.sha256(content).hexdigest() == entry.sha256, f"{record.ref.step}: {entry.path}"
    again = start(file_root, extra_save=lambda: extra, extra_load=loaded.append)
    resume(again.attachment, again.checkpoints)
    assert loaded == [extra]


class _SlowDigest:
    def __init__(self) -> None:
        self.done = False

    def update(self, _: object) -> None:
        time.sleep(0.2)
        self.done = True


class _Full:
    def write(self, _: object) -> None:
        raise OSError("no space left")


@pytest.mark.parametrize("full", [False, True])
def test_nothing_reads_a_pieces_memory_once_write_has_ended(tmp_path: Path, *, full: bool) -> None:
    with (tmp_path / "file").open("wb") as file:
        writer = HashingWriter(_Full() if full else file)
        digest = _SlowDigest()
        writer._digest = digest  # type: ignore[assignment]
        try:
            writer.write(bytes(1 << 20))
        except OSError:
            assert full
        assert digest.done
        writer.close()
