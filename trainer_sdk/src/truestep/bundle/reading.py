"""Reading a bundle: every file's SHA-256 first, then what is in it. Nothing of it is believed before."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from truestep.bundle.contents import (
    BUNDLE_NAME,
    INPUTS_NAME,
    RECORDED_NAME,
    WEIGHTS_NAME,
    BundleError,
    BundleManifest,
    RecordedPass,
)
from truestep.bundle.place import locate, parsed, read_manifest
from truestep.checkpoints.catalogue import read_record
from truestep.checkpoints.errors import CheckpointCorruptError, CheckpointError
from truestep.checkpoints.files import MODEL_NAME
from truestep.checkpoints.storage import Storage, open_storage
from truestep.contract import CheckpointRef, FileEntry
from truestep.contract.words import counted
from truestep.fingerprint import fingerprint_tensors
from truestep.replay import PassInputs

T = TypeVar("T")
_COMPILED = "_orig_mod."


class Bundle:
    """A bundle whose files are what was written."""

    def __init__(
        self, uri: str, manifest: BundleManifest, content: Mapping[str, bytes], recorded: RecordedPass
    ) -> None:
        """Made by `open_bundle`."""
        self.uri = uri
        self.manifest = manifest
        self.recorded = recorded
        self._content = content

    def inputs(self, device: torch.device, *, allow_classes: bool = False) -> PassInputs:
        """What the pass starts from; tensors that were on an accelerator come to `device`.

        allow_classes: let the batch hold any class, which runs code that the bundle names.
        Raises `BundleError` for a batch with classes of its own where that is not allowed.
        """
        numpy_drawn = self._load(INPUTS_NAME, torch.device("cpu"), allow_classes=allow_classes)["rng"]["numpy"]
        if numpy_drawn is not None:
            # The recorded generator state can only be restored into a NumPy that is there.
            try:
                importlib.import_module("numpy")
            except ImportError:
                raise BundleError("the run used NumPy, whose random numbers the pass may draw; install numpy") from None
        same_kind = device.type == self.manifest.device_type

        def place(storage: Any, location: str) -> Any:
            keep = location == "cpu" and same_kind
            return storage if keep or device.type == "cpu" else storage.cuda(device.index)

        return PassInputs.from_document(self._load(INPUTS_NAME, place, allow_classes=allow_classes))

    def parameters(self) -> dict[str, torch.Tensor]:
        """The weights before the update, on the CPU, as their fingerprints say. Raises `BundleError`."""
        place = self.manifest.weights
        if place.kind == "file":
            weights = self._load(WEIGHTS_NAME, torch.device("cpu"))
        elif place.kind == "checkpoint" and place.checkpoint is not None:
            weights = _checkpoint_weights(place.checkpoint)
        else:
            older = f"; the newest trusted checkpoint was {place.checkpoint.uri}" if place.checkpoint else ""
            raise BundleError(
                f"{self.uri} holds no weights, so it cannot be run again: {place.reason or place.kind}{older}. "
                "Raise BundleSettings.max_bytes for the next run"
            )
        expected = self.recorded.parameters
        chosen = {name: _named(weights, name, self.uri) for name in expected}
        found = fingerprint_tensors(chosen)
        wrong = sorted(name for name in expected if found[name] != expected[name])
        if wrong:
            raise BundleError(
                f"{self.uri}: the weights are not those of the run ({counted(len(wrong), 'tensor')}, first "
                f"{wrong[0]}): they were damaged on the way; copy the bundle again"
            )
        return chosen

    def _load(self, name: str, place: Any, *, allow_classes: bool = False) -> Any:
        try:
            return torch.load(io.BytesIO(self._content[name]), map_location=place, weights_only=not allow_classes)
        except Exception as error:
            advice = (
                "; its batch may hold classes of your own: --allow-classes reads them, which runs code that the bundle "
                "names, so only for a bundle that you trust"
                if name == INPUTS_NAME and not allow_classes
                else ""
            )
            line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
            raise BundleError(
                f"torch cannot read {self.uri}/{name}: {line.split(' by default.')[0]}{advice}"
            ) from error


def open_bundle(text: str) -> Bundle:
    """The bundle at a URI or in a directory, every file hashed. Raises `BundleError` for anything else."""
    storage, directory = locate(text)
    uri = f"{storage.root_uri}/{directory}"
    manifest = read_manifest(storage, directory)
    if manifest is None:
        raise BundleError(f"{uri} is not a bundle: it has no {BUNDLE_NAME}, which is written last")
    try:
        content = {entry.path: _verified(storage, directory, entry) for entry in manifest.files}
    except CheckpointError as error:
        raise BundleError(str(error)) from error
    missing = {INPUTS_NAME, RECORDED_NAME} - set(content)
    if missing:
        raise BundleError(f"{uri}/{BUNDLE_NAME} lists no {', '.join(sorted(missing))}")
    return Bundle(uri, manifest, content, parsed(RecordedPass, content[RECORDED_NAME], f"{uri}/{RECORDED_NAME}"))


def _verified(storage: Storage, directory: str, entry: FileEntry) -> bytes:
    if entry.path != Path(entry.path).name:
        raise BundleError(f"{BUNDLE_NAME} lists {entry.path!r}, which leads out of the bundle")
    with storage.open_verified(f"{directory}/{entry.path}", entry) as file:
        return file.read()


def _checkpoint_weights(checkpoint: CheckpointRef) -> Mapping[str, torch.Tensor]:
    root, _, directory = checkpoint.uri.rpartition("/")
    try:
        storage = open_storage(root)
        record = read_record(storage, directory)
        if record is None or record.manifest is None or record.ref.manifest_sha256 != checkpoint.manifest_sha256:
            raise BundleError(f"the bundle's weights are those of {checkpoint.uri}, which is gone or was changed")
        entry = next((entry for entry in record.manifest.files if entry.path == MODEL_NAME), None)
        if entry is None:
            raise BundleError(f"{checkpoint.uri} lists no {MODEL_NAME}")
        with storage.open_verified(f"{directory}/{MODEL_NAME}", entry) as file:
            weights: Mapping[str, torch.Tensor] = torch.load(file, map_location="cpu", weights_only=True)
    except CheckpointCorruptError as error:
        raise BundleError(f"the bundle's weights are those of a checkpoint that is damaged: {error}") from error
    return weights


def _named(weights: Mapping[str, torch.Tensor], name: str, where: str) -> torch.Tensor:
    # A checkpoint is saved from inside torch.compile's wrapper, the run's names come from outside.
    found = weights.get(name, weights.get(name.replace(_COMPILED, "")))
    if not isinstance(found, torch.Tensor):
        raise BundleError(f"{where}: no weights for parameter {name}")
    return found
