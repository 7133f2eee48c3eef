"""boto3 clients of the functions, and which of their errors are worth another try."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import boto3
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    ResponseStreamingError,
)
from botocore.exceptions import ConnectionError as AwsConnectionError
from botocore.parsers import ResponseParserError

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
    return whole_answers(boto3.client(service, endpoint_url=endpoint_url, region_name=region, config=_CONFIG))


def whole_answers(made: Any) -> Any:
    """The boto3 client, refusing an answer of which less has arrived than it announced.

    botocore takes what arrived before the connection broke, and JSON that does not parse for an answer without a
    member: an item that is there would count as absent. Bodies that are read as streams check their own length.
    """
    made.meta.events.register("before-parse", _refuse_half)
    return made


def _refuse_half(operation_model: Any, response_dict: Mapping[str, Any], **_: Any) -> None:
    body, announced = response_dict["body"], response_dict["headers"].get("content-length")
    bodiless = operation_model.http.get("method") == "HEAD"
    if isinstance(body, bytes) and announced and not bodiless and len(body) < int(announced):
        arrived = f"{len(body)} of the {announced} bytes of {operation_model.name}'s answer arrived"
        raise ResponseStreamingError(error=arrived)


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
    except (AwsConnectionError, HTTPClientError, IncompleteReadError, ResponseParserError) as error:
        raise TransientError(f"no answer from AWS: {error}") from error
    except BotoCoreError as error:
        if "Timeout" in type(error).__name__:
            raise TransientError(f"no answer from AWS in time: {error}") from error
        raise
