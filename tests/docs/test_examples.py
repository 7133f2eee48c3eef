"""What the documentation shows works: programs run, commands exist with their options, documents parse."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from tests.distributed.conftest import (  # noqa: F401 - fixtures
    RunRanks,
    distributed_lock,
    process_context,
    run_ranks,
)
from tests.docs.blocks import DOCS, LANGUAGES, PAGES, REPOSITORY, blocks, blocks_of, commands, runs_on_ranks

AWAY = {"incidents", "drill", "check-access"}
"""Commands that need a deployment: their options are checked, and they are not run."""
NEEDS_MORE = re.compile(r"<|\.\.\.|s3://|--script|--plot|--outputs|checkpoints (list|verify|diff)|confirm|fingerprint")
"""A command line with a place for the reader's own value."""


def test_every_block_is_of_a_language_that_is_checked() -> None:
    assert {block.language for page in PAGES for block in blocks_of(page)} <= LANGUAGES


@pytest.mark.parametrize("page", [page for page in PAGES if not runs_on_ranks(page)], ids=lambda page: page.stem)
def test_the_programs_of_a_page_run(page: Path) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(page):
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(block.page), "exec"), names)  # noqa: S102


def whole_page(rank: int, page: str, root: str) -> dict[str, Any]:
    os.environ["TRUESTEP_CHECKPOINT_ROOT"] = root
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(Path(page)):
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)  # noqa: S102
    return {"rank": rank, "start": names["point"].start_step, "alarm": names["alarm"] is not None}


def fault_of_the_page(rank: int, page: str, root: str) -> dict[str, Any]:
    """As a reader puts the section together: names of nodes before `attach`, the fault after it, on one machine."""
    found = blocks_of(Path(page))
    before, inject = (next(b.text for b in found if words in b.text) for words in ('["NODE_NAME"]', "import inject"))
    variable, text = next(shlex.split(b.text)[1].split("=", 1) for b in found if "SIMULATED_FAULT" in b.text)
    os.environ.pop("NODE_NAME", None)
    os.environ.update({variable: text, "TRUESTEP_CHECKPOINT_ROOT": root, "TRUESTEP_HOLD_TIMEOUT_SECONDS": "0"})
    names: dict[str, Any] = {"__name__": "page"}
    own, added = [b.text for b in found if b.language == "python"][:2]
    with pytest.raises(SystemExit):
        exec(own + before + added.replace("schedule = ", f"{inject}\nschedule = "), names)  # noqa: S102
    alarm = names["alarm"]
    return {"step": alarm.step, "kind": str(alarm.verdict.kind), "suspects": [r.node_name for r in alarm.suspects]}


@pytest.mark.distributed
def test_the_fault_that_the_page_shows_is_caught_and_its_rank_named(
    run_ranks: RunRanks,  # noqa: F811 - the fixture
    tmp_path: Path,
) -> None:
    told = run_ranks(fault_of_the_page, 3, str(DOCS / "your_loop.md"), (tmp_path / "run").as_uri())
    assert told == [{"step": 7, "kind": "conclusive", "suspects": ["node-1"]}] * 3


RESUMED_AT = {"your_loop": 12, "checkpoints": 10}
"""After the newest audit of each page's program."""


@pytest.mark.distributed
@pytest.mark.parametrize("page", [page for page in PAGES if runs_on_ranks(page)], ids=lambda page: page.stem)
def test_a_page_that_is_a_program_for_several_ranks_trains_saves_and_resumes(
    run_ranks: RunRanks,  # noqa: F811 - the fixture
    tmp_path: Path,
    page: Path,
) -> None:
    root = (tmp_path / "run").as_uri()
    first = run_ranks(whole_page, 3, str(page), root)
    assert first == [{"rank": rank, "start": 0, "alarm": False} for rank in range(3)]
    again = run_ranks(whole_page, 3, str(page), root)
    assert [result["start"] for result in again] == [RESUMED_AT[page.stem]] * 3


def test_included_programs_are_those_that_the_tests_of_trainers_run() -> None:
    included = [
        re.fullmatch(r'--8<-- "examples/(\w+)/train.py"\n', block.text)
        for block in blocks("")
        if "--8<--" in block.text
    ]
    run = (REPOSITORY / "tests" / "distributed" / "test_trainers.py").read_text()
    assert included
    assert [match for match in included if match is None or f'("{match[1]}", ' not in run] == []


def test_json_and_yaml_parse() -> None:
    for block in blocks("json"):
        json.loads(block.text)
    for block in blocks("yaml"):
        included = re.sub(r'--8<-- "(.*)"', lambda match: (REPOSITORY / match[1]).read_text(), block.text)
        assert list(yaml.safe_load_all(included))


def typed(program: str) -> Iterator[tuple[str, list[str]]]:
    for where, line in commands():
        words = shlex.split(line)
        if words[0] == program:
            yield where, words[1:]


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    named = {(where, word) for where, words in typed("make") for word in words if "=" not in word}
    assert {word for _, word in named} >= {"demo", "test", "check", "synth"}
    assert [(where, word) for where, word in sorted(named) if word not in targets] == []


def test_every_module_that_is_run_exists() -> None:
    modules = {(where, words[1]) for where, words in typed("python")} | {
        (where, words[1]) for where, words in typed(".venv/bin/python")
    }
    assert modules
    outside = ("pytest", "pip", "demo.training")
    missing = [one for one in sorted(modules) if one[1] not in outside and importlib.util.find_spec(one[1]) is None]
    assert missing == []


def test_every_truestep_command_exists_with_its_options_and_runs_where_it_can() -> None:
    from truestep.cli.application import application

    runner = CliRunner()
    wide = {"COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
    seen = set()
    for where, words in typed("truestep"):
        path = []
        for word in words:
            if not re.fullmatch(r"[a-z]+(-[a-z]+)*", word) or len(path) == (
                2 if path[:1] in (["checkpoints"], ["incidents"]) else 1
            ):
                break
            path.append(word)
        told = runner.invoke(application, [*path, "--help"], env=wide)
        assert told.exit_code == 0, f"{where}: truestep {' '.join(words)}: {told.output}"
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert [one for one in options if one not in told.output] == [], f"{where}: truestep {' '.join(words)}"
        seen.add(" ".join(path))
        line = " ".join(words)
        if options and not AWAY & set(path) and not NEEDS_MORE.search(line):
            done = runner.invoke(application, words, env=wide)
            assert done.exit_code == 0, f"{where}: truestep {line}: {done.output}"
    assert {"plan", "doctor", "drill", "check-access", "checkpoints list", "incidents approve"} <= seen


def test_every_page_of_the_folder_is_in_the_navigation() -> None:
    navigation = (REPOSITORY / "mkdocs.yml").read_text()
    assert [name for page in DOCS.rglob("*.md") if (name := str(page.relative_to(DOCS))) not in navigation] == []
