"""Tensors in files that ``torch.save`` wrote, without the code of the model that they belong to."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from truestep.checkpoints.errors import CheckpointCorruptError
from truestep.checkpoints.storage import Storage
from truestep.cli.errors import CommandError
from truestep.contract import CheckpointManifest, FileEntry

if TYPE_CHECKING:
    import torch


def require_torch(what: str) -> None:
    """Raise `CommandError` where torch is not installed. what: the command or option that needs it."""
    if importlib.util.find_spec("torch") is None:
        raise CommandError(
            f"{what} needs torch, which is not installed here; install it or run this in the training image"
        )


def load_file(path: Path) -> Any:
    """What is in a file, on the CPU, by ``weights_only=True``. Raises `CommandError` for one that cannot be read."""
    import torch

    if not path.is_file():
        raise CommandError(f"{path} is not a file; give one that torch.save wrote")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror or error}") from error
    except Exception as error:  # whatever a damaged archive or an unknown class makes torch raise
        raise CommandError(f"{path} {_unreadable(error)}") from error


def load_share(storage: Storage, directory: str, manifest: CheckpointManifest, file: str) -> Any:
    """What ``model.pt`` or ``optimizer.pt`` would hold, from a checkpoint that every rank wrote its share of."""
    from truestep.checkpoints.sharded_files import read_shares

    files = {entry.path: entry for entry in manifest.files}
    return read_shares(storage, directory, files)[file.removesuffix(".pt")]


def is_in_shares(manifest: CheckpointManifest, file: str) -> bool:
    """Whether ``model.pt`` or ``optimizer.pt`` lies in shares instead of in a file of its own."""
    return file in ("model.pt", "optimizer.pt") and any(entry.path == ".metadata" for entry in manifest.files)


def load_checkpoint_file(storage: Storage, directory: str, entry: FileEntry) -> Any:
    """What is in a checkpoint's file, hashed while read. Raises `CheckpointCorruptError` naming the file."""
    import torch

    path = f"{directory}/{entry.path}"
    with storage.open_verified(path, entry) as file:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointCorruptError(
                f"{storage.root_uri}/{path} is what was written, but it {_unreadable(error)}"
            ) from error


def leaves_of(content: Any) -> dict[str, torch.Tensor | str]:
    """Path -> tensor, or the text of anything else, through mappings, lists and tuples; parts joined by ``/``."""
    return dict(_walk("", content))


def tensors_of(content: Any) -> dict[str, torch.Tensor]:
    """`leaves_of`, the tensors alone."""
    return {path: leaf for path, leaf in leaves_of(content).items() if not isinstance(leaf, str)}


def _walk(path: str, value: Any) -> Iterator[tuple[str, torch.Tensor | str]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield path or "tensor", value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(f"{path}/{key}" if path else str(key), item)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _walk(f"{path}/{index}" if path else str(index), item)
    else:
        yield path or "value", value.hex() if isinstance(value, float) else repr(value)


def _unreadable(error: Exception) -> str:
    """Why, in our own words: torch's message advises to switch the protection off."""
    code = re.search(r"GLOBAL ([\w.]+)", str(error))
    if code:
        return (
            f"holds {code[1]}, which is neither a tensor nor a plain value, so that reading it could run code; save "
            "the state_dict, and give that"
        )
    return "was not written by torch.save, or is damaged; give a file that torch.save wrote"
