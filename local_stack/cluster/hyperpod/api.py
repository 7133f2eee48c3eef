"""The SageMaker operations on HyperPod clusters as AWS JSON 1.1, held to botocore's own model of the service."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import botocore.session
from botocore.validate import ParamValidator

from local_stack.cluster.http_server import Request, Response
from local_stack.cluster.hyperpod.instances import Instance
from local_stack.cluster.hyperpod.model import HyperPodCluster, HyperPodError

CONTENT_TYPE = "application/x-amz-json-1.1"
_DEFAULT_PAGE = 100
_BATCH_LIMIT = 25

Json = dict[str, Any]


class _ServiceModel:
    """Checks requests and responses against the shapes that botocore's clients use."""

    def __init__(self) -> None:
        self._model = botocore.session.get_session().get_service_model("sagemaker")
        self._validator = ParamValidator()

    def check_request(self, operation: str, parameters: Json) -> None:
        """Raise ValidationException for unknown, missing or ill-typed members."""
        shape = self._model.operation_model(operation).input_shape
        report = self._validator.validate(parameters, shape)
        unknown = set(parameters) - set(shape.members)
        if report.has_errors() or unknown:
            why = report.generate_report() or f"unknown members {', '.join(sorted(unknown))}"
            raise HyperPodError("ValidationException", why)

    def check_response(self, operation: str, result: Json) -> None:
        """Fail where this stand-in would send what the service cannot."""
        report = self._validator.validate(result, self._model.operation_model(operation).output_shape)
        if report.has_errors():
            raise AssertionError(f"{operation} would answer what its model forbids: {report.generate_report()}")


class HyperPodApi:
    """Answers `POST /` with `X-Amz-Target: SageMaker.<Operation>` for all clusters of the server."""

    def __init__(self, clusters: Sequence[HyperPodCluster]) -> None:
        self._clusters = list(clusters)
        self._model = _ServiceModel()
        self._operations: Mapping[str, Callable[[Json], Json]] = {
            "DescribeCluster": self._describe_cluster,
            "ListClusters": self._list_clusters,
            "ListClusterNodes": self._list_cluster_nodes,
            "DescribeClusterNode": self._describe_cluster_node,
            "StartClusterHealthCheck": self._start_cluster_health_check,
            "BatchReplaceClusterNodes": lambda given: self._batch(given, lambda cluster, node: cluster.replace(node)),
            "BatchRebootClusterNodes": lambda given: self._batch(given, lambda cluster, node: cluster.reboot(node)),
        }

    def handle(self, request: Request) -> Response:
        """Answer one call; errors are AWS JSON errors."""
        operation = request.headers.get("x-amz-target", "").removeprefix("SageMaker.")
        try:
            result = self._answer(operation, request.body)
            return Response(body=json.dumps(result).encode(), content_type=CONTENT_TYPE)
        except HyperPodError as error:
            body = json.dumps({"__type": error.code, "message": error.message, "Message": error.message})
            return Response(400, body.encode(), CONTENT_TYPE, headers={"x-amzn-ErrorType": error.code})

    def _answer(self, operation: str, body: bytes) -> Json:
        answer = self._operations.get(operation)
        if answer is None:
            known = ", ".join(self._operations)
            raise HyperPodError("UnknownOperationException", f"{operation!r} is not served here; known: {known}")
        try:
            parameters = json.loads(body or b"{}")
        except ValueError as error:
            raise HyperPodError("SerializationException", f"the body is not JSON: {error}") from None
        if not isinstance(parameters, dict):
            raise HyperPodError("SerializationException", "the body must be a JSON object")
        self._model.check_request(operation, parameters)
        result = answer(parameters)
        self._model.check_response(operation, result)
        return result

    def _cluster(self, parameters: Json) -> HyperPodCluster:
        wanted = parameters["ClusterName"]
        for cluster in self._clusters:
            if wanted in (cluster.config.hyperpod_cluster_name, cluster.config.hyperpod_cluster_arn):
                return cluster
        raise HyperPodError("ResourceNotFound", f"Cluster {wanted} does not exist")

    def _describe_cluster(self, parameters: Json) -> Json:
        cluster = self._cluster(parameters)
        instances = cluster.instances()
        region, account = cluster.config.hyperpod_cluster_arn.split(":")[3:5]
        groups = [
            {
                "InstanceGroupName": group.name,
                "InstanceType": group.instance_type,
                "TargetCount": group.count,
                "CurrentCount": sum(
                    instance.instance_group == group.name and instance.status != "Pending" for instance in instances
                ),
                "Status": "InService",
                "ThreadsPerCore": 1,
            }
            for group in cluster.config.instance_groups
        ]
        eks_arn = f"arn:aws:eks:{region}:{account}:cluster/{cluster.config.eks_cluster_name}"
        return {
            "ClusterArn": cluster.config.hyperpod_cluster_arn,
            "ClusterName": cluster.config.hyperpod_cluster_name,
            "ClusterStatus": "InService",
            "CreationTime": cluster.creation_time,
            "InstanceGroups": groups,
            "Orchestrator": {"Eks": {"ClusterArn": eks_arn}},
            "NodeRecovery": cluster.config.node_recovery,
        }

    def _list_clusters(self, parameters: Json) -> Json:
        part = parameters.get("NameContains", "")
        summaries = [
            {
                "ClusterArn": cluster.config.hyperpod_cluster_arn,
                "ClusterName": cluster.config.hyperpod_cluster_name,
                "CreationTime": cluster.creation_time,
                "ClusterStatus": "InService",
            }
            for cluster in self._clusters
            if part in cluster.config.hyperpod_cluster_name
        ]
        page, following = _page(summaries, parameters)
        return {"ClusterSummaries": page, **following}

    def _list_cluster_nodes(self, parameters: Json) -> Json:
        cluster = self._cluster(parameters)
        part = parameters.get("InstanceGroupNameContains", "")
        instances = [instance for instance in cluster.instances() if part in instance.instance_group]
        if parameters.get("SortBy", "CREATION_TIME") == "CREATION_TIME":
            instances.sort(key=lambda instance: instance.launch_time)
        if parameters.get("SortOrder") == "Descending":
            instances.reverse()
        with_logical = parameters.get("IncludeNodeLogicalIds", False)
        page, following = _page([_summary(instance, with_logical=with_logical) for instance in instances], parameters)
        return {"ClusterNodeSummaries": page, **following}

    def _describe_cluster_node(self, parameters: Json) -> Json:
        cluster = self._cluster(parameters)
        instance_id, logical = parameters.get("NodeId", ""), parameters.get("NodeLogicalId", "")
        if bool(instance_id) == bool(logical):
            raise HyperPodError("ValidationException", "give either NodeId or NodeLogicalId")
        instance = cluster.find(instance_id=instance_id, node_logical_id=logical)
        if instance is None:
            raise HyperPodError("ResourceNotFound", f"Node {instance_id or logical} does not exist in the cluster")
        details = _summary(instance, with_logical=True)
        details["PrivatePrimaryIp"] = "127.0.0.1"
        return {"NodeDetails": details}

    def _start_cluster_health_check(self, parameters: Json) -> Json:
        cluster = self._cluster(parameters)
        names = {group.name for group in cluster.config.instance_groups}
        chosen: list[Instance] = []
        for configuration in parameters["DeepHealthCheckConfigurations"]:
            group = configuration["InstanceGroupName"]
            if group not in names:
                raise HyperPodError("ValidationException", f"instance group {group} does not exist in the cluster")
            members = [instance for instance in cluster.instances() if instance.instance_group == group]
            # As documented: no instance ids means every instance of the group.
            wanted = configuration.get("InstanceIds") or [instance.instance_id for instance in members]
            by_id = {instance.instance_id: instance for instance in members}
            if missing := [instance_id for instance_id in wanted if instance_id not in by_id]:
                raise HyperPodError(
                    "ValidationException", f"instances {', '.join(missing)} are not in instance group {group}"
                )
            chosen.extend(by_id[instance_id] for instance_id in wanted)
        cluster.start_health_check(chosen)
        return {"ClusterArn": cluster.config.hyperpod_cluster_arn}

    def _batch(self, parameters: Json, act: Callable[[HyperPodCluster, Instance], object]) -> Json:
        cluster = self._cluster(parameters)
        ids, logical_ids = parameters.get("NodeIds") or [], parameters.get("NodeLogicalIds") or []
        if not 1 <= len(ids) + len(logical_ids) <= _BATCH_LIMIT:
            raise HyperPodError("ValidationException", f"give between 1 and {_BATCH_LIMIT} nodes")
        result: Json = {"Successful": [], "Failed": [], "SuccessfulNodeLogicalIds": [], "FailedNodeLogicalIds": []}
        targets = [("NodeId", node_id, cluster.find(instance_id=node_id)) for node_id in ids]
        targets += [("NodeLogicalId", node_id, cluster.find(node_logical_id=node_id)) for node_id in logical_ids]
        for kind, node_id, instance in targets:
            suffix = "" if kind == "NodeId" else "NodeLogicalIds"
            if instance is None:
                why = f"{node_id} is not in the cluster"
                result[f"Failed{suffix}"].append({kind: node_id, "ErrorCode": "InstanceIdNotFound", "Message": why})
                continue
            try:
                act(cluster, instance)
                result[f"Successful{suffix}"].append(node_id)
            except HyperPodError as error:
                result[f"Failed{suffix}"].append({kind: node_id, "ErrorCode": error.code, "Message": error.message})
        # The model forbids empty lists here: what is empty is left out.
        return {key: nodes for key, nodes in result.items() if nodes}


def _summary(instance: Instance, *, with_logical: bool) -> Json:
    summary: Json = {
        "InstanceGroupName": instance.instance_group,
        "InstanceId": instance.instance_id,
        "InstanceType": instance.instance_type,
        "LaunchTime": instance.launch_time,
        "InstanceStatus": {"Status": instance.status},
    }
    if with_logical:
        summary["NodeLogicalId"] = instance.node_logical_id
    return summary


def _page(items: list[Json], parameters: Json) -> tuple[list[Json], Json]:
    token = parameters.get("NextToken", "")
    if token and not token.isdigit():
        raise HyperPodError("ValidationException", "NextToken is not one that was given out")
    start = int(token or 0)
    end = start + parameters.get("MaxResults", _DEFAULT_PAGE)
    return items[start:end], {"NextToken": str(end)} if end < len(items) else {}
