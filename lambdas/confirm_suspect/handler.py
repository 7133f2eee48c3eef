"""State ConfirmSuspect: whether the failing computation was run again on the suspect, and what that showed."""

from __future__ import annotations

from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.confirmation import confirmation_of
from lambdas.domain.outcome import Outcome
from lambdas.domain.recommendation import recommend


def confirm_suspect(work: Work) -> Answer:
    """``skipped`` with the reason, or ``recorded`` with what a confirmation on the suspect found."""
    confirmation = confirmation_of(work.incident)
    incident = work.incident.evolve(confirmation=confirmation)
    incident = incident.evolve(recommendation=recommend(incident))
    outcome = Outcome.SKIPPED if confirmation.status == "skipped" else Outcome.RECORDED
    return work.answer(outcome, confirmation.reason, incident=incident)


handler = workflow_handler("confirm_suspect", "ConfirmSuspect", confirm_suspect)
