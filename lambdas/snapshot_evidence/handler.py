"""SnapshotEvidence: keep what can be seen of the suspects before the job is stopped. Missing is said, never blocks."""

from __future__ import annotations

from lambdas.adapters.aws import client
from lambdas.adapters.cluster_ports import cluster_of, hyperpod_of, metrics_of
from lambdas.adapters.metrics import ContainerInsightsMetrics
from lambdas.adapters.metrics_evidence import EvidenceBucket
from lambdas.adapters.metrics_snapshot import Snapshot, with_evidence
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.outcome import Outcome

STATE = "SnapshotEvidence"


def act(work: Work) -> Answer:
    """Answers recorded, whatever could be had: the record says what could not."""
    incident = work.incident
    bucket = EvidenceBucket(client("s3"), work.settings.evidence_bucket, incident.incident_id)
    snapshot = Snapshot(incident, bucket, work.now)
    cluster = cluster_of(work)
    snapshot.alarm()
    snapshot.logs(cluster)
    snapshot.nodes(cluster, hyperpod_of(work))
    snapshot.gpu_metrics(metrics_of(work))
    snapshot.node_metrics(
        ContainerInsightsMetrics(client("cloudwatch")),
        work.settings.cluster(incident.job.cluster_arn).eks_cluster_name,
    )
    evidence = snapshot.finish()
    kept = sum(not value.startswith("no data") for value in evidence.items.values())
    reason = f"{kept} of {len(evidence.items)} pieces of evidence kept under {evidence.uri}"
    return work.answer(Outcome.RECORDED, reason, incident=with_evidence(incident, evidence))


handler = workflow_handler("snapshot_evidence", STATE, act)
