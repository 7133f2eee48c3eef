"""An alarm: what ranks observed. Immutable; the recovery concludes from it, never changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from truestep.contract.checkpoint import CheckpointRef
from truestep.contract.codec import from_json, sha256_hex, to_json
from truestep.contract.identity import IdentityRow
from truestep.contract.types import AlarmId, Rank, Step
from truestep.contract.verdict import Verdict

ALARM_SCHEMA_VERSION = 1
NODES_OF_RUN = "nodes_of_run"
"""Field of every alarm's evidence: on how many nodes the run's ranks say they are."""


class Check(StrEnum):
    """Which check raised the alarm."""

    NONFINITE = "nonfinite"
    RING_REPLAY = "ring_replay"
    WEIGHTS = "weights"
    OPTIMIZER_STATE = "optimizer_state"
    REDUCTION = "reduction"
    UPDATE_REPLAY = "update_replay"


@dataclass(frozen=True, kw_only=True)
class RunRef:
    """Which run of which job on which cluster."""

    run_id: str
    """Survives restarts and re-creation of the job (``TRUESTEP_RUN_ID``)."""
    attempt_id: str
    """A uuid that rank 0 broadcasts at attach: a recurrence after a resume is a new alarm, not a duplicate."""
    world_size: int
    restart_count: int = 0
    cluster_arn: str = ""
    region: str = ""
    namespace: str = ""
    job_name: str = ""
    job_kind: str = "HyperPodPyTorchJob"
    checkpoint_root: str = ""
    """URI below which the run's checkpoints lie, or empty where the run keeps none."""


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """What `train` returns and `report_sdc` sends: the detail of the event ``Training Corruption Alarm``."""

    schema_version: int = ALARM_SCHEMA_VERSION
    alarm_id: AlarmId
    run: RunRef
    check: Check
    step: Step
    verdict: Verdict
    suspects: tuple[IdentityRow, ...] = ()
    witnesses: tuple[IdentityRow, ...] = ()
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """Bounded at any world size: only what concerns suspects and witnesses; the rest is a reference."""
    clean_through: Step | None = None
    """Newest step at which every check that could see a computation fault had passed on every rank."""
    checkpoint: CheckpointRef | None = None
    """Newest trusted checkpoint that the run knew of."""
    detected_at: str
    """ISO 8601, UTC."""
    drill: bool = False
    """An exercise: nothing was detected. The recovery runs whole, changes nothing and keeps it out of histories."""

    @property
    def suspect_ranks(self) -> tuple[Rank, ...]:
        return tuple(row.rank for row in self.suspects)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = to_json(self)
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Alarm:
        """Raises `UnknownVersionError` for another major version, `ContractError` for a field that does not fit."""
        return from_json(cls, document)


def alarm_id(run: RunRef, check: Check, step: Step, suspects: tuple[Rank, ...]) -> AlarmId:
    """The id of an alarm: every rank's copy and every retry has the same one. 32 hex digits."""
    key = [run.run_id, run.attempt_id, run.restart_count, str(check), step, list(suspects)]
    return AlarmId(sha256_hex(key)[:32])
