"""docs/cost.md is what the template and the prices say, and follows both."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path

import pytest

from infra import cost
from infra.cost import Usage, document_of, idle_lines, incident_lines, polls_in, read_prices
from infra.errors import ConfigurationError
from lambdas.domain.policy import Policy

from .conftest import Template

LISTED = read_prices(cost.PRICES)
PRICES = LISTED.prices


def test_the_document_is_what_the_template_says(template: Template) -> None:
    assert cost.DOCUMENT.read_text() == document_of(template.document, LISTED), "run python -m infra.cost --write"


def test_one_more_alarm_and_key_cost_what_their_prices_say(template: Template) -> None:
    more = copy.deepcopy(template.resources)
    for kind in ("AWS::CloudWatch::Alarm", "AWS::KMS::Key"):
        more["Another" + kind[-3:]] = next(item for item in template.resources.values() if item["Type"] == kind)
    before, after = (
        sum(line.dollars for line in idle_lines(found, PRICES, Usage())) for found in (template.resources, more)
    )
    assert after - before == pytest.approx(PRICES.alarm_month + PRICES.kms_key_month)


def test_an_interface_endpoint_costs_by_zone_and_hour(template: Template) -> None:
    endpoint = {"Type": "AWS::EC2::VPCEndpoint", "Properties": {"SubnetIds": ["subnet-10000000", "subnet-20000000"]}}
    found = {**template.resources, "Endpoint": endpoint}
    (line,) = [line for line in idle_lines(found, PRICES, Usage()) if line.what.startswith("interface endpoints")]
    assert line.dollars == pytest.approx(2 * 730 * PRICES.interface_endpoint_hour)


def test_a_longer_wait_polls_more_but_less_than_in_proportion() -> None:
    policy = Policy(poll_seconds=10)
    assert polls_in(policy, 0) == 0
    assert polls_in(policy, 100) == 10
    assert polls_in(policy, 36_000) < 36_000 / 10 / 4


def test_an_incident_is_dearer_the_longer_its_replacement_takes(template: Template) -> None:
    totals = [
        sum(line.dollars for line in incident_lines(template.resources, Policy(), PRICES, Usage(replacement_minutes=m)))
        for m in (5, 60, 600)
    ]
    assert totals == sorted(set(totals))


def test_prices_that_are_wrong_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(cost.PRICES.read_text())
    prices = document["prices"]
    del prices["alarm_month"], document["looked_up"], prices["s3_get"]["source"]
    prices |= {"alarm_year": prices["kms_request"], "s3_put": {**prices["s3_put"], "dollars": "cheap"}}
    path = tmp_path / "prices.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigurationError) as caught:
        read_prices(path)
    missing = ("looked_up is missing", "alarm_month is missing")
    for wrong in (*missing, "alarm_year is unknown", "s3_put is no price", "s3_get needs a source"):
        assert wrong in str(caught.value)
    assert cost.main(["--prices", str(path)]) == 1
    assert capsys.readouterr().err.startswith("error: ")


def test_every_price_is_used_and_says_where_it_was_seen(template: Template) -> None:
    for field in dataclasses.fields(PRICES):
        dearer = dataclasses.replace(PRICES, **{field.name: getattr(PRICES, field.name) * 2 + 1})
        endpoint = {"Type": "AWS::EC2::VPCEndpoint", "Properties": {"SubnetIds": ["subnet-1"]}}
        found = {**template.resources, "Endpoint": endpoint}
        bills = [
            sum(line.dollars for line in (*idle_lines(found, p, Usage()), *incident_lines(found, Policy(), p, Usage())))
            for p in (PRICES, dearer)
        ]
        assert bills[1] > bills[0], f"{field.name} changes nothing"
    assert LISTED.sources.keys() == LISTED.seen.keys() == {field.name for field in dataclasses.fields(PRICES)}
