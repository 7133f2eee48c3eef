"""`VerifiedCheckpoints`: a `CheckpointStore` whose checkpoints say what was checked, and whose bytes can be proved."""

from __future__ import annotations

import hashlib
import logging
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn

import truestep
from truestep.checkpoints.background import DistributedSaves
from truestep.checkpoints.catalogue import (
    CheckpointRecord,
    Trust,
    directory_name,
    left_behind,
    list_records,
    remove_checkpoint,
)
from truestep.checkpoints.common_root import require_common_root
from truestep.checkpoints.errors import CheckpointError, CheckpointWriteError
from truestep.checkpoints.files import TrainingState
from truestep.checkpoints.own_functions import OwnFunctions, written_wrongly
from truestep.checkpoints.ranks import Attached, attempt_on_every_rank, decide_on_rank_0, own_rank
from truestep.checkpoints.sharded_files import VerifiedWriter
from truestep.checkpoints.storage import Storage, open_storage
from truestep.checkpoints.trust import TrustLedger, now
from truestep.contract import (
    MANIFEST_NAME,
    REVOKED_NAME,
    CheckpointManifest,
    CheckpointRef,
    FileEntry,
    ResumeDirective,
    Step,
    canonical_bytes,
    directive_sha256,
    from_json,
    ordered_checkpoint,
    to_json,
)
from truestep.contract.words import counted
from truestep.protocols import SaveEvidence
from truestep.report.reporter import EventReporter, reporter_from_environment

_LOG = logging.getLogger("truestep.checkpoints")


class VerifiedCheckpoints:
    """Checkpoints with a manifest, written last: without it a checkpoint does not exist.

    A new one is *written*; `promote` makes it *trusted* once an audit has passed at or after its step. Every rank
    constructs it and calls every method, at the same step.
    """

    def __init__(
        self,
        root_uri: str,
        attachment: Attached,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        save: Callable[[Path], Any] | None = None,
        load: Callable[[Path], Any] | None = None,
        extra_save: Callable[[], Any] | None = None,
        extra_load: Callable[[Any], None] | None = None,
        keep: int | None = None,
        keep_for: timedelta = timedelta(0),
        distributed: bool = False,
        asynchronous: bool = False,
        reshard: bool = False,
        risk: float = 0.05,
        reporter: EventReporter | None = None,
    ) -> None:
        """root_uri: ``s3://bucket/prefix``, ``file:///directory`` or ``/directory``; the same, and seen, by every rank.

        save, load: functions of your own for model, optimizer and whatever else, instead of ``torch.save``. Each is
        called on every rank with a directory: `save` writes files into an empty one and returns when they are complete,
        no two ranks a file of the same name; `load` finds there what all ranks wrote, verified, and nothing else. Alone
        it reads what an earlier run saved. Generators and buffers are kept without them.
        extra_save: returns what else to keep (scheduler, scaler, data loader): tensors and plain containers. Called on
        every rank; what is the same as on rank 0 is written once.
        extra_load: called on every rank with what `extra_save` returned there; on rank 0, where the number of ranks is
        another one.
        keep: how many checkpoints stay, besides the newest trusted one, which is never removed; None: all. Revoked and
        unreadable ones do not count. Keep enough to outlast the time from a fault to its detection, or no clean one is
        left when it is needed.
        keep_for: with keep: what was written within this time stays too.
        distributed: False: rank 0 writes model and optimizer with ``torch.save``. True: every rank writes its share
        with `torch.distributed.checkpoint`; what a sharded model needs. Either is read, whatever this says.
        asynchronous: with distributed: `save` copies the state to host memory and returns; a thread writes it.
        reshard: accept a distributed checkpoint of another number of ranks; batches and random numbers then differ.
        risk: that a fault passed the audits behind a trusted checkpoint; its mark says for which hit probability.
        Raises `CheckpointError` on every rank, before training, where any has another root, cannot write to it or does
        not see what rank 0 writes there.
        """
        if keep is not None and keep < 1:
            raise CheckpointError(
                f"keep is {keep}; give the number of checkpoints to keep, at least 1, or None for all"
            )
        if not 0 < risk < 1:
            raise CheckpointError(f"risk is {risk}; give a probability between 0 and 1, such as 0.05")
        if asynchronous and not distributed:
            raise CheckpointError(
                "asynchronous=True writes with torch.distributed.checkpoint: give distributed=True too"
            )
        if save is not None and distributed:
            raise CheckpointError(
                "distributed=True writes with torch.distributed.checkpoint, save= with a function of yours: give one"
            )
        self.storage: Storage = open_storage(root_uri)
        self.state = TrainingState(model, optimizer, extra_save, extra_load, OwnFunctions(save, load))
        self.reshard = reshard
        self._attachment = attachment
        self._keep = keep
        self._keep_for = keep_for
        self._reporter = reporter
        require_common_root(attachment, self.storage, self.reporter.run.checkpoint_root)
        self._distributed = DistributedSaves(attachment, in_background=asynchronous) if distributed else None
        self._trust = TrustLedger(self.storage, self.reporter, risk)
        self._newest_trusted: CheckpointRef | None = None
        self.reporter.note_checkpoint_root(self.storage.root_uri)
        self._directive: ResumeDirective | None = None

    @property
    def root_uri(self) -> str:
        return self.storage.root_uri

    @property
    def newest_trusted(self) -> CheckpointRef | None:
        return self._newest_trusted

    @property
    def reporter(self) -> EventReporter:
        """Where rank 0 reports checkpoints: the given one, or the process's own from the environment."""
        if self._reporter is None:
            attachment = self._attachment
            self._reporter = reporter_from_environment(attachment.identities[attachment.rank], attachment.run)
        return self._reporter

    def save(self, evidence: SaveEvidence) -> CheckpointRef | None:
        """Write a checkpoint; None where a thread still writes it. Before that, the one before it is complete.

        Raises `CheckpointWriteError` on every rank where any rank failed, now or in the background since the last call;
        that checkpoint does not exist then. Cost: one pass over model and optimizer, hashed while written; three small
        collectives.
        """
        self._await_background()
        opening = self._decided(lambda: self._open_directory(evidence.step))
        directory = opening["directory"]
        if self._distributed is not None:
            self._save_distributed(self._distributed, directory, evidence, opening["common"])
        else:
            self._save_whole(directory, evidence, opening["common"])
        completed = self._decided(lambda: to_json(self._trust.taken(directory)))
        return None if completed is None else from_json(CheckpointRef, completed)

    def _save_whole(self, directory: str, evidence: SaveEvidence, common: Mapping[str, Any]) -> None:
        rank = own_rank(self._attachment)

        def write() -> list[Any]:
            return [to_json(entry) for entry in self.state.write(self.storage, directory, rank, common)]

        _, failures, written = attempt_on_every_rank(self._attachment, write)
        _raise_unwritten(evidence.step, failures)
        if self.state.functions.writes:
            _raise_unwritten(evidence.step, written_wrongly([[entry["path"] for entry in rows] for rows in written]))
        files = tuple(from_json(FileEntry, entry) for rows in written for entry in rows)
        self._decided(lambda: self._complete(directory, evidence, files))

    def _save_distributed(
        self, saves: DistributedSaves, directory: str, evidence: SaveEvidence, common: Mapping[str, Any]
    ) -> None:
        own: dict[str, bytes] = {}
        _, failures, _ = attempt_on_every_rank(
            self._attachment, lambda: own.update(self.state.own_files(own_rank(self._attachment), common))
        )
        _raise_unwritten(evidence.step, failures)
        writer = VerifiedWriter(
            self.storage, directory, own, lambda files: self._complete(directory, evidence, tuple(files))
        )
        _raise_unwritten(evidence.step, saves.save(evidence.step, directory, self.state.sharded(), writer))

    def _await_background(self) -> None:
        if self._distributed is not None:
            step, failures = self._distributed.wait()
            _raise_unwritten(step, failures)

    def promote(self, clean_through: Step) -> CheckpointRef | None:
        """Mark this attempt's checkpoints at or before `clean_through` trusted. Returns the newest trusted one.

        A checkpoint that an earlier attempt left is not promoted: this attempt's audits say nothing about it. One whose
        mark cannot be written stays *written* and is tried again next time; training goes on. One that a thread still
        writes is marked by rank 0 as soon as it is complete.
        """
        news = self._decided(lambda: self._trust.promote(clean_through))
        for document in news:
            self.note_trusted(from_json(CheckpointRef, document))
        if news and self._attachment.rank == 0 and self._keep is not None:
            self._expire(self._keep)
        return self._newest_trusted

    def finish(self) -> None:
        """Wait for what a thread still writes; `train` calls it at its end. Raises as `save` does."""
        self._await_background()
        for document in self._decided(self._trust.news):
            self.note_trusted(from_json(CheckpointRef, document))

    def note_directive(self, directive: ResumeDirective) -> None:
        """Say in what this attempt writes under which directive it resumed; `resume` calls it."""
        self._directive = directive
        self.reporter.note_directive(directive)

    def note_trusted(self, ref: CheckpointRef) -> None:
        """Take a checkpoint into account that is known to be trusted; `resume` calls it."""
        if self._newest_trusted is None or ref.step >= self._newest_trusted.step:
            self._newest_trusted = ref

    def _decided(self, decide: Callable[[], Any]) -> Any:
        return decide_on_rank_0(self._attachment, decide)

    def _open_directory(self, step: Step) -> dict[str, Any]:
        """Rank 0: a free directory. A step that is trained again after a rollback finds its name taken."""
        attempt = self._attachment.run.attempt_id[:8]
        suffixes = ["", attempt, *(f"{attempt}-{number}" for number in range(2, 100))]
        for suffix in suffixes:
            name = directory_name(step, suffix)
            if all(self.storage.read(f"{name}/{file}") is None for file in (MANIFEST_NAME, REVOKED_NAME)):
                self.storage.remove_directory(name)  # what a killed save left behind
                return {"directory": name, "common": self._common(step)}
        raise CheckpointWriteError(
            f"{self.root_uri} holds {counted(len(suffixes), 'checkpoint')} of step {step} already"
        )

    def _common(self, step: Step) -> dict[str, Any]:
        try:
            return self.state.take_common()
        except Exception as error:
            cause = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
            raise CheckpointWriteError(f"checkpoint of step {step} was not written; {cause}") from error

    def _complete(self, directory: str, evidence: SaveEvidence, files: tuple[FileEntry, ...]) -> None:
        """Rank 0, in whichever thread wrote last: the manifest, and with it the checkpoint."""
        run = self._attachment.run
        manifest = CheckpointManifest(
            run_id=run.run_id,
            attempt_id=run.attempt_id,
            step=evidence.step,
            world_size=self._attachment.world_size,
            weights_fingerprint=evidence.weights_fingerprint,
            tensor_fingerprints=evidence.tensor_fingerprints,
            optimizer_fingerprint=evidence.optimizer_fingerprint,
            checks=evidence.checks,
            bucket_layout_sha256=evidence.bucket_layout_sha256,
            directive_sha256=directive_sha256(self._directive) if self._directive else "",
            ordered=ordered_checkpoint(self._directive) if self._directive else None,
            answers_alarm_ids=self._directive.answers_alarm_ids if self._directive else (),
            versions=_versions(),
            files=files,
            created_at=now(),
        )
        content = canonical_bytes(manifest)
        self.storage.write_once(f"{directory}/{MANIFEST_NAME}", content)
        sha256 = hashlib.sha256(content).hexdigest()
        ref = CheckpointRef(uri=f"{self.root_uri}/{directory}", step=evidence.step, manifest_sha256=sha256)
        self.reporter.checkpoint_written(ref, evidence.weights_fingerprint)
        self._trust.note_written(ref, evidence.weights_fingerprint)

    def _expire(self, keep: int) -> None:
        """Rank 0: remove what is older than the `keep` newest. A failure costs space, not training."""
        try:
            records = list_records(self.storage)
            due = expired(records, keep, written_before=(datetime.now(UTC) - self._keep_for).isoformat())
            for record in due:
                remove_checkpoint(self.storage, record.directory)
                _LOG.info("checkpoint %s (%s) removed: %d newer ones are kept", record.ref.uri, record.trust, keep)
            busy = self._distributed.directory if self._distributed is not None else ""
            for directory in left_behind(self.storage, records):
                if directory == busy:
                    continue
                if self.storage.remove_directory(directory):
                    _LOG.info(
                        "%s/%s removed: a killed process had left it without a manifest", self.root_uri, directory
                    )
        except CheckpointError as error:
            _LOG.warning("old checkpoints could not be removed: %s", error)


def expired(records: list[CheckpointRecord], keep: int, *, written_before: str) -> list[CheckpointRecord]:
    """Of `records`, newest first: those older than the `keep` newest usable ones and written before a time (ISO 8601,
    UTC), but never the newest trusted one.

    What is revoked or unreadable does not count: after a rollback the revoked ones are the newest, and counting them
    would remove exactly those that are still good.
    """
    usable = [record for record in records if record.trust in (Trust.WRITTEN, Trust.TRUSTED)]
    if len(usable) <= keep:
        return []
    oldest_kept = records.index(usable[keep - 1])
    newest_trusted = next((record for record in usable if record.trust is Trust.TRUSTED), None)
    return [
        record
        for record in records[oldest_kept + 1 :]
        if record is not newest_trusted and (record.manifest is None or record.manifest.created_at < written_before)
    ]


def _raise_unwritten(step: Step, failures: Sequence[str]) -> None:
    if failures:
        raise CheckpointWriteError(f"checkpoint of step {step} was not written; " + "; ".join(failures))


def _versions() -> dict[str, str]:
    versions = {"truestep": truestep.__version__, "torch": str(torch.__version__), "python": platform.python_version()}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions
