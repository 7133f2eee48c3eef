"""The whole recovery on this machine: start the servers, deploy the synthesised template, and look at what happened."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3
from botocore.config import Config

from local_stack.access_keys import ADMINISTRATOR, SECRET_ACCESS_KEY, access_key_of_role
from local_stack.cluster_settings import ClusterSettings
from local_stack.deploy import Deployment, clusters_of, deploy
from local_stack.edge.call_faults import CallFault
from local_stack.process import PendingServer, Server, start_server, stop
from local_stack.template import StackTemplate, load_assembly

_REPOSITORY = Path(__file__).resolve().parent.parent
_DEFAULT_REGION = "us-east-1"
_ACCOUNT_ID = "123456789012"
_POD_ROLE = "TrainingPod"
_REQUEST_SECONDS = 30

OnEvent = Callable[[str, str], None]
"""Told what the stack does: (kind, text), kinds `process`, `resource` and `ready`."""


class LocalStackError(RuntimeError):
    """The stack was used in a way that cannot work; the message says what to do."""


class LocalStack:
    """The recovery on this machine; a context manager.

        with LocalStack(state_dir, template_dir=Path("cdk.out")) as stack:
            stack.client("events").put_events(...)

    Every process ends with the block, and with this process, however it ends.
    """

    def __init__(
        self,
        state_dir: Path,
        template_dir: Path,
        *,
        on_event: OnEvent | None = None,
        cluster: ClusterSettings | None = ClusterSettings(),  # noqa: B008 - frozen
        region: str | None = None,
        host_layer: Path = _REPOSITORY / "build" / "layer-host",
        time_scale: float = 1.0,
    ) -> None:
        """state_dir: made if missing; keeps logs, calls and volumes. template_dir: a cloud assembly.

        cluster: size and pace of the cluster stand-in; None starts none. region: default that of the first cluster in
        the functions' settings. host_layer: directory with `python/`, the functions' dependencies for this machine.
        time_scale: factor of the waits and retry intervals of executions, for tests.
        """
        self.state_dir = state_dir.absolute()
        self._template_dir = template_dir
        self._on_event: OnEvent = on_event or (lambda _kind, _text: None)
        self._cluster_settings = cluster
        self._region = region
        self._host_layer = host_layer.absolute()
        self._time_scale = time_scale
        self._servers: list[PendingServer] = []
        self._clients: dict[str, Any] = {}
        self._clients_lock = threading.Lock()
        self._session = boto3.session.Session()
        self._kubernetes_clients: list[Any] = []
        self._edge_port: int | None = None
        self._cluster: Server | None = None
        self._deployment = Deployment()

    # --- life ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start and deploy. Raises ProcessError or TemplateError, with nothing left running."""
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop everything."""
        self.close()

    def close(self) -> None:
        """Stop all processes in order; may be called twice."""
        servers, self._servers = self._servers, []
        while self._kubernetes_clients:
            self._kubernetes_clients.pop().close()
        stop((server.process for server in servers), grace_seconds=5.0)

    def _start(self) -> None:
        stacks = load_assembly(self._template_dir)
        self.state_dir.mkdir(parents=True, exist_ok=True)
        for name in ("calls.jsonl", "sns.jsonl"):
            (self.state_dir / name).unlink(missing_ok=True)
        clusters = clusters_of(_environments(stacks))
        self._region = self._region or _region_of(clusters)
        # Sockets are opened here, so that each server knows the other's address before either runs.
        with _listening_socket() as edge_socket, _listening_socket() as cloud_socket:
            self._edge_port, cloud_port = edge_socket.getsockname()[1], cloud_socket.getsockname()[1]
            cluster = self._start_cluster(clusters)
            cloud = self._start_server(
                "cloud", cloud_socket, "--edge-port", self._edge_port, "--time-scale", self._time_scale
            )
            edge = self._start_server(
                "edge",
                edge_socket,
                "--cloud-port",
                cloud_port,
                "--state-dir",
                self.state_dir,
                "--account-id",
                _ACCOUNT_ID,
            )
        cloud.wait_ready()
        edge.wait_ready()
        self._deployment = deploy(
            stacks,
            account_id=_ACCOUNT_ID,
            region=self.region,
            endpoint_url=self.endpoint_url,
            client=self.client,
            host_layer=self._host_layer,
            on_resource=lambda kind, name: self._on_event("resource", f"{kind} {name}"),
        )
        self.configure_edge(self._deployment.edge_configuration())
        if cluster is not None:
            self._connect_cluster(cluster)
        self._on_event("ready", self.endpoint_url)

    def _start_server(self, name: str, listening: socket.socket, *arguments: object) -> PendingServer:
        argv = [sys.executable, "-m", f"local_stack.{name}.server", "--fd", str(listening.fileno())]
        argv += ["--region", self.region, *map(str, arguments)]
        return self._remember(name, argv, (listening.fileno(),))

    def _start_cluster(self, clusters: Mapping[str, Mapping[str, Any]]) -> PendingServer | None:
        if self._cluster_settings is None or not clusters:
            return None
        configuration = self.state_dir / "cluster.json"
        configuration.write_text(json.dumps(self._cluster_settings.document(clusters), indent=2), encoding="utf-8")
        argv = [sys.executable, "-m", "local_stack.cluster.server"]
        argv += ["--state-dir", str(self.state_dir), "--config", str(configuration)]
        return self._remember("cluster", argv, ())

    def _remember(self, name: str, argv: list[str], pass_fds: tuple[int, ...]) -> PendingServer:
        environment = dict(os.environ)
        # A developer's profile must reach neither the servers nor, through the kubelet, the pods.
        for variable in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL"):
            environment.pop(variable, None)
        paths = [str(_REPOSITORY), str(_REPOSITORY / "trainer_sdk" / "src"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        log_path = self.state_dir / "logs" / f"{name}.log"
        server = start_server(name, argv, log_path=log_path, env=environment, pass_fds=pass_fds)
        self._servers.append(server)
        self._on_event("process", f"{name} started, log in {log_path}")
        return server

    def _connect_cluster(self, pending: PendingServer) -> None:
        self._cluster = pending.wait_ready()
        kubernetes = {
            cluster["eks_cluster_name"]: {
                "url": cluster["kubernetes_url"],
                "pki_directory": str(self.state_dir / cluster["eks_cluster_name"] / "pki"),
            }
            for cluster in self.cluster_info()["clusters"]
        }
        self.configure_edge({"cluster_port": self._cluster_port, "kubernetes": kubernetes})
        self._cluster_request("POST", "/local/principals", self._deployment.principals_document())
        pod_environment = {
            "AWS_ENDPOINT_URL": self.endpoint_url,
            "AWS_REGION": self.region,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ACCESS_KEY_ID": access_key_of_role(_POD_ROLE),
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        self._cluster_request("POST", "/local/pod-environment", pod_environment)

    # --- the cloud -----------------------------------------------------------------------------------------------

    @property
    def endpoint_url(self) -> str:
        """Address of the edge: `AWS_ENDPOINT_URL` of every client, and base URL of the HTTP API."""
        if self._edge_port is None:
            raise LocalStackError("the local stack is not running: use it as a context manager")
        return f"http://127.0.0.1:{self._edge_port}"

    @property
    def region(self) -> str:
        """AWS region of everything deployed."""
        return self._region or _DEFAULT_REGION

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The templates' outputs, resolved."""
        return self._deployment.outputs

    @property
    def deployment(self) -> Deployment:
        """Everything that was created."""
        return self._deployment

    def client(self, service: str) -> Any:
        """Return the boto3 client of a service, with an administrator's key; one per service, usable by any thread."""
        with self._clients_lock:
            if service not in self._clients:
                self._clients[service] = self._session.client(
                    service,
                    region_name=self.region,
                    endpoint_url=self.endpoint_url,
                    aws_access_key_id=ADMINISTRATOR,
                    aws_secret_access_key=SECRET_ACCESS_KEY,
                    config=Config(max_pool_connections=32),
                )
            return self._clients[service]

    def configure_edge(self, configuration: Mapping[str, Any]) -> None:
        """Add or replace functions and routes at the edge (`FunctionConfiguration.to_json`, `HttpRoute`'s members)."""
        _request("PUT", f"{self.endpoint_url}/local/configuration", configuration)

    def set_call_faults(self, faults: Iterable[CallFault]) -> None:
        """Let calls of the functions fail from now on, instead of those set before; counts every call anew."""
        _request("PUT", f"{self.endpoint_url}/local/call-faults", [fault.to_json() for fault in faults])

    def call_faults(self) -> dict[str, Any]:
        """{struck: hits of each fault that is set, seen: [{site, count}] of every call since they were set}."""
        found: dict[str, Any] = _request("GET", f"{self.endpoint_url}/local/call-faults", None)
        return found

    def sns_messages(self) -> list[dict[str, Any]]:
        """What subscribers received, oldest first: SNS's HTTP deliveries, with `Subject` and `Message`."""
        return _json_lines(self.state_dir / "sns.jsonl")

    def calls(self) -> list[dict[str, Any]]:
        """AWS calls that the edge saw, oldest first: {time, access_key, service, operation, resource, status,
        authorization}; the last is what each asks IAM for, [{action, resource, context}]."""
        return _json_lines(self.state_dir / "calls.jsonl")

    def kubernetes_requests(self) -> list[dict[str, Any]]:
        """Requests to the Kubernetes APIs, oldest first a cluster: {time, user, groups, verb, group, resource,
        namespace, name, allowed}; discovery is not among them."""
        found = sorted(self.state_dir.glob("*/kubernetes-requests.jsonl"))
        return [entry for path in found for entry in _json_lines(path)]

    def given_up_events(self) -> list[str]:
        """Asynchronous events that their function could not handle in all attempts, one sentence each."""
        given_up: list[str] = _request("GET", f"{self.endpoint_url}/local/given-up-events", None)
        return given_up

    def executions(self) -> list[dict[str, Any]]:
        """All executions of all state machines, as ListExecutions describes them, oldest first."""
        client = self.client("stepfunctions")
        found: list[dict[str, Any]] = []
        for machine in client.list_state_machines()["stateMachines"]:
            pages = client.get_paginator("list_executions").paginate(stateMachineArn=machine["stateMachineArn"])
            found += [execution for page in pages for execution in page["executions"]]
        return sorted(found, key=lambda execution: execution["startDate"])

    def execution_history(self, execution_arn: str) -> list[dict[str, Any]]:
        """All events of an execution, in order."""
        pages = self.client("stepfunctions").get_paginator("get_execution_history").paginate(executionArn=execution_arn)
        return [event for page in pages for event in page["events"]]

    # --- the cluster ---------------------------------------------------------------------------------------------

    @property
    def _cluster_port(self) -> int:
        if self._cluster is None:
            raise LocalStackError(
                "this local stack has no cluster: it was started with cluster=None, or no function's settings name one"
            )
        return int(self._cluster.announcement["port"])

    def cluster_info(self) -> dict[str, Any]:
        """The clusters as they are now: `kubernetes_url`, `ca_pem`, `admin_token`, `clusters` with their nodes."""
        info: dict[str, Any] = self._cluster_request("GET", "/local/info")
        return info

    def kubernetes(self) -> Any:
        """Return a lightkube client with administrator's rights; closed with the stack."""
        from lightkube import Client, KubeConfig

        info = self.cluster_info()
        certificate = self.state_dir / "kubernetes-ca.pem"
        certificate.write_text(info["ca_pem"], encoding="utf-8")
        client = Client(
            KubeConfig.from_dict(
                {
                    "clusters": [
                        {
                            "name": "local",
                            "cluster": {"server": info["kubernetes_url"], "certificate-authority": str(certificate)},
                        }
                    ],
                    "users": [{"name": "administrator", "user": {"token": info["admin_token"]}}],
                    "contexts": [{"name": "local", "context": {"cluster": "local", "user": "administrator"}}],
                    "current-context": "local",
                }
            )
        )
        self._kubernetes_clients.append(client)
        return client

    def set_fault(self, node_name: str, fault: Mapping[str, Any] | None) -> None:
        """Let a node's GPU compute wrong, as `truestep.inject.Fault` describes; it ends with the node's instance, or
        with None, for pods that start later."""
        self._cluster_request("POST", "/local/faults", {"node_name": node_name, "fault": fault})

    def set_health_check_outcome(self, node_name: str, outcome: str) -> None:
        """What the node's next health check finds: `passed`, `failed` or `skipped`."""
        self._cluster_request("POST", "/local/health-check-outcomes", {"node_name": node_name, "outcome": outcome})

    def volume_path(self, claim_name: str) -> Path:
        """Directory behind a persistent volume claim of the first cluster."""
        return Path(self.cluster_info()["clusters"][0]["volumes_dir"]) / claim_name

    def _cluster_request(self, method: str, path: str, document: Any = None) -> Any:
        return _request(method, f"http://127.0.0.1:{self._cluster_port}{path}", document)


def _listening_socket() -> socket.socket:
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    listening.set_inheritable(True)
    return listening


def _environments(stacks: list[StackTemplate]) -> list[Mapping[str, str]]:
    """Environments of all functions, unresolved; the clusters' settings are literal text."""
    return [
        {name: value for name, value in variables.items() if isinstance(value, str)}
        for stack in stacks
        for resource in stack.resources.values()
        if resource["Type"] == "AWS::Lambda::Function"
        and (variables := resource["Properties"].get("Environment", {}).get("Variables"))
    ]


def _region_of(clusters: Mapping[str, Any]) -> str:
    regions = [found[1] for arn in clusters if (found := re.match(r"arn:aws[^:]*:sagemaker:([^:]+):", arn))]
    return regions[0] if regions else _DEFAULT_REGION


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Read complete lines; the writer may be in the middle of the next one."""
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _request(method: str, url: str, document: Any) -> Any:
    """Exchange JSON with a server of the stack. Raises LocalStackError with the server's words."""
    body = None if document is None else json.dumps(document).encode()
    request = urllib.request.Request(  # noqa: S310 - loopback
        url, data=body, method=method, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as answer:  # noqa: S310 - loopback
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        raise LocalStackError(f"{method} {url}: {error.code} {error.read().decode(errors='replace')}") from error
