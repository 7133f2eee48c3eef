"""Names that would leave their place in a request's path never reach the API server."""

from __future__ import annotations

from collections.abc import Callable

import httpx2
import pytest
from lightkube import Client
from lightkube.config.kubeconfig import Cluster, Context, SingleConfig, User

from lambdas.adapters.kubernetes import Kubernetes, KubernetesError
from lambdas.domain.records import JobKey

ELSEWHERE = "../../../apis/batch/v1/namespaces/team-b/jobs/x"
BAD = [ELSEWHERE, "..", "a/b", "p?x=", "p#x", "p%2f..", "p q", "n\n", ""]


def a_job(**changes: str) -> JobKey:
    names = {"cluster_arn": "arn", "namespace": "team-a", "kind": "HyperPodPyTorchJob", "name": "pretrain"}
    return JobKey(**{**names, **changes})


CALLS: list[Callable[[Kubernetes, str], object]] = [
    lambda cluster, bad: cluster.node(bad),
    lambda cluster, bad: cluster.cordon(bad, "inc-0123456789abcdef", "2026-01-01T00:00:00Z"),
    lambda cluster, bad: cluster.release(bad, "inc-0123456789abcdef"),
    lambda cluster, bad: cluster.pod("team-a", bad),
    lambda cluster, bad: cluster.pod(bad, "p"),
    lambda cluster, bad: cluster.log_tail("team-a", bad, 5),
    lambda cluster, bad: cluster.log_tail(bad, "p", 5),
    lambda cluster, bad: cluster.job(a_job(name=bad)),
    lambda cluster, bad: cluster.job(a_job(namespace=bad)),
    lambda cluster, bad: cluster.job_pods(a_job(namespace=bad)),
    lambda cluster, bad: cluster.suspend(a_job(name=bad)),
    lambda cluster, bad: cluster.read_directive(a_job(namespace=bad)),
    lambda cluster, bad: cluster.put_config_map("team-a", bad, {}),
]


def test_no_request_leaves_for_a_name_that_is_none() -> None:
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.url.raw_path.decode())
        return httpx2.Response(200, json={"metadata": {"name": "n", "resourceVersion": "7"}, "spec": {}})

    server = Cluster(server="https://api", insecure=True)
    config = SingleConfig(context_name="c", context=Context(cluster="c"), cluster=server, user=User(token="t"))
    cluster = Kubernetes(Client(config=config, transport=httpx2.MockTransport(answer)))
    cluster.node("ip-10-0-0-1.eu-central-1.compute.internal")
    assert asked == ["/api/v1/nodes/ip-10-0-0-1.eu-central-1.compute.internal"]
    for call in CALLS:
        for bad in BAD:
            with pytest.raises(KubernetesError, match="is no name"):
                call(cluster, bad)
    assert len(asked) == 1
