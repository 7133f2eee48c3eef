"""The kubelets of all nodes: run scheduled pods as processes, report their phase, stop them, serve their logs.

A container is never restarted in place: restarting is the training operator's decision, so `restartPolicy` other than
Never is not honoured.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from local_stack.cluster.controller import Controller
from local_stack.cluster.events import record_event
from local_stack.cluster.http_server import Response
from local_stack.cluster.kubernetes.errors import ApiError, bad_request
from local_stack.cluster.kubernetes.registry import Registry, now_rfc3339
from local_stack.cluster.kubernetes.resources import CONFIG_MAPS, NODES, PODS
from local_stack.cluster.kubernetes.store import Json
from local_stack.cluster.node_state import is_dark, is_ready
from local_stack.cluster.pod_log import PodLog
from local_stack.cluster.pod_sandbox import TERMINATION_LOG, PodProcess, PodSandbox, SandboxError
from local_stack.cluster.pod_worker import PodWorker
from local_stack.process import ProcessError

logger = logging.getLogger(__name__)

_INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "TMPDIR", "VIRTUAL_ENV")
_FINISHED = ("Succeeded", "Failed")
_MESSAGE_BYTES, _LOG_BYTES, _LOG_LINES = 4096, 2048, 80
InstanceEnvironment = Callable[[str], "dict[str, str] | None"]


def _base_environment(home: Path) -> dict[str, str]:
    """What a pod's process has before its own variables: a path, and the modules that this process can import.

    The checkout stands for the image, so the process finds what the server finds.
    """
    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    roots = [str(Path(entry).resolve()) for entry in sys.path if entry and not entry.startswith(sys.base_prefix)]
    environment["PYTHONPATH"] = os.pathsep.join(root for root in roots if not root.startswith(sys.prefix))
    environment["PYTHONUNBUFFERED"] = "1"
    environment["HOME"] = str(home)
    return environment


class Kubelet(Controller):
    """Runs the pods of every node that `instance_environment` knows.

    instance_environment: node name -> the variables that the instance adds to its pods (simulated GPU and fault), or
    None where no instance has that name, so that nobody runs its pods.
    """

    def __init__(self, registry: Registry, state_dir: Path, instance_environment: InstanceEnvironment) -> None:
        super().__init__(registry, "kubelet")
        self._pods_dir = state_dir / "pods"
        self._shared = state_dir / "volumes"
        self._instance_environment = instance_environment
        self._pod_environment: dict[str, str] = {}
        self._workers: dict[str, PodWorker] = {}
        self._logs: dict[str, PodLog] = {}
        self._lock = threading.Lock()
        self._ending = False

    def set_pod_environment(self, environment: Mapping[str, str]) -> None:
        """Variables for every pod that starts from now on (endpoint, region, credentials); they win over the pod's."""
        with self._lock:
            self._pod_environment = dict(environment)

    def reconcile(self) -> float | None:
        """One pass over all pods that have a node."""
        if self._ending:
            return None
        nodes = {node["metadata"]["name"]: node for node in self.registry.select(NODES)[0]}
        pods = [pod for pod in self.registry.select(PODS)[0] if pod["spec"].get("nodeName")]
        for pod in pods:
            node = nodes.get(pod["spec"]["nodeName"])
            worker = self._workers.get(pod["metadata"]["uid"])
            if node is None:
                self._collect(pod, worker)
            elif is_dark(node):
                if worker is not None:
                    worker.kill(node_lost=True)
            elif self._instance_environment(pod["spec"]["nodeName"]) is not None:
                self._attend(pod, worker, node_ready=is_ready(node))
        present = {pod["metadata"]["uid"] for pod in pods}
        for uid, worker in list(self._workers.items()):
            if uid not in present:
                worker.kill()
                if worker.ended:
                    del self._workers[uid]
        return None

    def read_log(self, pod: Json, query: dict[str, str]) -> Response:
        """The pod's log (see `PodLog.response`). Raises 400 for a container that is not there, or not started."""
        names = [container["name"] for container in pod["spec"]["containers"]]
        if query.get("container", names[0]) not in names:
            raise bad_request(f"container {query['container']} is not valid for pod {pod['metadata']['name']}")
        if query.get("previous") in ("true", "1"):
            raise bad_request(f'previous terminated container "{names[0]}" in pod not found')
        if "containerStatuses" not in (pod.get("status") or {}):
            raise bad_request(f'container "{names[0]}" in pod "{pod["metadata"]["name"]}" is waiting to start')
        return self._log(pod["metadata"]["uid"]).response(query)

    def shutdown(self, grace_seconds: float = 2.0) -> None:
        """Stop every process: SIGTERM together, SIGKILL after the grace.

        Their ends are reported by the next server: a controller of this one must not answer them any more.
        """
        self._ending = True
        workers = list(self._workers.values())
        for worker in workers:
            worker.terminate(grace_seconds)
        for worker in workers:
            worker.wait(grace_seconds + 1.0)

    def _attend(self, pod: Json, worker: PodWorker | None, *, node_ready: bool) -> None:
        phase = (pod.get("status") or {}).get("phase", "Pending")
        if worker is not None and not worker.ended:
            if not node_ready:
                worker.kill(node_lost=True)
            elif "deletionTimestamp" in pod["metadata"]:
                worker.terminate(float(pod["metadata"].get("deletionGracePeriodSeconds", 0)))
        elif "deletionTimestamp" in pod["metadata"]:
            self._remove(pod)
        elif phase in _FINISHED:
            return
        elif phase == "Running":
            # Neither running nor reported: the process ended with an earlier server.
            if worker is None:
                self._finish(pod, 137, "NodeRestarted")
            else:
                self._finish(pod, worker.exit_code, "NodeLost" if worker.node_lost else "")
        elif node_ready:
            self._start(pod)

    def _collect(self, pod: Json, worker: PodWorker | None) -> None:
        """The pod's node is gone for good: so is its process, and then the pod."""
        if worker is not None and not worker.ended:
            worker.kill(node_lost=True)
        else:
            self._remove(pod)

    def _remove(self, pod: Json) -> None:
        metadata = pod["metadata"]
        try:
            self.registry.delete(PODS, metadata["namespace"], metadata["name"], grace_seconds=0, uid=metadata["uid"])
        except ApiError as error:
            if error.code not in (404, 409):
                raise
        self._workers.pop(metadata["uid"], None)

    def _start(self, pod: Json) -> None:
        metadata = pod["metadata"]
        root = self._pods_dir / metadata["uid"]
        sandbox = PodSandbox(
            pod,
            root=root,
            shared=self._shared,
            read_config_map=lambda name: self.registry.find(CONFIG_MAPS, metadata["namespace"], name),
        )
        try:
            process = sandbox.prepare()
            environment = self._environment(pod, root, process)
            worker = PodWorker(metadata["uid"], process, environment, self._log(metadata["uid"]), self._exited)
        except (SandboxError, ProcessError, OSError) as error:
            self._report_waiting(pod, str(error))
            return
        self._workers[metadata["uid"]] = worker
        started = now_rfc3339()
        running = {"state": {"running": {"startedAt": started}}, "ready": True, "started": True}
        self._post(pod, "Running", running, started=started)
        record_event(self.registry, pod, "Started", "Started the container's process", component="kubelet")
        if worker.ended:
            self.poke()

    def _environment(self, pod: Json, root: Path, process: PodProcess) -> dict[str, str]:
        with self._lock:
            shared = dict(self._pod_environment)
        instance = self._instance_environment(pod["spec"]["nodeName"]) or {}
        return {**_base_environment(root), **process.environment, **shared, **instance}

    def _exited(self, worker: PodWorker) -> None:
        """In the worker's thread: report the end of the process, if its pod is still there."""
        if self._ending:
            return
        try:
            pod = next((pod for pod in self.registry.select(PODS)[0] if pod["metadata"]["uid"] == worker.uid), None)
            if pod is not None and not self._in_the_dark(pod):
                self._finish(pod, worker.exit_code, "NodeLost" if worker.node_lost else "")
        except ApiError as error:
            # Deleted or changed in the meantime: the next pass sees what it is now.
            logger.debug("the end of pod %s: %s", worker.uid, error)
        except Exception:
            if not self.registry.store.closed:
                logger.exception("the end of pod %s could not be reported", worker.uid)
        finally:
            self.poke()

    def _in_the_dark(self, pod: Json) -> bool:
        node = self.registry.find(NODES, "", pod["spec"]["nodeName"])
        return node is not None and is_dark(node)

    def _finish(self, pod: Json, exit_code: int, reason: str) -> None:
        phase = "Succeeded" if exit_code == 0 and not reason else "Failed"
        reason = reason or ("Completed" if exit_code == 0 else "Error")
        statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
        started = (statuses[0].get("state") or {}).get("running", {}).get("startedAt", now_rfc3339())
        terminated: dict[str, Any] = {
            "exitCode": exit_code, "reason": reason, "startedAt": started, "finishedAt": now_rfc3339(),
        }  # fmt: skip
        if message := self._last_words(pod, failed=phase == "Failed"):
            terminated["message"] = message
        self._post(pod, phase, {"state": {"terminated": terminated}, "ready": False, "started": False})

    def _last_words(self, pod: Json, *, failed: bool) -> str:
        """What the container left for its status, cut as Kubernetes cuts it: 4096 bytes, or the end of the log."""
        root = self._pods_dir / pod["metadata"]["uid"]
        words = _beginning(root / TERMINATION_LOG, _MESSAGE_BYTES)
        policy = pod["spec"]["containers"][0].get("terminationMessagePolicy", "File")
        if words or not failed or policy != "FallbackToLogsOnError":
            return words
        return self._log(pod["metadata"]["uid"]).end(lines=_LOG_LINES, size=_LOG_BYTES)

    def _report_waiting(self, pod: Json, message: str) -> None:
        waiting = {"reason": "CreateContainerConfigError", "message": message}
        statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
        if (statuses[0].get("state") or {}).get("waiting") == waiting:
            return  # said already: saying it again would wake this controller, and so on for ever
        self._post(pod, "Pending", {"state": {"waiting": waiting}, "ready": False, "started": False})
        record_event(self.registry, pod, "Failed", message, component="kubelet", warning=True)

    def _post(self, pod: Json, phase: str, container_state: dict[str, Any], *, started: str = "") -> None:
        metadata = pod["metadata"]
        container = pod["spec"]["containers"][0]
        ready = "True" if container_state["ready"] else "False"

        def posted(current: Json) -> Json:
            if current["metadata"]["uid"] != metadata["uid"]:
                return current
            status = current.setdefault("status", {})
            if status.get("phase") in _FINISHED:
                return current
            status["phase"] = phase
            status["hostIP"] = status["podIP"] = "127.0.0.1"
            if started:
                status["startTime"] = started
            status["containerStatuses"] = [
                {
                    "name": container["name"], "image": container.get("image", ""), "imageID": "",
                    "restartCount": 0, **container_state,
                }
            ]  # fmt: skip
            others = [item for item in status.get("conditions") or [] if item["type"] not in ("Ready", "Initialized")]
            status["conditions"] = [
                *others, {"type": "Initialized", "status": "True"}, {"type": "Ready", "status": ready},
            ]  # fmt: skip
            return current

        self.registry.update(PODS, metadata["namespace"], metadata["name"], posted, status=True)

    def _log(self, uid: str) -> PodLog:
        with self._lock:
            return self._logs.setdefault(uid, PodLog(self._pods_dir / uid / "container.log"))


def _beginning(path: Path, size: int) -> str:
    try:
        with path.open("rb") as file:
            return file.read(size).decode(errors="replace")
    except FileNotFoundError:
        return ""


def fault_environment(gpu_uuid: str, fault: Any) -> dict[str, str]:
    """The simulated hardware as variables: the GPU's UUID, and the fault (JSON) where the instance has one."""
    environment = {"TRUESTEP_SIMULATED_GPU_UUID": gpu_uuid}
    if fault is not None:
        environment["TRUESTEP_SIMULATED_FAULT"] = json.dumps(fault)
    return environment
