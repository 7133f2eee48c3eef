"""docs/recovery_cases.md names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "recovery_cases.md").read_text()


def test_every_case_names_tests_that_exist() -> None:
    cases = [line for line in PAGE.splitlines() if line.startswith("- **")]
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) >= len(cases) >= 20
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (path, name)
