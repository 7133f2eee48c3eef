"""The examination before training: every kind of trouble is found, with what to do, and leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import doctor_scenarios
from tests.distributed.conftest import RunRanks, same_everywhere

pytestmark = pytest.mark.distributed

_told: list[dict[str, Any]] = []


@pytest.fixture
def told(run_ranks: RunRanks) -> list[dict[str, Any]]:
    """What three ranks were told in each case; run once for all tests."""
    if not _told:
        _told.extend(run_ranks(doctor_scenarios.examinations, 3))
    return _told


def observations(told: list[dict[str, Any]], case: str) -> list[tuple[str, str, str]]:
    """(subject, level, message), the same on every rank."""
    document = same_everywhere([result[case] for result in told], "diagnosis")
    return [(o["subject"], o["level"], o["message"]) for o in document["observations"]]


@pytest.mark.parametrize("case", ["healthy", "healthy with running statistics", "no rebuild_batch"])
def test_nothing_is_found_where_nothing_is_wrong(told: list[dict[str, Any]], case: str) -> None:
    assert observations(told, case) == []


def test_no_examination_leaves_a_trace(told: list[dict[str, Any]]) -> None:
    assert [case for case in doctor_scenarios.CASES for result in told if not result[case]["left"]] == []


@pytest.mark.parametrize(
    ("case", "subject", "level", "words"),
    [
        (
            "unseeded augmentation",
            "rebuild_batch",
            "refused",
            [
                "rank 0 on node-0",
                "rebuild_batch(3, 0) gives another batch[0] at every call",
                "not seeded",
                "the batch that train fetched, or your loop gave to start_step",
            ],
        ),
        ("a batch that is different at every call", "rebuild_batch", "refused", ["another batch[1] at every call"]),
        (
            "another batch than the trained one",
            "rebuild_batch",
            "refused",
            ["batch[0] than the batch that is trained on", "call the same function of (step, rank)"],
        ),
        ("other data on another node", "rebuild_batch", "refused", ["batch[0] here than on rank", "data files"]),
        ("only one's own batch", "rebuild_batch", "refused", ["FileNotFoundError: shard-", "any rank's batch"]),
        (
            "noise in the forward",
            "kernels",
            "refused",
            ["forward does not repeat bit for bit", "aten.mul in added (Noisy)", "audit_every=None"],
        ),
        (
            "noise in the backward",
            "kernels",
            "loss only",
            ["backward does not repeat", "_NoisyBackwardBackward", "added (Noisy)", "compare losses only"],
        ),
        (
            "a kernel without deterministic version",
            "kernels",
            "loss only",
            ["put_ does not have a deterministic implementation", "aten.put_ in added (PutsInto)"],
        ),
        (
            "mixed thread counts",
            "environment",
            "refused",
            ["num_threads is 1 on ranks 0, 2, 2 on ranks 1", "one image"],
        ),
        ("SyncBatchNorm", "modules", "refused", ["SyncBatchNorm (added)", "use BatchNorm or GroupNorm"]),
        ("a loss that communicates", "loss", "refused", ["communicates (allreduce)", "outside of compute_loss"]),
        (
            "a loss that is a tuple",
            "loss",
            "refused",
            ["must return one scalar tensor, and returned tuple", "return its loss alone"],
        ),
        (
            "a device that computes wrongly",
            "kernels",
            "suspect",
            ["rank 1 (node-1) computes other bits", "first at ", "blocks.1", "its hardware is suspect"],
        ),
    ],
)
def test_each_trouble_is_named_with_what_to_do(
    told: list[dict[str, Any]], case: str, subject: str, level: str, words: list[str]
) -> None:
    found = observations(told, case)
    assert [(s, found_level) for s, found_level, _ in found if s == subject] == [(subject, level)], found
    (message,) = [message for s, _, message in found if s == subject]
    assert [word for word in words if word not in message] == [], message
    coverage = same_everywhere([result[case] for result in told], "coverage")
    assert coverage == ("loss only: backward not covered" if level == "loss only" else "loss and gradients")


def test_a_preflight_keeps_every_bit_downgrades_openly_refuses_and_runs_once(run_ranks: RunRanks) -> None:
    results = run_ranks(doctor_scenarios.guarded_runs, 3)

    for result in results:
        assert result["preflight False"] == result["preflight True"]
        assert result["preflight True"]["alarm"] is False
        loss_only = result["loss only"]
        assert (loss_only["alarm"], loss_only["saved"], loss_only["promoted"]) == (False, 2, [])
        first, second = result["twice"]
        assert first > 0
        assert second == 0
    assert [result["loss only"]["said"] for result in results] == [1, 0, 0], "said once, by rank 0"
    assert "not seeded" in same_everywhere(results, "refused")
