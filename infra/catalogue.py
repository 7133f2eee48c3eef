"""The functions, and what each may touch. The one table from which roles, environments and alarms are built."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from lambdas.domain.cluster_access import Group


class Access(Enum):
    """A capability that a function's role is given; ``infra.permissions`` turns it into statements."""

    TABLE = auto()
    """Read and write whole items: every handler loads its incident and records what it did."""
    TABLE_READ = auto()
    """Read single items, and write nothing."""
    TABLE_UPDATE = auto()
    """Change one attribute of an item that others change too: an alarm's incident, the breaker's nodes."""
    TABLE_RELEASE = auto()
    """Delete claims (of the job, the node), and their places in the breaker."""
    HISTORY = auto()
    """Query what the table remembers of a GPU or of a job's checkpoints."""
    LISTING = auto()
    """Query which incidents there are, and which jobs train."""
    START_RECOVERY = auto()
    """Start an execution of the recovery."""
    SEE_RECOVERIES = auto()
    """See whether an execution of the recovery runs, and with what it was started."""
    LIST_RECOVERIES = auto()
    """See which executions of the recovery run."""
    SEE_DECISIONS = auto()
    """The same of an execution in which a person decides in the console."""
    ANSWER_TOKEN = auto()
    """Complete a state that waits for a task token."""
    ANNOUNCE = auto()
    """Publish to the topic."""
    SIGN = auto()
    """Make the signature of an approval link."""
    VERIFY_SIGNATURE = auto()
    """Check the signature of an approval link."""
    SIGN_DECISION = auto()
    """Make the MAC of a person's decision."""
    VERIFY_DECISION = auto()
    """Check the MAC of a decision before acting on it."""
    CONSOLE_LINK = auto()
    """Make and check links of the console; its key signs nothing else."""
    EVIDENCE_WRITE = auto()
    EVIDENCE_READ = auto()
    """Read what was kept of an incident, to draw it."""
    KUBERNETES = auto()
    """Reach the API server of the configured clusters; what it may do there, its Kubernetes groups say."""
    HYPERPOD_LIST = auto()
    """List the clusters' instances."""
    HYPERPOD_NODE = auto()
    """Look at one instance."""
    HYPERPOD_CHECK = auto()
    """Start deep health checks, and see whether the cluster acts on a failed one by itself."""
    HYPERPOD_REPLACE = auto()
    """Replace nodes, which destroys their volumes."""
    METRICS_READ = auto()
    """Query DCGM series in Managed Prometheus and Container Insights in CloudWatch."""
    CHECKPOINT_READ = auto()
    CHECKPOINT_LIST = auto()
    """See whether the checkpoints' places can be listed."""
    CHECKPOINT_REVOKE = auto()
    """Write revocation marks, and nothing else, among the checkpoints."""


@dataclass(frozen=True, kw_only=True)
class FunctionSpec:
    """One function: its folder in ``lambdas``, its limits, and its capabilities."""

    folder: str
    access: frozenset[Access]
    groups: frozenset[Group] = frozenset()
    """Its Kubernetes groups in every configured cluster."""
    timeout_seconds: int = 60
    memory_mib: int = 512

    @property
    def construct_id(self) -> str:
        """``open_incident`` -> ``OpenIncident``."""
        return "".join(word.capitalize() for word in self.folder.split("_"))

    @property
    def substitution(self) -> str:
        """Name under which the state machine's definition refers to the function's ARN."""
        return f"{self.construct_id}Arn"

    @property
    def handler(self) -> str:
        """Handler path inside the asset."""
        return f"lambdas.{self.folder}.handler.handler"


def _function(folder: str, *access: Access | Group, timeout_seconds: int = 60) -> FunctionSpec:
    groups = frozenset(item for item in access if isinstance(item, Group))
    reach = {Access.KUBERNETES} if groups else set()
    return FunctionSpec(
        folder=folder,
        access=frozenset({Access.TABLE, *reach, *(item for item in access if isinstance(item, Access))}),
        groups=groups,
        timeout_seconds=timeout_seconds,
    )


# An alarm after a relaunch ends the earlier incident's wait for success.
RECEIVE_ALARM = _function(
    "receive_alarm",
    Access.TABLE_UPDATE,
    Access.START_RECOVERY,
    Access.ANSWER_TOKEN,
    Access.ANNOUNCE,
    timeout_seconds=30,
)
RECORD_TRAINING_EVENT = _function("record_training_event", Access.ANSWER_TOKEN, timeout_seconds=30)
# A choice that the ended execution was to take goes on in a new one. One that was started by hand is known by no name.
NOTICE_END = _function(
    "notice_end",
    Access.SEE_RECOVERIES,
    Access.LIST_RECOVERIES,
    Access.START_RECOVERY,
    Access.SIGN,
    Access.ANNOUNCE,
    timeout_seconds=30,
)
# API Gateway gives up after 30 seconds; an answer that came later would reach nobody.
DECIDE_APPROVAL = _function(
    "decide_approval",
    Access.VERIFY_SIGNATURE,
    Access.SIGN_DECISION,
    # A choice whose execution has ended goes on in a new one.
    Access.START_RECOVERY,
    Access.SEE_RECOVERIES,
    Access.SEE_DECISIONS,
    Access.ANSWER_TOKEN,
    Access.EVIDENCE_READ,
    timeout_seconds=25,
)

# Reads everything and writes nothing: a link that only shows must lead to nothing that decides.
SHOW_CONSOLE = FunctionSpec(
    folder="show_console",
    access=frozenset({Access.TABLE_READ, Access.HISTORY, Access.LISTING, Access.CONSOLE_LINK}),
    timeout_seconds=25,
)

# Asks what the recovery may do, and remembers nothing.
CHECK_ACCESS = FunctionSpec(
    folder="check_access",
    access=frozenset({Access.KUBERNETES, Access.HYPERPOD_LIST, Access.CHECKPOINT_LIST}),
    groups=frozenset({Group.REVIEW}),
)

WORKFLOW_FUNCTIONS: tuple[FunctionSpec, ...] = (
    # An execution that was started by hand takes up what no other one drives.
    _function("open_incident", Access.SEE_RECOVERIES),
    _function("resolve_node", Access.TABLE_UPDATE, Access.HYPERPOD_LIST, Group.NODES, Group.NEIGHBOURS, Group.PODS),
    _function("cordon_node", Group.NODES, Group.QUARANTINE),
    _function(
        "snapshot_evidence",
        Group.NODES,
        Group.EVIDENCE,
        Access.HYPERPOD_NODE,
        Access.METRICS_READ,
        Access.EVIDENCE_WRITE,
        timeout_seconds=300,
    ),
    _function("stop_training", Group.JOBS),
    _function("read_history", Access.HISTORY),
    # Gives back what it clears: the cordon, the claim and the place in the breaker.
    _function(
        "confirm_suspect",
        Group.CONFIRMATION,
        Group.NODES,
        Group.QUARANTINE,
        Access.TABLE_RELEASE,
        Access.EVIDENCE_WRITE,
    ),
    # The check needs the GPUs of the confirmation's Job, which it deletes.
    _function("start_health_check", Group.NODES, Group.CONFIRMATION_END, Access.HYPERPOD_NODE, Access.HYPERPOD_CHECK),
    # Token states complete themselves where the answer is known when they are entered.
    _function("request_approval", Access.ANNOUNCE, Access.SIGN, Access.ANSWER_TOKEN),
    # Starts the check that was put off until after the approval; puts back what the check has taken off the node.
    _function(
        "settle_health_check",
        Group.NODES,
        Group.QUARANTINE,
        Access.HYPERPOD_NODE,
        Access.HYPERPOD_CHECK,
        Access.VERIFY_DECISION,
    ),
    # Looks for other jobs' pods that came onto the node since the approver saw its list.
    _function(
        "replace_node",
        Group.NODES,
        Group.NEIGHBOURS,
        Access.HYPERPOD_NODE,
        Access.HYPERPOD_REPLACE,
        Access.VERIFY_DECISION,
    ),
    _function("await_replacement", Group.NODES, Access.HYPERPOD_NODE),
    _function("release_node", Group.NODES, Group.QUARANTINE, Access.TABLE_RELEASE, Access.VERIFY_DECISION),
    _function(
        "choose_checkpoint", Access.HISTORY, Access.CHECKPOINT_READ, Access.CHECKPOINT_REVOKE, timeout_seconds=120
    ),
    _function("relaunch_training", Group.JOBS, Group.DIRECTIVES, Access.HISTORY),
    _function("verify_recovery", Access.ANSWER_TOKEN),
    _function("close_incident", Access.ANNOUNCE, Access.EVIDENCE_WRITE, Access.TABLE_RELEASE),
    # Goes on by itself where a person's choice is on record, and only its delivery was lost.
    _function("escalate", Access.ANNOUNCE, Access.SIGN, Access.ANSWER_TOKEN),
)
"""Functions that the state machine invokes, in its order."""

FUNCTIONS: tuple[FunctionSpec, ...] = (
    RECEIVE_ALARM,
    RECORD_TRAINING_EVENT,
    NOTICE_END,
    DECIDE_APPROVAL,
    SHOW_CONSOLE,
    CHECK_ACCESS,
    *WORKFLOW_FUNCTIONS,
)
