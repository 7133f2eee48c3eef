"""The deployed recovery on the local stack, with jobs whose pods only wait: a run of the workflow costs seconds.

Used by `benchmarks.recovery_faults` and by the workflow's tests. Nothing here knows how a handler works: people, pods
and the bus are played through the same interfaces that they use in production.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from lightkube import Client
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Namespace, Node

from benchmarks.recovery_jobs import JobShape, WaitingJob
from lambdas.domain.incident import job_of
from local_stack import LocalStack
from local_stack.cluster_settings import ClusterSettings
from truestep.contract import Alarm, CheckpointManifest, FileEntry, Step, TrustMark, canonical_bytes, training_source

REPOSITORY = Path(__file__).parent.parent
NAMESPACE = "research"
STAGE = "faults"
BUCKET = "truestep-faults-checkpoints"
TRUSTED_STEP, SUSPECT_STEP, ALARM_STEP, VERIFIED_STEP = 19, 39, 44, 29
"""The checkpoint to resume from, the one inside the suspect window, the alarm, and the first passing audit."""
FUNCTION_SECONDS = 10.0
"""Time limit of every function, so that a call which hangs costs no more."""
PATIENCE_SECONDS = 240.0
_GOLDEN = REPOSITORY / "trainer_sdk/src/truestep/contract/golden/alarm-v1.valid.conclusive.json"
_WORKSPACE = "/workspaces/ws-faults"

Found = TypeVar("Found")


class StuckError(AssertionError):
    """Nothing has happened for too long; the message says what was waited for."""


def until(look: Callable[[], Found], what: str, seconds: float = PATIENCE_SECONDS) -> Found:
    """Wait until `look` returns something; the services have no other way than to ask."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        if time.monotonic() > deadline:
            raise StuckError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.05)
    return found


def context(query_url: str, **policy: Any) -> dict[str, Any]:
    """Context of the deployment. policy: fields that differ from what these runs use."""
    cluster = {
        "hyperpod_cluster_arn": "arn:aws:sagemaker:us-west-2:123456789012:cluster/faults000001",
        "hyperpod_cluster_name": "faults",
        "eks_cluster_name": "faults-eks",
        "training_namespaces": [NAMESPACE],
        "checkpoint_buckets": [BUCKET],
        "amp_workspace_arn": f"arn:aws:aps:us-west-2:123456789012:workspace/{_WORKSPACE.rsplit('/', 1)[1]}",
        "amp_query_url": query_url,
    }
    used = {"poll_seconds": 1, "audit_interval_steps": 10, "allow_automatic_replacement": True, **policy}
    return {"truestep": {"stage": STAGE, "clusters": [cluster], "policy": used, "deletion_protection": False}}


class Workspace:
    """A metrics workspace without series. Every query goes through the edge first, which may let it fail."""

    def __init__(self) -> None:
        workspace = self
        self.edge_url = ""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*workspace.ask(self.path, dict(self.headers.items())))

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """A function that was killed has hung up."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}{_WORKSPACE}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def ask(self, path: str, headers: Mapping[str, str]) -> tuple[int, bytes]:
        """The edge's fault where there is one, else no series."""
        request = urllib.request.Request(self.edge_url + path, headers=dict(headers))  # noqa: S310 - loopback
        try:
            with urllib.request.urlopen(request, timeout=FUNCTION_SECONDS):  # noqa: S310
                pass
        except urllib.error.HTTPError as error:
            body = error.read()
            if b"a fault that was asked for" in body:
                return error.code, body
        except OSError:
            return 502, b""
        return 200, json.dumps({"status": "success", "data": {"resultType": "matrix", "result": []}}).encode()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()


@dataclass(frozen=True, kw_only=True)
class Alarmed:
    """A job about which an alarm has been sent."""

    job: WaitingJob
    alarm: dict[str, Any]

    @property
    def suspect(self) -> str:
        """Node that the alarm accuses."""
        return str(self.alarm["suspects"][0]["node_name"])


class RecoveryWorld:
    """One deployment."""

    def __init__(self, stack: LocalStack) -> None:
        self.stack = stack
        self.client: Client = stack.kubernetes()
        self.cluster_arn: str = stack.cluster_info()["clusters"][0]["hyperpod_cluster_arn"]
        self.client.create(Namespace.from_dict({"metadata": {"name": NAMESPACE}}))
        self.last_calls: list[dict[str, Any]] = []
        """Calls of the story that ended last: `{site, count}` each."""
        self._letters_taken = 0
        self.closed_by_people: set[str] = set()
        """Nodes that people have cordoned, for reasons of their own."""
        self.functions = {function.access_key: function.name for function in stack.deployment.functions}
        limited = [replace(function, timeout_seconds=FUNCTION_SECONDS) for function in stack.deployment.functions]
        stack.configure_edge({"functions": [function.to_json() for function in limited]})

    # --- training ------------------------------------------------------------------------------------------------

    def start_job(self, name: str, shape: JobShape | None = None) -> WaitingJob:
        """A job whose pods wait, with a trusted checkpoint and one in the suspect window."""
        job = WaitingJob(self.client, NAMESPACE, name, shape or JobShape())
        for step in (TRUSTED_STEP, SUSPECT_STEP):
            self._checkpoint(job, step)
        job.create()
        until(job.all_run, f"the pods of {name} to run")
        return job

    def raise_alarm(self, job: WaitingJob, **changes: Any) -> Alarmed:
        """Send the golden alarm, told of the job's pods; the first is the suspect."""
        alarmed = Alarmed(job=job, alarm=self.alarm(job) | changes)
        self.send("Training Corruption Alarm", alarmed.alarm)
        return alarmed

    def alarm(self, job: WaitingJob) -> dict[str, Any]:
        """The alarm's detail."""
        gpus = {node["node_name"]: node["gpu_uuids"][0] for node in self.nodes()}
        pods = job.pods()
        run = {
            "run_id": f"run-{job.name}", "attempt_id": uuid.uuid4().hex, "world_size": len(pods), "restart_count": 0,
            "cluster_arn": self.cluster_arn, "region": self.stack.region, "namespace": NAMESPACE,
            "job_name": job.name, "job_kind": job.shape.kind, "checkpoint_root": f"s3://{BUCKET}/{job.name}",
        }  # fmt: skip
        alarm: dict[str, Any] = json.loads(_GOLDEN.read_text())
        alarm |= {"alarm_id": uuid.uuid4().hex, "detected_at": datetime.now(UTC).isoformat(), "run": run}
        alarm |= {"step": ALARM_STEP, "clean_through": TRUSTED_STEP + 10, "witnesses": []}
        alarm["evidence"] = {"bundle_uri": self._broken_bundle(job)}
        alarm["suspects"] = [
            alarm["suspects"][0]
            | {
                "node_name": pods[0]["spec"]["nodeName"],
                "pod_name": pods[0]["metadata"]["name"],
                "pod_uid": pods[0]["metadata"]["uid"],
                "namespace": NAMESPACE,
                "job_name": job.name,
                "gpu_uuid": gpus[pods[0]["spec"]["nodeName"]],
                "restart_count": 0,
                "cluster_arn": self.cluster_arn,
                "region": self.stack.region,
            }
        ]
        return alarm

    def _broken_bundle(self, job: WaitingJob) -> str:
        """A bundle whose confirmation makes every call and says at once that it cannot be read: no run of a model."""
        directory = self.stack.volume_path("fsx") / "bundles" / job.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "bundle.json").write_text("{}")
        return directory.as_uri()

    def confirmations(self, incident_id: str) -> list[str]:
        """Names of the Jobs that the incident's confirmation has left behind."""
        jobs = self.client.list(Job, namespace=NAMESPACE, labels={"truestep.ai/incident": incident_id})
        return [str(job.metadata.name) for job in jobs if job.metadata]

    def verified(self, incident: Mapping[str, Any]) -> None:
        """What rank 0 says of the resumed run's first passing audit."""
        run = incident["alarm"]["run"] | {"attempt_id": uuid.uuid4().hex}
        detail = {"schema_version": 1, "run": run, "incident_id": incident["incident_id"], "step": VERIFIED_STEP}
        detail |= {"nodes": [], "checkpoint": incident["checkpoint"]["checkpoint"]}
        self.send("Training Verified", detail)

    def send(self, detail_type: str, detail: Mapping[str, Any]) -> None:
        """One event on the bus."""
        entry = {
            "Source": training_source(self.cluster_arn, NAMESPACE),
            "DetailType": detail_type,
            "Detail": json.dumps(detail),
            "EventBusName": self.stack.outputs["EventBusName"],
        }
        assert self.stack.client("events").put_events(Entries=[entry])["FailedEntryCount"] == 0

    def _checkpoint(self, job: WaitingJob, step: int) -> None:
        folder, body = f"{job.name}/step-{step:08d}", b"weights"
        file = FileEntry(path="model.pt", bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
        manifest = canonical_bytes(
            CheckpointManifest(
                run_id=f"run-{job.name}",
                attempt_id="first",
                step=Step(step),
                world_size=2,
                weights_fingerprint="v1:0",
                files=(file,),
            )
        )
        digest = hashlib.sha256(manifest).hexdigest()
        trust = canonical_bytes(TrustMark(manifest_sha256=digest, step=Step(step), clean_through=Step(step)))
        for name, content in (("model.pt", body), ("manifest.json", manifest), ("trusted.json", trust)):
            self.stack.client("s3").put_object(Bucket=BUCKET, Key=f"{folder}/{name}", Body=content)

    def forget_health_checks(self) -> None:
        """Take the labels of earlier checks off: with one, a new check's end is told from it by waiting."""
        for node in self.nodes():
            patch = {"metadata": {"labels": {"sagemaker.amazonaws.com/deep-health-check-status": None}}}
            self.client.patch(Node, node["node_name"], patch)

    def close_a_node(self) -> None:
        """A person cordons the last node, for reasons of their own."""
        name = self.nodes()[-1]["node_name"]
        self.client.patch(Node, name, {"spec": {"unschedulable": True}})
        self.closed_by_people.add(name)

    # --- people --------------------------------------------------------------------------------------------------

    def link(self, incident_id: str) -> str:
        """The newest link of the incident that people were sent; empty where none was."""
        for message in reversed(self.stack.sns_messages()):
            for link in re.findall(r"http://\S+/incidents/\S+signature=\S+", message["Message"]):
                if f"/incidents/{incident_id}?" in link:
                    return str(link)
        return ""

    def subjects(self, incident_id: str) -> list[str]:
        """Subjects of the messages about the incident."""
        return [message["Subject"] for message in self.stack.sns_messages() if incident_id in message["Subject"]]

    @staticmethod
    def post(link: str, **form: str) -> int:
        """Send the page's form; the HTTP status."""
        where, _, query = link.partition("?")
        body = urllib.parse.urlencode(form).encode()
        try:
            with urllib.request.urlopen(f"{where}/decision?{query}", data=body, timeout=60) as answer:  # noqa: S310
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    # --- what is there -------------------------------------------------------------------------------------------

    def nodes(self) -> list[dict[str, Any]]:
        """The cluster's instances."""
        nodes: list[dict[str, Any]] = self.stack.cluster_info()["clusters"][0]["nodes"]
        return nodes

    def node(self, name: str) -> Any:
        """The node's object."""
        return self.client.get(Node, name)

    def item(self, pk: str, sk: str) -> dict[str, Any]:
        """An item of the table; empty where there is none."""
        key = {"PK": {"S": pk}, "SK": {"S": sk}}
        found = self.stack.client("dynamodb").get_item(TableName=self.stack.outputs["TableName"], Key=key)
        item: dict[str, Any] = found.get("Item", {})
        return item

    def incident_id_of(self, alarm: Mapping[str, Any]) -> str:
        """Id of the incident that the alarm belongs to; empty where it has none yet."""
        received = Alarm.from_json(alarm)
        item = self.item(f"JOB#{job_of(received)}", f"ALARM#{received.alarm_id}")
        return str(item.get("incident_id", {}).get("S", ""))

    def incident(self, incident_id: str) -> dict[str, Any]:
        """The incident's record."""
        document = self.item(f"INCIDENT#{incident_id}", "RECORD").get("document", {"S": "{}"})
        parsed: dict[str, Any] = json.loads(document["S"])
        return parsed

    def execution(self, incident_id: str) -> dict[str, Any]:
        """The workflow's execution of the incident; empty before its start."""
        machine = self.stack.outputs["StateMachineArn"]
        arn = f"{machine.replace(':stateMachine:', ':execution:')}:{incident_id}"
        client = self.stack.client("stepfunctions")
        try:
            described: dict[str, Any] = client.describe_execution(executionArn=arn)
        except client.exceptions.ExecutionDoesNotExist:
            return {}
        return described

    def dead_letters(self) -> list[dict[str, Any]]:
        """Take what has come into the dead-letter queues: `{requestContext, requestPayload, ...}` each."""
        given_up = len(self.stack.given_up_events())
        if given_up == self._letters_taken:
            return []
        sqs = self.stack.client("sqs")
        found = []
        for url in sqs.list_queues().get("QueueUrls", []):
            while batch := sqs.receive_message(QueueUrl=url, MaxNumberOfMessages=10).get("Messages", []):
                for message in batch:
                    sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
                    found.append(json.loads(message["Body"]))
        self._letters_taken += len(found)
        return found

    def redrive(self, letters: list[dict[str, Any]]) -> None:
        """Give dead letters to their functions again, as an operator does once the cause is cured."""
        for letter in letters:
            name = letter["requestContext"]["functionArn"].split(":")[6]
            payload = json.dumps(letter["requestPayload"])
            self.stack.client("lambda").invoke(FunctionName=name, InvocationType="Event", Payload=payload)


@contextmanager
def recovery_world(
    directory: Path, *, nodes: int = 5, time_scale: float = 0.05, **policy: Any
) -> Iterator[RecoveryWorld]:
    """Synthesise, start, deploy; stop at the end. policy: fields that differ from what these runs use."""
    workspace = Workspace()
    directory.mkdir(parents=True, exist_ok=True)
    settings = directory / "context.json"
    settings.write_text(json.dumps(context(workspace.url, **policy)))
    command = [sys.executable, "app.py", "--context", str(settings), "--output", str(directory / "cdk.out")]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    cluster = ClusterSettings(node_count=nodes, provisioning_seconds=0.1, health_check_seconds=0.1)
    try:
        with LocalStack(directory / "state", directory / "cdk.out", cluster=cluster, time_scale=time_scale) as stack:
            workspace.edge_url = stack.endpoint_url
            world = RecoveryWorld(stack)
            world.close_a_node()
            yield world
    finally:
        workspace.close()
