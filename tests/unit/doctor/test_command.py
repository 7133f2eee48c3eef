"""``truestep doctor``: real processes on this machine, one for each node."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from truestep.cli import main

SCRIPTS = "tests.unit.doctor.scripts"


@pytest.fixture
def doctor(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    """(exit code, output, complaint), both with their wrapping undone; also what the processes print."""
    monkeypatch.setenv("COLUMNS", "100")

    def call(script: str, *options: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["doctor", "--script", script, *options])
        printed = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, " ".join(printed.out.split()), " ".join(printed.err.split())

    return call


def test_a_script_whose_audits_can_work(doctor: Callable[..., tuple[int, str, str]]) -> None:
    assert doctor(f"{SCRIPTS}:fine") == (0, "nothing found: audits cover loss and gradients", "")


def test_what_is_wrong_is_told_with_the_leaf_and_exit_code_1(doctor: Callable[..., tuple[int, str, str]]) -> None:
    code, out, _ = doctor(f"{SCRIPTS}:augmented", "--processes", "2", "--json")
    document = json.loads(out)
    assert (code, document["coverage"]) == (1, "nothing")
    found = {o["subject"]: o for o in document["observations"]}
    assert found["nodes"]["level"] == "note"
    assert found["rebuild_batch"]["level"] == "refused"
    assert "gives another batch.pixels at every call" in found["rebuild_batch"]["message"]


@pytest.mark.parametrize(
    ("script", "options", "words"),
    [
        ("train", (), "give module:function"),
        (f"{SCRIPTS}:fine", ("--processes", "1"), "two at least"),
        ("nowhere_to_be_found:pieces", (), "no module 'nowhere_to_be_found'"),
        ("nowhere/train.py:pieces", (), "nowhere/train.py; give module:function or file.py:function"),
        (f"{SCRIPTS}:missing", (), "has no function 'missing'"),
        (f"{SCRIPTS}:bare", (), "returned Linear; return truestep.doctor.Examined"),
        (f"{SCRIPTS}:fails_on_one", (), "no such shard"),
    ],
)
def test_a_script_that_cannot_be_used_is_refused_with_what_to_give(
    doctor: Callable[..., tuple[int, str, str]], script: str, options: tuple[str, ...], words: str
) -> None:
    code, out, complaint = doctor(script, *options)
    assert (code, out) == (2, "")
    assert words in complaint


def test_a_script_that_never_returns_is_given_up(doctor: Callable[..., tuple[int, str, str]]) -> None:
    began = time.monotonic()
    code, _, complaint = doctor(f"{SCRIPTS}:stuck", "--timeout", "1")
    assert code == 2
    assert complaint == "truestep: the examination took more than 1 s; give --timeout more seconds"
    assert time.monotonic() - began < 150
