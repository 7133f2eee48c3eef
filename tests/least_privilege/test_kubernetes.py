"""The shipped ClusterRole allows exactly the verbs that the functions used."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.batch_v1 import Job

from infra.paths import KUBERNETES_MANIFESTS
from lambdas.adapters.eks_access import connect
from lambdas.adapters.kubernetes import Kubernetes
from lambdas.domain.cluster_jobs import JOB_KINDS
from lambdas.domain.records import JobKey
from local_stack.access_keys import SECRET_ACCESS_KEY, access_key_of_role
from local_stack.cluster.kubernetes.auth import Caller
from local_stack.cluster.kubernetes.rbac import Access, Authorizer
from tests.least_privilege.roles import Roles
from tests.least_privilege.story import Story
from tests.least_privilege.world import NAMESPACE, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
WORKLOAD = create_namespaced_resource("kueue.x-k8s.io", "v1beta1", "Workload", "workloads")
Verb = tuple[str, str, str]
"""API group, resource, verb."""


@pytest.fixture(scope="session")
def used(story: Story, roles: Roles) -> frozenset[Verb]:
    """What the functions asked of the API server, the kinds of jobs that the story has not included."""
    for kind in sorted(JOB_KINDS.keys() - {"HyperPodPyTorchJob"}):
        _stop_and_start(story, roles, kind)
    # One in a queue is stopped through its Workload.
    _stop_and_start(story, roles, "JobSet", queue="team")
    functions = {row["user"] for row in story.stack.kubernetes_requests() if "/" in row["user"]}
    assert len(functions) > 5
    rows = [row for row in story.stack.kubernetes_requests() if row["user"] in functions]
    assert [row for row in rows if not row["allowed"]] == []
    return frozenset((row["group"], row["resource"], row["verb"]) for row in rows)


def _stop_and_start(story: Story, roles: Roles, kind: str, *, queue: str = "") -> None:
    """Suspend and resume a job of this kind, as the functions do it, with the key of one that does."""
    how = JOB_KINDS[kind]
    resource = Job if kind == "Job" else create_namespaced_resource(how.group, how.version, kind, how.plural)
    name = f"{queue or 'other'}-{how.plural}"
    spec: dict[str, Any] = {"template": {"spec": {"containers": [], "restartPolicy": "Never"}}} if kind == "Job" else {}
    body = {"apiVersion": f"{how.group}/{how.version}", "kind": kind, "spec": spec}
    labels = {"kueue.x-k8s.io/queue-name": queue} if queue else {}
    metadata = {"name": name, "namespace": NAMESPACE, "labels": labels}
    story.world.client.create(resource.from_dict({**body, "metadata": metadata}))
    if labels:
        until(lambda: list(story.world.client.list(WORKLOAD, namespace=NAMESPACE)), "the Workload of the queued job")
    role = story.stack.deployment.resources[f"truestep-story/{roles.function_role('stop_training')}"]
    session = boto3.Session(
        region_name=story.stack.region,
        aws_access_key_id=access_key_of_role(role),
        aws_secret_access_key=SECRET_ACCESS_KEY,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", story.stack.endpoint_url)
        kubernetes = Kubernetes(connect(session, "story-eks"))
    key = JobKey(cluster_arn="", namespace=NAMESPACE, kind=kind, name=name)
    assert kubernetes.suspend(key)
    assert kubernetes.unsuspend(key)
    kubernetes.close()


def granted(manifests: Path) -> frozenset[Verb]:
    return frozenset(_verbs(yaml.safe_load((manifests / "cluster-role.yaml").read_text())))


def _verbs(role: Mapping[str, Any]) -> Iterator[Verb]:
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                for verb in rule["verbs"]:
                    yield group, resource, verb


def refusals(manifests: Path, used: frozenset[Verb]) -> frozenset[Verb]:
    """What the functions' group could not do any more under these manifests."""
    caller = Caller("function", frozenset({"truestep-recovery"}))
    authorizer = Authorizer(manifests)
    return frozenset(
        (group, resource, verb)
        for group, resource, verb in used
        if not authorizer.allowed(caller, Access(verb=verb, group=group, resource=resource))
    )


def test_the_role_grants_exactly_what_was_used(used: frozenset[Verb]) -> None:
    assert refusals(KUBERNETES_MANIFESTS, used) == frozenset()
    assert granted(KUBERNETES_MANIFESTS) - used == frozenset()


def test_a_verb_that_is_removed_is_missed(used: frozenset[Verb], tmp_path: Path) -> None:
    copied = Path(shutil.copytree(KUBERNETES_MANIFESTS, tmp_path / "manifests"))
    role = copied / "cluster-role.yaml"
    document = yaml.safe_load(role.read_text())
    for rule in document["rules"]:
        if rule["resources"] == ["nodes"]:
            rule["verbs"].remove("patch")
    role.write_text(yaml.safe_dump(document))
    assert refusals(copied, used) == {("", "nodes", "patch")}


def test_a_verb_that_nobody_uses_is_found(used: frozenset[Verb], tmp_path: Path) -> None:
    copied = Path(shutil.copytree(KUBERNETES_MANIFESTS, tmp_path / "manifests"))
    role = copied / "cluster-role.yaml"
    document = yaml.safe_load(role.read_text())
    document["rules"].append({"apiGroups": [""], "resources": ["pods"], "verbs": ["delete"]})
    role.write_text(yaml.safe_dump(document))
    assert granted(copied) - used == {("", "pods", "delete")}
