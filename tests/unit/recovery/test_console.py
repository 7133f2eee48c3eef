"""What the console says of a deployment, on the store's in-memory twin: large, full and unusual ones."""

from __future__ import annotations

import dataclasses
import json
from datetime import timedelta

from lambdas.adapters.console import console_page
from lambdas.domain.incident import Incident, IncidentStatus, iso, open_incident
from lambdas.domain.records import TrainingAttempt
from lambdas.settings import settings_from_environment
from tests.adapters.store.memory import MemoryIncidentStore
from tests.unit.recovery.alarms import CLUSTER_ARN, NOW, a_row, an_alarm
from truestep.contract import CheckpointEvent, CheckpointRef, NodeName, Step


def page(store: MemoryIncidentStore, **policy: object) -> str:
    environment = {
        "TRUESTEP_TABLE": "t",
        "TRUESTEP_CONSOLE_KEY_ID": "k",
        "TRUESTEP_APPROVAL_URL": "https://approval.example",
        "TRUESTEP_CLUSTERS": json.dumps(
            {
                CLUSTER_ARN: {
                    "hyperpod_cluster_name": "hp",
                    "eks_cluster_name": "eks",
                    "training_namespaces": ["team-a"],
                }
            }
        ),
        "TRUESTEP_POLICY": json.dumps(policy),
    }
    settings = settings_from_environment("show_console", environment)
    return console_page(store, settings, now=NOW, until=NOW + timedelta(hours=1))


def an_incident(store: MemoryIncidentStore, number: int = 0, *, drill: bool = False, text: str = "") -> Incident:
    alarm = an_alarm(job_name=f"job-{number}{text}")
    row = dataclasses.replace(a_row(2), node_name=NodeName(f"node-{number}{text}"), gpu_uuid=f"GPU-{number}{text}")
    alarm = dataclasses.replace(alarm, suspects=(row,), alarm_id=f"alarm-{number}", drill=drill)
    opened = store.open(open_incident(alarm, now=NOW - timedelta(minutes=number), dry_run=drill))
    if not drill:
        store.record_gpus(opened)
    return opened


def test_a_page_of_the_longest_values_stays_within_its_budget_and_counts_what_it_leaves_out() -> None:
    store = MemoryIncidentStore()
    for number in range(70):
        incident = an_incident(store, number, text="x" * 5_000)
        store.record_attempt(incident.job, TrainingAttempt(attempt_id="a", heard_at=iso(NOW), seen_at=iso(NOW)))
        ref = CheckpointRef(uri=f"s3://b/{'x' * 5_000}", step=Step(9), manifest_sha256="ab" * 32)
        event = CheckpointEvent(run=incident.alarm.run, checkpoint=ref, weights_fingerprint="v1:0")
        store.record_checkpoint(incident.job, event, "trusted")
        if number % 2:
            store.save(incident.evolve(status=IncidentStatus.CLOSED, closed_at=iso(NOW)))
    text = page(store)
    assert "35 incidents open" in text
    assert "And 10 more" in text
    assert len(text.encode()) < 200_000


def test_a_full_breaker_says_what_the_next_suspect_meets() -> None:
    store = MemoryIncidentStore()
    incident = an_incident(store)
    store.claim_nodes(incident.incident_id, CLUSTER_ARN, ["worker-1"], limit=1)
    assert "1 node in quarantine (worker-1). The circuit breaker allows 2 in the cluster at once" in page(store)
    assert "Full: it quarantines no further node" not in page(store)
    assert "Full: it quarantines no further node, and" in page(store, max_quarantined_nodes=1)
    assert "Dry run: nothing is changed" in page(store, dry_run=True)


def test_the_share_of_a_group_and_its_limit_are_two_figures() -> None:
    store = MemoryIncidentStore()
    incident = an_incident(store)
    store.claim_nodes(incident.incident_id, CLUSTER_ARN, ["worker-1"], limit=1)
    (suspect,) = incident.suspects
    small = dataclasses.replace(suspect, claim_key="worker-1", instance_group="workers", group_nodes=4)
    incident = store.save(incident.with_suspect(small))
    text = page(store)
    assert "1 node in quarantine (worker-1): 1 of 4 in workers (25%)." in text
    assert "10% of the suspect&#39;s instance group (rounded down, but always one): 1 for workers." in text
    assert "Full: it quarantines no further node in workers, and" in text
    store.save(incident.with_suspect(dataclasses.replace(small, group_nodes=40)))
    assert "1 of 40 in workers (2%)" in page(store)
    assert "Full:" not in page(store)


def test_a_drill_is_marked_and_its_node_is_in_no_gpus_history() -> None:
    store = MemoryIncidentStore()
    drill = an_incident(store, drill=True)
    assert f"{drill.incident_id} · dry run · drill" in page(store)
    store.save(drill.evolve(status=IncidentStatus.CLOSED, closed_at=iso(NOW)))
    text = page(store)
    assert "No GPU was suspected" in text
    assert "node-0: a drill; closed" in text
