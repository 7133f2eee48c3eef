"""GPU metrics from Amazon Managed Prometheus and CloudWatch Container Insights.

An empty answer means "no data". It never means that nothing was wrong, and the callers say so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any
from urllib.parse import urlencode, urlsplit

import boto3
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.exceptions import BotoCoreError
from botocore.httpsession import URLLib3Session

from lambdas.adapters.aws import transient_errors
from truestep.contract import TruestepError, parse_json

_AMP_HOST = re.compile(r"aps-workspaces\.([a-z0-9-]+)\.")
_TIMEOUT_SECONDS = 10
CONTAINER_INSIGHTS = "ContainerInsights"
NODE_GPU_METRICS = (
    "node_gpu_utilization",
    "node_gpu_memory_utilization",
    "node_gpu_temperature",
    "node_gpu_power_draw",
)


class MetricsError(TruestepError):
    """A metrics source that is configured did not answer; the message says what it said."""


class PrometheusMetrics:
    """Range queries of one workspace, signed for service ``aps``."""

    def __init__(self, session: boto3.Session, query_url: str) -> None:
        """query_url: ``https://aps-workspaces.<region>.amazonaws.com/workspaces/<id>``, without ``/api``."""
        self._session = session
        self._url = query_url.rstrip("/").removesuffix("/api/v1/query_range") + "/api/v1/query_range"
        match = _AMP_HOST.search(urlsplit(query_url).netloc)
        self._region = match[1] if match else session.region_name
        self._http = URLLib3Session(timeout=_TIMEOUT_SECONDS)

    def series(self, query: str, *, start: datetime, end: datetime, step_seconds: int) -> list[dict[str, Any]]:
        """The matrix of a range query: ``{"metric": {...}, "values": [[epoch seconds, "value"], ...]}`` a series.

        Raises `MetricsError` where the workspace refuses the query or does not answer.
        """
        parameters = {
            "query": query,
            "start": f"{start.timestamp():.3f}",
            "end": f"{end.timestamp():.3f}",
            "step": str(step_seconds),
        }
        request = AWSRequest(method="GET", url=f"{self._url}?{urlencode(parameters)}")
        credentials = self._session.get_credentials()
        if credentials is None or not self._region:
            raise MetricsError("no AWS credentials or region to sign a metrics query with")
        SigV4Auth(credentials, "aps", self._region).add_auth(request)
        try:
            response = self._http.send(request.prepare())
        except BotoCoreError as error:
            raise MetricsError(f"{self._url} does not answer: {error}") from error
        if response.status_code != 200:
            raise MetricsError(f"{self._url} answered {response.status_code}: {response.text[:200]}")
        return _matrix(response.text)


class ContainerInsightsMetrics:
    """A node's GPU metrics in CloudWatch. `client` is a boto3 CloudWatch client."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def node_series(
        self,
        *,
        eks_cluster_name: str,
        instance_id: str,
        node_name: str,
        start: datetime,
        end: datetime,
        step_seconds: int = 60,
        metrics: Sequence[str] = NODE_GPU_METRICS,
    ) -> dict[str, list[tuple[float, float]]]:
        """Metric name -> [(epoch seconds, average)], oldest first; an empty list is "no data"."""
        dimensions = [
            {"Name": "ClusterName", "Value": eks_cluster_name},
            {"Name": "InstanceId", "Value": instance_id},
            {"Name": "NodeName", "Value": node_name},
        ]
        queries = [
            {
                "Id": f"m{index}",
                "MetricStat": {
                    "Metric": {"Namespace": CONTAINER_INSIGHTS, "MetricName": name, "Dimensions": dimensions},
                    "Period": step_seconds,
                    "Stat": "Average",
                },
            }
            for index, name in enumerate(metrics)
        ]
        points: dict[str, list[tuple[float, float]]] = {name: [] for name in metrics}
        names = {f"m{index}": name for index, name in enumerate(metrics)}
        with transient_errors():
            pages = self._client.get_paginator("get_metric_data").paginate(
                MetricDataQueries=queries, StartTime=start, EndTime=end, ScanBy="TimestampAscending"
            )
            for page in pages:
                for result in page["MetricDataResults"]:
                    points[names[result["Id"]]] += [
                        (at.timestamp(), value)
                        for at, value in zip(result["Timestamps"], result["Values"], strict=True)
                    ]
        return {name: sorted(values) for name, values in points.items()}


def _matrix(text: str) -> list[dict[str, Any]]:
    try:
        document = parse_json(text)
        data = document["data"]
        if document["status"] != "success" or data["resultType"] != "matrix":
            raise MetricsError(f"the metrics query failed: {document.get('error', data.get('resultType'))}")
        return list(data["result"])
    except (ValueError, KeyError, TypeError) as error:
        raise MetricsError(f"the metrics source did not answer in Prometheus' format: {text[:200]!r}") from error
