"""The files of one checkpoint: what each rank writes into them, and how it reads them back verified."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import PurePosixPath
from typing import Any

import torch
from torch import nn

from truestep.checkpoints.errors import CheckpointCorruptError, CheckpointError
from truestep.checkpoints.own_functions import OwnFunctions, is_own
from truestep.checkpoints.rank_state import buffer_digests, rank_state, restore_rank_state, unwrapped
from truestep.checkpoints.sharded_files import LAYOUT_NAME, load_training_state, training_state_dict
from truestep.checkpoints.storage import HashingWriter, Storage
from truestep.checkpoints.whole import whole_model, whole_optimizer
from truestep.contract import CheckpointManifest, FileEntry, Rank
from truestep.fingerprint import combine
from truestep.serialization import save_unchecked

MODEL_NAME = "model.pt"
OPTIMIZER_NAME = "optimizer.pt"
EXTRA_NAME = "extra.pt"
_COMPILED = "_orig_mod."


def rng_name(rank: Rank) -> str:
    """Name of the file that holds what belongs to `rank` alone."""
    return f"rng-{rank:05d}.pt"


def extra_name(rank: Rank) -> str:
    """Name of the file that holds the user's extra state of `rank`; rank 0's stands for every rank without one."""
    return EXTRA_NAME if rank == 0 else f"extra-{rank:05d}.pt"


class TrainingState:
    """Model, optimizer and the user's extra state of one rank, as files of a checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        extra_save: Callable[[], Any] | None,
        extra_load: Callable[[Any], None] | None,
        functions: OwnFunctions,
    ) -> None:
        if (extra_save is None) != (extra_load is None):
            raise CheckpointError("extra_save and extra_load belong together: give both or neither")
        if hasattr(optimizer, "consolidate_state_dict"):
            raise CheckpointError(
                f"{type(optimizer).__name__} keeps a part of its state on every rank, rank 0 would save only its own; "
                "train with an optimizer whose state is whole on every rank"
            )
        self.model = unwrapped(model)
        self._optimizer = optimizer
        self._extra_save = extra_save
        self._extra_load = extra_load
        self._extra = b""
        self.functions = functions

    def take_common(self) -> dict[str, Any]:
        """On rank 0, before a save: digests, as JSON, of what another rank writes only where its own differs."""
        self._extra = self._serialized_extra()
        return {"buffers": buffer_digests(self.model), "extra": hashlib.sha256(self._extra).hexdigest()}

    def write(self, storage: Storage, directory: str, rank: Rank, common: Mapping[str, Any]) -> list[FileEntry]:
        """Write this rank's files: all of the common ones on rank 0, the rank's own on every rank."""
        # Whose buffers `load` brings back is the user's choice: every rank's are its own then.
        buffers = {} if self.functions.writes else common["buffers"]
        own = self._own(rank, buffers, common["extra"])
        entries = [_write(storage, directory, name, content) for name, content in own.items()]
        if self.functions.writes:
            return [*entries, *self.functions.write(storage, directory)]
        if rank == 0:
            entries.append(_write(storage, directory, MODEL_NAME, self.model.state_dict()))
            entries.append(_write(storage, directory, OPTIMIZER_NAME, self._optimizer.state_dict()))
        return entries

    def own_files(self, rank: Rank, common: Mapping[str, Any]) -> dict[str, bytes]:
        """What is this rank's beside its share of model and optimizer, as it is now: file name -> content.

        Every rank's buffers are its own here: which rank's would be the common ones is torch's choice.
        """
        return self._own(rank, {}, common["extra"])

    def sharded(self) -> dict[str, Any]:
        """Model and optimizer as `torch.distributed.checkpoint` takes them."""
        return training_state_dict(self.model, self._optimizer)

    def load(
        self,
        storage: Storage,
        directory: str,
        manifest: CheckpointManifest,
        rank: Rank,
        world_size: int,
        kept: ExitStack,
    ) -> Callable[[], None]:
        """Load a checkpoint into this rank, every file's SHA-256 first, whichever way it was written. No communication.

        Returns what is left to be done once every rank has come so far: the user's own function may communicate. The
        generators come last, and stay as they are where another number of ranks wrote them. kept: closed after that.
        Raises `CheckpointCorruptError` naming the file that differs. The state is then undefined until another
        checkpoint has been loaded and `prove`d.
        """
        files = {entry.path: entry for entry in manifest.files}
        same_ranks = manifest.world_size == world_size
        finish: list[Callable[[], None]] = []
        if is_own(manifest):
            finish.append(self.functions.fetch(storage, directory, manifest, kept))
        elif LAYOUT_NAME in files:
            load_training_state(storage, directory, files, self.model, self._optimizer)
        else:
            self.model.load_state_dict(_read(storage, directory, files, MODEL_NAME))
            self._optimizer.load_state_dict(_read(storage, directory, files, OPTIMIZER_NAME))
        if self._extra_load is not None and EXTRA_NAME in files:
            own = extra_name(rank) if same_ranks and extra_name(rank) in files else EXTRA_NAME
            self._extra_load(_read(storage, directory, files, own))
        if same_ranks:
            state = _read(storage, directory, files, rng_name(rank))
            finish.append(lambda: restore_rank_state(self.model, state))

        def rest() -> None:
            for act in finish:
                act()

        return rest

    def prove(self, where: str, manifest: CheckpointManifest) -> None:
        """Raise `CheckpointCorruptError` unless weights and optimizer state have the manifest's fingerprints.

        Collective where the model is sharded. where: the checkpoint's URI, for the message.
        """
        table = self._listed(whole_model(self.model)[1], manifest)
        if manifest.weights_fingerprint not in _possible(table):
            expected = manifest.tensor_fingerprints
            differing = sorted(name for name in expected if table.get(name.removeprefix(_COMPILED)) != expected[name])
            source = _source(manifest, MODEL_NAME)
            raise CheckpointCorruptError(
                f"{where}: the weights loaded from {source} have fingerprint {combine(table)}, the manifest says "
                f"{manifest.weights_fingerprint} (first differing tensor: {differing[0] if differing else 'unknown'}): "
                "they were damaged before they were written, or in this machine's memory"
            )
        if manifest.optimizer_fingerprint:
            _, state = whole_optimizer(self._optimizer, self.model)
            if manifest.optimizer_fingerprint not in _possible(state):
                raise CheckpointCorruptError(
                    f"{where}: the optimizer state loaded from {_source(manifest, OPTIMIZER_NAME)} differs from the "
                    "one that was compared between the ranks before the checkpoint was written"
                )

    def _listed(self, table: Mapping[str, str], manifest: CheckpointManifest) -> dict[str, str]:
        """Without the buffers that the manifest leaves out, since each rank had its own; never without a parameter."""
        expected = {name.removeprefix(_COMPILED) for name in manifest.tensor_fingerprints}
        left_out = {name for name, _ in self.model.named_buffers()} - expected if expected else set()
        return {name: value for name, value in table.items() if name not in left_out}

    def _own(self, rank: Rank, common_buffers: Mapping[str, str], common_extra: str) -> dict[str, bytes]:
        files = {rng_name(rank): _serialized(rank_state(self.model, common_buffers))}
        extra = self._extra if rank == 0 else self._serialized_extra()
        if extra and (rank == 0 or hashlib.sha256(extra).hexdigest() != common_extra):
            files[extra_name(rank)] = extra
        return files

    def _serialized_extra(self) -> bytes:
        return b"" if self._extra_save is None else _readable(self._extra_save())


def _source(manifest: CheckpointManifest, name: str) -> str:
    return name if any(entry.path == name for entry in manifest.files) else "its files"


def require_plain_names(manifest: CheckpointManifest) -> None:
    """Raise `CheckpointCorruptError` for a manifest whose file paths would lead out of the checkpoint."""
    for entry in manifest.files:
        path = PurePosixPath(entry.path)
        if path.is_absolute() or ".." in path.parts or "\\" in entry.path:
            raise CheckpointCorruptError(f"the manifest lists {entry.path!r}, which leads out of its checkpoint")


def _possible(table: Mapping[str, str]) -> set[str]:
    """The fingerprints that the saving run may have printed for this state: torch.compile prefixes names."""
    prefixed = {name if name.startswith("group ") else _COMPILED + name: value for name, value in table.items()}
    return {combine(table), combine(prefixed)}


def _serialized(value: object) -> bytes:
    with io.BytesIO() as file:
        save_unchecked(value, file)
        return file.getvalue()


def _readable(extra: object) -> bytes:
    """`extra`, proved to be readable again: a checkpoint that nobody can load must not be found out at the resume."""
    try:
        content = _serialized(extra)
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"what extra_save returned cannot be read back with torch.load(weights_only=True): {_cause(error)}; "
            "return tensors, numbers, text, lists and dictionaries only, such as a scheduler's state_dict()"
        ) from error
    return content


def _cause(error: Exception) -> str:
    """What torch.load stumbled over, without its advice to load the file unsafely."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return next((line for line in lines if line.startswith("WeightsUnpickler error")), lines[0]).split(" by default.")[
        0
    ]


def _write(storage: Storage, directory: str, name: str, value: object) -> FileEntry:
    def stream(target: HashingWriter) -> None:
        if isinstance(value, bytes):
            target.write(value)
        else:
            save_unchecked(value, target)

    entry = storage.write_stream(f"{directory}/{name}", stream)
    return FileEntry(path=name, bytes=entry.bytes, sha256=entry.sha256)


def _read(storage: Storage, directory: str, files: Mapping[str, FileEntry], name: str) -> Any:
    where = f"{storage.root_uri}/{directory}/{name}"
    if name not in files:
        raise CheckpointCorruptError(f"{where} is not listed in the manifest")
    with storage.open_verified(f"{directory}/{name}", files[name]) as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointCorruptError(
                f"{where} is what was written, but torch.load(weights_only=True) cannot read it: {_cause(error)}"
            ) from error
