"""The Lambda service: synchronous and asynchronous invocations of the deployed functions."""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import boto3
from anyio import to_thread

from local_stack.access_keys import SECRET_ACCESS_KEY
from local_stack.edge.configuration import FunctionConfiguration
from local_stack.edge.instances import FunctionPool
from local_stack.edge.runtime_api import Outcome

_log = logging.getLogger(__name__)
# Lambda waits one minute, then two; the order of things is the same in less time.
_RETRY_SECONDS = (0.5, 1.0)
_MAX_PAYLOAD_BYTES = {"RequestResponse": 6 * 1024 * 1024, "Event": 1024 * 1024}


class InvocationError(Exception):
    """A refusal by the service itself, before the function runs."""

    def __init__(self, status: int, error_type: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.error_type = error_type
        self.message = message


class LambdaService:
    """All functions. One event loop; not for use from other threads."""

    def __init__(self, edge_url: str, region: str, log_directory: Path, on_failure: Callable[[str], None]) -> None:
        """on_failure: told about every asynchronous event that was given up, in one sentence."""
        self._edge_url = edge_url
        self._region = region
        self._log_directory = log_directory
        self._on_failure = on_failure
        self._functions: dict[str, FunctionConfiguration] = {}
        self._pools: dict[str, FunctionPool] = {}
        self._background: set[asyncio.Task[None]] = set()
        log_directory.mkdir(parents=True, exist_ok=True)

    async def register(self, function: FunctionConfiguration) -> None:
        """Add or replace a function; instances of the one it replaces are killed."""
        replaced = self._pools.pop(function.name, None)
        self._functions[function.name] = function
        if replaced is not None:
            await replaced.close()

    def find(self, name_or_arn: str) -> FunctionConfiguration:
        """Find by name, ARN or partial ARN, with or without a qualifier. Raises InvocationError(404)."""
        parts = unquote(name_or_arn).split(":")
        name = parts[6] if len(parts) > 6 else parts[-1] if len(parts) == 3 else parts[0]
        function = self._functions.get(name)
        if function is None:
            known = ", ".join(sorted(self._functions)) or "none"
            message = f"Function not found: {name} (deployed here: {known})"
            raise InvocationError(404, "ResourceNotFoundException", message)
        return function

    async def invoke(self, name_or_arn: str, event: bytes) -> Outcome:
        """Run one event and wait. Raises InvocationError for an unknown function or a payload that is no JSON."""
        function = self.find(name_or_arn)
        _check_payload(event, "RequestResponse")
        return await self._run(function, event or b"{}", str(uuid.uuid4()))

    def invoke_later(self, name_or_arn: str, event: bytes) -> None:
        """Accept one event and return; failures are retried, then go to the function's failure destination."""
        function = self.find(name_or_arn)
        _check_payload(event, "Event")
        task = asyncio.get_running_loop().create_task(self._run_with_retries(function, event or b"{}"))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def kill(self, access_key: str) -> None:
        """Kill what the functions with this key are doing, as a crash would."""
        owned = [pool for pool in self._pools.values() if pool.function.access_key == access_key]
        await asyncio.gather(*(pool.kill_busy() for pool in owned))

    async def close(self) -> None:
        """Drop what is queued and kill all instances."""
        for task in self._background:
            task.cancel()
        await asyncio.gather(*(pool.close() for pool in self._pools.values()), return_exceptions=True)

    async def _run(self, function: FunctionConfiguration, event: bytes, request_id: str) -> Outcome:
        if function.endpoint_url is not None:
            return await to_thread.run_sync(_invoke_endpoint, function, event, request_id)
        pool = self._pools.get(function.name)
        if pool is None:
            pool = FunctionPool(function, self._edge_url, self._region, self._log_directory)
            self._pools[function.name] = pool
        return await pool.invoke(event, request_id)

    async def _run_with_retries(self, function: FunctionConfiguration, event: bytes) -> None:
        request_id = str(uuid.uuid4())
        for attempt in range(1 + function.maximum_retry_attempts):
            if attempt:
                await asyncio.sleep(_RETRY_SECONDS[min(attempt, len(_RETRY_SECONDS)) - 1])
            outcome = await self._run(function, event, request_id)
            if not outcome.failed:
                return
            _log.warning("%s failed on an asynchronous event: %s", function.name, outcome.payload[:500].decode())
        attempts = 1 + function.maximum_retry_attempts
        self._on_failure(f"{function.name} failed {attempts} times on an asynchronous event; see its log")
        if function.on_failure_arn is not None:
            record = _failure_record(function, event, outcome, request_id, attempts)
            await to_thread.run_sync(self._send_to_queue, function.on_failure_arn, function.access_key, record)

    def _send_to_queue(self, queue_arn: str, access_key: str, record: Mapping[str, Any]) -> None:
        client = boto3.session.Session().client(
            "sqs",
            region_name=self._region,
            endpoint_url=self._edge_url,
            aws_access_key_id=access_key,
            aws_secret_access_key=SECRET_ACCESS_KEY,
        )
        # Lambda itself needs nothing but SendMessage of the function's role, so nothing else is asked for here.
        account_id, name = queue_arn.rsplit(":", 2)[1:]
        client.send_message(QueueUrl=f"{self._edge_url}/{account_id}/{name}", MessageBody=json.dumps(record))


def _check_payload(event: bytes, invocation_type: str) -> None:
    limit = _MAX_PAYLOAD_BYTES[invocation_type]
    if len(event) > limit:
        raise InvocationError(
            413, "RequestTooLargeException", f"{len(event)} byte payload is too large for the {invocation_type} limit"
        )
    try:
        json.loads(event or b"{}")
    except ValueError as error:
        raise InvocationError(
            400, "InvalidRequestContentException", f"Could not parse request body into json: {error}"
        ) from error


def _failure_record(
    function: FunctionConfiguration, event: bytes, outcome: Outcome, request_id: str, attempts: int
) -> dict[str, Any]:
    """Return the record that Lambda sends to a failure destination."""
    return {
        "version": "1.0",
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "requestContext": {
            "requestId": request_id,
            "functionArn": f"{function.arn}:$LATEST",
            "condition": "RetriesExhausted",
            "approximateInvokeCount": attempts,
        },
        "requestPayload": json.loads(event),
        "responseContext": {"statusCode": 200, "executedVersion": "$LATEST", "functionError": "Unhandled"},
        "responsePayload": json.loads(outcome.payload or b"null"),
    }


def _invoke_endpoint(function: FunctionConfiguration, event: bytes, request_id: str) -> Outcome:
    headers = {"Content-Type": "application/json", "Lambda-Runtime-Aws-Request-Id": request_id}
    request = urllib.request.Request(str(function.endpoint_url), data=event, headers=headers)  # noqa: S310 - loopback
    try:
        with urllib.request.urlopen(request, timeout=function.timeout_seconds) as answer:  # noqa: S310 - loopback
            return Outcome(payload=answer.read(), failed="X-Amz-Function-Error" in answer.headers)
    except TimeoutError:
        message = f"RequestId: {request_id} Error: Task timed out after {function.timeout_seconds:.2f} seconds"
        return Outcome.error("Sandbox.Timedout", message)
    except urllib.error.URLError as error:
        return Outcome.error("Runtime.ExitError", f"{function.endpoint_url} does not answer: {error.reason}")
