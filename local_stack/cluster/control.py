"""The loopback control listener: health, information, faults, principals, pods' environment, and HyperPod's calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from local_stack.cluster.cluster import LocalCluster
from local_stack.cluster.http_server import Request, Response, json_response
from local_stack.cluster.hyperpod.api import HyperPodApi
from local_stack.cluster.hyperpod.instances import HEALTH_CHECK_OUTCOMES, Instance
from local_stack.cluster.hyperpod.model import HyperPodCluster
from local_stack.cluster.kubernetes.auth import parse_principals


class ControlApi:
    """Answers what only exists locally, and forwards `POST /` to the HyperPod operations."""

    def __init__(self, clusters: list[LocalCluster], hyperpod: HyperPodApi) -> None:
        self._clusters = clusters
        self._hyperpod = hyperpod
        self._routes: Mapping[tuple[str, str], Callable[[Any], Any]] = {
            ("GET", "/health"): lambda _: {"status": "ok"},
            ("GET", "/local/info"): lambda _: self._info(),
            ("POST", "/local/faults"): self._set_fault,
            ("POST", "/local/health-check-outcomes"): self._set_health_check_outcome,
            ("POST", "/local/power-losses"): self._lose_power,
            ("POST", "/local/principals"): self._set_principals,
            ("POST", "/local/pod-environment"): self._set_pod_environment,
        }

    def handle(self, request: Request) -> Response:
        """Answer one request; a body that cannot be used is a 400 that says why."""
        if (request.method, request.path) == ("POST", "/"):
            return self._hyperpod.handle(request)
        answer = self._routes.get((request.method, request.path))
        if answer is None:
            known = ", ".join(f"{method} {path}" for method, path in self._routes)
            return json_response({"message": f"{request.method} {request.path} is not served; known: {known}"}, 404)
        try:
            return json_response(answer(json.loads(request.body or b"{}")))
        except ValueError as error:
            return json_response({"message": str(error)}, 400)

    def _info(self) -> dict[str, Any]:
        clusters = [cluster.describe() for cluster in self._clusters]
        first = clusters[0]
        return {
            "kubernetes_url": first["kubernetes_url"],
            "ca_pem": first["ca_pem"],
            "admin_token": first["admin_token"],
            "clusters": clusters,
        }

    def _instance(self, body: Any) -> tuple[HyperPodCluster, Instance]:
        if not isinstance(body, dict):
            raise ValueError("the body must be a JSON object")  # noqa: TRY004 - answered as a 400
        keys = {key: body[key] for key in ("instance_id", "node_name", "node_logical_id") if body.get(key)}
        if len(keys) != 1:
            raise ValueError("name the instance by one of instance_id, node_name, node_logical_id")
        for cluster in self._clusters:
            instance = cluster.hyperpod.find(**keys)
            if instance is not None:
                return cluster.hyperpod, instance
        raise ValueError(f"no instance has {keys}; GET /local/info lists them")

    def _set_fault(self, body: Any) -> dict[str, Any]:
        hyperpod, instance = self._instance(body)
        if "fault" not in body:
            raise ValueError("give the fault: a JSON object, or null to heal the instance")
        hyperpod.set_fault(instance.instance_id, body["fault"])
        return {"instance_id": instance.instance_id, "node_name": instance.node_name, "fault": body["fault"]}

    def _set_health_check_outcome(self, body: Any) -> dict[str, Any]:
        hyperpod, instance = self._instance(body)
        outcome = body.get("outcome")
        if outcome not in HEALTH_CHECK_OUTCOMES:
            raise ValueError(f"outcome must be one of {', '.join(HEALTH_CHECK_OUTCOMES)}")
        hyperpod.set_health_check_outcome(instance.instance_id, outcome)
        return {"instance_id": instance.instance_id, "outcome": outcome}

    def _lose_power(self, body: Any) -> dict[str, Any]:
        hyperpod, instance = self._instance(body)
        hyperpod.lose_power(instance)
        return {"instance_id": instance.instance_id, "node_name": instance.node_name}

    def _set_principals(self, body: Any) -> dict[str, Any]:
        principals = parse_principals(body)
        for cluster in self._clusters:
            cluster.authenticator.register(principals)
        return {"registered": sorted(principal.access_key for principal in principals)}

    def _set_pod_environment(self, body: Any) -> dict[str, Any]:
        if not isinstance(body, dict) or not all(isinstance(value, str) for value in body.values()):
            raise ValueError("the body must be a JSON object of strings: variable name -> value")
        for cluster in self._clusters:
            cluster.kubelet.set_pod_environment(body)
        return {"variables": sorted(body)}
