"""Writing a bundle before the alarm goes out: in time or not at all, and never at the alarm's cost."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import IO, Any

import torch
from torch import nn

from truestep.attachment import Attachment
from truestep.bundle.contents import (
    BUNDLE_NAME,
    BUNDLES,
    INPUTS_NAME,
    RECORDED_NAME,
    WEIGHTS_NAME,
    BundleError,
    BundleManifest,
    PartyResult,
    RecordedPass,
    TraceEvent,
    WeightsPlace,
)
from truestep.bundle.failing import FailingPass
from truestep.bundle.modes import applied_modes, versions
from truestep.bundle.settings import BundleSettings
from truestep.bundle.trace import PassTrace, untraceable
from truestep.checkpoints.catalogue import read_record
from truestep.checkpoints.storage import Storage, open_storage, root_as_uri
from truestep.contract import (
    CheckpointRef,
    FileEntry,
    Rank,
    Step,
    Verdict,
    canonical_bytes,
    from_json,
)
from truestep.fingerprint import fingerprint_model, fingerprint_tensors
from truestep.group_lifetime import end_before_exit
from truestep.protocols import CheckpointStore
from truestep.replay import ComputeLoss, PassInputs, PassResult, replay
from truestep.serialization import save_unchecked

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Occasion:
    """The alarm that a bundle belongs to."""

    alarm_id: str
    step: Step
    verdict: Verdict
    failing: FailingPass


class EvidenceBundles:
    """Writes the bundles of one guarded model."""

    def __init__(
        self,
        attachment: Attachment,
        module: nn.Module,
        compute_loss: ComputeLoss | None,
        settings: BundleSettings | None,
        store: Callable[[], CheckpointStore | None],
    ) -> None:
        """module: the one inside DDP. settings: None writes none."""
        self._attachment = attachment
        self._module = module
        self._compute_loss = compute_loss
        self._settings = settings
        self._store = store

    def write(self, occasion: Occasion) -> dict[str, str]:
        """What the alarm's evidence says: ``bundle_uri``, or ``bundle_failed`` or ``bundle_missing`` with the reason.

        ``bundle_expected`` beside ``bundle_failed`` is the address at which the bundle may be complete later; empty
        where none will come. Collective; never raises. Takes at most the settings' `timeout_seconds`, and the exchange
        of the results.
        """
        settings, compute_loss = self._settings, self._compute_loss
        if settings is None or compute_loss is None:
            return {"bundle_missing": "this run keeps no bundles (bundles=None)"}
        chosen = occasion.failing.chosen
        address = ""
        try:
            address = self._address(occasion, settings)
            results = self._gather_results(occasion.failing)
            outcome: dict[str, str] = {}
            if self._attachment.rank == chosen.writer:
                outcome = self._in_time(occasion, results, settings, compute_loss, address)
            said: dict[str, str] = json.loads(
                self._attachment.cpu_group.broadcast_bytes(canonical_bytes(outcome), chosen.writer)
            )
        except Exception as error:
            # How far the writer got, or gets, this rank does not know.
            said = {"bundle_failed": _sentence(error), "bundle_expected": address}
        if "bundle_failed" in said and self._attachment.rank == chosen.writer:
            _log.error("the evidence bundle was not written: %s", said["bundle_failed"])
        return said

    def _gather_results(self, failing: FailingPass) -> dict[Rank, PassResult]:
        """On the writer: what every party computed. Empty on the others."""
        chosen, me = failing.chosen, self._attachment.rank
        transfers = [(int(party), int(chosen.writer)) for party in chosen.parties if party != chosen.writer]
        own = canonical_bytes(asdict(failing.own)) if failing.own is not None else b""
        arrived = self._attachment.cpu_group.exchange(transfers, own)
        if me != chosen.writer:
            return {}
        if failing.own is not None:
            arrived[me] = own
        return {Rank(rank): from_json(PassResult, json.loads(data)) for rank, data in arrived.items()}

    def _in_time(
        self,
        occasion: Occasion,
        results: Mapping[Rank, PassResult],
        settings: BundleSettings,
        compute_loss: ComputeLoss,
        address: str,
    ) -> dict[str, str]:
        outcome: dict[str, str] = {}

        def work() -> None:
            try:
                if torch.cuda.is_available():  # a thread starts on the first device, whatever its process uses
                    torch.cuda.set_device(_device(self._module))
                outcome["bundle_uri"] = self._write(occasion, results, settings, compute_loss)
            except Exception as error:
                outcome.update(bundle_failed=_sentence(error), bundle_expected="")

        # A daemon: a storage or a device that hangs must keep neither the alarm nor the end of the process.
        thread = threading.Thread(target=work, name="truestep-bundle", daemon=True)
        thread.start()
        end_before_exit(thread)
        thread.join(settings.timeout_seconds)
        if thread.is_alive():
            late = f"not written within {settings.timeout_seconds:g} s; it may be complete later"
            return {"bundle_failed": late, "bundle_expected": address}
        return dict(outcome)

    def _write(
        self,
        occasion: Occasion,
        results: Mapping[Rank, PassResult],
        settings: BundleSettings,
        compute_loss: ComputeLoss,
    ) -> str:
        root = self._root(settings)
        if not root:
            raise BundleError(
                "no place for it: set TRUESTEP_CHECKPOINT_ROOT, or give the guard BundleSettings(root_uri=...)"
            )
        if len(occasion.failing.payload) > settings.max_bytes:
            raise BundleError(
                f"micro-batch and buffers take {len(occasion.failing.payload)} bytes, more than the "
                f"{settings.max_bytes} of BundleSettings.max_bytes"
            )
        bundle = _BundleFiles(open_storage(root), f"{BUNDLES}/{occasion.alarm_id}")
        parameters = dict(self._module.named_parameters())
        place = self._place_weights(parameters, settings.max_bytes - len(occasion.failing.payload))
        bundle.add(INPUTS_NAME, lambda file: file.write(occasion.failing.payload))
        if place.kind == "file":
            weights = {name: parameter.detach() for name, parameter in parameters.items()}
            bundle.add(WEIGHTS_NAME, lambda file: save_unchecked(weights, file))
        recorded = self._recorded(occasion, results, compute_loss)
        bundle.add(RECORDED_NAME, lambda file: file.write(canonical_bytes(recorded)))
        return bundle.seal(self._manifest(occasion, settings, place, bundle.files))

    def _root(self, settings: BundleSettings) -> str:
        """Where bundles go; empty where nothing says it."""
        store = self._store()
        return settings.root_uri or (store.root_uri if store else "") or self._attachment.run.checkpoint_root

    def _address(self, occasion: Occasion, settings: BundleSettings) -> str:
        """URI of the bundle once it is complete; empty where there is no place for it. Looks at no storage."""
        root = root_as_uri(self._root(settings).rstrip("/"))
        return f"{root}/{BUNDLES}/{occasion.alarm_id}" if root else ""

    def _place_weights(self, parameters: Mapping[str, nn.Parameter], max_bytes: int) -> WeightsPlace:
        store = self._store()
        size = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
        trusted = store.newest_trusted if store is not None else None
        if trusted is not None and _weights_of(trusted) == fingerprint_model(self._module)[0]:
            return WeightsPlace(kind="checkpoint", bytes=size, checkpoint=trusted)
        if size <= max_bytes:
            return WeightsPlace(kind="file", bytes=size)
        reason = f"the weights take {size} bytes, more than the {max_bytes} that BundleSettings.max_bytes leaves"
        return WeightsPlace(kind="left_out", bytes=size, checkpoint=trusted, reason=reason)

    def _recorded(
        self, occasion: Occasion, results: Mapping[Rank, PassResult], compute_loss: ComputeLoss
    ) -> RecordedPass:
        trace, missing = self._trace(occasion.failing, compute_loss)
        return RecordedPass(
            results={str(rank): party_result(result) for rank, result in sorted(results.items())},
            parameters=dict(fingerprint_tensors(dict(self._module.named_parameters()))),
            frozen=tuple(name for name, p in self._module.named_parameters() if not p.requires_grad),
            evaluating=tuple(name for name, child in self._module.named_modules() if not child.training),
            trace=trace,
            trace_missing=missing,
        )

    def _trace(self, failing: FailingPass, compute_loss: ComputeLoss) -> tuple[tuple[TraceEvent, ...], str]:
        missing = untraceable(self._module)
        if missing:
            return (), missing
        with applied_modes(failing.modes):
            trace = PassTrace(self._module)
            try:
                again = replay(self._module, PassInputs.from_bytes(failing.payload), compute_loss)
                events = trace.take()
            finally:
                trace.close()
        if failing.own is None or party_result(again) != party_result(failing.own):
            return (), "the writer did not get its own result again"
        return events, ""

    def _manifest(
        self, occasion: Occasion, settings: BundleSettings, place: WeightsPlace, files: tuple[FileEntry, ...]
    ) -> BundleManifest:
        failing, attachment, device = occasion.failing, self._attachment, _device(self._module)
        return BundleManifest(
            alarm_id=occasion.alarm_id,
            run=attachment.run,
            step=occasion.step,
            producer=failing.chosen.producer,
            replayer=failing.chosen.replayer,
            writer=attachment.identity,
            suspects=tuple(attachment.identities[rank] for rank in occasion.verdict.suspects[:16]),
            reference=failing.chosen.reference,
            compares_loss=failing.compares_loss,
            compares_gradients=failing.compares_gradients,
            inputs_fingerprint=PassInputs.from_bytes(failing.payload).fingerprint(),
            weights=place,
            model=settings.model,
            device_type=device.type,
            versions=versions(device),
            modes=failing.modes,
            files=files,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        )


class _BundleFiles:
    """The files of one bundle, and its marker."""

    def __init__(self, storage: Storage, directory: str) -> None:
        self._storage = storage
        self._directory = directory
        self.files: tuple[FileEntry, ...] = ()

    def add(self, name: str, write: Callable[[IO[bytes]], Any]) -> None:
        entry = self._storage.write_stream(f"{self._directory}/{name}", write)
        self.files = (*self.files, FileEntry(path=name, bytes=entry.bytes, sha256=entry.sha256))

    def seal(self, manifest: BundleManifest) -> str:
        self._storage.write_once(f"{self._directory}/{BUNDLE_NAME}", canonical_bytes(manifest))
        return f"{self._storage.root_uri}/{self._directory}"


def party_result(result: PassResult) -> PartyResult:
    """What is compared of a pass."""
    return PartyResult(
        loss=result.loss,
        loss_value=result.loss_value,
        gradients={name: tuple(values) for name, values in result.gradients.items()},
    )


def _weights_of(checkpoint: CheckpointRef) -> str:
    """The fingerprint in a checkpoint's manifest; empty where it is not what the reference says."""
    root, _, directory = checkpoint.uri.rpartition("/")
    record = read_record(open_storage(root), directory)
    known = record is not None and record.ref.manifest_sha256 == checkpoint.manifest_sha256
    return record.manifest.weights_fingerprint if record is not None and known and record.manifest else ""


def _device(module: nn.Module) -> torch.device:
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _sentence(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:500]
