"""What the deployer tells the edge: functions and HTTP routes, as they stand in the template."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self


class ConfigurationError(ValueError):
    """A function or route that cannot be served; the message names it and says why."""


@dataclass(frozen=True, kw_only=True)
class FunctionConfiguration:
    """One Lambda function.

    task_root: directory of the unpacked asset. layer_paths: directories put after it on the module search path.
    endpoint_url: where set, invocations are POSTed there instead of running `handler` (a debugger, a scripted test);
    an answer with the header `X-Amz-Function-Error` is a failed invocation.
    on_failure_arn: SQS queue for asynchronous events that failed `1 + maximum_retry_attempts` times.
    """

    name: str
    arn: str
    handler: str
    task_root: str
    access_key: str
    layer_paths: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    runtime: str = "python3.13"
    timeout_seconds: float = 3.0
    memory_mebibytes: int = 128
    maximum_retry_attempts: int = 2
    on_failure_arn: str | None = None
    endpoint_url: str | None = None

    def __post_init__(self) -> None:
        if self.endpoint_url is None and not Path(self.task_root).is_dir():
            raise ConfigurationError(
                f"function {self.name}: {self.task_root} is not a directory; synthesise the template again"
            )
        if self.timeout_seconds <= 0:
            raise ConfigurationError(f"function {self.name}: the timeout must be positive, not {self.timeout_seconds}")

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Raises ConfigurationError for members that are unknown or missing."""
        try:
            return cls(**{**value, "layer_paths": tuple(value.get("layer_paths", ()))})
        except TypeError as error:
            raise ConfigurationError(f"function {value.get('name')}: {error}") from error

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` takes."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class HttpRoute:
    """One route of the HTTP API: `route_key` is `METHOD /path/{parameter}` or `$default`."""

    api_id: str
    route_key: str
    function_name: str

    def match(self, method: str, path: str) -> dict[str, str] | None:
        """Return the path's parameters where the route serves this request, else None."""
        if self.route_key == "$default":
            return {}
        route_method, _, template = self.route_key.partition(" ")
        if route_method not in {"ANY", method}:
            return None
        pattern = "".join(
            f"(?P<{part[1:-2]}>.+)"
            if part.endswith("+}")
            else f"(?P<{part[1:-1]}>[^/]+)"
            if part[:1] == "{"
            else re.escape(part)
            for part in re.split(r"(\{[^}]+\})", template)
        )
        found = re.fullmatch(pattern, path)
        return None if found is None else found.groupdict()
