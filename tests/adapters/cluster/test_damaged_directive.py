"""A directive's ConfigMap that somebody has damaged, or another version wrote: it is replaced, and the log says so."""

from __future__ import annotations

import json
import logging

import pytest

from lambdas.adapters.kubernetes import ConfigMap
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.test_recovery_states import CHOICE
from tests.adapters.cluster.world import NAMESPACE, World

OTHER_VERSION = json.dumps({"schema_version": 99, "incident_id": "inc-0"})


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", "[" * 100_000, OTHER_VERSION])
def test_what_cannot_be_read_keeps_no_relaunch_from_its_order(
    recovery: Recovery, world: World, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    incident = recovery.open()
    name = f"truestep-resume-{incident.job.name}"
    world.admin.create(ConfigMap({"metadata": {"name": name, "namespace": NAMESPACE}, "data": {"resume.json": text}}))
    assert recovery.settle("stop_training", incident.incident_id)["outcome"] == "stopped"
    recovery.store.save(recovery.load(incident.incident_id).evolve(checkpoint=CHOICE))
    with caplog.at_level(logging.WARNING):
        assert recovery.settle("relaunch_training", incident.incident_id)["outcome"] == "relaunched"
    assert f"ConfigMap {NAMESPACE}/{name} holds no directive that can be read" in caplog.text
    assert world.directive(incident.job.name)["checkpoint_uri"] == CHOICE.checkpoint.uri
