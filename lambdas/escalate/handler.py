"""State Escalate (task token): keeps everything as it is, tells people, and waits for one to say where to go on."""

from __future__ import annotations

from datetime import timedelta

from lambdas.adapters.approval_links import KmsLinks
from lambdas.adapters.aws import client
from lambdas.adapters.escalations import go_on, tell_of_stop
from lambdas.adapters.executions import StepFunctions
from lambdas.adapters.notifications import SnsNotifier
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.outcome import Outcome
from lambdas.domain.workflow import escalated, last_stop, readable_cause, resumed, unheard_choice


def escalate(work: Work) -> Answer:
    """Stores the token and the stop. Input has `failed_state`, `error` and `cause` after a Catch; a Choice leaves it to
    the timeline. `execution`: its ARN. The state's heartbeat brings it back here every few minutes.
    """
    stopped_at, why = last_stop(work.incident)
    failed_state = str(work.event.get("failed_state") or stopped_at)
    error = str(work.event.get("error") or "")
    cause = readable_cause(str(work.event.get("cause") or (why if not error else "")))
    incident = escalated(
        work.incident,
        failed_state=failed_state,
        error=error,
        cause=cause,
        task_token=work.task_token,
        execution=str(work.event.get("execution") or ""),
        now=work.now,
    )
    chosen = unheard_choice(work.incident, failed_state)
    if chosen:
        incident = resumed(incident, chosen, by="as was decided before the execution waited for it", now=work.now)
        return work.answer(Outcome.WAITING, f"a person has decided already: goes on from {chosen}", incident=incident)
    reason = ": ".join(part for part in (failed_state, error, cause) if part)
    return work.answer(Outcome.WAITING, reason, incident=incident)


def announce_or_go_on(work: Work) -> None:
    """After the token is stored, so that an answer finds it. Where the answer is there already, nobody is asked."""
    if work.incident.escalation is not None and work.incident.escalation.resume_from:
        go_on(work.store, StepFunctions(client("stepfunctions")), work.incident)
        return
    tell_of_stop(
        work.store,
        KmsLinks(client("kms"), work.settings.hmac_key_id, work.settings.approval_url),
        SnsNotifier(client("sns"), work.settings.topic_arn),
        work.incident,
        now=work.now,
        valid=timedelta(hours=work.policy.link_valid_hours),
    )


handler = workflow_handler("escalate", "Escalate", escalate, after_save=announce_or_go_on)
