"""``truestep checkpoints start-from``: a person's order, on checkpoints that the SDK wrote."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from tests.unit.cli.conftest import Printed, SavedRun, flip_bit_of_file
from truestep.contract import MANIFEST_NAME

Truestep = Callable[..., Printed]
Start = Callable[..., SavedRun]


def test_start_from_orders_the_newest_trusted_checkpoint_of_a_root_or_the_one_that_is_named(
    saved: tuple[Path, Path], root: Path, truestep: Truestep
) -> None:
    printed = truestep("checkpoints", "start-from", str(root))
    assert printed.code == 0
    assert f"resumes from {saved[0].as_uri()} with step 10; trusted for faults" in printed.words
    directive = json.loads((root / "resume.json").read_bytes())["directive"]
    manifest = hashlib.sha256((saved[0] / MANIFEST_NAME).read_bytes()).hexdigest()
    assert (directive["manifest_sha256"], directive["max_step"]) == (manifest, 9)
    printed = truestep("checkpoints", "start-from", str(saved[1]), "--json")
    assert json.loads(printed.out) == json.loads((root / "resume.json").read_bytes())
    assert json.loads(printed.out)["directive"]["max_step"] == 19
    assert "NOT trusted" in truestep("checkpoints", "start-from", str(saved[1])).words


def test_start_from_a_damaged_checkpoint_orders_nothing_unless_it_is_told_not_to_look(
    root: Path, saved: tuple[Path, Path], truestep: Truestep
) -> None:
    flip_bit_of_file(saved[1] / "optimizer.pt", -100)
    printed = truestep("checkpoints", "start-from", str(saved[1]))
    assert (printed.code, printed.out) == (1, "")
    assert "step-00000019 is DAMAGED: optimizer.pt: " in printed.complaint
    assert "so nothing was ordered; name another" in printed.complaint
    assert not (root / "resume.json").exists()
    assert truestep("checkpoints", "start-from", str(saved[1]), "--no-verify").code == 0
    assert (root / "resume.json").exists()


def test_start_from_a_root_where_nothing_is_trusted_says_what_is_left_to_do(
    root: Path, start: Start, truestep: Truestep
) -> None:
    start(root.as_uri()).save(9)
    printed = truestep("checkpoints", "start-from", str(root))
    assert printed.code == 2
    assert "is trusted; name one of those" in printed.complaint
    assert not (root / "resume.json").exists()
