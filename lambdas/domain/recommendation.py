"""What to advise the person who decides, and why."""

from __future__ import annotations

from lambdas.domain.incident import Incident
from lambdas.domain.records import ConfirmationStatus, HealthCheckStatus, PastIncident, Recommendation
from truestep.contract import VerdictCause, VerdictKind
from truestep.contract.words import counted

REPLACE = "replace"
NO_ADVICE = "none"


def recommend(incident: Incident) -> Recommendation:
    """Advise replacement only where the same GPU was caught again.

    One event cannot tell a bad GPU from a rare race. Caught again means: a confirmation in a fresh process reproduced
    the fault, or an earlier conclusive incident named the same GPU. A failed health check is advice to replace too, but
    says nothing about the cause of *this* alarm. What a healthy node computes wrongly as well is software, whatever
    the history says.
    """
    confirmation = incident.confirmation
    if confirmation is not None and confirmation.status is ConfirmationStatus.SOFTWARE:
        return _advice(NO_ADVICE, f"Replacing hardware would not help: {confirmation.reason}.")
    if confirmation is not None and confirmation.status is ConfirmationStatus.REPRODUCED:
        return _advice(REPLACE, f"A fresh process on the GPU failed again: {confirmation.reason}.", hardware=True)
    if incident.alarm.verdict.kind is VerdictKind.AMBIGUOUS:
        settle = incident.alarm.verdict.settle or "Run the confirmation on every candidate."
        tried = f" The confirmation did not: {confirmation.reason}." if confirmation is not None else ""
        return _advice(NO_ADVICE, f"The evidence does not single out one GPU. What would settle it: {settle}{tried}")
    again = repeat_offences(incident.history)
    if again:
        ids = ", ".join(past.incident_id for past in again[:3])
        return _advice(
            REPLACE,
            f"The same GPU was named in {counted(len(again), 'earlier incident')} ({ids}).",
            hardware=True,
        )
    check = incident.health_check
    if check is not None and check.status is HealthCheckStatus.FAILED:
        return _advice(REPLACE, f"The health check failed: {check.reason}")
    return _advice(
        NO_ADVICE,
        "This is the GPU's first incident, and one event cannot tell a bad GPU from a rare software race. The node is "
        "quarantined either way; replacing it is the cautious choice, and a second incident would settle the cause.",
    )


def repeat_offences(history: tuple[PastIncident, ...]) -> tuple[PastIncident, ...]:
    """Earlier incidents that count as catching the GPU before.

    Not those where it was one of several candidates, those that a person rejected, or those whose relaunch led here.
    """
    return tuple(
        past
        for past in history
        if past.verdict_kind == VerdictKind.CONCLUSIVE and not past.rejected and not past.linked
    )


def _advice(action: str, reason: str, *, hardware: bool = False) -> Recommendation:
    cause = VerdictCause.HARDWARE if hardware else VerdictCause.OPEN
    return Recommendation(action=action, reason=reason, cause=str(cause))
