"""Dataclass <-> JSON object, strictly typed, tolerant of unknown fields.

Unknown fields are ignored so that a newer producer can talk to an older consumer; a missing or mistyped field raises
`ContractError` with the path of the field, because a document half understood is worse than one refused.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

from truestep.contract.errors import ContractError, UnknownVersionError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """Return `value` as plain JSON types: dataclasses become objects, tuples become arrays, enums their value.

    Non-finite floats become the strings ``nan``, ``inf``, ``-inf``: JSON has no such numbers, evidence does.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, StrEnum):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def from_json(cls: type[T], document: Any, *, path: str = "$") -> T:
    """Build the dataclass `cls` from a JSON object. Raises `ContractError` naming the first field that does not fit.

    A class with a field ``schema_version`` accepts only that field's default: `UnknownVersionError` otherwise.
    """
    if not isinstance(document, Mapping):
        raise ContractError(f"{path}: expected an object, got {type(document).__name__}")
    _check_version(cls, document, path)
    hints = typing.get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        where = f"{path}.{field.name}"
        if field.name in document:
            arguments[field.name] = _convert(hints[field.name], document[field.name], where)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ContractError(f"{where}: required field is missing")
    try:
        return cls(**arguments)
    except ValueError as error:
        raise ContractError(f"{path}: {error}") from error


def parse_json(text: str | bytes) -> Any:
    """The JSON document in a text from outside. Raises ValueError for what is none, and for brackets too deep to read.

    Nested deeper than Python's parser goes (about a thousand), a text is damage like any other.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its brackets are nested too deep to be read") from error


def canonical_bytes(document: Any) -> bytes:
    """The one byte string of a JSON document: sorted keys, no spaces, UTF-8. Hashes and signatures cover it."""
    return json.dumps(to_json(document), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def sha256_hex(document: Any) -> str:
    """SHA-256 of `canonical_bytes(document)`, in hex."""
    return hashlib.sha256(canonical_bytes(document)).hexdigest()


def _check_version(cls: type[Any], document: Mapping[str, Any], path: str) -> None:
    for field in dataclasses.fields(cls):
        version = document.get("schema_version")
        # `True == 1` and `1.0 == 1` in Python; neither is a version.
        if field.name == "schema_version" and (type(version) is not int or version != field.default):
            raise UnknownVersionError(
                f"{path}: {cls.__name__} schema_version {version!r} is not supported (this reads {field.default}); "
                "use the same truestep release in the training image and in the deployed recovery"
            )


def _convert(hint: Any, value: Any, path: str) -> Any:
    if isinstance(hint, typing.NewType):
        hint = hint.__supertype__
    origin = typing.get_origin(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in typing.get_args(hint):
            return None
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _convert(inner, value, path)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ContractError(f"{path}: expected an array, got {type(value).__name__}")
        item = typing.get_args(hint)[0]
        return tuple(_convert(item, entry, f"{path}[{index}]") for index, entry in enumerate(value))
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ContractError(f"{path}: expected an object, got {type(value).__name__}")
        item = typing.get_args(hint)[1]
        return {str(key): _convert(item, entry, f"{path}.{key}") for key, entry in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return value if isinstance(value, hint) else from_json(hint, value, path=path)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        try:
            return hint(value)
        except ValueError:
            raise ContractError(f"{path}: {value!r} is not one of {', '.join(hint)}") from None
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise ContractError(f"{path}: expected {hint.__name__}, got {type(value).__name__} {value!r}")
    return value
