"""What was hashed is what was written, although torch.save frees the memory that it hands over."""

from __future__ import annotations

import errno
import hashlib
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from truestep.checkpoints import StorageError, list_checkpoints, storage
from truestep.checkpoints.storage import FileStorage, HashingWriter
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


def test_what_the_disk_refuses_while_the_rest_is_written_fails_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says it once: the fsync at the end would succeed, and the file would lack what was refused."""

    def refuse(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(storage, "_DISK_BYTES", 1 << 16)
    root = FileStorage(tmp_path)
    entry = root.write_stream("step-00000001/model.pt", lambda stream: stream.write(bytes(1 << 18)))
    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(StorageError, match="Input/output error"):
        root.write_stream("step-00000001/model.pt", lambda stream: stream.write(bytes(1 << 20)))
    with root.open_verified("step-00000001/model.pt", entry):
        assert [path.name for path in (tmp_path / "step-00000001").iterdir()] == ["model.pt"]
