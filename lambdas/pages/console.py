"""What the console says, worked out before the template: the template only places it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from lambdas.domain.incident import Incident
from lambdas.domain.policy import Policy
from lambdas.domain.records import JobKey, PastIncident
from lambdas.pages.quarantine import full_groups, group_sizes, quarantine_sentence
from lambdas.pages.times import moment
from lambdas.pages.view import headline, state_sentence, summary, tone
from truestep.contract import CheckpointEvent
from truestep.contract.words import counted

_LONGEST = 300
"""Characters of one value. An event may say anything at any length, and the page has many of them."""


@dataclass(frozen=True, kw_only=True)
class ClusterState:
    """One cluster of the deployment."""

    arn: str
    name: str
    policy: Policy
    quarantined: Mapping[str, str]
    """Key of a node's claim -> the incident that holds it; empty where none does any more."""


@dataclass(frozen=True, kw_only=True)
class JobState:
    """A job that was seen training."""

    job: JobKey
    seen_at: str
    trusted: CheckpointEvent | None


@dataclass(frozen=True, kw_only=True)
class ConsoleFacts:
    """What the page is made of."""

    clusters: tuple[ClusterState, ...]
    opened: tuple[Incident, ...]
    """Newest first."""
    more_open: int
    """Open incidents beyond those."""
    closed: tuple[Incident, ...]
    jobs: tuple[JobState, ...]
    checkpoints_tried: int
    gpus: Mapping[str, tuple[PastIncident, ...]]


@dataclass(frozen=True, kw_only=True)
class IncidentLine:
    """One open incident."""

    incident_id: str
    headline: str
    marks: tuple[str, ...]
    state: str
    tone: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class ClusterLine:
    """One cluster: its breaker in a sentence, and its quarantined nodes."""

    name: str
    breaker: str
    full: bool
    nodes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class ConsoleView:
    """The page's content. Strings are not escaped yet; the template does that."""

    headline: str
    scope: str
    opened: tuple[IncidentLine, ...]
    more_open: int
    clusters: tuple[ClusterLine, ...]
    jobs: tuple[tuple[str, tuple[str, ...]], ...]
    gpus: tuple[tuple[str, tuple[str, ...]], ...]
    closed: tuple[tuple[str, str], ...]


def console_view(facts: ConsoleFacts, *, now: datetime, until: datetime) -> ConsoleView:
    """The page's content at `now`. until: when its link ends."""
    return ConsoleView(
        headline=_headline(facts),
        scope=f"{', '.join(one.name for one in facts.clusters)} · as of {now:%H:%M:%S} UTC on {now.day} {now:%B %Y} · "
        f"this link shows and decides nothing, and ends at {until:%H:%M} UTC",
        opened=tuple(_line(one, now) for one in facts.opened),
        more_open=facts.more_open,
        clusters=tuple(_cluster(one, facts.opened) for one in facts.clusters),
        jobs=tuple(
            (_short(f"{one.job.namespace}/{one.job.name}"), tuple(map(_short, _job(one, facts, now))))
            for one in facts.jobs
        ),
        gpus=tuple(
            (_short(gpu), tuple(_short(_past(one, now)) for one in past)) for gpu, past in facts.gpus.items() if past
        ),
        closed=tuple((one.incident_id, _short(_closed(one, now))) for one in facts.closed),
    )


def _headline(facts: ConsoleFacts) -> str:
    count = len(facts.opened) + facts.more_open
    if not count:
        return "No incident is open"
    asking = sum(tone(one) == "asking" for one in facts.opened)
    stopped = sum(tone(one) == "stopped" for one in facts.opened)
    parts = [f"{counted(count, 'incident')} open"]
    parts += [f"{asking} waiting for a decision"] if asking else []
    parts += [f"{stopped} stopped"] if stopped else []
    return ", ".join(parts)


def _line(incident: Incident, now: datetime) -> IncidentLine:
    marks = [word for word, holds in (("dry run", incident.dry_run), ("drill", incident.alarm.drill)) if holds]
    rows = (*summary(incident, now), ("Opened", moment(incident.opened_at, now)))
    return IncidentLine(
        incident_id=incident.incident_id,
        headline=_short(headline(incident)),
        marks=tuple(marks),
        state=_short(state_sentence(incident, now, whose="a")),
        tone=tone(incident),
        rows=tuple((label, _short(value)) for label, value in rows),
    )


def _cluster(cluster: ClusterState, opened: tuple[Incident, ...]) -> ClusterLine:
    names = {suspect.claim_key: suspect.node_name for one in opened for suspect in one.suspects if suspect.claim_key}
    policy, count = cluster.policy, len(cluster.quarantined)
    # Only an incident knows its suspects' groups, and an incident of another cluster knows those of another one.
    suspects = [one for incident in opened if incident.job.cluster_arn == cluster.arn for one in incident.suspects]
    groups = full_groups(policy, count, group_sizes(suspects))
    full = count >= policy.max_quarantined_nodes
    breaker = quarantine_sentence(policy, cluster.quarantined, suspects)
    if full or groups:
        where = "" if full else f" in {', '.join(groups)}"
        breaker += f" Full: it quarantines no further node{where}, and a recovery that needs one stops and asks."
    if policy.dry_run:
        breaker += " Dry run: nothing is changed in this cluster."
    nodes = sorted((names.get(key, key), holder) for key, holder in cluster.quarantined.items())
    return ClusterLine(
        name=cluster.name,
        breaker=breaker,
        full=full or bool(groups),
        nodes=tuple((_short(name), f"held by {holder}" if holder else "being given back") for name, holder in nodes),
    )


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _job(state: JobState, facts: ConsoleFacts, now: datetime) -> Iterator[str]:
    trusted = state.trusted
    if trusted is None:
        yield f"No trusted checkpoint among its {facts.checkpoints_tried} newest: a recovery would look further back."
    else:
        at = f", {moment(trusted.at, now)}" if trusted.at else ""
        yield f"Step {trusted.checkpoint.step}: {trusted.checkpoint.uri}{at}"
    yield f"Last sign of training {moment(state.seen_at, now)}"


def _past(past: PastIncident, now: datetime) -> str:
    return f"{past.incident_id}: {past.verdict_kind} verdict on {past.node_name}, {moment(past.at, now)}"


def _closed(incident: Incident, now: datetime) -> str:
    if incident.alarm.drill:
        outcome = "a drill"
    elif incident.dry_run:
        outcome = "a dry run: nothing was changed"
    elif incident.rejected:
        outcome = "rejected, the node was given back"
    else:
        replaced = any(one.replacement and one.replacement.new_instance_id for one in incident.suspects)
        outcome = "approved" if incident.approved else "no decision"
        outcome += ", the node was replaced" if replaced else ""
    nodes = ", ".join(suspect.node_name for suspect in incident.suspects) or "no node"
    return f"{nodes}: {outcome}; closed {moment(incident.closed_at, now)}"
