"""State ConfirmSuspect: run the failing computation again where it failed and on a healthy node, and say what it shows.

It never stands in the way: what cannot be run, or does not end in time, is recorded with a sentence.
"""

from __future__ import annotations

from lambdas.adapters.cluster_ports import batch_jobs_of, cluster_of
from lambdas.adapters.confirming import begin, give_back_cleared, keep, look
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.confirmation import STATE, conclude, finished, not_run, wanted_anew
from lambdas.domain.incident import iso
from lambdas.domain.outcome import Outcome
from lambdas.domain.recommendation import recommend
from lambdas.domain.records import Confirmation, ConfirmationStatus


def act(work: Work) -> Answer:
    """Answers pending while the Jobs run, then recorded; skipped with the reason where they are not run."""
    known = None if wanted_anew(work.incident) else work.incident.confirmation
    if known is not None and known.status is not ConfirmationStatus.RUNNING:
        skipped = known.status is ConfirmationStatus.SKIPPED
        return work.answer(Outcome.SKIPPED if skipped else Outcome.RECORDED, known.reason)
    if known is None and (refusal := not_run(work.incident, work.policy)):
        skip = Confirmation(status=ConfirmationStatus.SKIPPED, reason=refusal, at=iso(work.now))
        return _recorded(work, skip)
    jobs = batch_jobs_of(work)
    if known is None:
        begun = begin(work, cluster_of(work), jobs)
        return work.pending(STATE, begun.reason, incident=work.incident.evolve(confirmation=begun))
    seen = look(work, jobs, known)
    if not finished(seen.nodes):
        waiting = "; ".join(f"{node.job_name}: {node.problem}" for node in seen.nodes if node.problem)
        return work.pending(STATE, waiting or known.reason, incident=work.incident.evolve(confirmation=seen))
    return _recorded(work, keep(work, conclude(work.incident, seen)))


def _recorded(work: Work, confirmation: Confirmation) -> Answer:
    incident, released = give_back_cleared(work, cluster_of(work), confirmation)
    incident = incident.evolve(confirmation=confirmation)
    incident = incident.evolve(recommendation=recommend(incident))
    skipped = confirmation.status is ConfirmationStatus.SKIPPED
    reason = "; ".join(filter(None, (confirmation.reason, released)))
    return work.answer(Outcome.SKIPPED if skipped else Outcome.RECORDED, reason, incident=incident)


handler = workflow_handler("confirm_suspect", STATE, act)
