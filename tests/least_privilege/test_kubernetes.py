"""Each function's Kubernetes groups allow exactly what it asked of the API server, where it asked for it."""

from __future__ import annotations

import itertools
import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from lightkube.generic_resource import create_namespaced_resource
from lightkube.resources.batch_v1 import Job

from infra.catalogue import FUNCTIONS
from infra.paths import KUBERNETES_MANIFESTS
from lambdas.adapters.eks_access import connect
from lambdas.adapters.kubernetes import Kubernetes
from lambdas.domain.cluster_jobs import JOB_KINDS
from lambdas.domain.records import JobKey
from local_stack.access_keys import SECRET_ACCESS_KEY, access_key_of_role
from local_stack.cluster.kubernetes.auth import Caller
from local_stack.cluster.kubernetes.rbac import Access, Authorizer
from local_stack.template import StackTemplate
from tests.least_privilege.roles import Roles
from tests.least_privilege.story import Story
from tests.least_privilege.world import NAMESPACE, until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
WORKLOAD = create_namespaced_resource("kueue.x-k8s.io", "v1beta1", "Workload", "workloads")
FOLDERS = [spec.folder for spec in FUNCTIONS]
CALLING = [spec.folder for spec in FUNCTIONS if spec.groups]
Used = Mapping[str, frozenset[Access]]
"""Function -> what it asked for, whatever the names."""
Groups = Mapping[str, frozenset[str]]


@pytest.fixture(scope="session")
def used(story: Story, roles: Roles) -> Used:
    """What the functions asked of the API server, the kinds of jobs that the story has not included."""
    stop, start = (_as_function(story, roles, folder) for folder in ("stop_training", "relaunch_training"))
    for kind in sorted(JOB_KINDS.keys() - {"HyperPodPyTorchJob"}):
        _stop_and_start(story, stop, start, kind)
    # One in a queue is stopped through its Workload.
    _stop_and_start(story, stop, start, "JobSet", queue="team")
    stop.close()
    start.close()
    folders = {_role_name(story, roles, folder): folder for folder in FOLDERS}
    found: dict[str, set[Access]] = defaultdict(set)
    for row in story.stack.kubernetes_requests():
        role, _, name = row["user"].rpartition("/")
        if role:
            assert row["allowed"], row
            where = {key: row[key] for key in ("verb", "group", "resource", "namespace")}
            found[folders[name]].add(Access(**where))
    return {folder: frozenset(found[folder]) for folder in FOLDERS}


@pytest.fixture(scope="session")
def groups(template: StackTemplate, roles: Roles) -> Groups:
    """Function -> its groups, by the access entries that were deployed."""
    entries = [one["Properties"] for one in template.resources.values() if one["Type"] == "AWS::EKS::AccessEntry"]
    by_role = {entry["PrincipalArn"]["Fn::GetAtt"][0]: frozenset(entry["KubernetesGroups"]) for entry in entries}
    return {folder: by_role.get(roles.function_role(folder), frozenset()) for folder in FOLDERS}


def _role_name(story: Story, roles: Roles, folder: str) -> str:
    return str(story.stack.deployment.resources[f"truestep-story/{roles.function_role(folder)}"])


def _stop_and_start(story: Story, stop: Kubernetes, start: Kubernetes, kind: str, *, queue: str = "") -> None:
    """Suspend and resume a job of this kind as the two functions do it, each with its own key."""
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
    key = JobKey(cluster_arn="", namespace=NAMESPACE, kind=kind, name=name)
    assert stop.suspend(key)
    assert start.unsuspend(key)


def _as_function(story: Story, roles: Roles, folder: str) -> Kubernetes:
    session = boto3.Session(
        region_name=story.stack.region,
        aws_access_key_id=access_key_of_role(_role_name(story, roles, folder)),
        aws_secret_access_key=SECRET_ACCESS_KEY,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", story.stack.endpoint_url)
        return Kubernetes(connect(session, "story-eks"))


def granted(manifests: Path) -> dict[str, set[Access]]:
    """Role -> what it grants; without a namespace where it is cluster-wide."""
    found: dict[str, set[Access]] = defaultdict(set)
    for folder, namespace in (("cluster", ""), ("namespace", NAMESPACE)):
        for path in sorted((manifests / folder).glob("*.yaml")):
            for document in yaml.safe_load_all(path.read_text()):
                for rule in document.get("rules", ()):
                    parts = itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
                    found[document["metadata"]["name"]] |= {
                        Access(verb=verb, group=group, resource=resource, namespace=namespace)
                        for group, resource, verb in parts
                    }
    return found


def refused(manifests: Path, used: Used, groups: Groups, namespace: str = NAMESPACE) -> dict[str, set[str]]:
    """Function -> what it could not do any more under these manifests and groups, applied in this namespace."""
    authorizer = Authorizer(manifests, [namespace])
    found = {
        folder: {
            f"{asked.verb} {asked.resource}"
            for asked in used[folder]
            if not authorizer.allowed(Caller("function", groups[folder]), asked)
        }
        for folder in FOLDERS
    }
    return {folder: lacking for folder, lacking in found.items() if lacking}


def unused(manifests: Path, used: Used, groups: Groups) -> dict[str, set[str]]:
    """Function -> what it is granted and never asked for; a cluster-wide grant must have been used cluster-wide."""
    grants = granted(manifests)
    found = {
        folder: {
            f"{one.verb} {one.resource}"
            for group in groups[folder]
            for one in grants.get(group, ())
            if one not in used[folder]
        }
        for folder in FOLDERS
    }
    return {folder: superfluous for folder, superfluous in found.items() if superfluous}


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Manifests that a test may change."""
    return Path(shutil.copytree(KUBERNETES_MANIFESTS, tmp_path / "manifests"))


def change(path: Path, resource: str, verbs: list[str]) -> None:
    """Give the role in this file exactly these verbs on the resource."""
    role, binding = yaml.safe_load_all(path.read_text())
    role["rules"] = [rule for rule in role["rules"] if rule["resources"] != [resource]]
    role["rules"] += [{"apiGroups": [""], "resources": [resource], "verbs": verbs}] if verbs else []
    path.write_text(yaml.safe_dump_all([role, binding]))


def test_only_functions_with_groups_asked_for_anything(used: Used) -> None:
    assert [folder for folder in FOLDERS if used[folder]] == CALLING


def test_each_function_may_do_exactly_what_it_did(used: Used, groups: Groups) -> None:
    assert refused(KUBERNETES_MANIFESTS, used, groups) == {}
    assert unused(KUBERNETES_MANIFESTS, used, groups) == {}


def test_a_verb_that_is_removed_is_missed_by_everyone_who_uses_it(used: Used, groups: Groups, copied: Path) -> None:
    change(copied / "cluster" / "quarantine.yaml", "nodes", [])
    lacking = refused(copied, used, groups)
    quarantining = ("cordon_node", "confirm_suspect", "settle_health_check", "release_node")
    assert lacking == {name: {"patch nodes"} for name in quarantining}


def test_a_verb_that_nobody_uses_is_found_with_everyone_who_holds_it(used: Used, groups: Groups, copied: Path) -> None:
    change(copied / "namespace" / "directives.yaml", "configmaps", ["get", "create", "patch", "delete"])
    assert unused(copied, used, groups) == {"relaunch_training": {"delete configmaps"}}


def test_a_group_that_a_function_does_not_need_is_found(used: Used, groups: Groups) -> None:
    more = {**groups, "snapshot_evidence": groups["snapshot_evidence"] | {"truestep-quarantine"}}
    assert unused(KUBERNETES_MANIFESTS, used, more) == {"snapshot_evidence": {"patch nodes"}}


def test_a_group_that_is_taken_from_a_function_is_missed(used: Used, groups: Groups) -> None:
    fewer = {**groups, "relaunch_training": groups["relaunch_training"] - {"truestep-directives"}}
    verbs = ("get", "create", "patch")
    assert refused(KUBERNETES_MANIFESTS, used, fewer) == {"relaunch_training": {f"{verb} configmaps" for verb in verbs}}


def test_what_is_granted_in_another_namespace_helps_nobody(used: Used, groups: Groups) -> None:
    lacking = refused(KUBERNETES_MANIFESTS, used, groups, namespace="kube-system")
    assert lacking.keys() == {
        "resolve_node",
        "snapshot_evidence",
        "stop_training",
        "confirm_suspect",
        "start_health_check",
        "relaunch_training",
    }
    assert {"get configmaps", "create configmaps", "patch configmaps"} <= lacking["relaunch_training"]


def test_what_is_granted_everywhere_and_used_in_one_namespace_is_found(
    used: Used, groups: Groups, copied: Path
) -> None:
    shutil.move(copied / "namespace" / "directives.yaml", copied / "cluster" / "directives.yaml")
    assert unused(copied, used, groups)["relaunch_training"] == {
        f"{verb} configmaps" for verb in ("get", "create", "patch")
    }
