"""The contract between training and recovery: alarm, verdict, manifest, directive, events. Standard library only."""

from truestep.contract.alarm import Alarm, Check, RunRef, alarm_id
from truestep.contract.checkpoint import (
    MANIFEST_NAME,
    REVOKED_NAME,
    TRUSTED_NAME,
    CheckpointManifest,
    CheckpointRef,
    FileEntry,
    RevocationMark,
    TrustMark,
)
from truestep.contract.codec import canonical_bytes, from_json, sha256_hex, to_json
from truestep.contract.directive import ResumeDirective
from truestep.contract.errors import ContractError, TruestepError, UnknownVersionError
from truestep.contract.events import (
    SOURCE_RECOVERY,
    SOURCE_TRAINING,
    CheckpointEvent,
    DetailType,
    ResumeEvent,
    schema,
)
from truestep.contract.identity import IdentityRow
from truestep.contract.types import AlarmId, IncidentId, NodeName, Rank, Step
from truestep.contract.verdict import Verdict, VerdictCause, VerdictKind

__all__ = [
    "MANIFEST_NAME",
    "REVOKED_NAME",
    "SOURCE_RECOVERY",
    "SOURCE_TRAINING",
    "TRUSTED_NAME",
    "Alarm",
    "AlarmId",
    "Check",
    "CheckpointEvent",
    "CheckpointManifest",
    "CheckpointRef",
    "ContractError",
    "DetailType",
    "FileEntry",
    "IdentityRow",
    "IncidentId",
    "NodeName",
    "Rank",
    "ResumeDirective",
    "ResumeEvent",
    "RevocationMark",
    "RunRef",
    "Step",
    "TruestepError",
    "TrustMark",
    "UnknownVersionError",
    "Verdict",
    "VerdictCause",
    "VerdictKind",
    "alarm_id",
    "canonical_bytes",
    "from_json",
    "schema",
    "sha256_hex",
    "to_json",
]
