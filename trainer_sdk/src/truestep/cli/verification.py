"""Hash a checkpoint's files again and compare with its manifest. Knows nothing of the model's code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from truestep.checkpoints.catalogue import CheckpointRecord, Trust
from truestep.checkpoints.errors import CheckpointCorruptError
from truestep.checkpoints.own_functions import is_own
from truestep.checkpoints.storage import Storage
from truestep.contract import CheckpointManifest, FileEntry, Step

MODEL_FILE = "model.pt"


@dataclass(frozen=True, kw_only=True)
class VerifiedFile:
    """One file that the manifest lists, hashed again."""

    path: str
    bytes: int
    """What the manifest says."""
    problem: str = ""
    """How it differs; empty where it does not."""


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What was found of one checkpoint."""

    uri: str
    step: Step
    manifest_sha256: str
    trust: Trust
    reason: str
    """Why it is revoked or unreadable."""
    files: tuple[VerifiedFile, ...] = ()
    weights_compared: int = 0
    """Tensors whose fingerprint was taken again and compared; 0 where that was not asked for."""
    weight_problems: tuple[str, ...] = ()

    @property
    def intact(self) -> bool:
        """Whether every byte is as written, and a compared weight as it was in the GPUs' memory."""
        damaged = any(file.problem for file in self.files) or self.weight_problems
        return self.trust is not Trust.UNREADABLE and not damaged

    @property
    def usable(self) -> bool:
        """Intact and not revoked."""
        return self.intact and self.trust is not Trust.REVOKED


def bytes_to_verify(record: CheckpointRecord, *, weights: bool) -> int:
    """How much `verify_checkpoint` reads of the storage."""
    files = record.manifest.files if record.manifest else ()
    again = sum(file.bytes for file in files if file.path == MODEL_FILE) if weights else 0
    return sum(file.bytes for file in files) + again


def verify_checkpoint(storage: Storage, record: CheckpointRecord, *, weights: bool = False) -> Verification:
    """Read every file that the manifest lists. Damage is part of the result, never raised.

    weights: also load model.pt and compare its tensors with the fingerprints that the ranks agreed on before it was
    written. Cost: one pass over all bytes. Raises `StorageError` where the storage fails.
    """
    manifest = record.manifest
    if manifest is None:
        files: tuple[VerifiedFile, ...] = ()
    else:
        files = tuple(_verify_file(storage, record.directory, entry) for entry in manifest.files)
    compared, problems = 0, list[str]()
    if weights and manifest is not None:
        broken = {file.path for file in files if file.problem}
        compared, problems = _verify_weights(storage, record.directory, manifest, broken)
    return Verification(
        uri=record.ref.uri,
        step=record.ref.step,
        manifest_sha256=record.ref.manifest_sha256,
        trust=record.trust,
        reason=record.reason,
        files=files,
        weights_compared=compared,
        weight_problems=tuple(problems),
    )


def _verify_file(storage: Storage, directory: str, entry: FileEntry) -> VerifiedFile:
    path = PurePosixPath(entry.path)
    if path.is_absolute() or ".." in path.parts or "\\" in entry.path:
        return VerifiedFile(path=entry.path, bytes=entry.bytes, problem="leads out of the checkpoint; not read")
    try:
        with storage.open_verified(f"{directory}/{entry.path}", entry):
            return VerifiedFile(path=entry.path, bytes=entry.bytes)
    except CheckpointCorruptError as error:
        return VerifiedFile(path=entry.path, bytes=entry.bytes, problem=str(error))


def _verify_weights(
    storage: Storage, directory: str, manifest: CheckpointManifest, broken: set[str]
) -> tuple[int, list[str]]:
    """(tensors compared, what differs)."""
    from truestep.cli.tensors import is_in_shares, load_checkpoint_file, load_share, require_torch, tensors_of

    require_torch("--weights")
    entries = {entry.path: entry for entry in manifest.files}
    if is_in_shares(manifest, MODEL_FILE):
        if broken:
            return 0, [f"the weights are not compared: {', '.join(sorted(broken))} is not what was written"]
        tensors = tensors_of(load_share(storage, directory, manifest, MODEL_FILE))
        return len(manifest.tensor_fingerprints), list(_weight_problems(tensors, manifest))
    if MODEL_FILE not in entries:
        if is_own(manifest):
            return 0, ["the weights are not compared: only a resume can read what the run's own functions wrote"]
        return 0, [f"the manifest lists no {MODEL_FILE}"]
    if MODEL_FILE in broken:
        return 0, [f"the weights are not compared: {MODEL_FILE} is not what was written"]
    try:
        tensors = tensors_of(load_checkpoint_file(storage, directory, entries[MODEL_FILE]))
    except CheckpointCorruptError as error:
        return 0, [str(error)]
    return len(manifest.tensor_fingerprints), list(_weight_problems(tensors, manifest))


def _weight_problems(tensors: Mapping[str, Any], manifest: CheckpointManifest) -> Iterator[str]:
    from truestep.fingerprint import combine, fingerprint_tensors

    expected = manifest.tensor_fingerprints
    if not expected:
        yield "the manifest holds no fingerprints of tensors, so there is nothing to compare the weights with"
        return
    if combine(expected) != manifest.weights_fingerprint:
        yield "the manifest's fingerprints of tensors do not add up to its fingerprint of the weights"
    # A buffer that is not persistent has a fingerprint and no place in a state dict.
    present = {name: tensors[name] for name in expected if name in tensors}
    for name, found in fingerprint_tensors(present).items():
        if found != expected[name]:
            yield f"tensor {name} in {MODEL_FILE} differs from the one that the ranks compared before it was written"
    if not present:
        yield f"{MODEL_FILE} holds none of the tensors that the manifest names"
