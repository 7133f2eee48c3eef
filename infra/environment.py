"""The functions' environment: what is written into it, and whether it fits."""

from __future__ import annotations

import json
from collections.abc import Mapping

from infra.configuration import CONTEXT_KEY, DeploymentSettings
from infra.errors import ConfigurationError
from lambdas import settings as names

LIMIT_BYTES = 4096
"""Of a function's variables together. Lambda measures them as one JSON object, so that a quote inside a value counts as
two bytes (its message of refusal shows the string that it measured)."""

_MADE_LATER_BYTES: Mapping[str, int] = {
    names.TABLE: 96,
    names.EVIDENCE_BUCKET: 63,
    names.TOPIC_ARN: 128,
    names.HMAC_KEY_ID: 36,
    names.DECISION_KEY_ID: 36,
    names.CONSOLE_KEY_ID: 36,
    names.APPROVAL_URL: 96,
    names.STATE_MACHINE_ARN: 128,
    names.APPROVE_STATE_MACHINE_ARN: 128,
}
"""The most bytes of a value that is known only once it is deployed; names contain the stage's, at most 16 letters."""


def clusters_document(settings: DeploymentSettings) -> str:
    """``TRUESTEP_CLUSTERS``: JSON of HyperPod cluster ARN -> where its parts are."""
    document = {}
    for cluster in settings.clusters:
        entry: dict[str, object] = {
            "hyperpod_cluster_name": cluster.hyperpod_cluster_name,
            "eks_cluster_name": cluster.eks_cluster_name,
            "training_namespaces": list(cluster.training_namespaces),
            "checkpoint_buckets": list(cluster.checkpoint_buckets),
        }
        if cluster.query_url:
            entry["amp_query_url"] = cluster.query_url
        document[cluster.hyperpod_cluster_arn] = entry
    return _compact(document)


def policy_document(settings: DeploymentSettings) -> str:
    """``TRUESTEP_POLICY``: JSON of the policy's fields."""
    return _compact(settings.policy)


def service_variables(settings: DeploymentSettings, folder: str) -> dict[str, str]:
    """Powertools' own variables. folder: the function's."""
    return {
        "POWERTOOLS_SERVICE_NAME": folder,
        "POWERTOOLS_METRICS_NAMESPACE": metrics_namespace(settings.stage),
        "POWERTOOLS_LOG_LEVEL": settings.log_level,
    }


def metrics_namespace(stage: str) -> str:
    """CloudWatch namespace of the functions' own metrics: two stages of one account must not add up."""
    return f"truestep/{stage}"


def check_size(settings: DeploymentSettings) -> None:
    """Refuse clusters and a policy that Lambda would refuse in the middle of a deployment.

    Raises ConfigurationError that says how many of the clusters fit.
    """
    used = most_bytes(settings)
    if used <= LIMIT_BYTES:
        return
    clusters, policy = (_measured(document(settings)) for document in (clusters_document, policy_document))
    numbers = range(len(settings.clusters), 0, -1)
    fitting = next((number for number in numbers if most_bytes(_first(settings, number)) <= LIMIT_BYTES), 0)
    raise ConfigurationError(
        f"{CONTEXT_KEY}.clusters: a function's environment would take {used} bytes, and Lambda allows {LIMIT_BYTES}: "
        f"{clusters} for {len(settings.clusters)} clusters, {policy} for the policy, "
        f"{used - clusters - policy} for the rest. "
        + (
            f"The first {fitting} fit: deploy the others as another stage, which may be in the same account"
            if fitting
            else "Not even the first fits: list fewer training_namespaces or checkpoint_buckets, or shorten the policy"
        )
    )


def most_bytes(settings: DeploymentSettings) -> int:
    """Bytes of the largest environment of all functions, as Lambda measures it; what is made later counts in full."""
    written = {names.CLUSTERS: clusters_document(settings), names.POLICY: policy_document(settings)}
    later = dict(_MADE_LATER_BYTES)
    if settings.approval_domain:
        later[names.APPROVAL_URL] = len(f"https://{settings.approval_domain.name}")
    if settings.existing_topic_arn:
        later[names.TOPIC_ARN] = len(settings.existing_topic_arn)
    values = {**{name: "x" * size for name, size in later.items()}, **written}
    return max(
        _measured({name: values[name] for name in variables} | service_variables(settings, folder))
        for folder, variables in names.FUNCTION_VARIABLES.items()
    )


def _first(settings: DeploymentSettings, number: int) -> DeploymentSettings:
    """The settings for this many of the clusters, without what the policy says of the others."""
    clusters = settings.clusters[:number]
    kept = {cluster.hyperpod_cluster_arn for cluster in clusters}
    policy = dict(settings.policy)
    if "clusters" in policy:
        policy["clusters"] = {arn: fields for arn, fields in policy["clusters"].items() if arn in kept}
    return settings.model_copy(update={"clusters": clusters, "policy": policy})


def _compact(document: object) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"))


def _measured(value: object) -> int:
    return len(_compact(value))
