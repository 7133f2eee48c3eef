"""Runs the confirmation's Jobs: begins them, looks how far they are, keeps what they showed, and deletes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from lambdas.adapters.aws import client
from lambdas.adapters.kubernetes import KubernetesError
from lambdas.adapters.metrics_evidence import EvidenceBucket
from lambdas.adapters.runtime import Work
from lambdas.domain.cluster_adoption import pods_of, same_job
from lambdas.domain.cluster_confirmation import (
    OVERDUE_SECONDS,
    Place,
    comparison,
    is_labelled,
    job_manifest,
    job_name,
    place_of,
    progress,
    without_pod,
)
from lambdas.domain.cluster_jobs import CONFIRMATION_LABEL
from lambdas.domain.confirmation import STATE, bundle_of, cleared_by, to_confirm, unfinished
from lambdas.domain.incident import Incident, iso
from lambdas.domain.records import Confirmation, ConfirmationStatus, ConfirmedNode, JobKey
from lambdas.ports import BatchJobs, Cluster
from truestep.contract import to_json


def begin(work: Work, cluster: Cluster, jobs: BatchJobs) -> Confirmation:
    """Create the Jobs: one on every suspect's node, one on a healthy node. Of those that are there, ours are kept."""
    incident, workload = work.incident, work.incident.workload
    assert workload is not None
    names = [suspect.node_name for suspect in to_confirm(incident)]
    places: list[Place] = []
    nodes: list[ConfirmedNode] = []
    for name in names:
        node = cluster.node(name)
        if node is None:
            gone = ConfirmedNode(node_name=name, job_name="", ended=True, problem="the node has left the cluster")
            nodes.append(gone)
        else:
            places.append(place_of(node, workload))
    healthy = comparison(places, names)
    nodes += [_begun(work, jobs, place) for place in (*places, *([healthy] if healthy else []))]
    return Confirmation(
        status=ConfirmationStatus.RUNNING,
        reason="the failing computation runs again on the suspects and on a healthy node",
        at=iso(work.now),
        nodes=tuple(nodes),
    )


def look(work: Work, jobs: BatchJobs, confirmation: Confirmation) -> Confirmation:
    """The confirmation with what can be seen of its Jobs now; what takes too long counts as ended."""
    incident = work.incident
    waited = incident.waited_seconds(STATE, work.now)
    overdue = waited > work.policy.confirm_timeout_seconds + OVERDUE_SECONDS
    pods = jobs.labelled_pods(incident.job.namespace, CONFIRMATION_LABEL, incident.incident_id)
    suspects = [suspect.node_name for suspect in incident.suspects]
    nodes = []
    for node in confirmation.nodes:
        if not node.ended:
            mine = pods_of(pods, node.job_uid)
            if mine:
                node = progress(node, mine, suspects=suspects, alarm_id=incident.alarm.alarm_id, waited_seconds=waited)
            else:
                node = without_pod(node, jobs.job(_key(incident, node.job_name)), waited_seconds=waited)
        if overdue and not node.ended:
            node = dataclasses.replace(node, ended=True, problem=f"it had not ended after {waited:.0f} s")
        nodes.append(node)
    return dataclasses.replace(confirmation, nodes=tuple(nodes))


def keep(work: Work, confirmation: Confirmation) -> Confirmation:
    """Write what the nodes reported to the incident's evidence; the confirmation with its URI."""
    incident = work.incident
    bucket = EvidenceBucket(client("s3"), work.settings.evidence_bucket, incident.incident_id)
    document = {"bundle_uri": bundle_of(incident), "workload": to_json(incident.workload), **to_json(confirmation)}
    return dataclasses.replace(confirmation, evidence=bucket.put("confirmation", document))


def give_back_cleared(work: Work, cluster: Cluster, confirmation: Confirmation) -> tuple[Incident, str]:
    """Release the suspects that another one's runs have cleared; the incident without them, and what was done.

    Before the record changes: a state that dies in between finds the same result again and does the same.
    """
    incident, said = work.incident, []
    for suspect in cleared_by(incident, confirmation):
        plan = cluster.release(suspect.node_name, incident.incident_id)
        said.append(plan.reason if plan else f"{suspect.node_name} has left the cluster")
        if suspect.claim_key:
            work.store.release_nodes(incident.incident_id, incident.job.cluster_arn, [suspect.claim_key])
        released = dataclasses.replace(suspect, released_at=iso(work.now) if plan and plan.released else "")
        incident = incident.evolve(
            suspects=tuple(one for one in incident.suspects if one.node_name != suspect.node_name),
            cleared=(*incident.cleared, released),
        )
    return incident, "; ".join(said)


def end_jobs(jobs: BatchJobs, incident: Incident) -> str:
    """Delete the incident's Jobs, also those that a state which died has not recorded; what could not be deleted.

    A Job that stays ends by itself, so that a refusal is told and stops nothing.
    """
    problems = []
    for name in _job_names(incident):
        try:
            found = jobs.job(_key(incident, name))
            if found is not None and is_labelled(found, incident.incident_id):
                jobs.delete_batch_job(incident.job.namespace, name)
        except KubernetesError as error:
            problems.append(f"the confirmation's Job {name} is left to end by itself: {error}")
    return "; ".join(problems)


def _begun(work: Work, jobs: BatchJobs, place: Place) -> ConfirmedNode:
    incident = work.incident
    assert incident.workload is not None
    manifest = job_manifest(
        place,
        incident.workload,
        namespace=incident.job.namespace,
        incident_id=incident.incident_id,
        alarm_id=incident.alarm.alarm_id,
        bundle_uri=bundle_of(incident),
        late=bool(unfinished(incident)),
        policy=work.policy,
    )
    name = manifest["metadata"]["name"]
    node = ConfirmedNode(node_name=place.node_name, job_name=name, suspect=bool(place.node_name))
    try:
        found = jobs.job(_key(incident, name))
        if found is None:
            return dataclasses.replace(node, job_uid=jobs.create_batch_job(manifest))
        if not same_job(found, manifest):
            foreign = f"a Job {name} of somebody else is there: it is not the one that the recovery makes"
            return dataclasses.replace(node, job_name="", ended=True, problem=foreign)
    except KubernetesError as error:
        # Not allowed, over a quota, refused by an admission policy: said, and the recovery goes on without it.
        return dataclasses.replace(node, job_name="", ended=True, problem=str(error)[:400])
    return dataclasses.replace(node, job_uid=str(found["metadata"]["uid"]))


def _job_names(incident: Incident) -> Iterable[str]:
    known = incident.confirmation.nodes if incident.confirmation else ()
    if known:
        return tuple(node.job_name for node in known if node.job_name)
    if incident.workload is None or incident.workload.refused or not bundle_of(incident):
        return ()
    # Nothing is recorded: the state may have died between a Job and its record.
    keys = [suspect.node_name for suspect in to_confirm(incident)] + ["comparison"]
    return tuple(job_name(incident.incident_id, key) for key in keys)


def _key(incident: Incident, name: str) -> JobKey:
    return dataclasses.replace(incident.job, kind="Job", name=name)
