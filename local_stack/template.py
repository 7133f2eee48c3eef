"""The synthesised cloud assembly: its templates, its assets, and CloudFormation's intrinsic functions."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final


class TemplateError(ValueError):
    """The assembly or template cannot be deployed locally; the message names the place and what to do."""


class _NoValue:
    """What `AWS::NoValue` resolves to: the member is left out."""


_NO_VALUE: Final = _NoValue()
_SUBSTITUTION = re.compile(r"\$\{(!?)([^}]+)\}")


@dataclass(frozen=True, kw_only=True)
class StackTemplate:
    """One stack of an assembly. assets: object key in the staging bucket -> directory or file on disk."""

    name: str
    template: Mapping[str, Any]
    assets: Mapping[str, Path]

    @property
    def resources(self) -> Mapping[str, Mapping[str, Any]]:
        """Logical id -> resource."""
        resources: Mapping[str, Mapping[str, Any]] = self.template.get("Resources", {})
        return resources


def load_assembly(directory: Path) -> list[StackTemplate]:
    """Read all stacks of a cloud assembly (`cdk.out`), in the order of its manifest.

    Raises TemplateError where the directory is no assembly.
    """
    manifest_path = directory / "manifest.json"
    if not manifest_path.is_file():
        raise TemplateError(f"{directory} has no manifest.json: synthesise first (python app.py --output {directory})")
    manifest = json.loads(manifest_path.read_text(encoding="utf-8"))
    stacks = []
    for artifact_id, artifact in manifest["artifacts"].items():
        if artifact["type"] == "aws:cloudformation:stack":
            properties = artifact["properties"]
            template = json.loads((directory / properties["templateFile"]).read_text(encoding="utf-8"))
            stacks.append(
                StackTemplate(
                    name=properties.get("stackName", artifact_id),
                    template=template,
                    assets=_assets(directory, artifact_id),
                )
            )
    if not stacks:
        raise TemplateError(f"{manifest_path} has no stack")
    return stacks


def _assets(directory: Path, artifact_id: str) -> dict[str, Path]:
    path = directory / f"{artifact_id}.assets.json"
    if not path.is_file():
        return {}
    files = json.loads(path.read_text(encoding="utf-8")).get("files", {})
    return {
        destination["objectKey"]: directory / asset["source"]["path"]
        for asset in files.values()
        for destination in asset["destinations"].values()
    }


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the pseudo parameters stand for."""

    account_id: str
    region: str


class Resolver:
    """Replaces intrinsic functions by values. Resources are asked for through two functions, which may create them."""

    def __init__(
        self,
        stack: StackTemplate,
        environment: Environment,
        *,
        reference: Callable[[str], Any],
        attribute: Callable[[str, str], Any],
        imported: Callable[[str], Any],
    ) -> None:
        """reference: `Ref` of a logical id. attribute: `Fn::GetAtt`. imported: the value of another stack's export."""
        self._stack = stack
        self._reference = reference
        self._attribute = attribute
        self._imported = imported
        self._pseudo: dict[str, Any] = {
            "AWS::AccountId": environment.account_id,
            "AWS::Region": environment.region,
            "AWS::Partition": "aws",
            "AWS::URLSuffix": "amazonaws.com",
            "AWS::StackName": stack.name,
            "AWS::StackId": ":".join(
                ("arn:aws:cloudformation", environment.region, environment.account_id, f"stack/{stack.name}/local")
            ),
            "AWS::NotificationARNs": [],
            "AWS::NoValue": _NO_VALUE,
        }
        self._functions: dict[str, Callable[[Any], Any]] = {
            "Fn::GetAtt": self._get_att,
            "Fn::Join": self._join,
            "Fn::Sub": self._sub,
            "Fn::Select": self._select,
            "Fn::Split": self._split,
            "Fn::If": self._if,
            "Fn::FindInMap": self._find_in_map,
            "Fn::Base64": lambda value: base64.b64encode(str(self.resolve(value)).encode()).decode(),
            "Fn::ImportValue": lambda value: self._imported(self.resolve(value)),
            "Fn::GetAZs": lambda _: [f"{environment.region}{zone}" for zone in "abc"],
            "Fn::ToJsonString": lambda value: json.dumps(self.resolve(value)),
        }

    def resolve(self, value: Any) -> Any:
        """Return `value` with every intrinsic function replaced. Raises TemplateError for one that is unknown."""
        if isinstance(value, list):
            return [item for item in map(self.resolve, value) if item is not _NO_VALUE]
        if not isinstance(value, dict):
            return value
        if len(value) == 1:
            name, argument = next(iter(value.items()))
            if name == "Ref":
                return self._ref(argument)
            if name in self._functions:
                return self._functions[name](argument)
            if name.startswith("Fn::"):
                known = ", ".join(sorted(self._functions))
                raise TemplateError(f"stack {self._stack.name}: {name} is not known here (known: Ref, {known})")
        resolved = {name: self.resolve(item) for name, item in value.items()}
        return {name: item for name, item in resolved.items() if item is not _NO_VALUE}

    def condition(self, name: str) -> bool:
        """Evaluate one of the template's conditions."""
        conditions = self._stack.template.get("Conditions", {})
        if name not in conditions:
            raise TemplateError(f"stack {self._stack.name}: condition {name} does not exist")
        return self._evaluate(conditions[name])

    def _evaluate(self, expression: Mapping[str, Any]) -> bool:
        name, argument = next(iter(expression.items()))
        match name:
            case "Condition":
                return self.condition(argument)
            case "Fn::Equals":
                return bool(self.resolve(argument[0]) == self.resolve(argument[1]))
            case "Fn::And":
                return all(self._evaluate(part) for part in argument)
            case "Fn::Or":
                return any(self._evaluate(part) for part in argument)
            case "Fn::Not":
                return not self._evaluate(argument[0])
        raise TemplateError(f"stack {self._stack.name}: {name} is no condition function")

    def _ref(self, name: str) -> Any:
        if name in self._pseudo:
            return self._pseudo[name]
        parameter = self._stack.template.get("Parameters", {}).get(name)
        if parameter is None:
            return self._reference(name)
        if "Default" not in parameter:
            raise TemplateError(
                f"stack {self._stack.name}: parameter {name} has no default, and none can be given here"
            )
        return parameter["Default"]

    def _get_att(self, argument: Any) -> Any:
        logical_id, attribute = argument.split(".", 1) if isinstance(argument, str) else argument
        return self._attribute(logical_id, self.resolve(attribute))

    def _join(self, argument: Any) -> str:
        separator, parts = argument
        return str(separator).join(str(part) for part in self.resolve(parts))

    def _sub(self, argument: Any) -> str:
        text, variables = (argument, {}) if isinstance(argument, str) else argument

        def replace(found: re.Match[str]) -> str:
            escaped, name = found.groups()
            if escaped:
                return "${" + name + "}"
            if name in variables:
                return str(self.resolve(variables[name]))
            return str(self._get_att(name) if "." in name else self._ref(name))

        return _SUBSTITUTION.sub(replace, text)

    def _select(self, argument: Any) -> Any:
        index, items = argument
        return self.resolve(items)[int(self.resolve(index))]

    def _split(self, argument: Any) -> list[str]:
        separator, text = argument
        return str(self.resolve(text)).split(separator)

    def _if(self, argument: Any) -> Any:
        name, when_true, when_false = argument
        return self.resolve(when_true if self.condition(name) else when_false)

    def _find_in_map(self, argument: Any) -> Any:
        table, first, second = (self.resolve(part) for part in argument)
        try:
            return self._stack.template["Mappings"][table][first][second]
        except KeyError as error:
            raise TemplateError(f"stack {self._stack.name}: Mappings has no {table}.{first}.{second}") from error
