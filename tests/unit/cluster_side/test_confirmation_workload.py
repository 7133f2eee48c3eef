"""The variables and mounts that the confirmation's Job has of the training's pod: what it computes with, no secret."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from lambdas.domain.cluster_workload import workload_of
from lambdas.domain.records import Workload
from tests.unit.cluster_side.test_confirmation_job import FSX, POD, S3

SECRET = {"secretKeyRef": {"name": "s", "key": "k"}}
SETTINGS = {"configMapKeyRef": {"name": "settings", "key": "threads"}}
WRITTEN = "d0-not-show"


def workload(
    env: list[dict[str, Any]] | None = None, *, bundle: str = S3, mount: dict[str, Any] | None = None, **container: Any
) -> Workload:
    """Of the training's pod with these variables, and this in place of the mount of /fsx."""
    pod = copy.deepcopy(POD)
    pod["metadata"] |= {"labels": {"team": "vision"}, "uid": "uid-1"}
    pod["spec"]["nodeName"] = "node-1"
    training = pod["spec"]["containers"][1]
    del training["envFrom"]
    training |= {"env": env or [], **container}
    if mount is not None:
        training["volumeMounts"][0] |= mount
    return workload_of(pod, bundle_uri=bundle, checkpoint_root="")


def variables(found: Workload) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in found.container["env"]}


def literal(**values: str) -> list[dict[str, Any]]:
    return [{"name": name, "value": value} for name, value in values.items()]


@pytest.mark.parametrize(
    "variable",
    [
        {"name": "PYTHON_KEYRING_PASSWORD", "value": WRITTEN},
        {"name": "TORCH_HUB_TOKEN", "value": WRITTEN},
        {"name": "TORCH_API_KEY", "value": WRITTEN},
        {"name": "PYTORCH_secret", "value": WRITTEN},
        {"name": "PYTHON_INDEX", "value": f"https://me:{WRITTEN}@packages.example/simple"},
        {"name": "AWS_ENDPOINT_URL", "value": f"https://me:{WRITTEN}@s3.example"},
        {"name": "PYTHONSTARTUP", "valueFrom": {"secretKeyRef": {"name": WRITTEN, "key": "k"}}},
        {"name": "TORCH_TOKEN", "valueFrom": {"configMapKeyRef": {"name": WRITTEN, "key": "k"}}},
    ],
    ids=lambda variable: variable["name"],
)
def test_a_secret_stays_behind_whatever_its_name_begins_with_and_it_is_said(variable: dict[str, Any]) -> None:
    found = workload([variable, *literal(PYTHONHASHSEED="0")])
    assert variables(found) == {"PYTHONHASHSEED": "0"}
    assert WRITTEN not in json.dumps([found.pod, found.container, found.left_out])
    assert [sentence.split(":")[0] for sentence in found.left_out] == [variable["name"]]


def test_a_secret_is_not_carried_along_by_a_variable_that_refers_to_it() -> None:
    named = literal(GIT_TOKEN=WRITTEN, PYTHONPATH="/code:/$(GIT_TOKEN)")
    held = [{"name": "LOGIN", "valueFrom": SECRET}, *literal(TORCH_HOME="/$(LOGIN)/x", AGAIN="$(LOGIN)")]
    found = workload([*named, *held, *literal(TORCH_LOGS="$(AGAIN)")])
    assert variables(found) == {}
    assert found.left_out == (
        "PYTHONPATH: it refers to GIT_TOKEN: its name says that it is a secret",
        "TORCH_HOME: it refers to LOGIN: its value is in a Secret",
        "TORCH_LOGS: it refers to AGAIN: it refers to LOGIN: its value is in a Secret",
    )
    assert WRITTEN not in json.dumps([found.pod, found.container, found.left_out])


def test_what_the_computation_reads_is_kept_with_the_values_that_the_training_had() -> None:
    fields = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
        for name, path in {
            "ME": "metadata.name",
            "TEAM": "metadata.labels['team']",
            "TORCH_NODE": "spec.nodeName",
        }.items()
    ]
    cpus = {"resource": "limits.cpu", "containerName": "training", "divisor": "1"}
    found = workload(
        [
            *fields,
            *literal(CODE="/code/$(TEAM)", PYTHONPATH="$(CODE)/lib:$(NOWHERE)", TORCH_LOGS="$$(ME) $(ME) 5$"),
            {"name": "OMP_NUM_THREADS", "valueFrom": {"resourceFieldRef": cpus}},
            {"name": "MKL_NUM_THREADS", "valueFrom": SETTINGS},
        ]
    )
    assert variables(found) == {
        "TORCH_NODE": "node-1",
        # A name that nothing defines stays as it is; what is resolved is not resolved again.
        "PYTHONPATH": "/code/vision/lib:$$(NOWHERE)",
        "TORCH_LOGS": "$$(ME) job-0 5$$",
        "OMP_NUM_THREADS": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1"}},
        "MKL_NUM_THREADS": SETTINGS,
    }
    assert found.left_out == ()
    assert "/code" in [mount["mountPath"] for mount in found.container["volumeMounts"]]


def test_a_reference_that_only_kubernetes_can_resolve_is_left_out_and_said() -> None:
    from_map = [{"name": "THREADS", "valueFrom": SETTINGS}, *literal(OMP_NUM_THREADS="$(THREADS)")]
    assert workload(from_map).left_out == ("OMP_NUM_THREADS: it refers to THREADS: its value is in a ConfigMap",)
    whole = workload(literal(PYTHONPATH="$(ROOT)/x"), envFrom=[{"configMapRef": {"name": "all"}}])
    assert whole.left_out == ("PYTHONPATH: it refers to ROOT: the pod has it from envFrom, or not at all",)


def test_whole_config_maps_are_referred_to_and_a_secret_stays_behind_which_is_said() -> None:
    found = workload(
        envFrom=[
            {"configMapRef": {"name": "tuning", "optional": True}},
            {"secretRef": {"name": "keys-of-the-team"}},
            {"configMapRef": {"name": "paths"}, "prefix": "TORCH_"},
            {"configMapRef": {"name": "api-tokens"}},
            {"configMapRef": {"name": "more"}, "prefix": "SECRET_"},
        ]
    )
    assert found.container["envFrom"] == [
        {"configMapRef": {"name": "tuning", "optional": True}},
        {"configMapRef": {"name": "paths"}, "prefix": "TORCH_"},
    ]
    assert found.left_out == (
        "all of Secret keys-of-the-team: its values are secrets",
        "all of ConfigMap api-tokens: its name says that it is a secret",
        "all of ConfigMap SECRET_more: its name says that it is a secret",
    )
    assert "envFrom" not in workload().container


def test_a_mount_of_a_directory_named_by_variables_is_that_of_the_training() -> None:
    me = [{"name": "ME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}, *literal(RUN="run-7")]
    found = workload(me, bundle=FSX, mount={"subPathExpr": "$(RUN)/$(ME)"})
    fsx = next(mount for mount in found.container["volumeMounts"] if mount["mountPath"] == "/fsx")
    assert fsx == {"name": "fsx", "mountPath": "/fsx", "subPath": "run-7/job-0", "readOnly": True}


@pytest.mark.parametrize(
    ("env", "why"),
    [
        ([{"name": "WHO", "valueFrom": SECRET}], "its value is in a Secret"),
        ([{"name": "WHO", "valueFrom": SETTINGS}], "its value is in a ConfigMap"),
        (literal(DIR_TOKEN=WRITTEN, WHO="$(DIR_TOKEN)"), "its name says that it is a secret"),
    ],
)
def test_a_mount_whose_directory_cannot_be_named_refuses_the_job_with_a_sentence(env: Any, why: str) -> None:
    refused = workload(env, bundle=FSX, mount={"subPathExpr": "$(WHO)"})
    assert (refused.pod, refused.container) == ({}, {})
    assert refused.refused.startswith(
        "the training pod's mount /fsx has subPathExpr '$(WHO)', which the Job cannot have"
    )
    assert why in refused.refused
    assert WRITTEN not in refused.refused
    # Where nothing below it is needed, it is not in the way.
    assert workload(env, mount={"subPathExpr": "$(WHO)"}).refused == ""
