"""What a decision is signed over, and that it counts for nothing else than what its page showed."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lambdas.adapters.decision_mac import KmsDecisionMacs
from lambdas.decide_approval.handler import handler as decide_approval
from lambdas.domain.decision import digest_of
from lambdas.domain.incident import Incident
from tests.adapters.store_handlers.conftest import Cloud
from tests.adapters.store_handlers.people import CONTEXT, asked, notice, post, request


@pytest.mark.parametrize("word", ["approve", "reject"])
def test_a_decision_is_signed_with_a_key_that_signs_no_links(cloud: Cloud, incident: Incident, word: str) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    suspects = tuple(replace(one, instance_id="i-1", other_pods=("a/b",)) for one in incident.suspects)
    cloud.store.save(cloud.store.load(incident.incident_id).evolve(suspects=suspects))
    post(path, query, decision=word, comment="seen", acknowledge="yes")
    stored = cloud.store.load(incident.incident_id)
    assert stored.approval is not None
    decision = stored.approval.decision
    assert decision is not None
    about = [(node.node_name, node.instance_id, node.other_pods) for node in decision.nodes]
    assert about == [(one.node_name, "i-1", ("a/b",)) for one in suspects]
    digest = digest_of(stored, decision)
    assert KmsDecisionMacs(cloud.client("kms"), cloud.decision_key_id).verifies(digest, decision.mac)
    assert not KmsDecisionMacs(cloud.client("kms"), cloud.key_id).verifies(digest, decision.mac)


def test_an_approval_counts_only_for_the_nodes_and_pods_that_its_page_showed(cloud: Cloud, incident: Incident) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])

    def shown() -> str:
        found = re.search(
            r'name="shown" value="([0-9a-f]{64})"', decide_approval(request("GET", path, query), CONTEXT)["body"]
        )
        assert found is not None
        return found[1]

    before = shown()
    changes: tuple[dict[str, object], ...] = ({"instance_id": "i-2"}, {"other_pods": ("team-b/neighbour",)})
    for change in changes:
        stored = cloud.store.load(incident.incident_id)
        cloud.store.save(stored.evolve(suspects=tuple(replace(one, **change) for one in stored.suspects)))
        status, said = notice(post(path, query, decision="approve", acknowledge="yes", shown=before))
        assert (status, "not those that your page showed" in said[0]) == (409, True)
    post(path, query, decision="approve", acknowledge="yes", shown=shown())
    assert cloud.store.load(incident.incident_id).approved


def test_a_question_whose_suspects_have_changed_since_its_approval_is_asked_anew(
    cloud: Cloud, incident: Incident
) -> None:
    path, query = asked(cloud, incident, cloud.waiting_execution()[1])
    post(path, query, decision="approve")
    approved = cloud.store.load(incident.incident_id)
    suspects = tuple(replace(one, instance_id="i-2") for one in approved.suspects)
    cloud.store.save(approved.evolve(suspects=suspects))
    execution, token = cloud.waiting_execution()
    asked(cloud, incident, token)
    assert cloud.still_waits(execution)
    assert "Approve: replace" in decide_approval(request("GET", path, query), CONTEXT)["body"]
    post(path, query, decision="approve")
    output = cloud.output(execution)
    assert output is not None
    assert output["outcome"] == "approved"
    stored = cloud.store.load(incident.incident_id)
    assert stored.approval is not None
    assert stored.approval.decision is not None
    assert [node.instance_id for node in stored.approval.decision.nodes] == ["i-2" for _ in suspects]
    assert [entry.outcome for entry in stored.timeline if entry.state == "Decision"] == [
        "approved",
        "set_aside",
        "approved",
    ]
