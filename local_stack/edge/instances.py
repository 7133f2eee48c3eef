"""Instances of a Lambda function: one `awslambdaric` process each, started when first needed, replaced when it dies.

They run in separate processes because each function has its own environment and credentials.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from asyncio.subprocess import Process
from contextlib import suppress
from pathlib import Path
from typing import Any

from local_stack.access_keys import SECRET_ACCESS_KEY
from local_stack.edge.configuration import FunctionConfiguration
from local_stack.edge.runtime_api import Invocation, Outcome, RuntimeApi
from local_stack.process import tethered

_MAX_INSTANCES = 3
# Lambda allows 10 s; a machine that also trains a model needs longer for the same imports.
_INITIALISATION_SECONDS = 60.0


class Instance:
    """One runtime process and its Runtime API."""

    def __init__(self, function: FunctionConfiguration, process: Process, api: RuntimeApi) -> None:
        self._function = function
        self._process = process
        self._api = api
        self._exited = asyncio.ensure_future(process.wait())

    @classmethod
    async def start(cls, function: FunctionConfiguration, edge_url: str, region: str, log_directory: Path) -> Instance:
        """Start the runtime; it loads the handler's module while the caller goes on."""
        api = RuntimeApi()
        environment = _environment(function, await api.start(), edge_url, region)
        command, descriptors = tethered([sys.executable, "-m", "awslambdaric", function.handler])
        with (log_directory / f"{function.name}.log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                *command,
                pass_fds=descriptors,
                cwd=function.task_root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
            )
        return cls(function, process, api)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return not self._exited.done()

    async def invoke(self, request_id: str, event: bytes) -> Outcome:
        """Run one event. An instance that timed out, crashed or could not load its module is dead afterwards."""
        if not await self._ready():
            return await self._failed_initialisation(request_id)
        limit = self._function.timeout_seconds
        invocation = Invocation(
            request_id=request_id, function_arn=self._function.arn, event=event, timeout_seconds=limit
        )
        self._api.submit(invocation)
        await _first_of(invocation.outcome, self._exited, timeout_seconds=limit)
        if invocation.outcome.done():
            return invocation.outcome.result()
        if not self.alive:
            return _exit_error(request_id, self._exited.result())
        await self.kill()
        return Outcome.error(
            "Sandbox.Timedout", f"RequestId: {request_id} Error: Task timed out after {limit:.2f} seconds"
        )

    async def _ready(self) -> bool:
        polled = asyncio.ensure_future(self._api.polled.wait())
        await _first_of(polled, self._exited, timeout_seconds=_INITIALISATION_SECONDS)
        return polled.done() or not polled.cancel()

    async def _failed_initialisation(self, request_id: str) -> Outcome:
        timed_out = self.alive
        await self.kill()
        if self._api.initialisation_error is not None:
            return self._api.initialisation_error
        if timed_out:
            return Outcome.error(
                "Sandbox.Timedout",
                f"RequestId: {request_id} Error: initialisation took longer than {_INITIALISATION_SECONDS:g} seconds",
            )
        return _exit_error(request_id, self._exited.result())

    async def kill(self) -> None:
        """End the process and whatever it started."""
        self._api.close()
        if self.alive:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        await self._exited


class FunctionPool:
    """The instances of one function. Invocations beyond the instances wait for a free one, in order."""

    def __init__(self, function: FunctionConfiguration, edge_url: str, region: str, log_directory: Path) -> None:
        self.function = function
        self._edge_url = edge_url
        self._region = region
        self._log_directory = log_directory
        self._slots = asyncio.Semaphore(_MAX_INSTANCES)
        self._idle: list[Instance] = []
        self._all: set[Instance] = set()
        self._closed = False

    async def invoke(self, event: bytes, request_id: str | None = None) -> Outcome:
        """Run one event on a free instance, starting one where none is."""
        async with self._slots:
            instance = await self._take()
            try:
                outcome = await instance.invoke(request_id or str(uuid.uuid4()), event)
            except BaseException:
                await instance.kill()  # cancelled half-way: what it is doing now is unknown
                raise
            finally:
                await self._give_back(instance)
            return outcome

    async def _take(self) -> Instance:
        while self._idle:
            instance = self._idle.pop()
            if instance.alive:
                return instance
            self._all.discard(instance)
        instance = await Instance.start(self.function, self._edge_url, self._region, self._log_directory)
        self._all.add(instance)
        return instance

    async def kill_busy(self) -> None:
        """Kill the instances that run an event now."""
        busy = [instance for instance in self._all if instance not in self._idle]
        await asyncio.gather(*(instance.kill() for instance in busy))

    async def _give_back(self, instance: Instance) -> None:
        if instance.alive and not self._closed:
            self._idle.append(instance)
        else:
            self._all.discard(instance)
            await instance.kill()

    async def close(self) -> None:
        """Kill all instances, whatever they are doing."""
        self._closed = True
        await asyncio.gather(*(instance.kill() for instance in self._all))


async def _first_of(first: asyncio.Future[Any], second: asyncio.Future[Any], *, timeout_seconds: float) -> None:
    await asyncio.wait({first, second}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)


def _exit_error(request_id: str, status: int) -> Outcome:
    how = f"signal: {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return Outcome.error("Runtime.ExitError", f"RequestId: {request_id} Error: Runtime exited with error: {how}")


def _environment(function: FunctionConfiguration, runtime_api: str, edge_url: str, region: str) -> dict[str, str]:
    """Return the whole environment of an instance: what Lambda sets, then the template's variables.

    Nothing of this process's own environment but the search path: a developer's AWS profile must not leak in.
    """
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "LANG": "en_US.UTF-8",
        "TZ": ":UTC",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": os.pathsep.join((function.task_root, *function.layer_paths)),
        "LAMBDA_TASK_ROOT": function.task_root,
        "_HANDLER": function.handler,
        "AWS_EXECUTION_ENV": f"AWS_Lambda_{function.runtime}",
        "AWS_LAMBDA_RUNTIME_API": runtime_api,
        "AWS_LAMBDA_FUNCTION_NAME": function.name,
        "AWS_LAMBDA_FUNCTION_VERSION": "$LATEST",
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(function.memory_mebibytes),
        "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{function.name}",
        "AWS_LAMBDA_LOG_STREAM_NAME": "local",
        "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
        "AWS_REGION": region,
        "AWS_DEFAULT_REGION": region,
        "AWS_ACCESS_KEY_ID": function.access_key,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "AWS_ENDPOINT_URL": edge_url,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        # No X-Ray daemon listens here.
        "POWERTOOLS_TRACE_DISABLED": "true",
        **function.environment,
    }
