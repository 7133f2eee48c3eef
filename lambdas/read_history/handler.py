"""State ReadHistory: what is known of the suspects' GPUs from earlier incidents."""

from __future__ import annotations

from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.outcome import Outcome
from lambdas.domain.recommendation import recommend, repeat_offences


def read_history(work: Work) -> Answer:
    """Always ``read``; an unknown GPU has no history, which is said as such."""
    incident = work.incident
    gpus = [gpu for suspect in incident.suspects for gpu in suspect.gpu_uuids]
    past = tuple(
        entry for gpu in gpus for entry in work.store.gpu_history(gpu) if entry.incident_id != incident.incident_id
    )
    incident = incident.evolve(history=past)
    incident = incident.evolve(recommendation=recommend(incident))
    if not gpus:
        reason = "the alarm carries no GPU UUID, so no history can be looked up"
    else:
        reason = f"{len(past)} earlier incidents of {len(gpus)} GPU(s), {len(repeat_offences(past))} of them conclusive"
    return work.answer(Outcome.READ, reason, incident=incident)


handler = workflow_handler("read_history", "ReadHistory", read_history)
