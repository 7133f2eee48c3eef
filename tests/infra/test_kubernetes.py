"""Each function may quarantine nodes, or suspend jobs where training runs, as far as it does; nothing is deleted."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from infra.catalogue import FUNCTIONS
from infra.guide import DOCUMENT as DEPLOY
from infra.lint import check_manifests
from infra.paths import KUBERNETES_MANIFESTS
from lambdas.domain.cluster_access import CLUSTER_WIDE, IN_NAMESPACES, Group

NEEDED = {"cluster": CLUSTER_WIDE, "namespace": IN_NAMESPACES}
Verb = tuple[str, str, str]


def roles(folder: str) -> dict[str, dict[str, Any]]:
    """The folder's roles by name."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((KUBERNETES_MANIFESTS / folder).glob("*.yaml"))]
    documents = [document for text in texts for document in yaml.safe_load_all(text)]
    return {one["metadata"]["name"]: one for one in documents if one["kind"] in ("Role", "ClusterRole")}


def granted(role: dict[str, Any]) -> set[Verb]:
    return {
        triple
        for rule in role["rules"]
        for triple in itertools.product(rule["apiGroups"], rule["resources"], rule["verbs"])
    }


@pytest.mark.parametrize("folder", NEEDED)
def test_each_role_grants_what_check_access_asks_of_its_group_and_no_more(folder: str) -> None:
    needed = {
        str(group): {(verb.group, verb.resource, verb.verb) for verb in verbs}
        for group, verbs in NEEDED[folder].items()
    }
    assert {name: granted(role) for name, role in roles(folder).items()} == needed


def test_only_nodes_the_list_of_their_pods_and_questions_are_cluster_wide() -> None:
    cluster_wide = set().union(*(granted(role) for role in roles("cluster").values()))
    assert {resource for _, resource, _ in cluster_wide} == {"nodes", "pods", "subjectaccessreviews"}
    assert ("", "pods", "get") not in cluster_wide
    assert not {("", "configmaps", verb) for verb in ("get", "create", "patch")} & cluster_wide


def test_nothing_can_be_deleted_but_the_recoverys_own_jobs_and_no_secret_read() -> None:
    everything = set().union(*(granted(role) for folder in NEEDED for role in roles(folder).values()))
    assert {verb for _, _, verb in everything} <= {"get", "list", "create", "patch", "delete"}
    assert {(group, resource) for group, resource, verb in everything if verb == "delete"} == {("batch", "jobs")}
    assert "secrets" not in {resource for _, resource, _ in everything}


HELD_BY: list[tuple[Group, set[str]]] = [
    (Group.QUARANTINE, {"cordon_node", "confirm_suspect", "settle_health_check", "release_node"}),
    (Group.CONFIRMATION, {"confirm_suspect"}),
    (Group.CONFIRMATION_END, {"start_health_check"}),
    (Group.JOBS, {"stop_training", "relaunch_training"}),
    (Group.DIRECTIVES, {"relaunch_training"}),
    (Group.EVIDENCE, {"snapshot_evidence"}),
    (Group.REVIEW, {"check_access"}),
]


@pytest.mark.parametrize(("group", "folders"), HELD_BY)
def test_a_group_is_held_by_the_functions_that_use_it(group: Group, folders: set[str]) -> None:
    assert {spec.folder for spec in FUNCTIONS if group in spec.groups} == folders


def test_the_guides_table_of_groups_is_what_is_deployed() -> None:
    rows = re.findall(r"^\| `(truestep-[a-z-]+)` \| (\w+) \|.*\| ([^|]+) \|$", DEPLOY.read_text(encoding="utf-8"), re.M)
    assert {name: (bound, set(holders.split(", "))) for name, bound, holders in rows} == {
        str(group): (bound, {spec.folder for spec in FUNCTIONS if group in spec.groups})
        for bound, needed in NEEDED.items()
        for group in needed
    }


def test_the_manifests_are_whole() -> None:
    assert check_manifests(KUBERNETES_MANIFESTS).problems == ""


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", NEEDED)
def test_kubectl_reads_both_folders(folder: str) -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES_MANIFESTS / folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    documents = list(yaml.safe_load_all(done.stdout))
    assert len(documents) == 2 * len(NEEDED[folder])


def changed(folder: Path, name: str, old: str, new: str) -> str:
    """What the lint says of a copy with one change."""
    copied = Path(shutil.copytree(KUBERNETES_MANIFESTS, folder / "kubernetes"))
    path = copied / name
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")
    return check_manifests(copied).problems


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        ("cluster/nodes.yaml", 'verbs: ["get"]', 'verbs: ["*"]', "wildcard"),
        ("cluster/nodes.yaml", "kind: Group\n    name: truestep-nodes", "kind: Group\n    name: all", "does not bind"),
        (
            "cluster/nodes.yaml",
            "  kind: ClusterRole\n  name: truestep-nodes",
            "  kind: Role\n  name: x",
            "another role",
        ),
        ("cluster/nodes.yaml", "kind: ClusterRoleBinding", "kind: ConfigMap", "does not belong here"),
        ("cluster/kustomization.yaml", "  - nodes.yaml\n", "", "cluster/nodes.yaml is not listed"),
        ("cluster/kustomization.yaml", "  - nodes.yaml\n", "  - nodes.yaml\n  - other.yaml\n", "listed but missing"),
        (
            "namespace/jobs.yaml",
            "  name: truestep-jobs\n  labels",
            "  namespace: x\n  name: y\n  labels",
            "a namespace",
        ),
    ],
)
def test_a_manifest_that_would_grant_something_else_is_found(
    tmp_path: Path, name: str, old: str, new: str, problem: str
) -> None:
    assert problem in changed(tmp_path, name, old, new)
