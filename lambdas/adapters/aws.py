"""boto3 clients of the functions, and which of their errors are worth another try."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError, HTTPClientError
from botocore.exceptions import ConnectionError as AwsConnectionError

from lambdas.domain.errors import TransientError

_CONFIG: Final = Config(
    retries={"mode": "standard", "total_max_attempts": 4}, connect_timeout=3, read_timeout=15, tcp_keepalive=True
)

_TRANSIENT_CODES: Final = frozenset(
    {
        "InternalFailure",
        "InternalServerError",
        "InternalServiceException",
        "KMSInternalException",
        "DependencyTimeoutException",
        "LimitExceededException",
        "ProvisionedThroughputExceededException",
        "RequestLimitExceeded",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TooManyRequestsException",
        "TransactionConflictException",
        "TransactionInProgressException",
    }
)


def client(service: str) -> Any:
    """The boto3 client of a service, one a process; region, credentials and endpoint come from the environment."""
    return _client(service, os.environ.get("AWS_ENDPOINT_URL"), os.environ.get("AWS_REGION"))


@functools.lru_cache(maxsize=32)
def _client(service: str, endpoint_url: str | None, region: str | None) -> Any:
    return boto3.client(service, endpoint_url=endpoint_url, region_name=region, config=_CONFIG)


def error_code(error: ClientError) -> str:
    """The code that the service gave, e.g. ``ConditionalCheckFailedException``."""
    return str(error.response.get("Error", {}).get("Code", ""))


@contextmanager
def transient_errors() -> Iterator[None]:
    """Raise what another try may cure as `TransientError`; everything else passes unchanged."""
    try:
        yield
    except ClientError as error:
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if error_code(error) in _TRANSIENT_CODES or status >= 500:
            raise TransientError(f"{error.operation_name}: {error}") from error
        raise
    except (AwsConnectionError, HTTPClientError) as error:
        raise TransientError(f"no answer from AWS: {error}") from error
    except BotoCoreError as error:
        if "Timeout" in type(error).__name__:
            raise TransientError(f"no answer from AWS in time: {error}") from error
        raise
