"""The HyperPod control plane: one instance a call, partial failures read, and never a whole group by accident."""

from __future__ import annotations

import threading
from typing import Any

import boto3
import pytest

from lambdas.adapters.hyperpod import HyperPodCluster, HyperPodError
from lambdas.domain.errors import TransientError
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.world import GROUP, HYPERPOD_NAME, World, wait_until

UNKNOWN = "i-00000000000000000"


@pytest.fixture
def hyperpod(access: None) -> HyperPodCluster:
    return HyperPodCluster(boto3.client("sagemaker"), HYPERPOD_NAME)


def test_instances_carry_group_logical_id_and_node_name(hyperpod: HyperPodCluster, world: World) -> None:
    known = {node["instance_id"]: node for node in world.nodes()}
    found = {state.instance_id: state for state in hyperpod.instances()}
    assert set(found) == set(known)
    for instance_id, state in found.items():
        assert state.node_name == known[instance_id]["node_name"]
        assert state.logical_id == known[instance_id]["node_logical_id"]
        assert (state.instance_group, state.status) == (GROUP, "Running")
        assert hyperpod.instance(instance_id=instance_id) == state
        assert hyperpod.instance(logical_id=state.logical_id) == state


def test_an_instance_that_does_not_exist_is_none_and_a_cluster_that_does_not_is_an_error(
    hyperpod: HyperPodCluster, access: None
) -> None:
    assert hyperpod.instance(instance_id=UNKNOWN) is None
    with pytest.raises(HyperPodError, match="elsewhere"):
        HyperPodCluster(boto3.client("sagemaker"), "elsewhere").instances()


@pytest.mark.parametrize("ids", [{}, {"instance_id": "i-1", "logical_id": "l-1"}])
def test_a_node_is_named_by_exactly_one_id(hyperpod: HyperPodCluster, ids: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="not by both or neither"):
        hyperpod.instance(**ids)


@pytest.mark.parametrize(("group", "ids"), [(GROUP, []), (GROUP, [""]), (GROUP, ["node-logical-1"]), ("", [UNKNOWN])])
def test_a_health_check_without_instance_ids_never_reaches_the_control_plane(group: str, ids: list[str]) -> None:
    class Untouchable:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was called")

    with pytest.raises(ValueError, match="needs a group and instance ids"):
        HyperPodCluster(Untouchable(), HYPERPOD_NAME).start_health_check(group, ids)


def test_a_replacement_by_anything_but_an_instance_id_is_refused(hyperpod: HyperPodCluster, world: World) -> None:
    before = world.nodes()
    with pytest.raises(ValueError, match="nothing is replaced"):
        hyperpod.replace(before[0]["node_logical_id"])
    answer = hyperpod.replace(UNKNOWN)
    assert (answer.accepted, answer.code) == (False, "InstanceIdNotFound")
    assert world.nodes() == before


def test_automatic_recovery_is_read_from_the_cluster(hyperpod: HyperPodCluster) -> None:
    assert hyperpod.automatic_recovery() is False


def test_no_answer_is_worth_another_try(access: None) -> None:
    client = boto3.client(
        "sagemaker",
        endpoint_url="http://127.0.0.1:9",
        config=boto3.session.Config(retries={"total_max_attempts": 1}),
    )
    with pytest.raises(TransientError, match="no answer"):
        HyperPodCluster(client, HYPERPOD_NAME).instances()


def test_a_health_check_that_hyperpod_refuses_is_recorded_as_skipped(recovery: Recovery) -> None:
    incident = recovery.open()
    recovery.run("resolve_node", incident.incident_id)
    found = recovery.load(incident.incident_id)
    lost = found.suspects[0].instance_id
    wrong = found.evolve(
        suspects=tuple(type(entry)(**{**vars(entry), "instance_group": "no-such-group"}) for entry in found.suspects)
    )
    recovery.store.save(wrong)
    answer = recovery.run("start_health_check", incident.incident_id)
    assert answer["outcome"] == "skipped"
    assert "HyperPod did not start it" in answer["reason"]
    assert lost in {
        state.instance_id for state in HyperPodCluster(boto3.client("sagemaker"), HYPERPOD_NAME).instances()
    }


def test_two_replacements_at_once_exchange_the_instance_once(recovery: Recovery, world: World) -> None:
    incident = recovery.open()
    ident = incident.incident_id
    recovery.run("resolve_node", ident)
    recovery.decide(ident)
    outcomes: list[str] = []

    def replace() -> None:
        for _ in range(20):
            try:
                outcomes.append(recovery.run("replace_node", ident)["outcome"])
            except TransientError:
                continue  # as the state machine's Retry does
            return

    threads = [threading.Thread(target=replace) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 3
    assert set(outcomes) <= {"requested", "already_replaced"}
    recovery.settle("await_replacement", ident)
    suspect = recovery.load(ident).suspects[0]
    assert suspect.replacement is not None
    new = suspect.replacement.new_instance_id
    assert recovery.run("replace_node", ident)["outcome"] == "already_replaced"
    wait_until(lambda: all(node["status"] == "Running" for node in world.nodes()), "all instances run")
    holder = next(node for node in world.nodes() if node["node_logical_id"] == suspect.logical_id)
    assert holder["instance_id"] == new
