"""A training job's life with real processes: start, suspend, resume, failure, completion."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from local_stack.cluster.kubernetes.resources import EVENTS, HYPERPOD_PYTORCH_JOBS, PODS
from local_stack.cluster.training_operator import assign_ranks
from tests.adapters.kubernetes_standin.running_cluster import RunningCluster
from tests.adapters.pods.training import HOLD, REPORT, Job, is_running

FAIL_ONCE = REPORT + "\nsys.exit(3 if os.environ['JOB_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1' else 0)\n"
DEAF = REPORT.replace(
    'report =', 'signal.signal(signal.SIGTERM, lambda *_: print("asked to stop", flush=True))\nreport ='
) + "\nwhile True: time.sleep(60)\n"  # fmt: skip
WITH_CHILD = REPORT.replace(
    "entry =",
    "import subprocess\nos.environ['CHILD'] = str(subprocess.Popen(['sleep', '300']).pid)\nentry =",
) + "\nwhile True: time.sleep(60)\n"  # fmt: skip


def test_every_rank_starts_once_on_a_node_of_its_own(cluster: RunningCluster) -> None:
    job = Job(cluster).create(HOLD)
    job.wait_for("Running")
    reports = job.reports(0)
    assert sorted(reports) == ["gpt-worker-0", "gpt-worker-1", "gpt-worker-2"]
    assert sorted(entry["RANK"] for entry in reports.values()) == ["0", "1", "2"]
    assert len({entry["NODE_NAME"] for entry in reports.values()}) == 3
    assert len({entry["TRUESTEP_SIMULATED_GPU_UUID"] for entry in reports.values()}) == 3
    assert {entry["WORLD_SIZE"] for entry in reports.values()} == {"3"}
    assert {(entry["MASTER_ADDR"], entry["LOCAL_RANK"]) for entry in reports.values()} == {("127.0.0.1", "0")}
    (port,) = {entry["MASTER_PORT"] for entry in reports.values()}
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(port)))
    uids = {name: pod["metadata"]["uid"] for name, pod in job.pods().items()}
    assert {name: entry["POD_UID"] for name, entry in reports.items()} == uids


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_a_pods_index_is_not_its_rank(count: int) -> None:
    names = [f"gpt-worker-{index}" for index in range(count)]
    for seed in range(50):
        ranks = assign_ranks(names, str(seed))
        assert sorted(ranks.values()) == list(range(count))
        assert [ranks[name] for name in names] != list(range(count))
    assert assign_ranks(names, "7") == assign_ranks(names, "7")


def test_suspend_really_stops_the_processes_and_resume_starts_new_ones(cluster: RunningCluster) -> None:
    job = Job(cluster).create(WITH_CHILD)
    first = job.reports(0)
    processes = [int(entry[key]) for entry in first.values() for key in ("PID", "CHILD")]
    assert all(map(is_running, processes))
    job.suspend()
    job.wait_for("Suspended")
    assert job.pods() == {}
    assert not any(map(is_running, processes))
    job.suspend(False)
    second = job.reports(1)
    job.wait_for("Running")
    assert not {entry["POD_UID"] for entry in first.values()} & {entry["POD_UID"] for entry in second.values()}
    assert job.status["startCount"] == 2
    assert job.status.get("restartCount", 0) == 0


def test_a_process_that_ignores_sigterm_is_killed_after_its_grace(cluster: RunningCluster) -> None:
    job = Job(cluster).create(DEAF, replicas=1)
    (entry,) = job.reports(0, count=1).values()
    uid = entry["POD_UID"]
    job.suspend()
    job.wait_for("Suspended")
    assert not is_running(entry["PID"])
    log = cluster.state_dir / "training-eks" / "pods" / uid / "container.log"
    assert "asked to stop" in log.read_text()


def test_a_failed_rank_restarts_the_whole_job(cluster: RunningCluster) -> None:
    job = Job(cluster).create(FAIL_ONCE, run_policy={"jobMaxRetryCount": 1})
    job.wait_for("Completed")
    reports = job.reports(1)
    assert {entry["JOB_RESTART_COUNT"] for entry in reports.values()} == {"1"}
    assert (job.status["startCount"], job.status["restartCount"]) == (2, 1)
    assert len(job.status["latestFaultyPodInstanceList"]) == 1
    expected = {"Scheduled", "Started", "PodFailed", "JobCompleted"}
    cluster.wait_until(
        lambda: expected <= {event["reason"] for event in cluster.objects(EVENTS).values()}, f"events {expected}"
    )


def test_a_job_without_retries_left_fails_and_its_other_ranks_stop(cluster: RunningCluster) -> None:
    program = REPORT + (
        "\nwhile len(list(report.glob('*.json'))) < 3: time.sleep(0.01)"
        "\nif os.environ['RANK'] == '2': sys.exit(7)\nwhile True: time.sleep(60)\n"
    )
    job = Job(cluster).create(program)
    job.wait_for("Failed")
    reports = job.reports(0)
    failed = cluster.wait_until(
        lambda: left if len(left := list(job.pods().values())) == 1 else [], "only the failed pod is left"
    )
    state = failed[0]["status"]["containerStatuses"][0]["state"]["terminated"]
    assert (state["exitCode"], state["reason"]) == (7, "Error")
    others = [entry["PID"] for entry in reports.values() if entry["RANK"] != "2"]
    assert not any(map(is_running, others))


@pytest.mark.parametrize(("policy", "left"), [("All", 0), ("None", 2), ("OnlyComplete", 0)])
def test_clean_pod_policy_decides_what_a_completed_job_leaves(cluster: RunningCluster, policy: str, left: int) -> None:
    job = Job(cluster).create(REPORT, replicas=2, run_policy={"cleanPodPolicy": policy})
    job.wait_for("Completed")
    cluster.wait_until(lambda: len(job.pods()) == left, f"{left} pods are left")


def test_deleting_a_job_deletes_its_pods(cluster: RunningCluster) -> None:
    job = Job(cluster).create(HOLD)
    processes = [entry["PID"] for entry in job.reports(0).values()]
    cluster.cluster.registry.delete(HYPERPOD_PYTORCH_JOBS, "default", "gpt")
    cluster.wait_until(lambda: not cluster.objects(PODS), "no pod is left")
    assert not any(map(is_running, processes))


def test_replacing_a_node_kills_its_pod_and_the_job_comes_back_on_the_new_one(cluster: RunningCluster) -> None:
    job = Job(cluster).create(HOLD, run_policy={"jobMaxRetryCount": 1})
    victim = job.reports(0)["gpt-worker-1"]
    instance_id = victim["NODE_NAME"].removeprefix("hyperpod-")
    sagemaker = cluster.sagemaker()
    answer = sagemaker.batch_replace_cluster_nodes(ClusterName="training", NodeIds=[instance_id])
    sagemaker.close()
    assert answer["Successful"] == [instance_id]
    second = job.reports(1)
    assert not is_running(victim["PID"])
    assert victim["NODE_NAME"] not in {entry["NODE_NAME"] for entry in second.values()}
    assert victim["TRUESTEP_SIMULATED_GPU_UUID"] not in {
        entry["TRUESTEP_SIMULATED_GPU_UUID"] for entry in second.values()
    }


def test_a_reboot_kills_the_nodes_pod_and_the_job_starts_again(cluster: RunningCluster) -> None:
    job = Job(cluster).create(HOLD, run_policy={"jobMaxRetryCount": 1})
    victim = job.reports(0)["gpt-worker-0"]
    sagemaker = cluster.sagemaker()
    instance_id = victim["NODE_NAME"].removeprefix("hyperpod-")
    sagemaker.batch_reboot_cluster_nodes(ClusterName="training", NodeIds=[instance_id])
    sagemaker.close()
    second = job.reports(1)
    assert not is_running(victim["PID"])
    assert victim["TRUESTEP_SIMULATED_GPU_UUID"] in {entry["TRUESTEP_SIMULATED_GPU_UUID"] for entry in second.values()}


def test_a_template_that_makes_no_valid_pod_fails_the_job_with_the_reason(cluster: RunningCluster) -> None:
    cluster.cluster.registry.create(
        HYPERPOD_PYTORCH_JOBS,
        "default",
        {
            "metadata": {"name": "gpt"},
            "spec": {
                "replicaSpecs": [
                    {
                        "name": "worker",
                        "template": {
                            "metadata": {"labels": {"team": "not a label value"}},
                            "spec": {"containers": [{"name": "c", "command": ["true"]}]},
                        },
                    }
                ]
            },
        },
    )
    job = Job(cluster)
    job.wait_for("Failed")
    assert "metadata.labels" in job.status["conditions"][-1]["message"]


def test_a_fault_belongs_to_the_instance_and_dies_with_it(cluster: RunningCluster) -> None:
    fault: dict[str, Any] = {"kind": "bit_flip", "bit": 12}
    nodes = cluster.control("/local/info")[1]["clusters"][0]["nodes"]
    faulty = nodes[0]["node_name"]
    assert cluster.control("/local/faults", {"node_name": faulty, "fault": fault})[0] == 200
    job = Job(cluster).create(HOLD)
    reports = job.reports(0)
    suffering = {entry["NODE_NAME"] for entry in reports.values() if "TRUESTEP_SIMULATED_FAULT" in entry}
    assert suffering == {faulty}
    job.suspend()
    job.wait_for("Suspended")
    sagemaker = cluster.sagemaker()
    sagemaker.batch_replace_cluster_nodes(ClusterName="training", NodeIds=[nodes[0]["instance_id"]])
    sagemaker.close()
    job.suspend(False)
    assert not [entry for entry in job.reports(1).values() if "TRUESTEP_SIMULATED_FAULT" in entry]
