"""What operators look with finds what the functions really write: saved queries their logs, alarms their metrics."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from local_stack.template import StackTemplate
from tests.least_privilege.story import Story

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def written(story: Story) -> list[dict[str, Any]]:
    """Every JSON line that a function wrote."""
    logs = sorted((story.stack.state_dir / "logs" / "functions").glob("*.log"))
    lines = [line for path in logs for line in path.read_text(encoding="utf-8").splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def properties(template: StackTemplate, kind: str) -> list[dict[str, Any]]:
    return [item["Properties"] for item in template.resources.values() if item["Type"] == kind]


def fields_of(query: str) -> set[str]:
    """Names that a query reads, without those that CloudWatch itself adds."""
    found: set[str] = set()
    for command in query.split("\n| "):
        verb, _, rest = command.partition(" ")
        if verb == "fields":
            found |= set(rest.split(", "))
        elif verb == "filter":
            found |= set(re.findall(r"(\w+) = ", rest))
        elif verb == "stats":
            found |= set(re.findall(r"latest\((\w+)\)", rest)) | set(rest.partition(" by ")[2].split(", "))
    return {name for name in found if not name.startswith("@")}


@pytest.mark.parametrize(
    "title", ["One incident, in order", "Errors by function", "Decisions by state", "Alarms taken in"]
)
def test_a_saved_query_reads_fields_that_the_functions_write(
    title: str, template: StackTemplate, written: list[dict[str, Any]]
) -> None:
    (query,) = [
        one["QueryString"]
        for one in properties(template, "AWS::Logs::QueryDefinition")
        if one["Name"].endswith(f"/{title}")
    ]
    fixed = dict(re.findall(r"(\w+) = '([A-Za-z ]+)'", query))
    read = fields_of(query)
    assert len(read) > 2
    assert any(read <= line.keys() and all(line[name] == value for name, value in fixed.items()) for line in written), (
        f"no line has all of {sorted(read)}"
    )


def test_the_alarm_on_escalations_watches_a_metric_that_an_escalation_writes(
    template: StackTemplate, written: list[dict[str, Any]]
) -> None:
    (alarm,) = [
        one for one in properties(template, "AWS::CloudWatch::Alarm") if one["AlarmName"].endswith("-RecoveryEscalated")
    ]
    watched = {dimension["Name"]: dimension["Value"] for dimension in alarm["Dimensions"]}
    matching = [
        line
        for line in written
        for metric in line.get("_aws", {}).get("CloudWatchMetrics", ())
        if metric["Namespace"] == alarm["Namespace"]
        and {"Name": alarm["MetricName"], "Unit": "Count"} in metric["Metrics"]
        and [set(names) for names in metric["Dimensions"]] == [set(watched)]
        and all(line[name] == value for name, value in watched.items())
    ]
    assert matching


def test_the_other_alarms_on_own_metrics_have_the_dimensions_that_counters_have(
    template: StackTemplate, written: list[dict[str, Any]]
) -> None:
    own = [one for one in properties(template, "AWS::CloudWatch::Alarm") if one["Namespace"].startswith("truestep/")]
    plain = [one for one in own if one["MetricName"] != "Decisions"]
    assert {one["MetricName"] for one in plain} == {"ApprovalReminders", "BreakerTripped"}
    failures = [
        set(metric["Dimensions"][0])
        for line in written
        for metric in line.get("_aws", {}).get("CloudWatchMetrics", ())
        if metric["Metrics"][0]["Name"] == "Failures"
    ]
    for alarm in plain:
        assert {dimension["Name"] for dimension in alarm["Dimensions"]} == failures[0]
