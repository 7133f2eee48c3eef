"""The SDK's whole part of a recovery: a fault, its alarm, and the resume that the alarm makes possible."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import custody_scenarios
from tests.distributed.conftest import RunRanks, same_everywhere
from truestep.contract import Alarm, ResumeDirective, to_json

pytestmark = pytest.mark.distributed


def test_run_resumed_from_the_alarms_checkpoint_ends_as_if_the_fault_had_never_been(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    clean = run_ranks(custody_scenarios.custody_run, 4, (tmp_path / "clean").as_uri(), 20, None, None)
    root = (tmp_path / "faulty").as_uri()
    alarm = Alarm.from_json(same_everywhere(run_ranks(custody_scenarios.custody_run, 4, root, 20, 7, None), "alarm"))
    assert alarm.suspect_ranks == (2,)
    assert (alarm.step, alarm.clean_through) == (9, 4)
    assert alarm.checkpoint is not None
    assert alarm.checkpoint.step == 4

    directive = ResumeDirective(
        incident_id="incident-1",
        checkpoint_uri=alarm.checkpoint.uri,
        manifest_sha256=alarm.checkpoint.manifest_sha256,
        max_step=alarm.checkpoint.step,
        banned_gpu_uuids=tuple(row.gpu_uuid for row in alarm.suspects),
        answers_alarm_ids=(alarm.alarm_id,),
    )
    nodes = ["node-1", "node-0", "spare", "node-3"]
    resumed = run_ranks(custody_scenarios.custody_run, 4, root, 20, None, json.dumps(to_json(directive)), nodes=nodes)

    assert same_everywhere(resumed, "start_step") == 5
    assert same_everywhere(resumed, "alarm") is None
    for before, after in zip(clean, resumed, strict=True):
        assert after["state"]["losses"] == before["state"]["losses"][5:]
        assert {**after["state"], "losses": None} == {**before["state"], "losses": None}
