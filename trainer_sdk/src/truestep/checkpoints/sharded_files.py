"""A checkpoint's model and optimizer in the format of `torch.distributed.checkpoint`: every rank writes its share.

The files are those that torch's own `FileSystemWriter` makes, so that torch's tools read them; but they go to any
`Storage`, are hashed while they are written, and are verified before anything is loaded. Tensors and the layout are
read without running code that a file may hold.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future as ConcurrentFuture
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from truestep.checkpoints.errors import CheckpointCorruptError
from truestep.checkpoints.storage import HashingWriter, Storage
from truestep.contract import FileEntry
from truestep.serialization import save_unchecked

LAYOUT_NAME = ".metadata"
"""torch's name for the file that says which tensor lies where; a checkpoint in this format has it."""


def training_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Model and optimizer under the parameters' names, whichever way they are wrapped or sharded."""
    return {"model": get_model_state_dict(model), "optimizer": _optimizer_state_dict(model, optimizer)}


def _optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    if optimizer.state:
        return get_optimizer_state_dict(model, optimizer)
    # torch's function would make the state by a step of its own, which counts: it would not be this optimizer any more.
    return {"param_groups": optimizer.state_dict()["param_groups"]}


def load_training_state(
    storage: Storage,
    directory: str,
    files: Mapping[str, FileEntry],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Load what this rank needs, whatever the number of ranks that wrote it. No communication.

    Raises `CheckpointCorruptError` naming the file that is not what was written.
    """
    saved = VerifiedReader(storage, directory, files).read_metadata().state_dict_metadata
    stateless = not any(name.startswith("optimizer.state.") for name in saved)
    if stateless:
        optimizer.state.clear()
        state = training_state_dict(model, optimizer)
    else:
        state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    load_into(state, storage, directory, files, _SafePlanner())
    set_model_state_dict(model, state["model"])
    if stateless:
        for group, settings in zip(optimizer.param_groups, state["optimizer"]["param_groups"], strict=True):
            group.update({key: value for key, value in settings.items() if key != "params"})
    else:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])


def read_shares(storage: Storage, directory: str, files: Mapping[str, FileEntry]) -> dict[str, Any]:
    """``{"model": {name: tensor}, "optimizer": ...}``, whole and on the CPU, without the model's code."""
    state: dict[str, Any] = {}
    load_into(state, storage, directory, files, _SafeWholePlanner())  # type: ignore[no-untyped-call]
    return state


def load_into(
    state: dict[str, Any],
    storage: Storage,
    directory: str,
    files: Mapping[str, FileEntry],
    planner: LoadPlanner,
) -> None:
    """Fill `state` from a checkpoint, each of its files verified first. No communication."""
    reader = VerifiedReader(storage, directory, files)
    try:
        _load_state_dict(state, reader, no_dist=True, planner=planner)
    except CheckpointException as failed:
        raise first_cause(failed) from failed


def first_cause(failed: CheckpointException) -> Exception:
    """What went wrong on the lowest rank that failed, as an ordinary exception."""
    cause = failed.failures[min(failed.failures)][0]
    return cause if isinstance(cause, Exception) else RuntimeError(str(cause))


class VerifiedWriter(StorageWriter):
    """Writes one file a rank, hashed on the way; once all ranks have written, rank 0 writes the layout and seals."""

    def __init__(
        self,
        storage: Storage,
        directory: str,
        own: Mapping[str, bytes],
        seal: Callable[[Sequence[FileEntry]], None],
    ) -> None:
        """own: this rank's further files. seal: called on rank 0 with every file of every rank."""
        self._storage, self._directory = storage, directory
        self._own, self._seal = own, seal

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to forget: one writer a checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to set up."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """The checkpoint is named by the constructor."""
        return checkpoint_id is None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As torch planned it."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names each rank's file, as torch does."""
        return [dataclasses.replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files; what they are travels to rank 0 with the results."""
        results: list[WriteResult] = []
        entries = [self._write(name, [content]) for name, content in self._own.items()]
        if plan.items:
            name = plan.storage_data

            def stream(target: HashingWriter) -> None:
                position = _Position(target)
                results.extend(_write_item(position, item, planner, name) for item in plan.items)

            path = f"{self._directory}/{name}"
            entries.append(self._named(self._storage.write_stream(path, stream), name))
        done: Future[list[WriteResult]] = Future()
        done.set_result([*results, cast(WriteResult, _FilesOfRank(entries))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0, after every rank has written: the layout, then the manifest."""
        written = [result for row in results for result in row]
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {r.index: r.storage_data for r in written if isinstance(r, WriteResult)}
        entries = [entry for row in written if isinstance(row, _FilesOfRank) for entry in row.entries]
        self._seal([*entries, self._write(LAYOUT_NAME, [pickle.dumps(metadata)])])

    def _write(self, name: str, parts: Sequence[bytes]) -> FileEntry:
        def stream(target: HashingWriter) -> None:
            for part in parts:
                target.write(part)

        return self._named(self._storage.write_stream(f"{self._directory}/{name}", stream), name)

    @staticmethod
    def _named(entry: FileEntry, name: str) -> FileEntry:
        return dataclasses.replace(entry, path=name)


@dataclasses.dataclass(frozen=True)
class _FilesOfRank:
    """Rides along with the results, which torch only hands on."""

    entries: list[FileEntry]


class _Position:
    """A write-only stream that knows where it stands."""

    def __init__(self, target: HashingWriter) -> None:
        self._target = target
        self.offset = 0

    def write(self, content: Any) -> int:
        written = self._target.write(content)
        self.offset += written
        return written

    def flush(self) -> None:
        """Nothing is buffered here."""


def _write_item(stream: _Position, item: WriteItem, planner: SavePlanner, name: str) -> WriteResult:
    start, data = stream.offset, planner.resolve_data(item)
    if item.type == WriteItemType.BYTE_IO:
        stream.write(cast(io.BytesIO, data).getvalue())
    else:
        tensor = cast(torch.Tensor, data).detach().cpu()
        # torch.save writes a view's whole storage.
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        save_unchecked(tensor if whole else tensor.clone(), stream)
    length = stream.offset - start
    return WriteResult(
        index=item.index,
        size_in_bytes=length,
        storage_data=_StorageInfo(name, start, length, transform_descriptors=None),
    )


class VerifiedReader(StorageReader):
    """Reads files whose SHA-256 is the manifest's, and nothing else."""

    def __init__(self, storage: Storage, directory: str, files: Mapping[str, FileEntry]) -> None:
        """files: what the manifest lists, by name."""
        self._storage, self._directory, self._files = storage, directory, files
        self._places: dict[Any, _StorageInfo] = {}

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing to forget: one reader a checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """The checkpoint is named by the constructor."""
        return checkpoint_id is None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """The layout."""
        with self._open(LAYOUT_NAME) as file:
            try:
                return _LayoutUnpickler(file).load()  # type: ignore[no-any-return]
            except Exception as error:
                raise CheckpointCorruptError(f"{self._where(LAYOUT_NAME)} cannot be read: {error}") from error

    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,  # noqa: ARG002
        *_args: Any,
        **_kwargs: Any,
    ) -> None:
        """Remember where everything lies."""
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As torch planned it."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As torch planned it."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Each file is verified once, then its parts are read."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._places[item.storage_index].relative_path, []).append(item)
        for name, items in sorted(by_file.items()):
            with self._open(name) as file:
                for item in items:
                    self._read_item(file, name, item, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: IO[bytes], name: str, item: ReadItem, planner: LoadPlanner) -> None:
        place = self._places[item.storage_index]
        file.seek(place.offset)
        content = io.BytesIO(file.read(place.length))
        if item.type == LoadItemType.BYTE_IO:
            planner.load_bytes(item, content)
            return
        tensor = torch.load(content, map_location="cpu", weights_only=True)
        for dimension, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
            tensor = tensor.narrow(dimension, start, length)
        target = planner.resolve_tensor(item).detach()
        if target.size() != tensor.size():
            raise CheckpointCorruptError(
                f"{self._where(name)}: {item.dest_index.fqn} has shape {list(tensor.size())}, the model wants "
                f"{list(target.size())}"
            )
        target.copy_(tensor)
        planner.commit_tensor(item, target)

    def _open(self, name: str) -> Any:
        if name not in self._files:
            raise CheckpointCorruptError(f"{self._where(name)} is not listed in the manifest")
        return self._storage.open_verified(f"{self._directory}/{name}", self._files[name])

    def _where(self, name: str) -> str:
        return f"{self._storage.root_uri}/{self._directory}/{name}"


class _SafePlanner(DefaultLoadPlanner):
    """torch's planner unpickles whatever a file holds."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, map_location="cpu", weights_only=True)
        again = io.BytesIO()
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


class _SafeWholePlanner(_SafePlanner, _EmptyStateDictLoadPlanner):
    """Makes the state from the layout; what is no tensor is read like everything else."""


class _LayoutUnpickler(pickle.Unpickler):
    """Makes objects of the classes of which a layout consists, and no others."""

    _ALLOWED = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("builtins", "set"),
        }
    )
    _MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name) if module in ("torch", *self._MODULES) else None
        if (module, name) in self._ALLOWED:
            return super().find_class(module, name)
        layout_class = module in self._MODULES and isinstance(found, type) and found.__module__ == module
        if layout_class or (module == "torch" and isinstance(found, torch.dtype)):
            return found
        raise pickle.UnpicklingError(f"it holds {module}.{name}, which is no part of a layout")


def every_cause(failed: CheckpointException) -> str:
    """What went wrong on each rank that failed."""
    return "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in sorted(failed.failures.items()))


def save_together(state: dict[str, Any], writer: VerifiedWriter, group: dist.ProcessGroup) -> None:
    """Collective over `group`; returns on every rank once the checkpoint is sealed, or raises on every rank."""
    save(state, storage_writer=writer, process_group=group)


def save_in_background(
    state: dict[str, Any], writer: VerifiedWriter, group: dist.ProcessGroup
) -> ConcurrentFuture[Any]:
    """Copy the state to host memory now, write it in a thread. `group` must serve nothing else meanwhile."""
    return cast("ConcurrentFuture[Any]", async_save(state, storage_writer=writer, process_group=group))
