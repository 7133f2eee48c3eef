"""The site builds without a warning, loads nothing from elsewhere, and its references are in step with the code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from infra.policy_reference import PAGE, reference
from tests.docs.blocks import DOCS, REPOSITORY


def test_the_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
        cwd=REPOSITORY,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 15
    loads = r'<(?:script|img|iframe|link rel="stylesheet"|link rel="preconnect")[^>]*(?:src|href)="https?://[^"]*"'
    assert [(page.name, found) for page in pages for found in re.findall(loads, page.read_text())] == []


def test_the_policies_page_is_what_the_model_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run: python -m infra.policy_reference"


def test_the_pods_page_knows_only_variables_that_the_architecture_defines() -> None:
    defined = set(re.findall(r"`([A-Z][A-Z_]+)`", (DOCS / "architecture.md").read_text()))
    named = set(re.findall(r"`([A-Z][A-Z_]+)`", (DOCS / "pods.md").read_text()))
    assert len(named) > 10
    assert named - defined == set()
