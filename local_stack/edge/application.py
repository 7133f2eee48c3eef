"""The edge's router: decides for each request who answers it, and records the AWS calls."""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from local_stack.edge import cluster, http_api
from local_stack.edge.authorization import Place
from local_stack.edge.call_faults import CallFault, CallFaults, CallSite, FaultKind, aws_error
from local_stack.edge.calls import Call, CallRecord, identify
from local_stack.edge.configuration import ConfigurationError, FunctionConfiguration, HttpRoute
from local_stack.edge.forwarding import ForwardedAnswer, Upstream
from local_stack.edge.kubernetes_proxy import KubernetesProxy
from local_stack.edge.lambda_service import InvocationError, LambdaService
from local_stack.edge.notifications import Inbox

_INVOCATION = re.compile(r"/2015-03-31/functions/([^/]+)/invocations")
_EKS_CLUSTER = re.compile(r"/clusters/([^/]+)")


class Edge:
    """An ASGI application. Every client of the stack talks to it, the workflow engine and the functions included."""

    def __init__(self, *, edge_port: int, cloud_port: int, state_directory: Path, region: str, account_id: str) -> None:
        self._url = f"http://127.0.0.1:{edge_port}"
        self._region = region
        self._account_id = account_id
        self._cloud = Upstream("cloud", cloud_port)
        self._cluster: Upstream | None = None
        self._routes: list[HttpRoute] = []
        self._place = Place(region=region, account_id=account_id)
        self._inbox = Inbox(state_directory / "sns.jsonl")
        self._calls = CallRecord(state_directory / "calls.jsonl")
        self._given_up: list[str] = []
        self._faults = CallFaults()
        self._kubernetes: dict[str, KubernetesProxy] = {}
        self._functions = LambdaService(
            self._url, region, state_directory / "logs" / "functions", self._given_up.append
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        request = Request(scope, receive)
        body = await request.body()
        raw_path = scope["raw_path"].decode()
        response = await self._local(request, raw_path, body)
        if response is None:
            response = await self._answer(request, raw_path, body, receive)
        await response(scope, receive, send)

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._functions.close()
                for proxy in self._kubernetes.values():
                    proxy.close()
                self._calls.close()
                self._inbox.close()
                await send({"type": "lifespan.shutdown.complete"})
                return
            await send({"type": "lifespan.startup.complete"})

    async def _answer(self, request: Request, raw_path: str, body: bytes, receive: Receive) -> Response:
        query = request.scope["query_string"].decode()
        headers = {name.lower(): value for name, value in request.headers.items()}
        call = identify(request.method, raw_path, query, headers, body, self._place)
        if call is None and not _is_aws(headers):
            return await self._http_api(request, query, body)
        kind = None
        if call is not None:
            site = CallSite(access_key=call.access_key, service=call.service, operation=call.operation)
            kind = self._faults.strike(site)
        if call is None or kind is None:
            response = await self._aws(request, raw_path, query, call, body)
        else:
            response = await self._struck(kind, call, partial(self._aws, request, raw_path, query, call, body), receive)
        if call is not None:
            self._calls.add(call, response.status_code)
        return response

    async def _struck(
        self, kind: FaultKind, call: Call, carry_out: Callable[[], Awaitable[Response]], receive: Receive
    ) -> Response:
        """The answer to a call that a fault hits."""
        if kind is FaultKind.HANG:
            while (await receive())["type"] != "http.disconnect":
                pass
        answered = await carry_out() if kind.takes_effect else None
        if kind.kills:
            await self._functions.kill(call.access_key)
        if kind is FaultKind.CUT and answered is not None:
            # Half of what its length says; the server then breaks the connection off.
            answered.body = bytes(answered.body)[: len(answered.body) // 2]
            return answered
        error = aws_error(kind, call.service, call.content_type)
        return Response(error.body, error.status, dict(error.headers))

    async def _aws(self, request: Request, raw_path: str, query: str, call: Call | None, body: bytes) -> Response:
        service = call.service if call else ""
        invocation = _INVOCATION.fullmatch(raw_path)
        if invocation and request.method == "POST":
            return await self._invoke(request, invocation[1], body)
        if service == "sagemaker" and call:
            return _response(await cluster.hyperpod(self._cluster, call.operation, request.headers.items(), body))
        eks = _EKS_CLUSTER.fullmatch(raw_path)
        if service == "eks" and eks and request.method == "GET":
            proxies = {name: proxy.url for name, proxy in self._kubernetes.items()}
            described = cluster.describe_eks_cluster(
                self._cluster, unquote(eks[1]), self._region, self._account_id, proxies
            )
            return _response(await described)
        target = f"{raw_path}?{query}" if query else raw_path
        return _response(await self._cloud.send(request.method, target, request.headers.items(), body))

    async def _invoke(self, request: Request, function: str, body: bytes) -> Response:
        kind = request.headers.get("x-amz-invocation-type", "RequestResponse")
        try:
            if kind == "Event":
                self._functions.invoke_later(function, body)
                return Response(status_code=202)
            if kind == "DryRun":
                self._functions.find(function)
                return Response(status_code=204)
            outcome = await self._functions.invoke(function, body)
        except InvocationError as error:
            headers = {"x-amzn-errortype": error.error_type}
            content = {"Type": "User", "Message": error.message, "message": error.message}
            return JSONResponse(content, error.status, headers)
        headers = {"x-amz-executed-version": "$LATEST"}
        if outcome.failed:
            headers["x-amz-function-error"] = "Unhandled"
        return Response(outcome.payload, 200, headers, "application/json")

    async def _http_api(self, request: Request, query: str, body: bytes) -> Response:
        path = request.url.path
        for route in sorted(self._routes, key=lambda candidate: candidate.route_key == "$default"):
            parameters = route.match(request.method, path)
            if parameters is None:
                continue
            received = http_api.HttpRequest(
                method=request.method,
                path=path,
                query=query,
                headers=[(name.lower(), value) for name, value in request.headers.items()],
                body=body,
                source_ip=request.client.host if request.client else "127.0.0.1",
            )
            event = http_api.event_of(received, route, parameters, self._account_id)
            try:
                outcome = await self._functions.invoke(route.function_name, json.dumps(event).encode())
            except InvocationError:
                return _http_response(http_api.message(500, "Internal Server Error"))
            return _http_response(http_api.answer_of(outcome))
        return _http_response(http_api.message(404, "Not Found"))

    async def _local(self, request: Request, raw_path: str, body: bytes) -> Response | None:
        """Answer what only the local stack has; None for everything else."""
        match request.method, raw_path:
            case "GET", "/health":
                return JSONResponse({"status": "ok"})
            case "POST", "/local/sns":
                self._inbox.receive(body)
                return Response(status_code=200)
            case "GET", "/local/given-up-events":
                return JSONResponse(self._given_up)
            case "PUT", "/local/call-faults":
                return self._set_faults(json.loads(body))
            case "GET", "/local/call-faults":
                return JSONResponse({"struck": self._faults.struck(), "seen": self._faults.seen()})
            case "PUT", "/local/configuration":
                return await self._configure(json.loads(body))
        return None

    def _set_faults(self, faults: list[dict[str, Any]]) -> Response:
        try:
            self._faults.replace(CallFault.from_json(fault) for fault in faults)
        except (ValueError, TypeError, KeyError) as error:
            return JSONResponse({"message": f"no call fault: {error}"}, 400)
        return JSONResponse({"status": "ok"})

    async def _configure(self, configuration: dict[str, Any]) -> Response:
        """Take functions (added or replaced by name), routes (all of them) and the cluster server's port."""
        try:
            functions = [FunctionConfiguration.from_json(value) for value in configuration.get("functions", ())]
            routes = [HttpRoute(**value) for value in configuration.get("routes", ())]
        except (ConfigurationError, TypeError) as error:
            return JSONResponse({"message": str(error)}, 400)
        for function in functions:
            await self._functions.register(function)
            clusters = json.loads(function.environment.get("TRUESTEP_CLUSTERS", "{}"))
            names = {cluster.get("hyperpod_cluster_name", ""): arn for arn, cluster in clusters.items()}
            self._place = replace(self._place, hyperpod_arns={**self._place.hyperpod_arns, **names})
        if "routes" in configuration:
            self._routes = routes
        if "cluster_port" in configuration:
            self._cluster = Upstream("cluster", int(configuration["cluster_port"]))
        for name, where in configuration.get("kubernetes", {}).items():
            proxy = KubernetesProxy(where["url"], self._faults, self._functions.kill)
            await proxy.start(Path(where["pki_directory"]))
            self._kubernetes[name] = proxy
        return JSONResponse({"status": "ok"})


def _is_aws(headers: dict[str, str]) -> bool:
    """Whether an unsigned request is meant for an AWS service all the same (unsigned operations, moto's own pages)."""
    return "x-amz-target" in headers or headers.get("user-agent", "").startswith(("Boto3", "Botocore"))


def _response(answer: ForwardedAnswer) -> Response:
    response = Response(answer.body, answer.status)
    given = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    names = {name for name, _ in given}
    # HEAD answers keep the length of what they do not carry.
    response.raw_headers = [(n, v) for n, v in response.raw_headers if n not in names] + given
    return response


def _http_response(answer: http_api.HttpAnswer) -> Response:
    response = Response(answer.body, answer.status)
    response.raw_headers += [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
    return response
