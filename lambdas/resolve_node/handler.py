"""ResolveNode: from the alarm's rows to nodes and instances, rechecked against the cluster, and claimed."""

from __future__ import annotations

from lambdas.adapters.cluster_ports import cluster_of, hyperpod_of
from lambdas.adapters.runtime import Answer, Work, count, workflow_handler
from lambdas.domain.cluster_jobs import others_on_node, pod_view
from lambdas.domain.cluster_resolution import (
    Resolution,
    claim_keys,
    claimed,
    facts_of,
    own_pods,
    recheck_pod,
    resolve,
    smallest_group,
)
from lambdas.domain.cluster_workload import workload_of
from lambdas.domain.confirmation import bundle_of
from lambdas.domain.incident import Incident
from lambdas.domain.outcome import Outcome

STATE = "ResolveNode"


def act(work: Work) -> Answer:
    """Answers resolved, ambiguous, node_gone, or escalate where the breaker or another incident is in the way."""
    incident, job = work.incident, work.incident.job
    cluster, instances = cluster_of(work), hyperpod_of(work).instances()
    names = [suspect.node_name for suspect in incident.suspects]
    facts = {
        name: facts_of(
            name, cluster.node(name), instances, others_on_node(cluster.pods_on(name), job.namespace, job.name)
        )
        for name in names
    }
    doubts, own, workload = [], set(), incident.workload
    for row in incident.alarm.suspects:
        pod = cluster.pod(job.namespace, row.pod_name) if row.pod_name else None
        view = None if pod is None else pod_view(pod)
        doubt = recheck_pod(row, view, job.name)
        doubts.append(doubt)
        if view is not None and view.job_name == job.name:
            own.add(view.name)
        if pod is not None and not doubt and workload is None:
            # Now, because StopTraining deletes the pod.
            root = incident.alarm.run.checkpoint_root
            workload = workload_of(pod, bundle_uri=bundle_of(incident), checkpoint_root=root)
    resolution = resolve(own_pods(incident.suspects, own), facts, doubts, incident.alarm.verdict.kind)
    found = incident.evolve(suspects=resolution.suspects, workload=workload)
    if resolution.outcome not in (Outcome.RESOLVED, Outcome.AMBIGUOUS) or incident.dry_run:
        return work.answer(resolution.outcome, resolution.reason, incident=found)
    limit = work.policy.quarantine_limit(smallest_group(resolution.suspects))
    return _claim(work, found, resolution, limit)


def _claim(work: Work, incident: Incident, resolution: Resolution, limit: int) -> Answer:
    keys = claim_keys(resolution.suspects)
    answer = work.store.claim_nodes(incident.incident_id, incident.job.cluster_arn, keys, limit=limit)
    if answer.tripped:
        count("resolve_node", "BreakerTripped")
    if not answer.granted:
        return work.answer(Outcome.ESCALATE, answer.reason, incident=incident)
    return work.answer(
        resolution.outcome, resolution.reason, incident=incident.evolve(suspects=claimed(resolution.suspects))
    )


handler = workflow_handler("resolve_node", STATE, act)
