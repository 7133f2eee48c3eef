"""A deployed recovery, found by its stack's outputs, and what the command line asks of it. Needs the extra ``aws``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truestep.cli.errors import CommandError
from truestep.cli.output import working

_NEEDED = (
    "EventBusName",
    "TableName",
    "ClusterArns",
    "TrainingSources",
    "CheckAccessFunction",
    "ConsoleFunction",
    "DecideFunction",
)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """What the stack's outputs say, and a session to use them with."""

    outputs: dict[str, str]
    session: Any

    @property
    def cluster_arns(self) -> tuple[str, ...]:
        """HyperPod clusters that it serves."""
        return tuple(self.outputs["ClusterArns"].split(","))

    def client(self, service: str) -> Any:
        return self.session.client(service)

    def item(self, pk: str, sk: str = "RECORD") -> dict[str, Any] | None:
        """The item ``<pk> / <sk>`` of the recovery's table, strongly consistent; None where there is none."""
        key = {"PK": {"S": pk}, "SK": {"S": sk}}
        table = self.outputs["TableName"]
        found: dict[str, Any] = self.client("dynamodb").get_item(TableName=table, Key=key, ConsistentRead=True)
        return found.get("Item")


@contextmanager
def asking_aws(needs: str) -> Iterator[None]:
    """Raises `CommandError` for what AWS refuses or cannot be reached for. needs: permissions that the block takes."""
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except ClientError as error:
        raise CommandError(f"{error}; this command needs {needs}") from error
    except BotoCoreError as error:
        raise CommandError(f"AWS does not answer: {error}; look at the network, the region and the sign-in") from error


def find_deployment(stage: str, outputs_file: Path | None, region: str | None) -> Deployment:
    """The deployment of the stage: by the file that ``cdk deploy --outputs-file`` wrote, else by asking CloudFormation.

    Raises `CommandError` that says what is missing.
    """
    try:
        import boto3
    except ImportError as error:
        raise CommandError("this command talks to AWS: pip install 'truestep[aws]'") from error
    name = f"truestep-{stage}"
    # First: whoever gave a file that is not there need not be told of credentials.
    outputs = {} if outputs_file is None else _from_file(outputs_file, name)
    session = boto3.session.Session(region_name=region or os.environ.get("AWS_REGION"))
    if session.region_name is None:
        raise CommandError("no AWS region: give --region, or set AWS_REGION")
    if session.get_credentials() is None:
        raise CommandError("no AWS credentials: sign in, or set AWS_PROFILE")
    if outputs_file is None:
        needs = f"cloudformation:DescribeStacks, and --stage and --region of the deployment (now {session.region_name})"
        with working(f"looking for the stack {name}"), asking_aws(needs):
            stacks = session.client("cloudformation").describe_stacks(StackName=name)["Stacks"]
        outputs = {entry["OutputKey"]: entry["OutputValue"] for entry in stacks[0].get("Outputs", ())}
    if missing := [needed for needed in _NEEDED if needed not in outputs]:
        raise CommandError(f"the outputs of {name} lack {', '.join(missing)}: deploy this version of the stack first")
    return Deployment(outputs=outputs, session=session)


def _from_file(path: Path, name: str) -> dict[str, str]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it is no JSON ({error})"
        raise CommandError(
            f"cannot read outputs from {path}: {why}; give the file that cdk deploy --outputs-file wrote, or leave "
            "--outputs away"
        ) from error
    if not isinstance(document, dict) or not isinstance(document.get(name), dict):
        raise CommandError(f"{path} has no outputs of {name}: write it with cdk deploy --outputs-file, or give --stage")
    outputs: dict[str, str] = document[name]
    return outputs


def invoke(deployment: Deployment, function: str, event: dict[str, Any]) -> Any:
    """What a function of the deployment answers. function: its name. Raises `CommandError` where it fails itself."""
    with working(f"waiting for {function}"), asking_aws(f"lambda:InvokeFunction on {function}"):
        answer = deployment.client("lambda").invoke(FunctionName=function, Payload=json.dumps(event))
        payload = json.loads(answer["Payload"].read())
    if "FunctionError" in answer:
        raise CommandError(
            f"{function} failed: {payload.get('errorMessage', payload)}; nothing is lost: see its log group, and give "
            "the command again"
        )
    return payload
