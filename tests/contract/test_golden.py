"""Golden documents: the JSON Schemas and the dataclasses accept and refuse the same ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import fastjsonschema
import pytest

import truestep.contract
from truestep.contract import (
    Alarm,
    CheckpointEvent,
    CheckpointManifest,
    ContractError,
    DetailType,
    ResumeDirective,
    ResumeEvent,
    UnknownVersionError,
    canonical_bytes,
    directive_schema,
    from_json,
    manifest_schema,
    schema,
    to_json,
)

GOLDEN = Path(truestep.contract.__file__).parent / "golden"
DOCUMENTS: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "alarm-v1": (Alarm, schema(DetailType.ALARM)),
    "checkpoint-v1": (CheckpointEvent, schema(DetailType.CHECKPOINT_TRUSTED)),
    "resume-v1": (ResumeEvent, schema(DetailType.RESUMED)),
    "directive-v1": (ResumeDirective, directive_schema()),
    "manifest-v1": (CheckpointManifest, manifest_schema()),
}
SCHEMA_ONLY = {
    "manifest-v1.invalid.path_escapes",
    "alarm-v1.invalid.node_name_leaves_the_path",
    "alarm-v1.invalid.pod_name_has_a_slash",
}
"""Refused by the schema's pattern; the dataclass has no patterns. Loader and intake refuse such names themselves."""


def golden(kind: str) -> list[Any]:
    return [pytest.param(path, id=path.stem) for path in sorted(GOLDEN.glob(f"*.{kind}.*.json"))]


def load(path: Path) -> tuple[type[Any], dict[str, Any], Any]:
    cls, json_schema = DOCUMENTS[path.name.split(".")[0]]
    return cls, json_schema, json.loads(path.read_text(encoding="utf-8"))


def known_part(document: Any, of: Any) -> Any:
    """`document` reduced to the fields that `of` has, recursively."""
    if isinstance(document, dict) and isinstance(of, dict):
        return {key: known_part(value, of[key]) for key, value in document.items() if key in of}
    return document


@pytest.mark.parametrize("path", golden("valid"))
def test_a_valid_document_passes_both_and_comes_back_the_same(path: Path) -> None:
    cls, json_schema, document = load(path)
    fastjsonschema.compile(json_schema)(document)
    value = from_json(cls, document)
    again = json.loads(canonical_bytes(value))
    assert known_part(document, again) == known_part(again, document)
    assert from_json(cls, again) == value
    fastjsonschema.compile(json_schema)(again)


@pytest.mark.parametrize("path", golden("invalid"))
def test_an_invalid_document_is_refused_by_both(path: Path) -> None:
    cls, json_schema, document = load(path)
    with pytest.raises(fastjsonschema.JsonSchemaValueException):
        fastjsonschema.compile(json_schema)(document)
    if path.stem not in SCHEMA_ONLY:
        with pytest.raises(ContractError):
            from_json(cls, document)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_document_has_golden_examples_of_both_kinds(name: str) -> None:
    assert list(GOLDEN.glob(f"{name}.valid.*.json"))
    assert list(GOLDEN.glob(f"{name}.invalid.*.json"))


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("version", [None, 0, 2, "1", True, 1.0])
def test_another_version_is_refused_with_advice(name: str, version: object) -> None:
    cls, _, document = load(next(iter(sorted(GOLDEN.glob(f"{name}.valid.*.json")))))
    with pytest.raises(UnknownVersionError, match="use the same truestep release"):
        from_json(cls, {**document, "schema_version": version})


@pytest.mark.parametrize("name", DOCUMENTS)
def test_unknown_fields_are_ignored(name: str) -> None:
    cls, json_schema, document = load(next(iter(sorted(GOLDEN.glob(f"{name}.valid.*.json")))))
    newer = {**document, "added_in_a_later_release": {"deep": [1, 2]}}
    fastjsonschema.compile(json_schema)(newer)
    assert from_json(cls, newer) == from_json(cls, document)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_schema_and_dataclass_have_the_same_fields_and_the_same_required_ones(name: str) -> None:
    cls, json_schema = DOCUMENTS[name]
    _assert_same_fields(cls, json_schema, json_schema)


def _assert_same_fields(cls: type[Any], node: dict[str, Any], root: dict[str, Any]) -> None:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    assert set(node["properties"]) == set(fields), cls
    required = {
        name
        for name, field in fields.items()
        if name == "schema_version"
        or (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
    }
    assert set(node["required"]) == required, cls
    for name, definition in root.get("definitions", {}).items():
        if node is root:
            _assert_same_fields(_DEFINITIONS[name], definition, root)


_DEFINITIONS: dict[str, type[Any]] = {
    "run": truestep.contract.RunRef,
    "identity": truestep.contract.IdentityRow,
    "verdict": truestep.contract.Verdict,
    "checkpoint": truestep.contract.CheckpointRef,
    "file": truestep.contract.FileEntry,
}


def test_the_largest_alarm_that_the_schema_allows_stays_under_the_event_bus_limit() -> None:
    """Every list full and every string of realistic length: 256 KB is the limit of one PutEvents entry."""
    _, json_schema, document = load(GOLDEN / "alarm-v1.valid.conclusive.json")
    row = document["suspects"][0]
    full = {
        **document,
        "suspects": [row] * 64,
        "witnesses": [row] * 64,
        "verdict": {
            **document["verdict"],
            "suspects": list(range(1024)),
            "witnesses": list(range(1024)),
            "reason": "r" * 2000,
            "settle": "s" * 2000,
        },
    }
    fastjsonschema.compile(json_schema)(full)
    assert len(canonical_bytes(full)) < 160_000
    for key in ("suspects", "witnesses"):
        with pytest.raises(fastjsonschema.JsonSchemaValueException):
            fastjsonschema.compile(json_schema)({**full, key: [row] * 65})


def test_non_finite_numbers_in_evidence_become_text_that_json_can_carry() -> None:
    _, _, document = load(GOLDEN / "alarm-v1.valid.conclusive.json")
    alarm = dataclasses.replace(Alarm.from_json(document), evidence={"loss": float("nan"), "norm": float("-inf")})
    sent = json.loads(canonical_bytes(alarm), parse_constant=lambda name: pytest.fail(f"JSON has no {name}"))
    assert sent["evidence"] == {"loss": "nan", "norm": "-inf"}
    assert to_json(1.5) == 1.5


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"step": 1.5}, r"\$\.step"),
        ({"suspects": [{"rank": 0}]}, r"\$\.suspects\[0\]\.local_rank"),
        ({"verdict": {"kind": "guilty", "reason": "x"}}, r"\$\.verdict\.kind"),
        ({"suspects": "rank 2"}, r"\$\.suspects"),
        ({"evidence": []}, r"\$\.evidence"),
        ({"checkpoint": {"uri": "s3://b/x", "step": 1}}, r"\$\.checkpoint\.manifest_sha256"),
    ],
)
def test_the_error_names_the_field(change: dict[str, Any], where: str) -> None:
    _, _, document = load(GOLDEN / "alarm-v1.valid.conclusive.json")
    with pytest.raises(ContractError, match=where):
        Alarm.from_json({**document, **change})
