"""A state whose execution was stopped while it waited, and that a person goes on from much later."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from lambdas.domain.incident import Incident, iso
from lambdas.domain.workflow import abandoned, answered, resumed
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.test_recovery_states import CHOICE

AGO = timedelta(hours=8)


def gone_on(recovery: Recovery, incident: Incident, state: str) -> None:
    """`state` had answered pending once; its execution was stopped, and a person goes on there 8 hours later."""
    then, now = datetime.now(UTC) - AGO, datetime.now(UTC)
    waits = answered(incident, state=state, outcome="pending", reason="waits", now=then)
    ended = abandoned(waits, execution="arn:e", status="ABORTED", why="", now=then)
    assert ended is not None
    recovery.store.save(resumed(ended, state, by="by link", now=now))


def test_a_job_is_waited_for_anew_to_stop(recovery: Recovery) -> None:
    incident = recovery.open(stubborn=True)
    gone_on(recovery, incident, "StopTraining")
    assert recovery.run("stop_training", incident.incident_id)["outcome"] == "pending"


def test_a_job_is_waited_for_anew_to_start(recovery: Recovery) -> None:
    ident = recovery.open().incident_id
    assert recovery.settle("stop_training", ident)["outcome"] == "stopped"
    gone_on(recovery, recovery.load(ident).evolve(checkpoint=CHOICE), "Relaunch")
    assert recovery.settle("relaunch_training", ident)["outcome"] == "relaunched"


def test_a_new_instance_is_waited_for_anew(recovery: Recovery) -> None:
    ident = recovery.open().incident_id
    for state in ("resolve_node", "cordon_node"):
        recovery.run(state, ident)
    recovery.settle("stop_training", ident)
    recovery.decide(ident)
    assert recovery.run("replace_node", ident)["outcome"] == "requested"
    gone_on(recovery, recovery.load(ident), "AwaitReplacement")
    assert recovery.settle("await_replacement", ident)["outcome"] == "ready"


def test_a_confirmation_that_is_asked_for_again_waits_for_its_jobs(
    recovery: Recovery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy: dict[str, Any] = {"poll_seconds": 1, "max_quarantined_nodes": 5, "max_quarantined_percent": 100}
    monkeypatch.setenv("TRUESTEP_POLICY", json.dumps({**policy, "health_check": "skip"}))
    ident = recovery.open(
        evidence={"bundle_uri": f"{tmp_path.as_uri()}/bundles/{'a' * 32}"}, checkpoint_root=tmp_path.as_uri()
    ).incident_id
    for state in ("resolve_node", "cordon_node"):
        recovery.run(state, ident)
    recovery.settle("stop_training", ident)
    assert recovery.run("confirm_suspect", ident)["outcome"] == "pending"
    began = iso(datetime.now(UTC) - AGO)
    recovery.store.save(recovery.load(ident).evolve(waiting_since={"ConfirmSuspect": began}))
    # Its next entry fails, and the workflow goes on with the health check.
    assert recovery.run("start_health_check", ident)["outcome"] == "skipped"
    ended = abandoned(recovery.load(ident), execution="arn:e", status="ABORTED", why="", now=datetime.now(UTC))
    assert ended is not None
    recovery.store.save(resumed(ended, "ConfirmSuspect", by="by link", now=datetime.now(UTC)))
    assert recovery.run("confirm_suspect", ident)["outcome"] == "pending"
    answer = recovery.run("confirm_suspect", ident)
    assert answer["outcome"] == "pending", answer
    assert recovery.run("start_health_check", ident)["outcome"] == "skipped"
