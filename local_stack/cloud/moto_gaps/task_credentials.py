"""Gap: every task calls with the access key `ak`, so that calls cannot be attributed to the state machine's role."""

from __future__ import annotations

import importlib
import threading
from functools import lru_cache
from typing import Any

import boto3
from botocore.config import Config
from moto.settings import moto_server_port

from local_stack.access_keys import SECRET_ACCESS_KEY, access_key_of_role

_SERVICES = "moto.stepfunctions.parser.asl.component.state.exec"
_IMPORTERS = (
    f"{_SERVICES}.state_task.lambda_eval_utils",
    f"{_SERVICES}.state_task.service.state_task_service_aws_sdk",
    f"{_SERVICES}.state_task.service.state_task_service_dynamodb",
    f"{_SERVICES}.state_task.service.state_task_service_events",
    f"{_SERVICES}.state_task.service.state_task_service_sfn",
    f"{_SERVICES}.state_task.service.state_task_service_sns",
    f"{_SERVICES}.state_task.service.state_task_service_sqs",
)
# Lambda's own limit; the state's TimeoutSeconds bounds the task earlier.
_READ_TIMEOUT_SECONDS = 900

_creating = threading.Lock()


def client_of_role(region: str, service: str, state_credentials: Any = None) -> Any:
    """Return a client of the edge that signs as the role of the execution (or of the task's Credentials)."""
    role_arn = "arn:aws:iam:::role/states" if state_credentials is None else state_credentials.role_arn
    with _creating:
        return _client(region, service, access_key_of_role(role_arn))


@lru_cache(maxsize=64)
def _client(region: str, service: str, access_key: str) -> Any:
    """Clients are shared: making one reads the service's model, which costs more than the call."""
    return boto3.session.Session().client(
        service,
        region_name=region,
        endpoint_url=f"http://127.0.0.1:{moto_server_port()}",
        aws_access_key_id=access_key,
        aws_secret_access_key=SECRET_ACCESS_KEY,
        config=Config(
            parameter_validation=False,
            retries={"max_attempts": 0, "total_max_attempts": 1},
            read_timeout=_READ_TIMEOUT_SECONDS,
            max_pool_connections=64,
        ),
    )


def install() -> None:
    """Let each kind of task build its client here."""
    for name in _IMPORTERS:
        module = importlib.import_module(name)
        module.boto_client_for = client_of_role  # type: ignore[attr-defined]
