"""The snapshot: what is kept, with hashes; and that what is missing is said to be missing, never to be clean."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from lambdas.adapters.metrics import ContainerInsightsMetrics, MetricsError, PrometheusMetrics
from lambdas.domain.incident import suspects_of
from local_stack.access_keys import SECRET_ACCESS_KEY
from tests.adapters.cluster.incidents import Recovery
from tests.adapters.cluster.world import ACCESS_KEY, EKS_NAME, HYPERPOD_ARN

NOW = datetime.now(UTC)


class Workspace:
    """A metrics workspace that verifies SigV4 for service ``aps`` and answers range queries from a list of series."""

    def __init__(self) -> None:
        self.series: list[dict[str, Any]] = []
        self.queries: list[dict[str, str]] = []
        self.url = ""

    def answer(self, path: str, headers: Any) -> tuple[int, dict[str, Any]]:
        parts = urlsplit(path)
        signed = AWSRequest(method="GET", url=f"{self.url}{path.removeprefix('/workspaces/ws-1')}")
        signed.headers["Host"] = headers["Host"]
        signed.context["timestamp"] = headers["X-Amz-Date"]
        signed.headers["X-Amz-Date"] = headers["X-Amz-Date"]
        signer = SigV4Auth(Credentials(ACCESS_KEY, SECRET_ACCESS_KEY), "aps", "us-east-1")
        signature = signer.signature(signer.string_to_sign(signed, signer.canonical_request(signed)), signed)
        if signature not in headers["Authorization"]:
            return 403, {"message": "The request signature we calculated does not match"}
        self.queries.append({key: values[0] for key, values in parse_qs(parts.query).items()})
        query = self.queries[-1]["query"]
        found = [entry for entry in self.series if entry["metric"]["UUID"] in query or query.startswith("DCGM")]
        return 200, {"status": "success", "data": {"resultType": "matrix", "result": found}}


@contextmanager
def serving(workspace: Workspace) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = workspace.answer(self.path, self.headers)
            content = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    workspace.url = f"http://127.0.0.1:{server.server_address[1]}/workspaces/ws-1"
    yield workspace.url
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def workspace() -> Iterator[Workspace]:
    made = Workspace()
    with serving(made):
        yield made


def test_a_range_query_is_signed_and_read(credentials: None, workspace: Workspace) -> None:
    labels = {"__name__": "DCGM_FI_DEV_GPU_TEMP", "UUID": "GPU-a"}
    workspace.series = [{"metric": labels, "values": [[NOW.timestamp(), "60"]]}]
    metrics = PrometheusMetrics(boto3.Session(region_name="us-east-1"), workspace.url)
    query = '{__name__=~"DCGM_FI_DEV_GPU_TEMP|X",UUID="GPU-a"}'
    found = metrics.series(query, start=NOW - timedelta(hours=1), end=NOW, step_seconds=30)
    assert found == workspace.series
    assert workspace.queries[0]["query"] == query
    assert workspace.queries[0]["step"] == "30"


def test_a_refused_query_is_an_error_not_an_empty_answer(
    credentials: None, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    metrics = PrometheusMetrics(boto3.Session(region_name="us-east-1"), workspace.url)
    with pytest.raises(MetricsError, match="403"):
        metrics.series("up", start=NOW - timedelta(hours=1), end=NOW, step_seconds=30)
    dead = PrometheusMetrics(boto3.Session(region_name="us-east-1"), "http://127.0.0.1:9/workspaces/ws-1")
    with pytest.raises(MetricsError, match="does not answer"):
        dead.series("up", start=NOW - timedelta(hours=1), end=NOW, step_seconds=30)


def test_container_insights_reads_the_nodes_gpu_metrics(credentials: None) -> None:
    cloudwatch = boto3.client("cloudwatch")
    dimensions = [
        {"Name": "ClusterName", "Value": EKS_NAME},
        {"Name": "InstanceId", "Value": "i-1"},
        {"Name": "NodeName", "Value": "node-1"},
    ]
    at = NOW.replace(second=0, microsecond=0) - timedelta(minutes=5)
    cloudwatch.put_metric_data(
        Namespace="ContainerInsights",
        MetricData=[{"MetricName": "node_gpu_temperature", "Dimensions": dimensions, "Timestamp": at, "Value": 71.0}],
    )
    metrics = ContainerInsightsMetrics(cloudwatch)
    read = partial(metrics.node_series, eks_cluster_name=EKS_NAME, start=NOW - timedelta(minutes=30), end=NOW)
    found = read(instance_id="i-1", node_name="node-1")
    assert [value for _, value in found["node_gpu_temperature"]] == [71.0]
    assert found["node_gpu_power_draw"] == []
    other = read(instance_id="i-2", node_name="node-2")
    assert not any(other.values())


def kept(s3: Any, uri: str) -> dict[str, Any]:
    """The document, after its hash was compared with the metadata."""
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    found = s3.get_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
    body = found["Body"].read()
    digest = hashlib.sha256(body)
    assert found["Metadata"]["sha256"] == digest.hexdigest()
    assert found["ChecksumSHA256"] == base64.b64encode(digest.digest()).decode()
    document: dict[str, Any] = json.loads(body)
    return document


def test_a_snapshot_keeps_alarm_log_node_and_instance_with_their_hashes(recovery: Recovery, s3: Any) -> None:
    incident = recovery.open()
    recovery.run("resolve_node", incident.incident_id)
    assert recovery.run("snapshot_evidence", incident.incident_id)["outcome"] == "recorded"
    evidence = recovery.load(incident.incident_id).evidence
    assert evidence is not None
    index = kept(s3, evidence.uri)
    assert f"/incidents/{incident.incident_id}/" in evidence.uri
    for name, entry in index["kept"].items():
        found = s3.head_object(Bucket=recovery.bucket, Key=f"incidents/{incident.incident_id}/{name}")
        assert (found["Metadata"]["sha256"], found["ContentLength"]) == (entry["sha256"], entry["bytes"])
    row = incident.alarm.suspects[0]
    assert "step 7 done" in kept(s3, evidence.items[f"log-{row.pod_name}"])["tail"]
    assert kept(s3, evidence.items[f"node-{row.node_name}"])["metadata"]["name"] == row.node_name
    assert kept(s3, evidence.items["alarm"])["alarm_id"] == incident.alarm.alarm_id
    suspect = recovery.load(incident.incident_id).suspects[0]
    assert kept(s3, evidence.items[f"hyperpod-{suspect.instance_id}"])["InstanceId"] == suspect.instance_id


def test_metrics_that_are_not_configured_are_no_data_and_never_clean(recovery: Recovery, s3: Any) -> None:
    incident = recovery.open()
    recovery.run("resolve_node", incident.incident_id)
    recovery.run("snapshot_evidence", incident.incident_id)
    evidence = recovery.load(incident.incident_id).evidence
    assert evidence is not None
    gpu = incident.suspects[0].gpu_uuids[0]
    assert evidence.items[f"dcgm-{gpu}"].startswith("no data")
    assert any(gpu in finding and "no data" in finding for finding in evidence.findings)
    assert "clean" not in json.dumps([evidence.findings, dict(evidence.items)])
    assert f"dcgm-{gpu}" in kept(s3, evidence.uri)["absent"]


def with_workspace(recovery: Recovery, monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    cluster = {"hyperpod_cluster_name": "training", "eks_cluster_name": EKS_NAME, "training_namespaces": ["any"]}
    cluster["amp_query_url"] = url
    monkeypatch.setenv("TRUESTEP_CLUSTERS", json.dumps({HYPERPOD_ARN: cluster}))


def test_dcgm_series_around_the_alarm_become_findings(
    recovery: Recovery, s3: Any, workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_workspace(recovery, monkeypatch, workspace.url)
    incident = recovery.open()
    gpu = incident.suspects[0].gpu_uuids[0]
    pivot = datetime.fromisoformat(incident.alarm.detected_at.replace("Z", "+00:00")).timestamp()
    ecc = {"__name__": "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "UUID": gpu, "Hostname": "node-1"}
    workspace.series = [{"metric": ecc, "values": [[pivot - 300, "2"], [pivot, "9"]]}]
    for uuid, kelvin in ((gpu, "84"), ("GPU-x", "60"), ("GPU-y", "62")):
        labels = {"__name__": "DCGM_FI_DEV_GPU_TEMP", "UUID": uuid, "Hostname": "node-1"}
        workspace.series.append({"metric": labels, "values": [[pivot - 300, "60"], [pivot, kelvin]]})
    recovery.run("snapshot_evidence", incident.incident_id)
    evidence = recovery.load(incident.incident_id).evidence
    assert evidence is not None
    text = "\n".join(evidence.findings)
    assert "ECC_SBE_VOL_TOTAL rose: 2 before, 9 after" in text
    assert "23 K hotter" in text
    document = kept(s3, evidence.items[f"dcgm-{gpu}"])
    assert {entry["reading"] for entry in document["comparisons"]} == {"rose", "no data"}
    assert workspace.queries[1]["query"] == 'DCGM_FI_DEV_GPU_TEMP{Hostname="node-1"}'


def test_a_workspace_that_is_down_does_not_stop_the_rest(recovery: Recovery, monkeypatch: pytest.MonkeyPatch) -> None:
    with_workspace(recovery, monkeypatch, "http://127.0.0.1:9/workspaces/ws-1")
    incident = recovery.open()
    assert recovery.run("snapshot_evidence", incident.incident_id)["outcome"] == "recorded"
    evidence = recovery.load(incident.incident_id).evidence
    assert evidence is not None
    gpu = incident.suspects[0].gpu_uuids[0]
    assert evidence.items[f"dcgm-{gpu}"].startswith("no data: MetricsError")
    assert evidence.items["alarm"].startswith("s3://")


def test_a_repeated_snapshot_keeps_what_only_the_first_could_see(recovery: Recovery) -> None:
    incident = recovery.open()
    recovery.run("snapshot_evidence", incident.incident_id)
    recovery.world.delete_job(incident.job.name)
    recovery.run("snapshot_evidence", incident.incident_id)
    evidence = recovery.load(incident.incident_id).evidence
    assert evidence is not None
    assert evidence.items[f"log-{incident.alarm.suspects[0].pod_name}"].startswith("s3://")


def test_a_log_of_another_jobs_pod_is_not_kept_whatever_the_alarm_calls_its_own(recovery: Recovery) -> None:
    theirs = recovery.open().alarm.suspects[0]
    incident = recovery.open()
    row = dataclasses.replace(incident.alarm.suspects[0], pod_name=theirs.pod_name, pod_uid=theirs.pod_uid)
    alarm = dataclasses.replace(incident.alarm, suspects=(row,))
    recovery.store.save(incident.evolve(alarm=alarm, suspects=suspects_of(alarm)))
    recovery.run("resolve_node", incident.incident_id)
    recovery.run("snapshot_evidence", incident.incident_id)
    evidence = recovery.load(incident.incident_id).evidence
    assert evidence is not None
    said = evidence.items[f"log-{theirs.pod_name}"]
    assert said == "no data: ResolveNode found no pod of the job by this name"
