"""Which job an alarm is about decides what it belongs to, not its id alone; and a drill is about no real job."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from lambdas.receive_alarm.handler import handler as receive_alarm
from tests.adapters.store_handlers.conftest import CLUSTER, Cloud
from tests.adapters.store_handlers.test_intake import CONTEXT, an_event, executions
from tests.unit.recovery.alarms import CLUSTER_ARN, an_alarm
from truestep.contract import Alarm

REAL = an_alarm()
DRILL = dataclasses.replace(REAL, drill=True)
OTHER_NAMESPACE = dataclasses.replace(an_alarm(namespace="team-b", job_name="nuisance"), alarm_id=REAL.alarm_id)
OTHER_JOB = dataclasses.replace(an_alarm(job_name="finetune"), alarm_id=REAL.alarm_id)


@pytest.mark.parametrize("forgotten", [False, True], ids=["one instance", "instances of their own"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)], ids=["real first", "real last"])
def test_an_id_that_another_jobs_alarm_or_a_drill_has_used_swallows_no_alarm(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...], forgotten: bool
) -> None:
    served = {CLUSTER_ARN: {**CLUSTER, "training_namespaces": ["team-a", "team-b"]}}
    monkeypatch.setenv("TRUESTEP_CLUSTERS", json.dumps(served))
    alarms = (REAL, DRILL, OTHER_NAMESPACE, OTHER_JOB)
    opened: dict[int, str] = {}
    for index in order:
        if forgotten:
            forget()
        opened[index] = receive_alarm(an_event(alarms[index]), CONTEXT)["incident_id"]
    assert sorted(executions(cloud)) == sorted(set(opened.values()))
    for index, incident_id in opened.items():
        stored = cloud.store.load(incident_id)
        assert (stored.alarm, stored.dry_run) == (alarms[index], alarms[index].drill)
        assert receive_alarm(an_event(alarms[index]), CONTEXT)["incident_id"] == incident_id


@pytest.mark.parametrize("alarms", [(DRILL, an_alarm(step=121)), (an_alarm(step=121), DRILL)], ids=["drill", "real"])
def test_a_real_alarm_and_a_drill_about_the_same_jobs_name_never_join(cloud: Cloud, alarms: tuple[Alarm, ...]) -> None:
    opened = [cloud.store.load(receive_alarm(an_event(alarm), CONTEXT)["incident_id"]) for alarm in alarms]
    assert [incident.dry_run for incident in opened] == [alarm.drill for alarm in alarms]
    assert [incident.follows for incident in opened] == ["", ""]


def forget() -> None:
    """As a new instance of the function begins."""
    from lambdas.receive_alarm import handler as module

    remembered: Any = module._taken
    remembered.cache_clear()
