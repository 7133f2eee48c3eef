"""The control plane of one HyperPod cluster. Every call names the one instance that it is about, never a whole group.

HyperPodError        the control plane refused a request, and a person has to look at it
TransientError       (lambdas.domain.errors) throttled, unavailable, or an InternalServerError for this instance
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import ClientError, EndpointConnectionError, HTTPClientError

from lambdas.domain.cluster_replacement import ReplaceAnswer, read_replace_answer
from lambdas.domain.errors import TransientError
from lambdas.ports import InstanceState
from truestep.contract import TruestepError

_INSTANCE_ID = re.compile(r"i-[a-f0-9]{8}(?:[a-f0-9]{9})?")
_TRANSIENT_CODES = ("ThrottlingException", "Throttling", "ServiceUnavailable", "InternalFailure", "InternalServerError")
_NOT_FOUND_CODES = ("ResourceNotFound", "ResourceNotFoundException")
NODE_NAME_PREFIX = "hyperpod-"


class HyperPodError(TruestepError):
    """The control plane refused a request; the message says which and why."""


class HyperPodCluster:
    """One cluster through one boto3 ``sagemaker`` client."""

    def __init__(self, client: Any, cluster_name: str) -> None:
        self._client = client
        self._name = cluster_name

    def instances(self) -> tuple[InstanceState, ...]:
        """All instances that have an instance id; follows the pages."""
        with self._translated("ListClusterNodes"):
            pages = self._client.get_paginator("list_cluster_nodes").paginate(
                ClusterName=self._name, IncludeNodeLogicalIds=True
            )
            return tuple(
                instance_state(node)
                for page in pages
                for node in page["ClusterNodeSummaries"]
                if node.get("InstanceId")
            )

    def instance(self, *, instance_id: str = "", logical_id: str = "") -> InstanceState | None:
        """One instance by either id, or None where the cluster has none. Raises ValueError without an id."""
        details = self.describe_node(instance_id=instance_id, logical_id=logical_id)
        return None if details is None else instance_state(details)

    def describe_node(self, *, instance_id: str = "", logical_id: str = "") -> dict[str, Any] | None:
        """``NodeDetails`` as the API returns it, or None. Raises ValueError without an id, and with both."""
        if bool(instance_id) == bool(logical_id):
            raise ValueError("name the node by its instance id or by its logical id, not by both or neither")
        node = {"NodeId": instance_id} if instance_id else {"NodeLogicalId": logical_id}
        try:
            with self._translated("DescribeClusterNode"):
                answer = self._client.describe_cluster_node(ClusterName=self._name, **node)
        except _NotFoundError:
            return None
        details: dict[str, Any] = answer["NodeDetails"]
        return None if details.get("InstanceStatus", {}).get("Status") == "NotFound" else details

    def automatic_recovery(self) -> bool:
        """Whether ``NodeRecovery`` is Automatic, which it is where it was never set."""
        with self._translated("DescribeCluster"):
            answer = self._client.describe_cluster(ClusterName=self._name)
        return bool(answer.get("NodeRecovery", "Automatic") != "None")

    def start_health_check(self, instance_group: str, instance_ids: Sequence[str]) -> None:
        """Start stress and connectivity checks on exactly these instances.

        Raises ValueError for no ids or an id that is none: HyperPod reads a blank list as the whole instance group.
        Raises `HyperPodError` where the control plane refuses, e.g. because a check is already running.
        """
        bad = [entry for entry in instance_ids if not _INSTANCE_ID.fullmatch(entry)]
        if not instance_ids or bad or not instance_group:
            raise ValueError(f"a health check needs a group and instance ids, got {instance_group!r} {instance_ids!r}")
        configuration = {
            "InstanceGroupName": instance_group,
            "InstanceIds": list(instance_ids),
            "DeepHealthChecks": ["InstanceStress", "InstanceConnectivity"],
        }
        with self._translated("StartClusterHealthCheck"):
            self._client.start_cluster_health_check(
                ClusterName=self._name, DeepHealthCheckConfigurations=[configuration]
            )

    def replace(self, instance_id: str) -> ReplaceAnswer:
        """Ask for the instance to be exchanged, by its *instance* id.

        A logical id would name the new instance as well, and a repeated request would replace that too.
        Raises ValueError for an id that is none, `TransientError` where the same request may succeed later.
        """
        if not _INSTANCE_ID.fullmatch(instance_id):
            raise ValueError(f"{instance_id!r} is not an instance id: nothing is replaced")
        with self._translated("BatchReplaceClusterNodes"):
            answer = self._client.batch_replace_cluster_nodes(ClusterName=self._name, NodeIds=[instance_id])
        result = read_replace_answer(answer, instance_id)
        if result.code == "InternalServerError":
            raise TransientError(f"BatchReplaceClusterNodes of {instance_id}: {result.message}")
        return result

    @contextmanager
    def _translated(self, operation: str) -> Iterator[None]:
        try:
            yield
        except ClientError as error:
            code = error.response["Error"]["Code"]
            message = f"{operation} on {self._name}: {code}: {error.response['Error'].get('Message', '')}"
            if code in _TRANSIENT_CODES or error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500:
                raise TransientError(message) from error
            if code in _NOT_FOUND_CODES:
                raise _NotFoundError(message) from error
            raise HyperPodError(message) from error
        except (EndpointConnectionError, HTTPClientError) as error:
            raise TransientError(f"{operation} on {self._name}: no answer ({error})") from error


class _NotFoundError(HyperPodError):
    """The cluster or the node does not exist."""


def instance_state(node: dict[str, Any]) -> InstanceState:
    """Read a ``ClusterNodeSummary`` or ``NodeDetails``. The Kubernetes node name follows from the instance id."""
    status = node.get("InstanceStatus", {})
    instance_id = node.get("InstanceId", "")
    return InstanceState(
        instance_id=instance_id,
        logical_id=node.get("NodeLogicalId", ""),
        instance_group=node.get("InstanceGroupName", ""),
        status=status.get("Status", ""),
        message=status.get("Message", ""),
        node_name=NODE_NAME_PREFIX + instance_id if instance_id else "",
    )
