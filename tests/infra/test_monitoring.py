"""Whatever can be lost or forgotten rings, says what to do, and can be looked at."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from infra.paths import REPOSITORY

from .conftest import Template

RUNBOOK = (REPOSITORY / "docs" / "runbook.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", RUNBOOK, flags=re.MULTILINE | re.DOTALL))
METRICS = {
    "DeadLettersPresent": "ApproximateNumberOfMessagesVisible",
    "ReceiveAlarmErrors": "Errors",
    "RecordTrainingEventErrors": "Errors",
    "DecideApprovalErrors": "Errors",
    "ExecutionsFailed": "ExecutionsFailed",
    "ExecutionsTimedOut": "ExecutionsTimedOut",
    "ExecutionsAborted": "ExecutionsAborted",
    "RecoveryEscalated": "Decisions",
    "ApprovalsWaiting": "ApprovalReminders",
    "BreakerTripped": "BreakerTripped",
    "TrainingSilent": "Invocations",
}


def alarms(template: Template) -> dict[str, dict[str, Any]]:
    """Name without the stage -> properties."""
    found = template.of_type("AWS::CloudWatch::Alarm").values()
    return {alarm["AlarmName"].removeprefix("truestep-prod-"): alarm for alarm in found}


def test_every_way_of_losing_or_forgetting_an_incident_rings_on_the_topic(template: Template) -> None:
    found = alarms(template)
    assert {name: alarm["MetricName"] for name, alarm in found.items()} == METRICS
    (topic,) = template.of_type("AWS::SNS::Topic")
    assert all(alarm["AlarmActions"] == [{"Ref": topic}] for alarm in found.values())


def test_the_runbook_has_a_section_for_every_alarm_and_none_for_others(template: Template) -> None:
    assert SECTIONS.keys() == alarms(template).keys()
    for name, alarm in alarms(template).items():
        # A heading's anchor is its text in lower case.
        assert alarm["AlarmDescription"].endswith(f"See docs/runbook.md#{name.lower()}.")
        for part in ("**Means.**", "**Look.**", "**Do.**"):
            assert part in SECTIONS[name], f"{name} lacks {part}"


def test_who_cannot_decide_is_told_of_every_way_to_decide() -> None:
    for way in ("the page", "`truestep incidents approve`", "`truestep-<stage>-approve`"):
        assert way in SECTIONS["DecideApprovalErrors"]


def test_silence_of_training_rings_and_any_event_within_the_day_ends_it(template: Template) -> None:
    silent = alarms(template)["TrainingSilent"]
    assert (silent["TreatMissingData"], silent["ComparisonOperator"]) == ("breaching", "LessThanThreshold")
    assert silent["Period"] * silent["EvaluationPeriods"] == 24 * 3600
    heard = {name: alarm["TreatMissingData"] for name, alarm in alarms(template).items() if name != "TrainingSilent"}
    assert set(heard.values()) == {"notBreaching"}


def test_a_stage_that_often_trains_nothing_has_no_alarm_on_silence(synthesised: Callable[..., Template]) -> None:
    template = synthesised(training_silence_hours=0)
    assert "TrainingSilent" not in alarms(template)


def test_metrics_of_the_functions_are_those_that_alarms_watch(template: Template) -> None:
    for name in ("RecoveryEscalated", "ApprovalsWaiting", "BreakerTripped"):
        alarm = alarms(template)[name]
        dimensions = {item["Name"]: item["Value"] for item in alarm["Dimensions"]}
        told = template.functions[dimensions["function"]]["Environment"]["Variables"]
        assert told["POWERTOOLS_METRICS_NAMESPACE"] == alarm["Namespace"] == "truestep/prod"
        assert told["POWERTOOLS_SERVICE_NAME"] == dimensions["service"]


def test_the_dashboard_shows_every_alarm_and_every_function(template: Template) -> None:
    body = json.dumps(template.only("AWS::CloudWatch::Dashboard")["DashboardBody"])
    for logical_id in (*template.of_type("AWS::CloudWatch::Alarm"), *template.of_type("AWS::Lambda::Function")):
        assert logical_id in body


@pytest.mark.parametrize("title", ["One incident, in order", "Errors by function", "Alarms taken in"])
def test_queries_are_saved_over_all_functions_logs(title: str, template: Template) -> None:
    (query,) = [
        one for one in template.of_type("AWS::Logs::QueryDefinition").values() if one["Name"].endswith(f"/{title}")
    ]
    assert query["Name"] == f"truestep-prod/{title}"
    assert len(query["LogGroupNames"]) == len(template.functions)
