"""Settings of the functions: read here from the environment, written by infra from the same names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from lambdas.domain.errors import SettingsError
from lambdas.domain.policy import Policy, policies_from_json
from truestep.contract import ContractError, from_json

TABLE: Final = "TRUESTEP_TABLE"
EVIDENCE_BUCKET: Final = "TRUESTEP_EVIDENCE_BUCKET"
TOPIC_ARN: Final = "TRUESTEP_TOPIC_ARN"
HMAC_KEY_ID: Final = "TRUESTEP_HMAC_KEY_ID"
DECISION_KEY_ID: Final = "TRUESTEP_DECISION_KEY_ID"
APPROVAL_URL: Final = "TRUESTEP_APPROVAL_URL"
STATE_MACHINE_ARN: Final = "TRUESTEP_STATE_MACHINE_ARN"
APPROVE_STATE_MACHINE_ARN: Final = "TRUESTEP_APPROVE_STATE_MACHINE_ARN"
CLUSTERS: Final = "TRUESTEP_CLUSTERS"
POLICY: Final = "TRUESTEP_POLICY"
CONSOLE_KEY_ID: Final = "TRUESTEP_CONSOLE_KEY_ID"

LISTING_INDEX: Final = "Listing"
"""The table's one index: see `lambdas.adapters.store_listing`."""
LISTED: Final = "listed"
LISTED_AT: Final = "listed_at"

_EVERY_FUNCTION = (TABLE, CLUSTERS, POLICY)

FUNCTION_VARIABLES: Final[Mapping[str, tuple[str, ...]]] = {
    "check_access": (CLUSTERS, POLICY),
    "receive_alarm": (*_EVERY_FUNCTION, TOPIC_ARN, STATE_MACHINE_ARN),
    "record_training_event": _EVERY_FUNCTION,
    "notice_end": (*_EVERY_FUNCTION, TOPIC_ARN, HMAC_KEY_ID, APPROVAL_URL, STATE_MACHINE_ARN),
    "open_incident": (*_EVERY_FUNCTION, STATE_MACHINE_ARN),
    "resolve_node": _EVERY_FUNCTION,
    "cordon_node": _EVERY_FUNCTION,
    "snapshot_evidence": (*_EVERY_FUNCTION, EVIDENCE_BUCKET),
    "stop_training": _EVERY_FUNCTION,
    "read_history": _EVERY_FUNCTION,
    "confirm_suspect": (*_EVERY_FUNCTION, EVIDENCE_BUCKET),
    "start_health_check": _EVERY_FUNCTION,
    "request_approval": (*_EVERY_FUNCTION, TOPIC_ARN, HMAC_KEY_ID, APPROVAL_URL),
    "decide_approval": (
        *_EVERY_FUNCTION,
        HMAC_KEY_ID,
        DECISION_KEY_ID,
        STATE_MACHINE_ARN,
        APPROVE_STATE_MACHINE_ARN,
    ),
    "show_console": (*_EVERY_FUNCTION, CONSOLE_KEY_ID, APPROVAL_URL),
    "settle_health_check": (*_EVERY_FUNCTION, DECISION_KEY_ID),
    "replace_node": (*_EVERY_FUNCTION, DECISION_KEY_ID),
    "await_replacement": _EVERY_FUNCTION,
    "release_node": (*_EVERY_FUNCTION, DECISION_KEY_ID),
    "choose_checkpoint": _EVERY_FUNCTION,
    "relaunch_training": _EVERY_FUNCTION,
    "verify_recovery": _EVERY_FUNCTION,
    "close_incident": (*_EVERY_FUNCTION, TOPIC_ARN, EVIDENCE_BUCKET),
    "escalate": (*_EVERY_FUNCTION, TOPIC_ARN, HMAC_KEY_ID, APPROVAL_URL),
}
"""Function -> the variables it needs, and so the grants it needs. Every key is a folder of `lambdas`."""


@dataclass(frozen=True, kw_only=True)
class ClusterSettings:
    """Where a HyperPod cluster's parts are."""

    hyperpod_cluster_name: str
    eks_cluster_name: str
    training_namespaces: tuple[str, ...]
    """Namespaces whose jobs may report, and in which the functions may act."""
    amp_query_url: str = ""
    """``https://aps-workspaces.<region>.amazonaws.com/workspaces/<id>``; empty: no metrics, said as "no data"."""
    checkpoint_buckets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One function's settings. A value that the function did not declare raises `SettingsError` when read."""

    function: str
    values: Mapping[str, str]
    clusters: Mapping[str, ClusterSettings]
    default_policy: Policy
    cluster_policies: Mapping[str, Policy] = field(default_factory=dict)

    @property
    def table(self) -> str:
        return self._value(TABLE)

    @property
    def evidence_bucket(self) -> str:
        return self._value(EVIDENCE_BUCKET)

    @property
    def topic_arn(self) -> str:
        return self._value(TOPIC_ARN)

    @property
    def hmac_key_id(self) -> str:
        return self._value(HMAC_KEY_ID)

    @property
    def decision_key_id(self) -> str:
        return self._value(DECISION_KEY_ID)

    @property
    def console_key_id(self) -> str:
        return self._value(CONSOLE_KEY_ID)

    @property
    def approval_url(self) -> str:
        return self._value(APPROVAL_URL)

    @property
    def state_machine_arn(self) -> str:
        return self._value(STATE_MACHINE_ARN)

    @property
    def approve_state_machine_arn(self) -> str:
        return self._value(APPROVE_STATE_MACHINE_ARN)

    def cluster(self, cluster_arn: str) -> ClusterSettings:
        """Raises `SettingsError` for a cluster that this deployment does not serve."""
        try:
            return self.clusters[cluster_arn]
        except KeyError:
            raise SettingsError(
                f"{cluster_arn or 'an empty cluster ARN'} is not in {CLUSTERS}: "
                "add it to the 'clusters' context and deploy"
            ) from None

    def policy(self, cluster_arn: str) -> Policy:
        """The cluster's policy, or the deployment's."""
        return self.cluster_policies.get(cluster_arn, self.default_policy)

    def _value(self, name: str) -> str:
        try:
            return self.values[name]
        except KeyError:
            raise SettingsError(f"{self.function} does not declare {name} in lambdas.settings") from None


def settings_from_environment(function: str, environ: Mapping[str, str] | None = None) -> Settings:
    """Read a function's settings. Raises `SettingsError` naming the variable that is missing or wrong."""
    environ = os.environ if environ is None else environ
    try:
        names = FUNCTION_VARIABLES[function]
    except KeyError:
        raise SettingsError(f"no function {function!r}: add it to FUNCTION_VARIABLES in lambdas.settings") from None
    missing = [name for name in names if not environ.get(name) and name != POLICY]
    if missing:
        raise SettingsError(f"{function} needs {', '.join(missing)} in its environment")
    default_policy, cluster_policies = policies_from_json(_json(POLICY, environ.get(POLICY) or "{}"))
    return Settings(
        function=function,
        values={name: environ.get(name, "") for name in names},
        clusters=_clusters(_json(CLUSTERS, environ[CLUSTERS])),
        default_policy=default_policy,
        cluster_policies=cluster_policies,
    )


def _json(name: str, text: str) -> Mapping[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise SettingsError(f"{name} is not JSON: {error}") from error
    if not isinstance(document, Mapping):
        raise SettingsError(f"{name} must be a JSON object")
    return document


def _clusters(document: Mapping[str, Any]) -> dict[str, ClusterSettings]:
    try:
        return {arn: from_json(ClusterSettings, entry, path=f"{CLUSTERS}[{arn}]") for arn, entry in document.items()}
    except ContractError as error:
        raise SettingsError(str(error)) from error
