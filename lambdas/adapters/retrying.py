"""Changing an incident that others change at the same time."""

from __future__ import annotations

from collections.abc import Callable

from lambdas.domain.errors import ConcurrentUpdateError
from lambdas.domain.incident import Incident
from lambdas.ports import IncidentStore

_ATTEMPTS = 8


def save_changed(store: IncidentStore, incident_id: str, change: Callable[[Incident], Incident | None]) -> Incident:
    """Load, change and save, again from the start where somebody else was faster.

    `change` may run several times and changes nothing elsewhere; None means that there is nothing to change. Returns
    the incident as stored. Raises `ConcurrentUpdateError` after 8 lost races, `IncidentNotFoundError`, and whatever
    `change` raises.
    """
    for _ in range(_ATTEMPTS):
        incident = store.load(incident_id)
        changed = change(incident)
        if changed is None:
            return incident
        try:
            return store.save(changed)
        except ConcurrentUpdateError:
            continue
    raise ConcurrentUpdateError(f"incident {incident_id} is changed by others all the time; try again")
