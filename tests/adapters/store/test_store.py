"""What the recovery's memory promises; the table and its in-memory twin pass the same suite."""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from lambdas.domain.attempts import ATTEMPTS_KEPT
from lambdas.domain.errors import ConcurrentUpdateError, IncidentNotFoundError, TransientError
from lambdas.domain.incident import Incident, IncidentStatus, open_incident
from lambdas.domain.records import CheckpointChoice, TrainingAttempt
from lambdas.ports import IncidentStore
from tests.unit.recovery.alarms import CLUSTER_ARN, NOW, an_alarm
from truestep.contract import CheckpointEvent, CheckpointRef, Step


def an_incident(**run: object) -> Incident:
    return open_incident(an_alarm(**run), now=NOW, dry_run=False)


def test_an_incident_comes_back_as_it_was_written(store: IncidentStore) -> None:
    ref = CheckpointRef(uri="s3://b/step-00000019", step=Step(19), manifest_sha256="cd" * 32)
    choice = CheckpointChoice(checkpoint=ref, reason="newest trusted", lost_steps=101, hit_probability=0.3, risk=0.05)
    opened = store.open(an_incident())
    stored = store.save(opened.evolve(checkpoint=choice, status=IncidentStatus.RECOVERING))
    assert store.load(stored.incident_id) == stored
    assert (opened.version, stored.version) == (1, 2)


def test_an_unknown_incident_is_said_to_be_unknown(store: IncidentStore) -> None:
    with pytest.raises(IncidentNotFoundError):
        store.load("inc-none")


def test_a_job_has_one_open_incident_and_others_join_it(store: IncidentStore) -> None:
    first = store.open(an_incident(step=120))
    assert store.open(an_incident(step=130)) == first
    assert store.holder(first.job) == first


def test_opening_the_same_incident_twice_is_once(store: IncidentStore) -> None:
    first = store.open(an_incident())
    changed = store.save(first.evolve(status=IncidentStatus.INVESTIGATING))
    assert store.open(an_incident()) == changed


def test_an_incident_takes_the_job_over_only_from_the_one_it_names(store: IncidentStore) -> None:
    first = store.open(an_incident(step=120))
    second, third = an_incident(step=130), an_incident(step=140)
    assert store.open(second, taking_over="inc-somebody-else") == first
    taken = store.open(second, taking_over=first.incident_id)
    assert taken.incident_id == second.incident_id
    assert store.open(third, taking_over=first.incident_id) == taken


def test_a_released_job_can_be_claimed_and_a_foreign_claim_stays(store: IncidentStore) -> None:
    first = store.open(an_incident(step=120))
    second = store.open(an_incident(step=130), taking_over=first.incident_id)
    store.release_job(first)
    assert store.holder(first.job) == second
    store.release_job(second)
    store.release_job(second)
    assert store.holder(first.job) is None


def test_the_second_writer_of_a_version_is_refused(store: IncidentStore) -> None:
    opened = store.open(an_incident())
    store.save(opened.evolve(status=IncidentStatus.INVESTIGATING))
    with pytest.raises(ConcurrentUpdateError):
        store.save(opened.evolve(status=IncidentStatus.CLOSED))
    assert store.load(opened.incident_id).status is IncidentStatus.INVESTIGATING


def test_an_alarm_belongs_to_the_first_incident_it_was_given(store: IncidentStore) -> None:
    alarm = an_alarm()
    assert store.record_alarm(alarm, NOW) is None
    assert store.record_alarm(alarm, NOW) is None
    store.assign_alarm(alarm, "inc-1")
    store.assign_alarm(alarm, "inc-2")
    assert store.record_alarm(alarm, NOW) == "inc-1"


def test_an_incidents_alarms_are_its_own_and_those_of_its_job_that_joined_it(store: IncidentStore) -> None:
    own, joined, other = an_alarm(), an_alarm(step=121), an_alarm(step=122)
    incident = store.open(open_incident(own, now=NOW, dry_run=False))
    assert store.alarms_of(incident) == (own.alarm_id,)
    for alarm, owner in ((own, incident.incident_id), (joined, incident.incident_id), (other, "notified")):
        store.record_alarm(alarm, NOW)
        store.assign_alarm(alarm, owner)
    store.record_alarm(an_alarm(step=123), NOW)  # not taken in to the end yet
    assert store.alarms_of(incident) == tuple(sorted((own.alarm_id, joined.alarm_id)))


def test_a_node_belongs_to_one_incident_and_claiming_again_is_granted(store: IncidentStore) -> None:
    assert store.claim_nodes("inc-1", CLUSTER_ARN, ["node-a"], limit=4).granted
    assert store.claim_nodes("inc-1", CLUSTER_ARN, ["node-a"], limit=4).granted
    refused = store.claim_nodes("inc-2", CLUSTER_ARN, ["node-a"], limit=4)
    assert not refused.granted
    assert "inc-1" in refused.reason


def test_a_set_of_nodes_is_claimed_whole_or_not_at_all(store: IncidentStore) -> None:
    store.claim_nodes("inc-1", CLUSTER_ARN, ["node-a"], limit=4)
    assert not store.claim_nodes("inc-2", CLUSTER_ARN, ["node-b", "node-a"], limit=4).granted
    assert store.quarantined(CLUSTER_ARN) == {"node-a"}


def test_the_breaker_counts_across_incidents_and_opens_again_when_a_node_is_released(store: IncidentStore) -> None:
    assert store.claim_nodes("inc-1", CLUSTER_ARN, ["node-a"], limit=2).granted
    tripped = store.claim_nodes("inc-2", CLUSTER_ARN, ["node-b", "node-c"], limit=2)
    assert not tripped.granted
    assert "circuit breaker" in tripped.reason
    store.release_nodes("inc-1", CLUSTER_ARN, ["node-a", "node-a"])
    assert store.claim_nodes("inc-2", CLUSTER_ARN, ["node-b", "node-c"], limit=2).granted
    assert store.quarantined(CLUSTER_ARN) == {"node-b", "node-c"}


def test_a_repeated_claim_is_granted_though_the_breaker_is_full(store: IncidentStore) -> None:
    store.claim_nodes("inc-1", CLUSTER_ARN, ["node-a", "node-b"], limit=2)
    assert store.claim_nodes("inc-1", CLUSTER_ARN, ["node-a", "node-b"], limit=1).granted


def test_another_cluster_has_a_breaker_of_its_own(store: IncidentStore) -> None:
    store.claim_nodes("inc-1", CLUSTER_ARN, ["node-a"], limit=1)
    assert store.claim_nodes("inc-2", CLUSTER_ARN + "2", ["node-b"], limit=1).granted


def test_releasing_someone_elses_node_changes_nothing(store: IncidentStore) -> None:
    store.claim_nodes("inc-1", CLUSTER_ARN, ["node-a"], limit=1)
    store.release_nodes("inc-2", CLUSTER_ARN, ["node-a", "node-z"])
    assert store.quarantined(CLUSTER_ARN) == {"node-a"}


def test_a_claim_without_nodes_or_with_too_many_is_an_error(store: IncidentStore) -> None:
    with pytest.raises(ValueError, match="nodes"):
        store.claim_nodes("inc-1", CLUSTER_ARN, [], limit=1)
    with pytest.raises(ValueError, match="nodes"):
        store.claim_nodes("inc-1", CLUSTER_ARN, [f"node-{i}" for i in range(65)], limit=99)


def test_at_once_the_breaker_never_lets_more_than_the_limit_through(dynamodb: object, table: str) -> None:
    from lambdas.adapters.store import DynamoIncidentStore

    store = DynamoIncidentStore(dynamodb, table)
    with ThreadPoolExecutor(8) as pool:
        answers = list(
            pool.map(lambda i: store.claim_nodes(f"inc-{i}", CLUSTER_ARN, [f"node-{i}"], limit=3).granted, range(8))
        )
    assert sum(answers) == 3
    assert len(store.quarantined(CLUSTER_ARN)) == 3


def test_a_claim_that_fills_the_breaker_is_granted_though_its_answer_was_lost(
    dynamodb: object, table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where the client repeats the request, or the function runs twice: what was written is one's own."""
    from lambdas.adapters.store import DynamoIncidentStore

    store = DynamoIncidentStore(dynamodb, table)
    write = DynamoIncidentStore._try_claim

    def unheard(self: DynamoIncidentStore, *given: Any) -> bool:
        write(self, *given)
        return write(self, *given)

    monkeypatch.setattr(DynamoIncidentStore, "_try_claim", unheard)
    answer = store.claim_nodes("inc-1", CLUSTER_ARN, ["node-a"], limit=1)
    assert (answer.granted, answer.tripped) == (True, False), answer
    refused = store.claim_nodes("inc-2", CLUSTER_ARN, ["node-b"], limit=1)
    assert (refused.granted, refused.tripped) == (False, True)
    with ThreadPoolExecutor(8) as pool:
        claims = pool.map(lambda _: store.claim_nodes("inc-3", "another", ["node-c"], limit=1).granted, range(8))
        assert all(claims)


def test_at_once_one_of_many_alarms_opens_the_incident(dynamodb: object, table: str) -> None:
    from lambdas.adapters.store import DynamoIncidentStore

    store = DynamoIncidentStore(dynamodb, table)
    with ThreadPoolExecutor(8) as pool:
        opened = list(pool.map(lambda step: store.open(an_incident(step=step)).incident_id, range(100, 116)))
    assert len(set(opened)) == 1


def test_a_gpus_history_is_newest_first_and_an_incident_is_in_it_once(store: IncidentStore) -> None:
    first, second = an_incident(step=120), an_incident(step=130).evolve(opened_at="2026-03-02T00:00:00.000Z")
    for incident in (first, second, second):
        store.record_gpus(incident)
    (gpu,) = first.suspects[0].gpu_uuids
    assert [past.incident_id for past in store.gpu_history(gpu)] == [second.incident_id, first.incident_id]
    assert store.gpu_history("GPU-never-seen") == ()


def a_checkpoint_event(step: int) -> CheckpointEvent:
    ref = CheckpointRef(uri=f"s3://b/step-{step:08d}", step=Step(step), manifest_sha256=f"{step:064x}")
    return CheckpointEvent(run=an_alarm().run, checkpoint=ref, weights_fingerprint="v1:00")


def test_checkpoints_come_newest_first(store: IncidentStore) -> None:
    job = an_incident().job
    for step in (19, 9, 29):
        store.record_checkpoint(job, a_checkpoint_event(step), "written")
    assert [kept.event.checkpoint.step for kept in store.checkpoints(job)] == [29, 19, 9]


def a_sign(attempt: str, *, heard: int, seen: int) -> TrainingAttempt:
    """Heard of and seen at these minutes."""
    return TrainingAttempt(
        attempt_id=attempt, heard_at=f"2026-03-01T00:{heard:02}:00.000Z", seen_at=f"2026-03-01T00:{seen:02}:00.000Z"
    )


def test_attempts_keep_the_order_in_which_they_were_heard_of_and_their_newest_signs(store: IncidentStore) -> None:
    job = an_incident().job
    assert store.attempts(job) == ()
    for attempt, heard, seen in (("a1", 1, 1), ("a2", 3, 0), ("a1", 4, 2), ("a1", 5, 1)):
        store.record_attempt(job, a_sign(attempt, heard=heard, seen=seen))
    assert store.attempts(job) == (a_sign("a1", heard=1, seen=2), a_sign("a2", heard=3, seen=0))
    assert store.attempts(an_incident(job_name="other").job) == ()


def test_a_job_that_restarts_again_and_again_keeps_its_newest_attempts(store: IncidentStore) -> None:
    job = an_incident().job
    for number in range(ATTEMPTS_KEPT + 3):
        store.record_attempt(job, a_sign(f"a{number}", heard=number, seen=number))
    kept = [attempt.attempt_id for attempt in store.attempts(job)]
    assert kept == [f"a{number}" for number in range(3, ATTEMPTS_KEPT + 3)]


def test_attempts_that_are_heard_of_at_once_are_all_kept(store: IncidentStore) -> None:
    job = an_incident().job

    def record(number: int) -> None:
        for _ in range(5):
            try:
                return store.record_attempt(job, a_sign(f"a{number}", heard=number, seen=number))
            except TransientError:
                continue
        raise AssertionError("five times transient")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(record, range(8)))
    assert sorted(attempt.attempt_id for attempt in store.attempts(job)) == [f"a{number}" for number in range(8)]


def test_trust_only_rises_whatever_the_order_of_events(store: IncidentStore) -> None:
    job = an_incident().job
    for trust in ("trusted", "written"):
        store.record_checkpoint(job, a_checkpoint_event(19), trust)
    assert [kept.trust for kept in store.checkpoints(job)] == ["trusted"]
    for trust in ("revoked", "trusted", "written"):
        store.record_checkpoint(job, a_checkpoint_event(19), trust)
    assert [kept.trust for kept in store.checkpoints(job)] == ["revoked"]
    with pytest.raises(ValueError, match="trus"):
        store.record_checkpoint(job, a_checkpoint_event(19), "certain")


def test_checkpoints_of_another_job_stay_apart(store: IncidentStore) -> None:
    job = an_incident().job
    store.record_checkpoint(job, a_checkpoint_event(19), "written")
    assert store.checkpoints(dataclasses.replace(job, name="other")) == ()


def test_incidents_are_listed_newest_first_and_the_closed_ones_apart(store: IncidentStore) -> None:
    opened = [
        store.open(an_incident(job_name=f"job-{day}").evolve(opened_at=f"2026-03-0{day}T00:00:00.000Z"))
        for day in (2, 3, 1)
    ]
    store.save(opened[0].evolve(status=IncidentStatus.ESCALATED))
    store.save(opened[1].evolve(status=IncidentStatus.CLOSED))
    second, third, first = (one.incident_id for one in opened)
    assert store.open_incident_ids() == (second, first)
    assert store.recent_incident_ids(2) == (third, second)


def test_jobs_are_listed_by_their_newest_sign_of_training(store: IncidentStore) -> None:
    jobs = [an_incident(job_name=name).job for name in ("a", "b#c", "d")]
    for minute, job in ((1, jobs[0]), (2, jobs[1]), (3, jobs[0]), (0, jobs[2])):
        store.record_attempt(job, a_sign("x", heard=minute, seen=minute))
    store.open(an_incident())
    assert [one.job for one in store.recent_jobs(2)] == [jobs[0], jobs[1]]
    assert store.recent_jobs(2)[0].seen_at == "2026-03-01T00:03:00.000Z"


def test_the_newest_trusted_checkpoint_is_looked_for_so_far_and_no_further(store: IncidentStore) -> None:
    job = an_incident().job
    assert store.newest_trusted(job, among=3) is None
    for step, trust in ((9, "trusted"), (19, "trusted"), (29, "revoked"), (39, "written")):
        store.record_checkpoint(job, a_checkpoint_event(step), trust)
    assert store.newest_trusted(job, among=3) == a_checkpoint_event(19)
    assert store.newest_trusted(job, among=2) is None


def test_a_nodes_claim_says_which_incident_holds_it(store: IncidentStore) -> None:
    store.claim_nodes("inc-1", CLUSTER_ARN, ["node-1"], limit=2)
    assert (store.node_holder("node-1"), store.node_holder("node-2")) == ("inc-1", None)
