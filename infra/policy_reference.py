"""Writes ``docs/policies.md``, the policies' reference, from the model that the functions validate with.

python -m infra.policy_reference
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from enum import StrEnum
from typing import Any

from infra.errors import PreparationError
from infra.paths import REPOSITORY
from lambdas.domain.policy import Policy

PAGE = REPOSITORY / "docs" / "policies.md"
_INTRODUCTION = """\
# Policies

What the recovery may do: `truestep.policy` in `cdk.json`. `policy.clusters.<HyperPod cluster ARN>` overrides fields
for one cluster. Unknown fields and values out of range stop the deployment with a sentence that names the field.
This page is written from the model by `python -m infra.policy_reference`.

```json
{"policy": {"dry_run": true, "max_quarantined_nodes": 1}}
```

| field | default | allowed | meaning |
|---|---|---|---|
"""


def reference() -> str:
    """The page. Raises `PreparationError` for a field without a docstring: nobody could set it."""
    meanings = _docstrings()
    schema = Policy.model_json_schema()
    rows = []
    for name, field in Policy.model_fields.items():
        if name not in meanings:
            raise PreparationError(f"Policy.{name} has no docstring below it; say what it does, in one sentence")
        default = json.dumps(field.default)
        allowed = _allowed(field.annotation, schema["properties"][name])
        rows.append(f"| `{name}` | `{default}` | {allowed} | {_one_line(meanings[name])} |")
    return _INTRODUCTION + "\n".join(rows) + "\n"


def _docstrings() -> dict[str, str]:
    (model,) = ast.parse(inspect.getsource(Policy)).body
    assert isinstance(model, ast.ClassDef)
    found = {}
    for field, following in zip(model.body, model.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
        ):
            found[field.target.id] = inspect.cleandoc(str(following.value.value))
    return found


def _allowed(annotation: Any, schema: dict[str, Any]) -> str:
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ", ".join(f"`{choice}`" for choice in annotation)
    if annotation is bool:
        return "`true`, `false`"
    lower = f"{schema['minimum']:,g} or more" if "minimum" in schema else f"above {schema['exclusiveMinimum']:,g}"
    upper = f"at most {schema['maximum']:,g}" if "maximum" in schema else ""
    upper = f"below {schema['exclusiveMaximum']:,g}" if "exclusiveMaximum" in schema else upper
    return f"{lower}, {upper}" if upper else lower


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


def main() -> int:
    """Command line; returns the exit status."""
    try:
        PAGE.write_text(reference(), encoding="utf-8")
    except PreparationError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
