"""What a deployment costs: idle, by month, and for each incident, from the synthesised resources and named prices.

    python -m infra.cost [--template FILE] [--prices FILE] [--write]

Prints docs/cost.md, or writes it. Prices are US dollars, in infra/prices.json; put your own contract's there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.catalogue import WORKFLOW_FUNCTIONS
from infra.errors import ConfigurationError, InfrastructureError
from infra.paths import REPOSITORY
from infra.synthesis import STACK_ID, synthesise
from lambdas.domain.policy import Policy

PRICES = REPOSITORY / "infra" / "prices.json"
DOCUMENT = REPOSITORY / "docs" / "cost.md"
_HOURS_A_MONTH = 730
_MILLISECONDS = 1000
_WRITES_AN_EVENT = 4
"""The checkpoint, the job's attempts (as long as a kilobyte holds them: five), and their entry in the index: taken out
where it was, put where it is. The attempts are read before."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """US dollars. Each is one line of the price list of its service."""

    kms_key_month: float
    kms_request: float
    alarm_month: float
    custom_metric_month: float
    dashboard_month: float
    interface_endpoint_hour: float
    log_ingested_gb: float
    log_stored_gb_month: float
    lambda_request: float
    lambda_arm_gb_second: float
    state_transition: float
    dynamodb_write_unit: float
    dynamodb_read_unit: float
    dynamodb_stored_gb_month: float
    dynamodb_pitr_gb_month: float
    s3_put: float
    s3_get: float
    s3_stored_gb_month: float
    sns_publish: float
    sns_email: float
    event_put: float
    http_request: float
    xray_trace: float


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What the template cannot say. Change these in a call; docs/cost.md shows the defaults."""

    events_an_hour: int = 60
    """Checkpoints, resumes and audits that all jobs report."""
    event_kilobytes: int = 1
    """What the table keeps of one."""
    subscribers: int = 3
    approval_reminders: int = 1
    replacement_minutes: int = 30
    stop_minutes: int = 2
    relaunch_minutes: int = 10
    health_check_minutes: int = 120
    invocation_milliseconds: int = 400
    incident_kilobytes: int = 20
    evidence_files: int = 12
    evidence_megabytes: int = 5
    log_kilobytes_an_invocation: int = 4
    checkpoint_candidates: int = 20


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of the bill."""

    what: str
    quantity: float
    dollars: float


@dataclass(frozen=True, kw_only=True)
class PriceList:
    """Prices, and how far each can be trusted."""

    prices: Prices
    region: str
    looked_up: str
    """Date, ISO."""
    sources: Mapping[str, str]
    """Price -> address of the page."""
    seen: Mapping[str, str]
    """Price -> one of `SEEN`."""


SEEN: Mapping[str, str] = {
    "provider": "the figure stands on the provider's own page",
    "third party": "the figure stands on somebody else's page; the provider's was not legible",
    "not seen": "no page with the figure was found: it is from memory, and the source is where it should be",
}
"""Where a price was seen, and what that means."""


def read_prices(path: Path) -> PriceList:
    """Raises ConfigurationError that names the price that is missing, unknown, no number, or without a source."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot read prices from {path}: {error}") from error
    entries = document.get("prices") if isinstance(document, dict) else None
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise ConfigurationError(f"{path}: expected region, looked_up and prices, as in infra/prices.json")
    names = {field.name for field in dataclasses.fields(Prices)}
    wrong = [f"{name} is missing" for name in ("region", "looked_up") if not document.get(name)]
    wrong += [f"{name} is missing" for name in sorted(names - entries.keys())]
    wrong += [f"{name} is unknown" for name in sorted(entries.keys() - names)]
    for name, entry in sorted(entries.items()):
        dollars = entry.get("dollars")
        if isinstance(dollars, bool) or not isinstance(dollars, int | float) or dollars < 0:
            wrong.append(f"{name} is no price: {dollars!r}")
        if not entry.get("source") or entry.get("seen") not in SEEN:
            wrong.append(f"{name} needs a source, and seen: {' or '.join(SEEN)}")
    if wrong:
        raise ConfigurationError(f"{path}: {'; '.join(wrong)}")
    return PriceList(
        prices=Prices(**{name: entry["dollars"] for name, entry in entries.items()}),
        region=document["region"],
        looked_up=document["looked_up"],
        sources={name: entry["source"] for name, entry in entries.items()},
        seen={name: entry["seen"] for name, entry in entries.items()},
    )


def idle_lines(resources: Mapping[str, Any], prices: Prices, usage: Usage) -> Iterator[Line]:
    """The bill of a month in which nothing goes wrong."""
    kinds = [item["Type"] for item in resources.values()]
    alarms = [item["Properties"] for item in resources.values() if item["Type"] == "AWS::CloudWatch::Alarm"]
    own_metrics = {alarm["MetricName"] for alarm in alarms if str(alarm["Namespace"]).startswith("truestep/")}
    keys, boards = kinds.count("AWS::KMS::Key"), kinds.count("AWS::CloudWatch::Dashboard")
    yield Line(what="KMS keys", quantity=keys, dollars=keys * prices.kms_key_month)
    yield Line(what="alarms", quantity=len(alarms), dollars=len(alarms) * prices.alarm_month)
    yield Line(what="dashboards", quantity=boards, dollars=boards * prices.dashboard_month)
    metrics = len(own_metrics)
    yield Line(what="own metrics that alarms watch", quantity=metrics, dollars=metrics * prices.custom_metric_month)
    zones = sum(
        len(item["Properties"]["SubnetIds"]) for item in resources.values() if item["Type"] == "AWS::EC2::VPCEndpoint"
    )
    dollars = zones * _HOURS_A_MONTH * prices.interface_endpoint_hour
    yield Line(what="interface endpoints, each zone", quantity=zones, dollars=dollars)
    events = usage.events_an_hour * _HOURS_A_MONTH
    stored = 12 * events * usage.event_kilobytes / 1024**2
    each = prices.dynamodb_stored_gb_month + prices.dynamodb_pitr_gb_month
    yield Line(what="table and its recovery, GB after a year", quantity=stored, dollars=stored * each)
    each = prices.event_put + prices.xray_trace + _invocation(resources, prices, usage)
    each += _WRITES_AN_EVENT * prices.dynamodb_write_unit + prices.dynamodb_read_unit
    yield Line(what="events of training", quantity=events, dollars=events * each)


def incident_lines(resources: Mapping[str, Any], policy: Policy, prices: Prices, usage: Usage) -> Iterator[Line]:
    """The bill of one incident that is approved."""
    polls = sum(polls_in(policy, minutes * 60) for minutes in _waits(usage))
    # Every function of the way to an approval once: all but those of a rejection and of an escalation.
    visited = len(WORKFLOW_FUNCTIONS) - len({"release_node", "escalate"})
    tasks = visited + polls + usage.approval_reminders
    # Start and Done; each task is followed by a choice, each poll by a wait too.
    steps = 2 + 2 * tasks + polls
    yield Line(what="state transitions", quantity=steps, dollars=steps * prices.state_transition)
    # One series a decision, billed by the hour in which it is written.
    series = visited * prices.custom_metric_month / _HOURS_A_MONTH
    yield Line(what="metrics of its decisions, an hour each", quantity=visited, dollars=series)
    yield Line(what="invocations", quantity=tasks, dollars=tasks * _invocation(resources, prices, usage))
    # Each reads the incident, and whether the job is still the incident's.
    writes, reads = tasks * usage.incident_kilobytes, tasks * (-(-usage.incident_kilobytes // 4) + 1)
    dollars = writes * prices.dynamodb_write_unit + reads * prices.dynamodb_read_unit
    yield Line(what="DynamoDB units", quantity=writes + reads, dollars=dollars)
    puts = usage.evidence_files + 1
    gets = 4 * usage.checkpoint_candidates
    dollars = puts * (prices.s3_put + prices.kms_request) + gets * (prices.s3_get + prices.s3_put)
    yield Line(what="S3 requests", quantity=puts + 2 * gets, dollars=dollars)
    gigabytes = usage.evidence_megabytes / 1024
    yield Line(what="evidence, GB for a year", quantity=gigabytes, dollars=12 * gigabytes * prices.s3_stored_gb_month)
    messages = 2 + usage.approval_reminders
    each = prices.sns_publish + 3 * prices.kms_request + usage.subscribers * prices.sns_email
    yield Line(what="messages", quantity=messages, dollars=messages * each)
    page = 2 * usage.subscribers
    each = prices.http_request + prices.kms_request + _invocation(resources, prices, usage)
    yield Line(what="page views and the decision", quantity=page, dollars=page * each)


def polls_in(policy: Policy, seconds: float) -> int:
    """How often a state is entered again that waits so long."""
    waited, polls = 0.0, 0
    while waited < seconds:
        waited += policy.poll_after(waited)
        polls += 1
    return polls


def _waits(usage: Usage) -> tuple[int, ...]:
    return (usage.stop_minutes, usage.health_check_minutes, usage.replacement_minutes, usage.relaunch_minutes)


def _invocation(resources: Mapping[str, Any], prices: Prices, usage: Usage) -> float:
    """One call of a function of the largest memory, with its log and trace."""
    functions = [item["Properties"] for item in resources.values() if item["Type"] == "AWS::Lambda::Function"]
    gigabytes = max(float(one["MemorySize"]) for one in functions) / 1024
    compute = gigabytes * usage.invocation_milliseconds / _MILLISECONDS * prices.lambda_arm_gb_second
    log = usage.log_kilobytes_an_invocation / 1024**2 * (prices.log_ingested_gb + 12 * prices.log_stored_gb_month)
    return prices.lambda_request + compute + log + prices.xray_trace


def document(resources: Mapping[str, Any], policy: Policy, listed: PriceList, usage: Usage) -> str:
    """The text of docs/cost.md."""
    prices = listed.prices
    idle = list(idle_lines(resources, prices, usage))
    incident = list(incident_lines(resources, policy, prices, usage))
    priced = dataclasses.asdict(prices).items()
    inputs = [f"| {name} | {value:.10g} | {listed.seen[name]} | <{listed.sources[name]}> |" for name, value in priced]
    unseen = sum(word == "not seen" for word in listed.seen.values())
    assumed = [f"| {field.name} | {getattr(usage, field.name)} |" for field in dataclasses.fields(usage)]
    parts = [
        "# Cost",
        "",
        "Written by `python -m infra.cost --write` from the synthesised template of `cdk.json`, the prices in",
        "`infra/prices.json` and the usage below; a test keeps it so. Free tiers and discounts are left out.",
        f"List prices of {listed.region}, looked up on {listed.looked_up} in stored copies of public pages; "
        f"{unseen} of {len(listed.seen)} were seen nowhere.",
        "Check them against the services' pages, and put your region's and your contract's there.",
        "",
        f"**A month without an incident: ${_total(idle):.2f}. An incident: ${_total(incident):.3f}**, against",
        "hours of a cluster that waits. Not in it: the cluster, its metrics workspace, NAT gateways, checkpoints, a",
        "web ACL of yours. The key that encrypts rotates every year: the first two rotations add a key's price each.",
        "",
        *_table("a month", idle),
        "",
        *_table("an incident", incident),
        "",
        "| price, US dollars | | seen | source |",
        "|---|---:|---|---|",
        *inputs,
        "",
        *(f"- {word}: {meaning}." for word, meaning in SEEN.items()),
        "",
        "| usage | |",
        "|---|---:|",
        *assumed,
        "",
    ]
    return "\n".join(parts)


def _table(title: str, lines: Sequence[Line]) -> list[str]:
    rows = [f"| {line.what} | {line.quantity:,.6g} | {line.dollars:.5f} |" for line in lines]
    return [f"| {title} | quantity | US dollars |", "|---|---:|---:|", *rows, f"| together | | {_total(lines):.5f} |"]


def _total(lines: Sequence[Line]) -> float:
    return sum(line.dollars for line in lines)


def document_of(template: Mapping[str, Any], listed: PriceList) -> str:
    """The document of a synthesised template, with the policy that its functions are told."""
    functions = [one["Properties"] for one in template["Resources"].values() if one["Type"] == "AWS::Lambda::Function"]
    policies = {one["Environment"]["Variables"]["TRUESTEP_POLICY"] for one in functions}
    told = json.loads(policies.pop())
    told.pop("clusters", None)
    return document(template["Resources"], Policy.model_validate(told), listed, Usage())


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="What a deployment costs.")
    parser.add_argument("--template", type=Path, help="a synthesised template; without it that of cdk.json is made")
    parser.add_argument("--prices", type=Path, default=PRICES, help="JSON of prices, as infra/prices.json")
    parser.add_argument("--write", action="store_true", help="write docs/cost.md instead of printing it")
    options = parser.parse_args(arguments)
    try:
        listed = read_prices(options.prices)
        with tempfile.TemporaryDirectory(prefix="truestep-cost-") as scratch:
            template = options.template or _synthesised(Path(scratch))
            text = document_of(json.loads(template.read_text(encoding="utf-8")), listed)
    except (InfrastructureError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.write:
        DOCUMENT.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


def _synthesised(folder: Path) -> Path:
    context = json.loads((REPOSITORY / "cdk.json").read_text(encoding="utf-8"))["context"]
    return synthesise(context, folder) / f"{STACK_ID}.template.json"


if __name__ == "__main__":
    sys.exit(main())
