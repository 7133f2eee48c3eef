"""Collects what is known about the suspects when an incident opens, before anything is stopped.

Every part is tried by itself: one that fails or is empty is recorded as "no data" with the cause, and the rest goes on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from lambdas.adapters.metrics import ContainerInsightsMetrics
from lambdas.adapters.metrics_evidence import EvidenceBucket
from lambdas.domain.errors import TransientError
from lambdas.domain.incident import Incident, iso, parse_iso
from lambdas.domain.metrics_comparison import METRICS, TEMPERATURE, compare, findings, hotter_than_peers
from lambdas.domain.records import Evidence, SuspectNode
from lambdas.ports import Cluster, HyperPod, Metrics
from truestep.contract import TruestepError, to_json

BEFORE = timedelta(hours=1)
AFTER = timedelta(minutes=10)
STEP_SECONDS = 30
LOG_TAIL_LINES = 400
_FAILURES = (TruestepError, ClientError, BotoCoreError, TransientError, ValueError)


class Snapshot:
    """One incident's evidence in the making."""

    def __init__(self, incident: Incident, bucket: EvidenceBucket, now: datetime) -> None:
        self._incident = incident
        self._bucket = bucket
        self._pivot = parse_iso(incident.alarm.detected_at)
        self._start = self._pivot - BEFORE
        self._end = max(self._pivot, min(now, self._pivot + AFTER))
        self._items: dict[str, str] = {}
        self._findings: list[str] = []

    def alarm(self) -> None:
        """The alarm as it was received."""
        self._keep("alarm", lambda: to_json(self._incident.alarm), "")

    def nodes(self, cluster: Cluster, hyperpod: HyperPod) -> None:
        """Node objects and HyperPod's descriptions of the suspects."""
        for suspect in self._incident.suspects:
            name = suspect.node_name
            self._keep(f"node-{name}", partial(cluster.node, name), "the node has left the cluster")
            instance = suspect.instance_id
            if instance:
                self._keep(
                    f"hyperpod-{instance}",
                    partial(_describe, hyperpod, instance),
                    "HyperPod does not know the instance any more",
                )

    def logs(self, cluster: Cluster) -> None:
        """The tails of the suspects' pod logs; of no other job's pod, whatever the alarm calls its own."""
        own = {name for suspect in self._incident.suspects for name in suspect.pod_names}
        for name in filter(None, (row.pod_name for row in self._incident.alarm.suspects)):
            if name in own:
                read = partial(_log, cluster, self._incident.job.namespace, name)
                self._keep(f"log-{name}", read, "the pod is gone, or has printed nothing")
            else:
                self._items[f"log-{name}"] = "no data: ResolveNode found no pod of the job by this name"

    def gpu_metrics(self, metrics: Metrics | None) -> None:
        """DCGM series of every suspect GPU and its node's others, before and after the alarm. None: not configured."""
        for suspect in self._incident.suspects:
            for gpu_uuid in suspect.gpu_uuids:
                name = f"dcgm-{gpu_uuid}"
                if metrics is None:
                    self._items[name] = "no data: no metrics workspace is configured (amp_query_url)"
                    self._findings.append(f"{gpu_uuid}: no data, because no metrics workspace is configured")
                    continue
                self._keep(
                    name,
                    partial(self._dcgm, metrics, gpu_uuid),
                    "the workspace has no series of this GPU in the window; that says nothing about the GPU",
                )
                if self._items[name].startswith("no data"):
                    self._findings.append(f"{gpu_uuid}: {self._items[name]}")

    def node_metrics(self, insights: ContainerInsightsMetrics, eks_cluster_name: str) -> None:
        """Container Insights' GPU metrics of every suspect node."""
        for suspect in self._incident.suspects:
            if suspect.instance_id:
                self._keep(
                    f"container-insights-{suspect.node_name}",
                    partial(self._insights, insights, eks_cluster_name, suspect),
                    "Container Insights has no GPU metrics of this node in the window",
                )

    def finish(self) -> Evidence:
        """Write the index and return what the incident remembers."""
        absent = {name: why for name, why in self._items.items() if why.startswith("no data")}
        uri = self._bucket.put_index(absent)
        return Evidence(uri=uri, items=self._items, findings=tuple(self._findings))

    def _keep(self, name: str, read: Callable[[], Mapping[str, Any] | None], empty: str) -> None:
        try:
            document = read()
            self._items[name] = f"no data: {empty}" if document is None else self._bucket.put(name, document)
        except _FAILURES as error:
            self._items[name] = f"no data: {type(error).__name__}: {error}"[:400]

    def _dcgm(self, metrics: Metrics, gpu_uuid: str) -> Mapping[str, Any] | None:
        names = "|".join(METRICS)
        query = partial(metrics.series, start=self._start, end=self._end, step_seconds=STEP_SECONDS)
        series = query(f'{{__name__=~"{names}",UUID="{_escaped(gpu_uuid)}"}}')
        if not series:
            return None
        host = str(_labels(series[0]).get("Hostname", ""))
        peers = query(f'{TEMPERATURE}{{Hostname="{_escaped(host)}"}}') if host else []
        comparisons = compare(
            series,
            gpu_uuid=gpu_uuid,
            start=self._start,
            pivot=self._pivot,
            end=self._end,
            step_seconds=STEP_SECONDS,
        )
        hotter_by = hotter_than_peers([*series, *peers], gpu_uuid=gpu_uuid, pivot=self._pivot)
        self._findings += findings(comparisons, hotter_by=hotter_by)
        return {
            "gpu_uuid": gpu_uuid,
            **self._window(STEP_SECONDS),
            "hotter_than_peers_kelvin": hotter_by,
            "comparisons": [to_json(entry) for entry in comparisons],
            "series": series,
            "peer_temperatures": peers,
        }

    def _insights(
        self, insights: ContainerInsightsMetrics, eks_cluster_name: str, suspect: SuspectNode
    ) -> Mapping[str, Any] | None:
        series = insights.node_series(
            eks_cluster_name=eks_cluster_name,
            instance_id=suspect.instance_id,
            node_name=suspect.node_name,
            start=self._start,
            end=self._end,
        )
        if not any(series.values()):
            return None
        coverage = {name: len(points) for name, points in series.items()}
        return {"node_name": suspect.node_name, **self._window(60), "samples": coverage, "series": series}

    def _window(self, step_seconds: int) -> dict[str, Any]:
        return {
            "start": iso(self._start),
            "alarm": iso(self._pivot),
            "end": iso(self._end),
            "step_seconds": step_seconds,
        }


def with_evidence(incident: Incident, evidence: Evidence) -> Incident:
    """The incident with the evidence; a repeated snapshot keeps what only an earlier one could still see."""
    earlier = incident.evidence
    if earlier is None:
        return incident.evolve(evidence=evidence)
    items = dict(evidence.items)
    for name, value in earlier.items.items():
        if items.get(name, "no data").startswith("no data"):
            items[name] = value
    kept = evidence.findings or earlier.findings
    return incident.evolve(evidence=dataclasses.replace(evidence, items=items, findings=kept))


def _log(cluster: Cluster, namespace: str, pod_name: str) -> Mapping[str, Any] | None:
    text = cluster.log_tail(namespace, pod_name, LOG_TAIL_LINES)
    return {"namespace": namespace, "pod": pod_name, "tail": text} if text else None


def _describe(hyperpod: HyperPod, instance_id: str) -> Mapping[str, Any] | None:
    details = hyperpod.describe_node(instance_id=instance_id)
    if details is None:
        return None
    # API answers carry datetimes, which JSON does not have.
    return {key: iso(value) if isinstance(value, datetime) else value for key, value in details.items()}


def _labels(series: Mapping[str, Any]) -> Mapping[str, Any]:
    labels: Mapping[str, Any] = series["metric"]
    return labels


def _escaped(value: str) -> str:
    """A PromQL string literal's content: alarm fields must not end the literal."""
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
