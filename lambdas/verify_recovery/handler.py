"""State VerifyRecovery (task token): waits until the resumed run has passed an audit."""

from __future__ import annotations

from lambdas.adapters.aws import client
from lambdas.adapters.executions import StepFunctions
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.outcome import Outcome
from lambdas.domain.verification import STATE, awaiting, given_up, verdict_on_recovery


def verify_recovery(work: Work) -> Answer:
    """Stores the token; ``waiting``, or the outcome where the run was faster than the workflow, or is not heard of.

    The state's heartbeat brings it back here every few minutes.
    """
    incident = given_up(
        awaiting(work.incident, work.task_token),
        waited_seconds=work.incident.waited_seconds(STATE, work.now),
        limit_seconds=work.policy.relaunch_timeout_seconds,
    )
    known = verdict_on_recovery(incident)
    if known is not None:
        return work.answer(known[0], known[1], incident=incident)
    reason = "waiting for the resumed run's first passing audit"
    return work.answer(Outcome.WAITING, reason, incident=incident)


def complete_if_known(work: Work) -> None:
    """After the token is stored. An event that arrives later finds the token; one that came before is found here."""
    known = verdict_on_recovery(work.incident)
    if known is not None:
        output = {"incident_id": work.incident.incident_id, "outcome": str(known[0]), "reason": known[1]}
        StepFunctions(client("stepfunctions")).complete(work.task_token, output)


handler = workflow_handler("verify_recovery", STATE, verify_recovery, after_save=complete_if_known)
