"""The contract between training and recovery: alarm, verdict, manifest, directive, events. Standard library only."""

from truestep.contract.alarm import Alarm, Check, RunRef, alarm_id
from truestep.contract.checkpoint import (
    MANIFEST_NAME,
    REVOKED_NAME,
    TOMBSTONE_NAME,
    TRUSTED_NAME,
    CheckpointManifest,
    CheckpointRef,
    FileEntry,
    RevocationMark,
    Tombstone,
    TrustMark,
)
from truestep.contract.codec import canonical_bytes, from_json, sha256_hex, to_json
from truestep.contract.confirmation import (
    MOST_RUNS,
    REPORT_BYTES,
    DeviceReport,
    NodeReport,
    read_report,
    report_bytes,
    wilson_interval,
)
from truestep.contract.directive import ResumeDirective, directive_sha256, ordered_checkpoint
from truestep.contract.errors import ContractError, TruestepError, UnknownVersionError
from truestep.contract.events import (
    SOURCE_RECOVERY,
    SOURCE_TRAINING,
    CheckpointEvent,
    DetailType,
    ResumeEvent,
    directive_schema,
    manifest_schema,
    schema,
    training_source,
)
from truestep.contract.identity import IdentityRow
from truestep.contract.types import INCIDENT_ID, AlarmId, IncidentId, NodeName, Rank, Step
from truestep.contract.verdict import Verdict, VerdictCause, VerdictKind

__all__ = [
    "INCIDENT_ID",
    "MANIFEST_NAME",
    "MOST_RUNS",
    "REPORT_BYTES",
    "REVOKED_NAME",
    "SOURCE_RECOVERY",
    "SOURCE_TRAINING",
    "TOMBSTONE_NAME",
    "TRUSTED_NAME",
    "Alarm",
    "AlarmId",
    "Check",
    "CheckpointEvent",
    "CheckpointManifest",
    "CheckpointRef",
    "ContractError",
    "DetailType",
    "DeviceReport",
    "FileEntry",
    "IdentityRow",
    "IncidentId",
    "NodeName",
    "NodeReport",
    "Rank",
    "ResumeDirective",
    "ResumeEvent",
    "RevocationMark",
    "RunRef",
    "Step",
    "Tombstone",
    "TruestepError",
    "TrustMark",
    "UnknownVersionError",
    "Verdict",
    "VerdictCause",
    "VerdictKind",
    "alarm_id",
    "canonical_bytes",
    "directive_schema",
    "directive_sha256",
    "from_json",
    "manifest_schema",
    "ordered_checkpoint",
    "read_report",
    "report_bytes",
    "schema",
    "sha256_hex",
    "to_json",
    "training_source",
    "wilson_interval",
]
