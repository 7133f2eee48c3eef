"""Relaunch: the resume directive first, then the job is let run; after a rejection just the same."""

from __future__ import annotations

from lambdas.adapters.cluster_ports import cluster_of
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.cluster_jobs import judge_starting, unfinished
from lambdas.domain.cluster_relaunch import directive_for
from lambdas.domain.incident import iso
from lambdas.domain.outcome import Outcome
from lambdas.domain.records import Relaunch

STATE = "Relaunch"


def act(work: Work) -> Answer:
    """Answers relaunched once the pods run, pending until then, escalate where they do not in time."""
    incident = work.incident
    cluster = cluster_of(work)
    if incident.alarm.drill:
        return work.answer(Outcome.RELAUNCHED, "drill: there is no job to start")
    if incident.checkpoint is None:
        return work.answer(Outcome.ESCALATE, "no checkpoint was chosen: resume the incident at ChooseCheckpoint")
    existing = cluster.read_directive(incident.job)
    directive = directive_for(incident, existing, issued_at=iso(work.now))
    early = unfinished(cluster.job_pods(incident.job))
    if early and directive != existing and not incident.dry_run:
        # Pods read the order when they start: these never would, and the run would go on from anywhere.
        cluster.suspend(incident.job)
        return _waiting(work, f"pods that started before the order to resume are stopped first: {early}")
    cluster.write_directive(incident.job, directive)
    if not cluster.unsuspend(incident.job):
        return work.answer(
            Outcome.ESCALATE,
            f"{incident.job.kind} {incident.job.namespace}/{incident.job.name} does not exist any more: re-create it "
            "(the resume directive is in place), then resume the incident at Relaunch",
        )
    relaunch = Relaunch(at=iso(work.now), reason=f"resume from step {incident.checkpoint.checkpoint.step}")
    if incident.dry_run:
        return work.answer(Outcome.RELAUNCHED, f"dry run, nothing was started; it would {relaunch.reason}")
    started, reason = judge_starting(cluster.job_pods(incident.job))
    if started:
        return work.answer(
            Outcome.RELAUNCHED, f"{reason}; they {relaunch.reason}", incident=incident.evolve(relaunch=relaunch)
        )
    return _waiting(work, reason)


def _waiting(work: Work, reason: str) -> Answer:
    if work.incident.waited_seconds(STATE, work.now) < work.policy.relaunch_timeout_seconds:
        return work.pending(STATE, reason)
    advice = "look at the job's events for quota, admission or capacity, then resume the incident at Relaunch"
    return work.answer(Outcome.ESCALATE, f"the job did not start in time: {reason}: {advice}")


handler = workflow_handler("relaunch_training", STATE, act)
