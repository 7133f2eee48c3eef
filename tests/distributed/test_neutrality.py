"""A guarded run ends with the same bits as one without truestep, and stays silent."""

from __future__ import annotations

import pytest

from tests.distributed import scenarios
from tests.distributed.conftest import RunRanks, same_everywhere

pytestmark = pytest.mark.distributed


@pytest.mark.timeout(600)
def test_300_audited_steps_end_bit_identical_to_plain_ddp_and_raise_no_alarm(
    run_ranks: RunRanks,
) -> None:
    plain = run_ranks(scenarios.plain_run, 3, "transformer", 300)
    audited = run_ranks(scenarios.audited_run, 3, "transformer", 300, 1)

    assert same_everywhere(audited, "alarm") is None
    for before, after in zip(plain, audited, strict=True):
        assert {**before, "alarm": None} == after


def test_running_statistics_and_dropout_streams_are_untouched_by_audits(run_ranks: RunRanks) -> None:
    plain = run_ranks(scenarios.plain_run, 3, "batch_norm", 30)
    audited = run_ranks(scenarios.audited_run, 3, "batch_norm", 30, 2)

    assert same_everywhere(audited, "alarm") is None
    assert [row["buffers"] for row in plain] == [row["buffers"] for row in audited]
    assert [row["weights"] for row in plain] == [row["weights"] for row in audited]
    assert plain[0]["buffers"]["norm.running_mean"] != plain[1]["buffers"]["norm.running_mean"], (
        "the test needs ranks that differ"
    )
