"""Calls that the cluster server answers: the HyperPod control plane (`SageMaker.*`) and EKS DescribeCluster."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Mapping
from typing import Any

from local_stack.edge.forwarding import ForwardedAnswer, Upstream
from local_stack.edge.service_models import ModelViolationError, check, service_model

_AWS_JSON = "application/x-amz-json-1.1"


def _error(status: int, error_type: str, message: str, content_type: str = _AWS_JSON) -> ForwardedAnswer:
    return ForwardedAnswer(
        status=status,
        headers=[("content-type", content_type), ("x-amzn-errortype", error_type)],
        body=json.dumps({"__type": error_type, "message": message, "Message": message}).encode(),
    )


async def hyperpod(
    upstream: Upstream | None, operation: str, headers: Iterable[tuple[str, str]], body: bytes
) -> ForwardedAnswer:
    """Forward one HyperPod call; request and answer are checked against botocore's model of SageMaker.

    A request that the model refuses is a ValidationException, an answer that it refuses the stand-in's failure (500).
    """
    if upstream is None:
        return _error(500, "InternalFailure", "this local stack was started without a cluster server")
    model = service_model("sagemaker")
    if operation not in model.operation_names:
        return _error(400, "UnknownOperationException", f"SageMaker has no operation {operation}")
    shapes = model.operation_model(operation)
    try:
        check(shapes.input_shape, json.loads(body or b"{}"))
    except ModelViolationError as error:
        return _error(400, "ValidationException", str(error))
    except ValueError as error:
        return _error(400, "SerializationException", f"the request is no JSON: {error}")
    answer = await upstream.send("POST", "/", headers, body)
    if answer.status == 200:
        try:
            check(shapes.output_shape, json.loads(answer.body or b"{}"))
        except ValueError as error:
            return _error(
                500, "InternalFailure", f"the HyperPod stand-in's answer to {operation} is no {operation}: {error}"
            )
    return answer


async def describe_eks_cluster(
    upstream: Upstream | None, name: str, region: str, account_id: str, proxies: Mapping[str, str]
) -> ForwardedAnswer:
    """Answer EKS DescribeCluster with the endpoint and the certificate authority of the Kubernetes stand-in.

    proxies: EKS cluster name -> where functions reach it instead.
    """
    if upstream is None:
        return _error(
            500, "ServerException", "this local stack was started without a cluster server", "application/json"
        )
    info_answer = await upstream.send("GET", "/local/info", [("Host", "127.0.0.1")], b"")
    if info_answer.status != 200:
        return info_answer
    info: dict[str, Any] = json.loads(info_answer.body)
    found = next((cluster for cluster in info["clusters"] if cluster["eks_cluster_name"] == name), None)
    if found is None:
        return _error(404, "ResourceNotFoundException", f"No cluster found for name: {name}.", "application/json")
    described = {
        "cluster": {
            "name": name,
            "arn": f"arn:aws:eks:{region}:{account_id}:cluster/{name}",
            "version": "1.33",
            "endpoint": proxies.get(name, found["kubernetes_url"]),
            "certificateAuthority": {"data": base64.b64encode(found["ca_pem"].encode()).decode()},
            "status": "ACTIVE",
            "accessConfig": {"authenticationMode": "API"},
        }
    }
    check(service_model("eks").operation_model("DescribeCluster").output_shape, described)
    return ForwardedAnswer(
        status=200, headers=[("content-type", "application/json")], body=json.dumps(described).encode()
    )
