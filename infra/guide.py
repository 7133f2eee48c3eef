"""The table of every value that people supply, in docs/deploy.md: made from the settings and from what they refuse.

    python -m infra.guide [--write]

Prints the table, or writes it between its two marks in docs/deploy.md; a test keeps it so.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from infra.configuration import (
    CONTEXT_KEY,
    ApprovalDomainSettings,
    ClusterSettings,
    DeploymentSettings,
    NetworkSettings,
    parse_settings,
)
from infra.errors import ConfigurationError
from infra.paths import REPOSITORY

DOCUMENT: Final = REPOSITORY / "docs" / "deploy.md"
START: Final = "<!-- values: written by python -m infra.guide --write -->\n"
END: Final = "<!-- end of values -->\n"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One value. refusal: what is said where it is wrong or missing; programs' words in backticks."""

    value: str
    default: str
    meaning: str
    refusal: str


MODELS: Final[Mapping[str, type[BaseModel]]] = {
    "": DeploymentSettings,
    "clusters[].": ClusterSettings,
    "network.": NetworkSettings,
    "approval_domain.": ApprovalDomainSettings,
}
"""Where the fields of a model stand in the settings -> the model."""

_VALID: Final[Mapping[str, Any]] = {
    "clusters": [
        {
            "hyperpod_cluster_arn": "arn:aws:sagemaker:us-west-2:111122223333:cluster/abc123def456",
            "hyperpod_cluster_name": "training",
            "eks_cluster_name": "training-eks",
            "training_namespaces": ["research"],
        }
    ],
    "network": {"vpc_id": "vpc-0a100000", "subnet_ids": ["subnet-0a100000"]},
    "approval_domain": {"name": "approve.example.com"},
}

WRONG: Final[Mapping[str, Any]] = {
    "stage": "Prod 1",
    "clusters": [],
    "policy": {"dry_runn": True},
    "existing_event_bus_name": "my bus",
    "existing_topic_arn": "oncall",
    "existing_topic_key_arn": "arn:aws:kms:us-west-2:111122223333:key/1a2b",
    "approver_emails": ["oncall"],
    "approval_domain": "approve.example.com",
    "training_account_ids": ["42"],
    "network": "vpc-0a100000",
    "training_silence_hours": 48,
    "log_retention_days": 8,
    "log_level": "debug",
    "deletion_protection": "no",
    "clusters[].hyperpod_cluster_arn": "training",
    "clusters[].hyperpod_cluster_name": "my cluster",
    "clusters[].eks_cluster_name": "my cluster",
    "clusters[].training_namespaces": ["team_a"],
    "clusters[].checkpoint_buckets": ["s3://checkpoints/llama"],
    "clusters[].security_group_id": "default",
    "clusters[].amp_workspace_arn": "ws-1a2b3c",
    "clusters[].amp_query_url": "ws-1a2b3c",
    "network.subnet_ids": ["private-a"],
    "network.security_group_ids": ["default"],
    "network.vpc_id": "main",
    "network.interface_endpoints": ["dynamodb"],
    "approval_domain.name": "https://approve.example.com",
    "approval_domain.certificate_arn": "arn:aws:acm:us-east-1:111122223333:certificate/1a2b",
}
"""A likely mistake for each setting; the table shows what is said about it."""

_UNSET: Final = "rank 0 warns at `attach`: `not set: the recovery refuses this run's alarms`"
PODS: Final = (
    Row(value="NODE_NAME", default="needed", meaning="downward API, `spec.nodeName`", refusal=_UNSET),
    Row(value="POD_NAME", default="needed", meaning="downward API, `metadata.name`", refusal=_UNSET),
    Row(value="POD_UID", default="needed", meaning="downward API, `metadata.uid`", refusal=_UNSET),
    Row(
        value="POD_NAMESPACE",
        default="needed",
        meaning="downward API, `metadata.namespace`; one of the cluster's `training_namespaces`",
        refusal=_UNSET + "; another: the dead-letter queue has the alarm; `is not among training_namespaces`",
    ),
    Row(value="TRUESTEP_JOB_NAME", default="needed", meaning="the job's `metadata.name`", refusal=_UNSET),
    Row(
        value="TRUESTEP_JOB_KIND",
        default="`HyperPodPyTorchJob`",
        meaning="the job's `kind`",
        refusal="one that the recovery cannot stop: its incident escalates; `cannot be suspended by this recovery`",
    ),
    Row(
        value="TRUESTEP_RUN_ID",
        default="needed",
        meaning="a name of yours that survives restarts and re-creation of the job",
        refusal=_UNSET,
    ),
    Row(
        value="TRUESTEP_CLUSTER_ARN",
        default="needed",
        meaning="`hyperpod_cluster_arn` of the cluster",
        refusal=_UNSET
        + "; another: the dead-letter queue has the alarm; `add it to the 'clusters' context and deploy`",
    ),
    Row(value="AWS_REGION", default="needed", meaning="the clusters' region", refusal=_UNSET),
    Row(
        value="TRUESTEP_EVENT_BUS",
        default="needed",
        meaning="output `EventBusName`; `EventBusArn` in another account",
        refusal="rank 0 warns at `attach`: `TRUESTEP_EVENT_BUS is not set`; no such bus: alarm TrainingSilent",
    ),
    Row(
        value="TRUESTEP_OUTBOX_DIR",
        default="needed",
        meaning="a directory on the checkpoint volume, which outlives the node",
        refusal="rank 0 warns at `attach`: `TRUESTEP_OUTBOX_DIR is not set`",
    ),
    Row(
        value="TRUESTEP_CHECKPOINT_ROOT",
        default="needed",
        meaning="`s3://bucket/prefix` under `checkpoint_buckets`, or `file:///fsx/...`",
        refusal=_UNSET,
    ),
)
"""Environment of the training pods."""

COMMANDS: Final = (
    Row(
        value="AWS sign-in",
        default="needed",
        meaning="account and region of the clusters, for `cdk deploy` and for `truestep`",
        refusal="`you are signed in to account`; none: `no AWS credentials`",
    ),
    Row(
        value="--outputs",
        default="asks CloudFormation",
        meaning="the file that `cdk deploy --outputs-file` wrote",
        refusal="`cannot read outputs from`; of another stage: `has no outputs of truestep-prod`",
    ),
    Row(value="--stage", default="`prod`", meaning="the deployment's `stage`", refusal="`has no outputs of truestep-`"),
    Row(
        value="--cluster-arn",
        default="needed",
        meaning="one of the deployment's clusters, for the drill",
        refusal="`this deployment does not serve`, and what it serves",
    ),
    Row(
        value="--namespace",
        default="the only one",
        meaning="one of the cluster's `training_namespaces`, for the drill",
        refusal="`is none of its training namespaces`; left out: `several training namespaces`",
    ),
    Row(
        value="--node",
        default="needed",
        meaning="any node that `kubectl get nodes` lists, for the drill",
        refusal="`is no name in Kubernetes`; no such node: `The cluster has no such node`",
    ),
)
"""What `cdk` and `truestep` are told."""


def settings_rows() -> Iterator[Row]:
    """One row a setting, in the order of the models."""
    for place, model in MODELS.items():
        for name, field in model.model_fields.items():
            yield Row(
                value=place + name,
                default=_default(field),
                meaning=_meaning(field),
                refusal=f"`{refusal(place + name)}`",
            )


def refusal(path: str) -> str:
    """What synthesis says of the mistake that `WRONG` has for this setting, without the common beginning."""
    try:
        parse_settings({CONTEXT_KEY: with_value(path, WRONG[path])})
    except ConfigurationError as error:
        return str(error).split("\n")[1].strip().replace("`", "'")
    raise AssertionError(f"{WRONG[path]!r} is not refused as {path}")


def with_value(path: str, value: Any) -> dict[str, Any]:
    """Valid settings but for this one. value: None takes the setting out."""
    settings = copy.deepcopy(dict(_VALID))
    place, _, name = path.rpartition(".")
    holder: dict[str, Any] = settings
    if place:
        holder = settings["clusters"][0] if place == "clusters[]" else settings[place]
    holder[name] = value
    if value is None:
        del holder[name]
    return settings


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "needed"
    value = field.get_default(call_default_factory=True, validated_data={})
    return "none" if value is None or value in ((), {}) else f"`{json.dumps(value)}`".replace('"', "")


def _meaning(field: FieldInfo) -> str:
    return " ".join(inspect.cleandoc(field.description or "").split()).replace("``", "`")


def table() -> str:
    """The Markdown table."""
    groups = (("in `cdk.json`", settings_rows()), ("environment of the training pods", PODS), ("commands", COMMANDS))
    lines = [
        "| value | default | what it is, and where it comes from | if it is wrong or missing |",
        "|---|---|---|---|",
    ]
    for title, rows in groups:
        lines.append(f"| **{title}** | | | |")
        lines += [f"| `{row.value}` | {row.default} | {row.meaning} | {row.refusal} |" for row in rows]
    return "\n".join(lines) + "\n"


def parts(document: str) -> tuple[str, str, str]:
    """What stands before the table, the table, and what comes after it. Raises ConfigurationError without the marks."""
    if document.count(START) != 1 or document.count(END) != 1:
        raise ConfigurationError(f"{DOCUMENT.relative_to(REPOSITORY)} needs these two lines once: {START}{END}")
    before, rest = document.split(START)
    inside, after = rest.split(END)
    return before + START, inside, END + after


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="The table of values in docs/deploy.md.")
    parser.add_argument("--write", action="store_true", help="write it there instead of printing it")
    options = parser.parse_args(arguments)
    if not options.write:
        print(table(), end="")
        return 0
    try:
        before, _, after = parts(DOCUMENT.read_text(encoding="utf-8"))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    DOCUMENT.write_text(before + table() + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
