"""Keeps an alarm within the limits of the event bus and of the schema, whatever its evidence holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from truestep.contract import Alarm, canonical_bytes, sha256_hex, to_json

DETAIL_BYTES = 200_000
"""Limit of a detail here; PutEvents takes 256 KB an entry."""
ROWS = 64
"""Identity rows of suspects, and of witnesses."""
RANKS = 1024
EVIDENCE_FIELDS = 64
TEXT = 2000
KEPT = ("bundle_uri", "bundle_failed", "bundle_expected", "bundle_missing")
"""Evidence that never gives way: by it the recovery finds what it can repeat."""


def fitted(alarm: Alarm) -> Alarm:
    """The alarm within the limits: rows and ranks beyond them are cut, too large evidence gives way to its hash.

    The alarm that training holds is not changed; what was cut is said in the evidence.
    """
    cut: dict[str, Any] = {}
    for name, limit, rows in (("suspects", ROWS, alarm.suspects), ("witnesses", ROWS, alarm.witnesses)):
        if len(rows) > limit:
            cut[f"{name}_in_all"] = len(rows)
    verdict = replace(
        alarm.verdict,
        suspects=alarm.verdict.suspects[:RANKS],
        witnesses=alarm.verdict.witnesses[:RANKS],
        reason=_shortened(alarm.verdict.reason),
        settle=_shortened(alarm.verdict.settle),
    )
    evidence = _plain(alarm.evidence)
    if len(evidence) + len(cut) > EVIDENCE_FIELDS or len(canonical_bytes(evidence)) > DETAIL_BYTES // 2:
        kept = {name: evidence[name] for name in KEPT if name in evidence and len(str(evidence[name])) <= TEXT}
        cut["evidence_left_out"] = {
            "fields": sorted(evidence.keys() - kept)[:EVIDENCE_FIELDS],
            "bytes": len(canonical_bytes(evidence)),
            "sha256": sha256_hex(evidence),
        }
        evidence = kept
    return replace(
        alarm,
        verdict=verdict,
        suspects=alarm.suspects[:ROWS],
        witnesses=alarm.witnesses[:ROWS],
        evidence={**evidence, **cut},
    )


def _plain(evidence: Mapping[str, Any]) -> dict[str, Any]:
    """The evidence as JSON types; what JSON cannot carry becomes its text, because an alarm is never lost to a type."""
    document: dict[str, Any] = json.loads(json.dumps(to_json(evidence), default=str))
    return document


def _shortened(text: str) -> str:
    return text if len(text) <= TEXT else text[: TEXT - 1] + "…"
