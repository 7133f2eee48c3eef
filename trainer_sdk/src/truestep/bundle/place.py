"""Where a bundle lies, and its marker. No torch: what only starts a confirmation need not load it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from truestep.bundle.contents import BUNDLE_NAME, BundleError, BundleManifest
from truestep.checkpoints.errors import CheckpointError
from truestep.checkpoints.storage import Storage, open_storage
from truestep.contract import ContractError, from_json, parse_json

T = TypeVar("T")


def read_manifest(storage: Storage, directory: str) -> BundleManifest | None:
    """The bundle's marker, which is written last; None while there is none. Raises `BundleError`."""
    try:
        marker = storage.read(f"{directory}/{BUNDLE_NAME}")
    except CheckpointError as error:
        raise BundleError(str(error)) from error
    where = f"{storage.root_uri}/{directory}/{BUNDLE_NAME}"
    return None if marker is None else parsed(BundleManifest, marker, where)


def locate(text: str) -> tuple[Storage, str]:
    """The storage and the directory in it that a URI, or a local directory, names. Raises `BundleError`."""
    place = text.rstrip("/").removesuffix(f"/{BUNDLE_NAME}")
    if "://" not in place:
        directory = Path(place).resolve()
        if not directory.is_dir():
            raise BundleError(f"{directory} is not a directory; give the bundle_uri of an alarm's evidence")
        place = directory.as_uri()
    root, _, name = place.rpartition("/")
    try:
        return open_storage(root), name
    except CheckpointError as error:
        raise BundleError(f"{text!r} is neither a directory nor s3://bucket/... or file:///...: {error}") from error


def parsed(cls: type[T], content: bytes, where: str) -> T:
    """The document of class `cls` in these bytes. where: for the message of the `BundleError`."""
    try:
        return from_json(cls, parse_json(content))
    except (ValueError, ContractError) as error:
        raise BundleError(f"{where} cannot be read: {error}") from error
