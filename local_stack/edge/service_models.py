"""Check requests and answers of stand-ins against botocore's own service models."""

from __future__ import annotations

from functools import cache
from typing import Any

import botocore.session
from botocore.model import ServiceModel, Shape
from botocore.validate import ParamValidator


class ModelViolationError(ValueError):
    """A message that the service's model does not allow; the text names the members."""


@cache
def service_model(service: str) -> ServiceModel:
    """Return botocore's model of a service (its name in boto3)."""
    return botocore.session.get_session().get_service_model(service)


def check(shape: Shape | None, value: dict[str, Any]) -> None:
    """Raise ModelViolationError where `value` lacks a required member, has a wrong type or one the model lacks."""
    if shape is None:
        if value:
            raise ModelViolationError(f"the operation has no members, but got {', '.join(value)}")
        return
    report = ParamValidator().validate(value, shape)
    problems = [report.generate_report()] if report.has_errors() else []
    problems += [f"Unknown member: {path}" for path in _unknown_members(shape, value, "")]
    if problems:
        raise ModelViolationError("\n".join(problems))


def _unknown_members(shape: Any, value: Any, path: str) -> list[str]:
    found: list[str] = []
    if shape.type_name == "structure" and isinstance(value, dict):
        for name, member in value.items():
            if name not in shape.members:
                found.append(f"{path}.{name}".lstrip("."))
            else:
                found += _unknown_members(shape.members[name], member, f"{path}.{name}")
    elif shape.type_name == "list" and isinstance(value, list):
        for index, member in enumerate(value):
            found += _unknown_members(shape.member, member, f"{path}[{index}]")
    elif shape.type_name == "map" and isinstance(value, dict):
        for name, member in value.items():
            found += _unknown_members(shape.value, member, f"{path}.{name}")
    return found
