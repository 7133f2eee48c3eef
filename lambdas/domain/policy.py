"""What the operator allows the recovery to do. Safe by default; per deployment, with overrides per cluster."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lambdas.domain.breaker import quarantine_limit
from lambdas.domain.errors import SettingsError


class ResumeWhen(StrEnum):
    """When training goes on. Going on at once, on fewer ranks, would change the batches, so there is one way yet."""

    AFTER_REPLACEMENT = "after_replacement"
    """Once the suspect's replacement is ready, or its release decided."""


class HealthCheckWhen(StrEnum):
    """When HyperPod's health check of the suspect runs."""

    BEFORE_APPROVAL = "before_approval"
    AFTER_APPROVAL = "after_approval"
    SKIP = "skip"


class Policy(BaseModel):
    """The policy of one cluster. Unknown fields are refused: a misspelt safety setting must not pass for set."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dry_run: bool = False
    """Read, decide, record and announce everything; change nothing."""
    max_quarantined_nodes: int = Field(default=2, ge=1, le=64)
    """Circuit breaker: at most so many nodes of a cluster in quarantine at once."""
    max_quarantined_percent: float = Field(default=10.0, gt=0, le=100)
    """Circuit breaker: and at most this share of the node's instance group, rounded down, but always one node."""
    resume: ResumeWhen = ResumeWhen.AFTER_REPLACEMENT
    """When training goes on: once the suspect's replacement is ready, or its release decided."""
    health_check: HealthCheckWhen = HealthCheckWhen.BEFORE_APPROVAL
    """When HyperPod's health check of the suspect runs. A pass clears nobody."""
    allow_automatic_replacement: bool = False
    """Whether a health check may start before the approval on a cluster whose NodeRecovery is Automatic, where a failed
    check makes HyperPod reboot or replace the node by itself."""
    replacement_by_link: bool = True
    """Whether the signed link alone may approve. A link is a bearer token: turn it off where callers are known."""
    approval_expires_after_hours: float = Field(default=72.0, gt=0, le=168)
    """How long the question stays open before the incident escalates; it can be approved after that too."""
    link_valid_hours: float = Field(default=25.0, ge=25, le=168)
    """How long one signed link works; a reminder carries a new one, that of a stop after 24 hours: until then the older
    one has to work."""
    acknowledge_other_pods: bool = True
    """Whether other jobs' pods on the node block its replacement until the approver has acknowledged them."""
    assumed_hit_probability: float = Field(default=1.0, gt=0, le=1)
    """Assumed probability p that the fault shows in an audited pass, before a confirmation has measured it."""
    risk: float = Field(default=0.05, gt=0, lt=1)
    """Accepted probability that the chosen checkpoint is corrupt all the same."""
    audit_interval_steps: int = Field(default=100, ge=1)
    """The training's `audit_every`, for the checkpoint margin."""
    stop_timeout_seconds: int = Field(default=900, ge=1, le=86_400)
    """How long the job's pods may take to go before the incident escalates."""
    replacement_timeout_seconds: int = Field(default=7_200, ge=1, le=172_800)
    """How long the new node may take to become ready before the incident escalates."""
    relaunch_timeout_seconds: int = Field(default=3_600, ge=1, le=86_400)
    """How long the job's pods may take to run again, and then the run to say that it resumed, before the incident
    escalates."""
    health_check_timeout_seconds: int = Field(default=10_800, ge=1, le=86_400)
    """How long the health check may take before the recovery goes on without its result."""
    confirm_runs: int = Field(default=1_000, ge=0, le=100_000)
    """How often the confirmation repeats the failing computation on each GPU of the suspect's node and of one healthy
    node; 0 runs none. It starts no other run after a third of `confirm_timeout_seconds`."""
    confirm_timeout_seconds: int = Field(default=1_800, ge=1, le=86_400)
    """How long the confirmation may take before the recovery goes on without its result."""
    poll_seconds: int = Field(default=15, ge=1, le=600)
    """First wait between two looks; grows with the time waited (see `poll_after`)."""

    def quarantine_limit(self, group_size: int) -> int:
        """Nodes that may be in quarantine at once, given the size of the suspect's instance group."""
        return quarantine_limit(
            max_nodes=self.max_quarantined_nodes, max_percent=self.max_quarantined_percent, group_size=group_size
        )

    def hit_probability(self, measured: float | None) -> float:
        """The p that the margin holds for: a confirmation's, else the assumed one.

        measured: `Confirmation.hit_probability`. A record that holds an impossible one measured nothing.
        """
        return measured if measured is not None and 0 < measured <= 1 else self.assumed_hit_probability

    def margin_steps(self, measured: float | None = None) -> int:
        """Steps before `clean_through` at which a checkpoint is clean with risk at most `risk`."""
        p = self.hit_probability(measured)
        return margin_steps(interval_steps=self.audit_interval_steps, hit_probability=p, risk=self.risk)

    def poll_after(self, waited_seconds: float) -> int:
        """Seconds until the next look: `poll_seconds`, then a tenth of the time waited, at most 5 minutes.

        Keeps a wait of days below Step Functions' 25,000 history events.
        """
        return max(self.poll_seconds, min(300, int(waited_seconds / 10)))


def margin_steps(*, interval_steps: int, hit_probability: float, risk: float) -> int:
    """interval * ln(risk) / ln(1 - d(p)), rounded up; d(p) = 1 - (1-p)^2 is an audit's detection probability.

    An audit runs the pass twice (the producer's and a witness's), so it misses with (1-p)^2. The margin is 0 where that
    is at most `risk` already, because the newest clean audit would have to miss too; and where every step is audited:
    no update is applied unaudited then.
    Raises ValueError for p outside (0, 1] or risk outside (0, 1).
    """
    if not 0 < hit_probability <= 1 or not 0 < risk < 1 or interval_steps < 1:
        raise ValueError(
            f"need interval >= 1, 0 < p <= 1 and 0 < risk < 1, got {interval_steps}, {hit_probability}, {risk}"
        )
    if (1 - hit_probability) ** 2 <= risk or interval_steps == 1:
        return 0
    log_missed = 2 * math.log1p(-hit_probability)
    return math.ceil(interval_steps * math.log(risk) / log_missed)


def policies_from_json(document: Mapping[str, Any]) -> tuple[Policy, dict[str, Policy]]:
    """The default policy, and those of clusters that override it: ``{...fields, "clusters": {<arn>: {...fields}}}``.

    Raises `SettingsError` naming the field that is wrong.
    """
    base = {key: value for key, value in document.items() if key != "clusters"}
    overrides = document.get("clusters", {})
    if not isinstance(overrides, Mapping):
        raise SettingsError("policy: 'clusters' maps a cluster ARN to the fields it overrides")
    default = _policy(base, "policy")
    return default, {arn: _override(base, arn, fields) for arn, fields in overrides.items()}


def _override(base: Mapping[str, Any], arn: str, fields: Any) -> Policy:
    if not isinstance(fields, Mapping):
        raise SettingsError(f"policy of {arn}: give the fields it overrides as an object, not {fields!r}")
    return _policy({**base, **fields}, f"policy of {arn}")


def _policy(fields: Mapping[str, Any], where: str) -> Policy:
    try:
        # Strict, as JSON: "off" is no false, and a dry run that somebody meant must not be live.
        return Policy.model_validate_json(json.dumps(dict(fields)), strict=True)
    except ValidationError as error:
        wrong = [f"field {'.'.join(map(str, each['loc']))!r}: {each['msg']}" for each in error.errors()]
        raise SettingsError(f"{where}: {'; '.join(wrong)}") from error
