"""State ReadHistory: what is known of the suspects' GPUs from earlier incidents."""

from __future__ import annotations

import dataclasses

from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.errors import IncidentNotFoundError
from lambdas.domain.incident import Incident
from lambdas.domain.outcome import Outcome
from lambdas.domain.recommendation import recommend, repeat_offences
from lambdas.domain.records import PastIncident
from lambdas.ports import IncidentStore
from truestep.contract.words import counted


def read_history(work: Work) -> Answer:
    """Always ``read``; an unknown GPU has no history, which is said as such."""
    incident = work.incident
    gpus = [gpu for suspect in incident.suspects for gpu in suspect.gpu_uuids]
    past = tuple(
        entry for gpu in gpus for entry in work.store.gpu_history(gpu) if entry.incident_id != incident.incident_id
    )
    incident = incident.evolve(history=_with_what_became_of_them(work.store, incident, past))
    incident = incident.evolve(recommendation=recommend(incident))
    if not gpus:
        reason = "the alarm carries no GPU UUID, so no history can be looked up"
    else:
        reason = f"{counted(len(past), 'earlier incident')} of {counted(len(gpus), 'GPU')}, "
        reason += f"{len(repeat_offences(incident.history))} of them conclusive, not rejected and not this one's cause"
    return work.answer(Outcome.READ, reason, incident=incident)


def _with_what_became_of_them(
    store: IncidentStore, incident: Incident, past: tuple[PastIncident, ...]
) -> tuple[PastIncident, ...]:
    """The entries with what their own records say now: the history was written before anybody decided."""
    led_here: set[str] = set()
    earlier = incident.follows
    while earlier and earlier not in led_here:
        led_here.add(earlier)
        record = _record(store, earlier)
        earlier = record.follows if record else ""
    ids = {entry.incident_id for entry in past}
    rejected = {one for one in ids if (record := _record(store, one)) is not None and record.rejected}
    return tuple(
        dataclasses.replace(entry, rejected=entry.incident_id in rejected, linked=entry.incident_id in led_here)
        for entry in past
    )


def _record(store: IncidentStore, incident_id: str) -> Incident | None:
    try:
        return store.load(incident_id)
    except IncidentNotFoundError:
        return None


handler = workflow_handler("read_history", "ReadHistory", read_history)
