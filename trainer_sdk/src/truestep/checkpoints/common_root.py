"""Before training: every rank keeps its checkpoints at the same root, can write there, and sees what others write."""

from __future__ import annotations

from contextlib import suppress

from truestep.checkpoints.errors import CheckpointError
from truestep.checkpoints.ranks import Attached, attempt_on_every_rank
from truestep.checkpoints.storage import Storage, open_storage


def require_common_root(attachment: Attached, storage: Storage, declared: str) -> None:
    """Collective; leaves nothing behind. Found out at the first save or resume, it would cost the steps until then.

    declared: what ``TRUESTEP_CHECKPOINT_ROOT`` says on this rank, or empty. Raises `CheckpointError` on every rank,
    naming those where it fails.
    """
    root = storage.root_uri

    def declare() -> str:
        # The tombstone goes where the run says its checkpoints are; written elsewhere it would hold nothing back.
        if declared and open_storage(declared).root_uri != root:
            raise CheckpointError(
                f"the checkpoints go to {root}, but TRUESTEP_CHECKPOINT_ROOT says {declared}: the mark that stops a "
                "restart would go there; give both the same, or unset the variable"
            )
        return root

    _, failures, roots = attempt_on_every_rank(attachment, declare)
    if failures:
        raise CheckpointError("; ".join(failures))
    others = [f"rank {rank} {other}" for rank, other in enumerate(roots) if other != roots[0]]
    if others:
        raise CheckpointError(
            f"rank 0 keeps its checkpoints at {roots[0]}, {', '.join(others[:8])}: give every rank the same root; "
            "nothing was trained"
        )
    shared = f"probe-{attachment.run.attempt_id[:12]}"
    try:
        _require_writable_and_shared(attachment, storage, shared)
    finally:
        if attachment.rank == 0:
            with suppress(CheckpointError, OSError):
                storage.remove_file(shared)


def _require_writable_and_shared(attachment: Attached, storage: Storage, shared: str) -> None:
    own, content = f"{shared}-{attachment.rank:05d}", attachment.run.attempt_id.encode()

    def write() -> None:
        storage.replace(own, content)
        storage.remove_file(own)
        if attachment.rank == 0:
            storage.replace(shared, content)

    def look() -> None:
        if storage.read(shared) != content:
            raise CheckpointError("the file that rank 0 has just written there is not there")

    _, failures, _ = attempt_on_every_rank(attachment, write)
    if failures:
        raise CheckpointError(
            f"checkpoints cannot be written below {storage.root_uri}: {'; '.join(failures)}. Mount the volume "
            "read-write for the training's user, or let the pods' role put and delete objects there, or give another "
            "root; nothing was trained"
        )
    _, failures, _ = attempt_on_every_rank(attachment, look)
    if failures:
        raise CheckpointError(
            f"{storage.root_uri} is not the same storage on every rank: {'; '.join(failures)}. Mount the same volume "
            "on every node, or give an s3:// root; a folder of the node itself cannot be resumed from; nothing was "
            "trained"
        )
