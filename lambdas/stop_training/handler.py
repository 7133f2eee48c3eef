"""StopTraining: ask for the job to stop, and look until none of its pods is left."""

from __future__ import annotations

import dataclasses
from datetime import timedelta

from lambdas.adapters.cluster_ports import cluster_of
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.attempts import overtaken_by
from lambdas.domain.cluster_jobs import (
    StopProgress,
    UnknownJobKindError,
    is_suspended,
    job_kind,
    judge_stopping,
    may_resume_itself,
    queue_labels,
    queue_of,
    unfinished,
)
from lambdas.domain.incident import Incident, iso, parse_iso
from lambdas.domain.outcome import Outcome
from lambdas.ports import Cluster

STATE = "StopTraining"


def act(work: Work) -> Answer:
    """Answers stopped, pending while pods are left, or escalate when they stay longer than the policy allows."""
    incident = work.incident
    cluster = cluster_of(work)
    try:
        kind = job_kind(incident.job.kind)
    except UnknownJobKindError as error:
        return work.answer(Outcome.ESCALATE, str(error))
    if incident.dry_run:
        return work.answer(Outcome.STOPPED, "dry run: the job was not suspended, it would be now")
    if not _insisted(incident) and (run := _run_to_ask_about(work, cluster)):
        return work.answer(Outcome.ESCALATE, f"{run}. Go on from StopTraining to stop it all the same")
    cluster.suspend(incident.job)
    job = cluster.job(incident.job)
    if job is not None and incident.workload is not None:
        incident = incident.evolve(workload=dataclasses.replace(incident.workload, queue=queue_labels(job)))
    waited = timedelta(seconds=incident.waited_seconds(STATE, work.now))
    judgement = judge_stopping(
        cluster.job_pods(incident.job),
        # A job that was deleted cannot start pods: as good as suspended.
        suspended=job is None or is_suspended(kind, job),
        asked_at=work.now - waited,
        now=work.now,
        limit=timedelta(seconds=work.policy.stop_timeout_seconds),
    )
    reason = judgement.reason
    if job is not None and queue_of(job) and judgement.progress is not StopProgress.STOPPED:
        reason += f"; Kueue queue {queue_of(job)} manages the job, and its Workload is deactivated"
    stopped = judgement.progress is StopProgress.STOPPED
    if stopped and job is not None and may_resume_itself(job) and not incident.found_stopped_at:
        again = "; HyperPod's auto-resume may start it again, so it is looked at once more"
        return work.pending(STATE, reason + again, incident=incident.evolve(found_stopped_at=iso(work.now)))
    incident = incident.evolve(found_stopped_at="")
    if judgement.progress is StopProgress.PENDING:
        return work.pending(STATE, reason, incident=incident)
    return work.answer(Outcome.STOPPED if stopped else Outcome.ESCALATE, reason, incident=incident)


def _insisted(incident: Incident) -> bool:
    """Whether a person has gone on from here; what was ordered since then, the person did not mean."""
    stop, relaunch = incident.escalation, incident.relaunch
    if stop is None or stop.resume_from != STATE:
        return False
    return relaunch is None or parse_iso(stop.at) >= parse_iso(relaunch.at)


def _run_to_ask_about(work: Work, cluster: Cluster) -> str:
    """What trains that the alarm says nothing of, and so nobody has asked to stop, as a sentence; empty: nothing."""
    incident = work.incident
    if incident.relaunch is not None:
        # By its pods: a run that nothing is heard of may be healthy all the same.
        left = unfinished(cluster.job_pods(incident.job))
        return left and (
            f"this incident has let the job run again, and {left}. To let it train, go on from VerifyRecovery, or from "
            "CloseIncident where it is known to be sound"
        )
    later = overtaken_by(incident.alarm, work.store.attempts(incident.job))
    if later is None:
        return ""
    started = "somebody has started the job anew"
    return f"attempt {later.attempt_id} was training at {later.seen_at}, after the alarm: {started}"


handler = workflow_handler("stop_training", STATE, act)
