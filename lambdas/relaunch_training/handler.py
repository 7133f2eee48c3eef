"""Relaunch: the resume directive first, then the job is let run; after a rejection just the same."""

from __future__ import annotations

from lambdas.adapters.cluster_ports import cluster_of
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.cluster_jobs import expected_pods, job_kind, judge_starting, unfinished
from lambdas.domain.cluster_relaunch import newly_ordered, standing_order, withdrawn
from lambdas.domain.incident import Incident, iso
from lambdas.domain.outcome import Outcome

STATE = "Relaunch"


def act(work: Work) -> Answer:
    """Answers relaunched once the pods run, pending until then, escalate where they do not in time.

    A run that follows the incident's order already is left alone, however often this is entered.
    """
    incident = work.incident
    cluster = cluster_of(work)
    if incident.alarm.drill:
        return work.answer(Outcome.RELAUNCHED, "drill: there is no job to start")
    if incident.checkpoint is None:
        return work.answer(Outcome.ESCALATE, "no checkpoint was chosen: resume the incident at ChooseCheckpoint")
    left = unfinished(cluster.job_pods(incident.job))
    order = standing_order(
        incident,
        cluster.read_directive(incident.job),
        waiting=STATE in incident.waiting_since,
        unfinished=bool(left),
    )
    if order is None:
        if left and not incident.dry_run:
            # Pods read the order when they start: these never would, and the run would go on from anywhere.
            cluster.suspend(incident.job)
            reason = f"pods that started before the order to resume are stopped first: {left}"
            return _waiting(work, withdrawn(incident, now=work.now), reason, "delete what is stuck")
        ordered, order = newly_ordered(incident, answers=work.store.alarms_of(incident), now=work.now)
        if not incident.dry_run:
            # In front of the start: what the new run says at once must find the order on record, and so must this
            # state if it is entered again before its pods are there.
            since = incident.waiting_since.get(STATE, iso(work.now))
            incident = work.store.save(ordered.evolve(waiting_since={STATE: since}))
    cluster.write_directive(incident.job, order)
    if not cluster.unsuspend(incident.job):
        return work.answer(
            Outcome.ESCALATE,
            f"{incident.job.kind} {incident.job.namespace}/{incident.job.name} does not exist any more: re-create it "
            "(the resume directive is in place), then resume the incident at Relaunch",
            incident=incident,
        )
    resumes = f"resume from step {order.max_step}"
    if incident.dry_run:
        return work.answer(Outcome.RELAUNCHED, f"dry run, nothing was started; it would {resumes}")
    wanted = expected_pods(job_kind(incident.job.kind), cluster.job(incident.job) or {})
    started, reason = judge_starting(cluster.job_pods(incident.job), expected=wanted)
    if started:
        return work.answer(Outcome.RELAUNCHED, f"{reason}; they {resumes}", incident=incident)
    advice = (
        "look at the log of pods that failed, and at the job's events for quota, admission or capacity; create a job "
        "anew that has failed for good"
    )
    return _waiting(work, incident, reason, advice)


def _waiting(work: Work, incident: Incident, reason: str, advice: str) -> Answer:
    if incident.waited_seconds(STATE, work.now) < work.policy.relaunch_timeout_seconds:
        return work.pending(STATE, reason, incident=incident)
    # What to do first: what a person reads at night is cut to its beginning.
    said = f"the job did not start in time: {advice}, then resume the incident at Relaunch. Last look: {reason}"
    return work.answer(Outcome.ESCALATE, said, incident=incident)


handler = workflow_handler("relaunch_training", STATE, act)
