"""Gathers what the console shows. Reads only, and so much of everything as a page can hold."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final

from lambdas.domain.errors import IncidentNotFoundError
from lambdas.domain.incident import Incident, IncidentStatus
from lambdas.pages import render_console
from lambdas.pages.console import ClusterState, ConsoleFacts, JobState
from lambdas.ports import IncidentStore
from lambdas.settings import Settings

LINK_VALID: Final = timedelta(hours=1)
"""How long a link of the console works. It is made for one look, and sent to nobody."""
_OPEN_LIMIT: Final = 25
_RECENT_LIMIT: Final = 25
_JOB_LIMIT: Final = 25
_GPU_LIMIT: Final = 25
_PAST_LIMIT: Final = 5
_CHECKPOINTS_TRIED: Final = 50


def console_page(store: IncidentStore, settings: Settings, *, now: datetime, until: datetime) -> str:
    """The console as HTML. until: when its link ends."""
    listed = store.open_incident_ids()
    opened = [one for one in _loaded(store, listed[:_OPEN_LIMIT]) if one.status is not IncidentStatus.CLOSED]
    recent = _loaded(store, [name for name in store.recent_incident_ids(_RECENT_LIMIT) if name not in listed])
    jobs = [
        JobState(job=one.job, seen_at=one.seen_at, trusted=store.newest_trusted(one.job, among=_CHECKPOINTS_TRIED))
        for one in store.recent_jobs(_JOB_LIMIT)
    ]
    # Nothing of a drill is in a GPU's history, and its suspects are no suspects.
    accused = (suspect for one in (*opened, *recent) if not one.alarm.drill for suspect in one.suspects)
    gpus = list(dict.fromkeys(gpu for suspect in accused for gpu in suspect.gpu_uuids))
    facts = ConsoleFacts(
        clusters=tuple(_cluster(store, settings, arn) for arn in settings.clusters),
        opened=tuple(opened),
        more_open=max(0, len(listed) - _OPEN_LIMIT),
        closed=tuple(one for one in recent if one.status is IncidentStatus.CLOSED),
        jobs=tuple(jobs),
        checkpoints_tried=_CHECKPOINTS_TRIED,
        gpus={gpu: store.gpu_history(gpu, limit=_PAST_LIMIT) for gpu in gpus[:_GPU_LIMIT]},
    )
    return render_console(facts, now=now, until=until)


def _loaded(store: IncidentStore, incident_ids: tuple[str, ...] | list[str]) -> list[Incident]:
    found = []
    for incident_id in incident_ids:
        try:
            found.append(store.load(incident_id))
        except IncidentNotFoundError:
            # Somebody deleted the item, and the listing has not followed yet.
            continue
    return found


def _cluster(store: IncidentStore, settings: Settings, arn: str) -> ClusterState:
    return ClusterState(
        arn=arn,
        name=settings.cluster(arn).hyperpod_cluster_name,
        policy=settings.policy(arn),
        quarantined={key: store.node_holder(key) or "" for key in store.quarantined(arn)},
    )
