"""The deployed template and one job on it, and what people and training do there."""

from __future__ import annotations

import dataclasses
import html
import json
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeVar

from lightkube import Client
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.core_v1 import Namespace, Node, Pod
from lightkube.types import PatchType

from lambdas.domain.incident import job_of
from local_stack import LocalStack
from tests.least_privilege import training_pod
from truestep.contract import Alarm, training_source

REPOSITORY = Path(__file__).parents[2]
ALARM = REPOSITORY / "trainer_sdk/src/truestep/contract/golden/alarm-v1.valid.conclusive.json"
NAMESPACE, JOB_NAME = "research", "gpt"
JOB = create_namespaced_resource("sagemaker.amazonaws.com", "v1", "HyperPodPyTorchJob", "hyperpodpytorchjobs")
QUARANTINE = "truestep.ai/quarantine"
PATIENCE_SECONDS = 240.0
WORKSPACE_ARN = "arn:aws:aps:us-west-2:123456789012:workspace/ws-story"

Found = TypeVar("Found")


def until(look: Callable[[], Found], what: str) -> Found:
    """Wait until `look` returns something; the services have no other way than to ask."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := look()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS:.0f} s for {what}"
        time.sleep(0.1)
    return found


def settings(query_url: str) -> dict[str, Any]:
    """Context of the deployment: every optional part that works here, and a prefix for everything that can have one."""
    cluster = {
        "hyperpod_cluster_arn": "arn:aws:sagemaker:us-west-2:123456789012:cluster/story0000001",
        "hyperpod_cluster_name": "story",
        "eks_cluster_name": "story-eks",
        "training_namespaces": [NAMESPACE],
        "checkpoint_buckets": [f"{training_pod.BUCKET}/runs"],
        "amp_workspace_arn": WORKSPACE_ARN,
        "amp_query_url": query_url,
    }
    policy = {"poll_seconds": 1, "audit_interval_steps": 10, "allow_automatic_replacement": True}
    # Two nodes are suspected at once, and a confirmation tells them apart: with so many runs that no margin is left.
    policy |= {"max_quarantined_percent": 50, "confirm_runs": 20}
    return {"truestep": {"stage": "story", "clusters": [cluster], "policy": policy, "deletion_protection": False}}


class Prometheus:
    """A workspace at a local address that knows one temperature of every GPU. What it is asked, it passes on
    to the edge, whose record is the proof.
    """

    def __init__(self) -> None:
        prometheus = self
        self.edge_url = ""

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                request = urllib.request.Request(prometheus.edge_url + self.path, headers=dict(self.headers.items()))  # noqa: S310 - loopback
                try:
                    with urllib.request.urlopen(request, timeout=30):  # noqa: S310
                        pass
                except urllib.error.HTTPError:
                    # The edge has no such service; it has recorded the call, and who signed it.
                    pass
                asked = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
                metric = {"__name__": "DCGM_FI_DEV_GPU_TEMP"}
                result = [
                    {"metric": {**metric, "UUID": uuid}, "values": [[float(asked["start"][0]), "50"]]}
                    for uuid in re.findall(r'UUID="([^"]*)"', asked["query"][0])
                ]
                body = json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/workspaces/{WORKSPACE_ARN.rsplit('/', 1)[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class World:
    """One deployment."""

    def __init__(self, stack: LocalStack) -> None:
        self.stack = stack
        self.client: Client = stack.kubernetes()
        self.cluster_arn = stack.cluster_info()["clusters"][0]["hyperpod_cluster_arn"]

    # --- training ------------------------------------------------------------------------------------------------

    def start_job(self) -> list[Any]:
        """Start a job of three pods; returns its running pods."""
        self.client.create(Namespace.from_dict({"metadata": {"name": NAMESPACE}}))
        values = {
            "TRUESTEP_EVENT_BUS": self.stack.outputs["EventBusName"],
            "TRUESTEP_CLUSTER_ARN": self.cluster_arn,
            "TRUESTEP_JOB_NAME": JOB_NAME,
        }
        namespace = {"name": "POD_NAMESPACE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.namespace"}}}
        container = {
            "name": "trainer",
            "image": "unused",
            "command": ["python", "-m", training_pod.__name__],
            "env": [*({"name": name, "value": value} for name, value in values.items()), namespace],
        }
        template = {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}}
        spec = {
            "nprocPerNode": "1",
            "runPolicy": {},
            "replicaSpecs": [{"name": "worker", "replicas": 3, "template": template}],
        }
        self.client.create(JOB(metadata={"name": JOB_NAME, "namespace": NAMESPACE}, spec=spec))
        return self.running_pods()

    def running_pods(self) -> list[Any]:
        def running() -> list[Any]:
            pods = self.pods()
            return pods if len(pods) == 3 and all(pod.status.phase == "Running" for pod in pods) else []

        return until(running, "the pods to run")

    def pods(self) -> list[Any]:
        return list(self.client.list(Pod, namespace=NAMESPACE, labels={"HPJob": JOB_NAME}))

    def node(self, name: str) -> Any:
        return self.client.get(Node, name)

    def lose_our_taint(self, name: str) -> None:
        """What the agent of a health check may do when it edits a node's taints."""
        taints = [taint.to_dict() for taint in self.node(name).spec.taints if taint.key != QUARANTINE]
        self.client.patch(Node, name, {"spec": {"taints": taints}}, patch_type=PatchType.MERGE)

    def alarm(self, pods: list[Any], **changes: Any) -> dict[str, Any]:
        """The golden alarm, told of these pods; the first is the suspect."""
        nodes = self.stack.cluster_info()["clusters"][0]["nodes"]
        gpus = {node["node_name"]: node["gpu_uuids"][0] for node in nodes}
        where = {"cluster_arn": self.cluster_arn, "region": self.stack.region}
        alarm: dict[str, Any] = json.loads(ALARM.read_text()) | changes
        alarm |= {"alarm_id": uuid.uuid4().hex, "detected_at": datetime.now(UTC).isoformat()}
        alarm["run"] |= where | {
            "run_id": training_pod.RUN_ID, "namespace": NAMESPACE, "job_name": JOB_NAME, "world_size": 3,
            "restart_count": 0, "attempt_id": uuid.uuid4().hex, "checkpoint_root": training_pod.ROOT,
        }  # fmt: skip
        for row, pod in zip((alarm["suspects"][0], *alarm["witnesses"]), pods, strict=True):
            row |= where | {
                "node_name": pod.spec.nodeName,
                "pod_name": pod.metadata.name,
                "pod_uid": pod.metadata.uid,
                "namespace": NAMESPACE,
                "job_name": JOB_NAME,
                "gpu_uuid": gpus[pod.spec.nodeName],
                "restart_count": 0,
            }
        return alarm

    def send(self, detail_type: str, detail: dict[str, Any], source: str = "") -> None:
        entry = {
            "Source": source or training_source(self.cluster_arn, NAMESPACE),
            "DetailType": detail_type,
            "Detail": json.dumps(detail),
            "EventBusName": self.stack.outputs["EventBusName"],
        }
        assert self.stack.client("events").put_events(Entries=[entry])["FailedEntryCount"] == 0

    # --- people --------------------------------------------------------------------------------------------------

    def link(self, incident_id: str) -> str:
        """The newest approval link of the incident, waited for."""

        def found() -> str:
            messages = [message["Message"] for message in self.stack.sns_messages()]
            links = re.findall(r"http://\S+/incidents/\S+signature=\S+", "\n".join(messages))
            return next((link for link in reversed(links) if f"/incidents/{incident_id}?" in link), "")

        return until(found, f"the link of {incident_id}")

    @staticmethod
    def page(link: str) -> str:
        with urllib.request.urlopen(link, timeout=60) as page:  # noqa: S310 - loopback
            assert page.status == 200
            text: str = page.read().decode()
            return text

    def picture(self, link: str) -> str:
        """The first chart of the page behind the link."""
        (source, *_) = re.findall(r'<img src="([^"]*)"', self.page(link))
        return self.page(urllib.parse.urljoin(link, html.unescape(source)))

    @staticmethod
    def decide(link: str, decision: str, **fields: str) -> None:
        """Send the page's form."""
        where, _, query = link.partition("?")
        form = urllib.parse.urlencode({"decision": decision, "comment": "a test", **fields}).encode()
        with urllib.request.urlopen(f"{where}/decision?{query}", data=form, timeout=60) as answer:  # noqa: S310
            assert answer.status == 200

    def start_by_hand(self, incident_id: str) -> dict[str, Any]:
        """Start an execution of the recovery as somebody does in the console; returns it once it has ended."""
        given = {"incident_id": incident_id}
        return self._ended_execution("StateMachineArn", given, "the execution that was started by hand")

    def decide_in_console(self, incident_id: str, decision: str, **fields: Any) -> dict[str, Any]:
        """Start the state machine approve; returns its execution once that has ended, as people see it."""
        given = {"incident_id": incident_id, "decision": decision, **fields}
        return self._ended_execution("ApproveStateMachineArn", given, "the decision in the console")

    def _ended_execution(self, machine: str, given: dict[str, Any], what: str) -> dict[str, Any]:
        client = self.stack.client("stepfunctions")
        arn = client.start_execution(
            stateMachineArn=self.stack.outputs[machine], name=uuid.uuid4().hex, input=json.dumps(given)
        )["executionArn"]

        def ended() -> dict[str, Any]:
            seen: dict[str, Any] = client.describe_execution(executionArn=arn)
            return {} if seen["status"] == "RUNNING" else seen

        return until(ended, what)

    def abort(self, name: str) -> str:
        """Stop the execution of this name, as somebody does by hand; returns its ARN."""
        (execution,) = [one for one in self.stack.executions() if one["name"] == name]
        client, arn = self.stack.client("stepfunctions"), str(execution["executionArn"])
        client.stop_execution(executionArn=arn)
        until(lambda: client.describe_execution(executionArn=arn)["status"] == "ABORTED", f"{arn} to be aborted")
        return arn

    def end(self, execution: str) -> None:
        """Tell of an end as a wrong rule would."""
        name, payload = "truestep-story-notice-end", json.dumps({"detail": {"executionArn": execution}})
        self.stack.client("lambda").invoke(FunctionName=name, InvocationType="Event", Payload=payload)

    def record_choice(self, incident: dict[str, Any], state: str) -> None:
        """Leave behind what a decision leaves that died between its record and its delivery."""
        document = {**incident, "escalation": {**incident["escalation"], "resume_from": state}}
        item = self.item(f"INCIDENT#{incident['incident_id']}", "RECORD")
        item["document"] = {"S": json.dumps(document)}
        self.stack.client("dynamodb").put_item(TableName=self.stack.outputs["TableName"], Item=item)

    def invoke(self, folder: str, **event: Any) -> None:
        """Call one function as the state machine does."""
        name = f"truestep-story-{folder.replace('_', '-')}"
        answer = self.stack.client("lambda").invoke(FunctionName=name, Payload=json.dumps(event))
        assert "FunctionError" not in answer, answer["Payload"].read()

    # --- what is remembered --------------------------------------------------------------------------------------

    def item(self, pk: str, sk: str) -> dict[str, Any]:
        key = {"PK": {"S": pk}, "SK": {"S": sk}}
        found = self.stack.client("dynamodb").get_item(TableName=self.stack.outputs["TableName"], Key=key)
        item: dict[str, Any] = found.get("Item", {})
        return item

    def incident_of(self, alarm: dict[str, Any]) -> str:
        """Id of the incident that the alarm opened, waited for."""

        def found() -> str:
            received = Alarm.from_json(alarm)
            item = self.item(f"JOB#{job_of(received)}", f"ALARM#{received.alarm_id}")
            return str(item.get("incident_id", {}).get("S", ""))

        return until(found, "the incident of the alarm")

    def incident(self, incident_id: str) -> dict[str, Any]:
        document = self.item(f"INCIDENT#{incident_id}", "RECORD").get("document", {"S": "{}"})
        parsed: dict[str, Any] = json.loads(document["S"])
        return parsed

    def wait_for(self, incident_id: str, status: str) -> dict[str, Any]:
        until(lambda: self.incident(incident_id).get("status") == status, f"{incident_id} to be {status}")
        return self.incident(incident_id)

    def visited(self, incident_id: str) -> list[str]:
        """States of the incident's execution, and of its successors, in order."""
        executions = [one for one in self.stack.executions() if one["name"].startswith(incident_id)]
        events = [event for one in executions for event in self.stack.execution_history(one["executionArn"])]
        return [event["stateEnteredEventDetails"]["name"] for event in events if "stateEnteredEventDetails" in event]

    # --- operators -----------------------------------------------------------------------------------------------

    def set_policy(self, *folders: str, **fields: Any) -> None:
        """Deploy another policy to some of the functions."""
        wanted = {f"truestep-story-{folder.replace('_', '-')}" for folder in folders}
        changed = []
        for function in self.stack.deployment.functions:
            if function.name in wanted:
                policy = json.loads(function.environment["TRUESTEP_POLICY"]) | fields
                environment = {**function.environment, "TRUESTEP_POLICY": json.dumps(policy)}
                changed.append(dataclasses.replace(function, environment=environment))
        assert len(changed) == len(wanted)
        self.stack.configure_edge({"functions": [function.to_json() for function in changed]})
