"""What a pod's process is given: paths, variables, configuration, log."""

from __future__ import annotations

import json
import os
import select
import signal
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx2
import pytest

from local_stack.cluster.kubernetes.resources import CONFIG_MAPS, PODS
from local_stack.cluster.pod_sandbox import PodSandbox, SandboxError, rewrite
from tests.adapters.kubernetes_standin.running_cluster import (
    RunningCluster,
    configuration,
    running_cluster,
)
from tests.adapters.pods.training import HOLD, REPORT, Job, is_running

REPOSITORY = Path(__file__).resolve().parents[3]
RESUME_VOLUME = {"name": "resume", "configMap": {"name": "truestep-resume-gpt", "optional": True}}
RESUME_MOUNT = {"name": "resume", "mountPath": "/etc/truestep"}


@pytest.mark.parametrize(
    ("value", "result"),
    [
        ("/fsx", "/data"),
        ("/fsx/a/b", "/data/a/b"),
        ("file:///fsx/a", "file:///data/a"),
        ("/fsx2/a", "/fsx2/a"),
        ("/fsx/deep/a", "/other/a"),
        ("s3://bucket/fsx/a", "s3://bucket/fsx/a"),
        ("--root=/fsx/a", "--root=/fsx/a"),
    ],
)
def test_only_a_leading_mount_path_is_rewritten_and_the_longest_wins(value: str, result: str) -> None:
    assert rewrite(value, {"/fsx": Path("/data"), "/fsx/deep": Path("/other")}) == result


def test_paths_below_a_shared_volume_lead_all_pods_to_one_directory(cluster: RunningCluster) -> None:
    job = Job(cluster).create(
        REPORT,
        env=[{"name": "ROOT", "value": "file:///fsx/checkpoints"}, {"name": "NAMED", "value": "$(ROOT)/$(POD_NAME)"}],
        container={"args": ["/fsx/data", "--name=$(POD_NAME)"]},
    )
    for name, entry in job.reports(0).items():
        assert entry["ROOT"] == f"file://{job.volume}/checkpoints"
        assert entry["NAMED"] == f"file://{job.volume}/checkpoints/{name}"
        assert entry["ARGV"][1:] == [f"{job.volume}/data", f"--name={name}"]


def test_a_config_map_is_projected_when_the_pod_starts_and_may_be_missing(cluster: RunningCluster) -> None:
    job = Job(cluster).create(HOLD, volumes=[RESUME_VOLUME], mounts=[RESUME_MOUNT])
    for entry in job.reports(0).values():
        assert not Path(entry["TRUESTEP_DIRECTIVE"]).exists()
    job.suspend()
    job.wait_for("Suspended")
    directive = {"metadata": {"name": "truestep-resume-gpt"}, "data": {"resume.json": '{"max_step": 19}'}}
    cluster.cluster.registry.create(CONFIG_MAPS, "default", directive)
    job.suspend(False)
    for entry in job.reports(1).values():
        assert json.loads(Path(entry["TRUESTEP_DIRECTIVE"]).read_text()) == {"max_step": 19}


def test_a_pod_waits_for_a_config_map_that_it_needs_and_starts_when_it_comes(cluster: RunningCluster) -> None:
    needed = {"name": "needed", "configMap": {"name": "settings"}}
    job = Job(cluster).create(HOLD, replicas=1, volumes=[needed], mounts=[{"name": "needed", "mountPath": "/s"}])

    def waiting() -> Any:
        statuses = [pod["status"].get("containerStatuses") for pod in job.pods().values()]
        return [status[0]["state"].get("waiting") for status in statuses if status]

    (reason,) = cluster.wait_until(waiting, "the pod waits")
    assert reason == {"reason": "CreateContainerConfigError", "message": 'configmap "settings" not found'}
    cluster.cluster.registry.create(CONFIG_MAPS, "default", {"metadata": {"name": "settings"}, "data": {"a": "1"}})
    job.wait_for("Running")


def test_the_nodes_variables_win_over_the_pods(cluster: RunningCluster) -> None:
    given = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_ACCESS_KEY_ID": "LOCALTrainingPods"}
    assert cluster.control("/local/pod-environment", given)[0] == 200
    job = Job(cluster).create(
        HOLD,
        replicas=1,
        env=[{"name": "AWS_ACCESS_KEY_ID", "value": "mine"}, {"name": "OMP_NUM_THREADS", "value": "1"}],
    )
    (entry,) = job.reports(0, count=1).values()
    assert {name: entry[name] for name in given} == given
    assert entry["OMP_NUM_THREADS"] == "1"


def test_a_pod_does_not_inherit_the_servers_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the developer")
    with running_cluster(tmp_path) as cluster:
        job = Job(cluster).create(HOLD, replicas=1)
        (entry,) = job.reports(0, count=1).values()
        assert "AWS_SECRET_ACCESS_KEY" not in entry


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"containers": [{"name": "a", "command": ["true"]}, {"name": "b"}]}, "exactly one container"),
        ({"containers": [{"name": "a"}]}, "give a command"),
        ({"volumes": [{"name": "v", "secret": {"secretName": "s"}}]}, "volume v (secret)"),
        ({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "../../etc"}}]}, "leaves the volume"),
        ({"containers": [{"name": "a", "command": ["x"], "workingDir": "/nowhere"}]}, "mount a volume there"),
        (
            {
                "containers": [
                    {"name": "a", "command": ["x"], "env": [{"name": "E", "valueFrom": {"secretKeyRef": {}}}]}
                ]
            },
            "env E",
        ),
    ],
)
def test_a_pod_that_cannot_run_here_says_what_to_change(tmp_path: Path, change: Any, words: str) -> None:
    pod = {
        "metadata": {"name": "p", "namespace": "default", "uid": "u"},
        "spec": {"containers": [{"name": "a", "command": ["true"]}], **change},
    }
    sandbox = PodSandbox(pod, root=tmp_path / "pod", shared=tmp_path / "shared", read_config_map=lambda _: None)
    with pytest.raises(SandboxError) as refused:
        sandbox.prepare()
    assert words in str(refused.value)


def test_a_command_that_does_not_exist_fails_the_pod_and_is_in_its_log(cluster: RunningCluster) -> None:
    job = Job(cluster).create("", replicas=1, container={"command": ["no-such-program"]})
    job.wait_for("Failed")
    assert "no-such-program" in job.log("gpt-worker-0")


def test_a_log_is_read_by_its_tail_and_with_timestamps(cluster: RunningCluster) -> None:
    job = Job(cluster).create("print('one'); print('two'); print('three', end='')", replicas=1)
    job.wait_for("Completed")
    assert job.log("gpt-worker-0") == "one\ntwo\nthree\n"
    assert job.log("gpt-worker-0", tailLines="2") == "two\nthree\n"
    assert job.log("gpt-worker-0", tailLines="0") == ""
    (line,) = job.log("gpt-worker-0", tailLines="1", timestamps="true").splitlines()
    assert line.endswith("Z three")


def test_a_followed_log_shows_lines_as_they_come_and_ends_with_the_process(cluster: RunningCluster) -> None:
    program = "import pathlib, sys, time\nprint('started', flush=True)\ngo = pathlib.Path(sys.argv[1])\n"
    program += "while not go.exists(): time.sleep(0.01)\nprint('released', flush=True)\n"
    job = Job(cluster).create(program, replicas=1, container={"args": ["/fsx/go"]})
    job.wait_for("Running")
    seen: list[str] = []
    first_seen = threading.Event()

    def follow() -> None:
        path = "/api/v1/namespaces/default/pods/gpt-worker-0/log"
        with cluster.http() as client, client.stream("GET", path, params={"follow": "true"}) as answer:
            for line in answer.iter_lines():
                seen.append(line)
                first_seen.set()

    follower = threading.Thread(target=follow)
    follower.start()
    assert first_seen.wait(10)
    assert seen == ["started"]
    (job.volume / "go").touch()
    follower.join(timeout=10)
    assert (follower.is_alive(), seen) == (False, ["started", "released"])


def test_pods_of_an_earlier_server_are_reported_failed_and_their_job_restarts(tmp_path: Path) -> None:
    with running_cluster(tmp_path) as cluster:
        job = Job(cluster).create(HOLD, run_policy={"jobMaxRetryCount": 1})
        job.wait_for("Running")
        processes = [entry["PID"] for entry in job.reports(0).values()]
    assert not any(map(is_running, processes))
    with running_cluster(tmp_path) as cluster:
        job = Job(cluster)
        job.wait_for("Running")
        assert len(job.reports(1)) == 3
        assert job.status["restartCount"] == 1


@pytest.fixture
def server_process(tmp_path: Path) -> Any:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(configuration()))
    command = [sys.executable, "-m", "local_stack.cluster.server"]
    command += ["--state-dir", str(tmp_path / "state"), "--config", str(config)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_pod_outlives_the_server(server_process: Any, tmp_path: Path, number: signal.Signals) -> None:
    announced = json.loads(server_process.stdout.readline())
    with httpx2.Client(base_url=announced["url"], trust_env=False) as client:
        assert client.get("/health").json() == {"status": "ok"}
        info = client.get("/local/info").json()
    pid_file = tmp_path / "state" / "training-eks" / "volumes" / "shared" / "pid"
    program = "import os, pathlib, sys, time\nfile = pathlib.Path(sys.argv[1])\n"
    program += "file.with_suffix('.new').write_text(str(os.getpid())); file.with_suffix('.new').rename(file)\n"
    program += "print('up', flush=True)\ntime.sleep(300)"
    container = {
        "name": "c", "command": ["python", "-c", program], "args": ["/s/pid"],
        "volumeMounts": [{"name": "s", "mountPath": "/s"}],
    }  # fmt: skip
    volume = {"name": "s", "persistentVolumeClaim": {"claimName": "shared"}}
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [container], "volumes": [volume]}}
    headers = {"Authorization": f"Bearer {info['admin_token']}"}
    authority = str(tmp_path / "state" / "training-eks" / "pki" / "ca.crt")
    trust = ssl.create_default_context(cafile=authority)
    with httpx2.Client(base_url=info["kubernetes_url"], headers=headers, verify=trust, trust_env=False) as client:
        assert client.post("/api/v1/namespaces/default/pods", json=pod).status_code == 201
        query = {"watch": "true", "timeoutSeconds": "20", "fieldSelector": "status.phase=Running"}
        with client.stream("GET", "/api/v1/namespaces/default/pods", params=query) as answer:
            assert json.loads(next(answer.iter_lines()))["type"] == "ADDED"
        with client.stream("GET", "/api/v1/namespaces/default/pods/p/log", params={"follow": "true"}) as answer:
            assert next(answer.iter_lines()) == "up"
    pid = int(pid_file.read_text())
    assert is_running(pid)
    watcher = os.pidfd_open(pid)
    server_process.send_signal(number)
    server_process.wait(timeout=15)
    gone, _, _ = select.select([watcher], [], [], 10)
    os.close(watcher)
    assert gone, "the pod's process outlived the server"


def test_a_configuration_that_cannot_be_used_is_refused_with_the_settings_name(tmp_path: Path) -> None:
    document = configuration()
    document["clusters"][0]["hyperpod_cluster_arn"] = "training"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(document))
    command = [
        sys.executable,
        "-m",
        "local_stack.cluster.server",
        "--state-dir",
        str(tmp_path),
        "--config",
        str(config),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 2
    assert "hyperpod_cluster_arn" in done.stderr
    assert PODS.plural not in done.stdout
