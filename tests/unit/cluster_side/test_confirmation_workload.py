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
        {"name": "TORCH_HUB_TOKEN", "value": WRITTEN},
        {"name": "TORCH_HUB_AUTH", "value": WRITTEN},
        {"name": "TRITON_REGISTRY_PAT", "value": WRITTEN},
        {"name": "TORCH_DB_PWD", "value": WRITTEN},
        {"name": "TORCH_DB_PASS", "value": WRITTEN},
        {"name": "MKL_DSN", "value": WRITTEN},
        {"name": "TORCH_API_KEY", "value": WRITTEN},
        {"name": "PYTORCH_secret", "value": WRITTEN},
        {"name": "TORCH_INDEX", "value": f"https://{WRITTEN}@packages.example/simple"},
        {"name": "PYTHONWARNINGS", "value": f"Authorization: Bearer {WRITTEN}"},
        {"name": "AWS_ENDPOINT_URL", "value": f"https://me:{WRITTEN}@s3.example"},
        {"name": "AWS_ENDPOINT_URL_S3", "value": f"http://user:pa/{WRITTEN}@minio:9000"},
        {"name": "PYTHONPATH", "value": f"/code:postgres://u:{WRITTEN}@db/x"},
        {"name": "TORCH_STORE", "value": f"https://x.blob.example/y?sv=1&sig={WRITTEN}"},
        {"name": "TORCH_OPTS", "value": f"--password={WRITTEN}"},
        {"name": "TORCH_ARGS", "value": f"-v --db-password {WRITTEN}"},
        {"name": "TORCH_JSON", "value": f'{{"user": "me", "api_key": "{WRITTEN}"}}'},
        {"name": "TORCH_FIRST", "value": f"ACCESS_TOKEN = {WRITTEN}"},
        {"name": "PYTHONHOME", "valueFrom": {"secretKeyRef": {"name": WRITTEN, "key": "k"}}},
        {"name": "TORCH_TOKEN", "valueFrom": {"configMapKeyRef": {"name": WRITTEN, "key": "k"}}},
    ],
    ids=lambda variable: variable["name"],
)
def test_a_secret_stays_behind_whatever_its_name_begins_with_and_it_is_said(variable: dict[str, Any]) -> None:
    found = workload([variable, *literal(PYTHONHASHSEED="0")])
    assert variables(found) == {"PYTHONHASHSEED": "0"}
    assert WRITTEN not in json.dumps([found.pod, found.container, found.left_out])
    assert [sentence.split(":")[0] for sentence in found.left_out] == [variable["name"]]


@pytest.mark.parametrize("value", ["/fsx/tokenizers:/code/key=1/lib", "/opt/auth:/x", "tokenizers:/code", "a=1,b=keys"])
def test_a_value_that_only_sounds_like_a_secret_is_kept(value: str) -> None:
    found = workload(literal(PYTHONPATH=value, CUBLAS_WORKSPACE_CONFIG=":4096:8", PATH="/bin"))
    assert variables(found) == {"PYTHONPATH": value, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PATH": "/bin"}
    assert found.left_out == ()


def test_an_applications_own_variable_is_none_of_pythons_whatever_its_name_begins_with() -> None:
    found = workload(literal(PYTHON_DB_LOGIN=WRITTEN, PYTHONHASHSEED="0"))
    assert (variables(found), found.left_out) == ({"PYTHONHASHSEED": "0"}, ())


def test_a_volume_of_secrets_is_not_mounted_where_the_code_lies_below_it() -> None:
    pod = copy.deepcopy(POD)
    driver = {"driver": "secrets-store.csi.k8s.io", "volumeAttributes": {"secretProviderClass": "x"}}
    code = next(volume for volume in pod["spec"]["volumes"] if volume["name"] == "code")
    for kind in set(code) - {"name"}:
        del code[kind]
    code["csi"] = driver
    found = workload_of(pod, bundle_uri=S3, checkpoint_root="")
    assert "code" not in [volume["name"] for volume in found.pod["volumes"]]
    code["csi"] = {"driver": "fsx.csi.aws.com"}
    assert code in workload_of(pod, bundle_uri=S3, checkpoint_root="").pod["volumes"]


@pytest.mark.parametrize("address", ["file://[::1/x", "file://]/x"])
def test_an_address_that_cannot_be_read_refuses_the_job_with_a_sentence(address: str) -> None:
    """The alarm's schema takes it, and the suspect has to be cordoned all the same."""
    for bundle, root in ((address, ""), (S3, address)):
        refused = workload_of(POD, bundle_uri=bundle, checkpoint_root=root)
        assert (refused.pod, refused.container) == ({}, {})
        assert "are none: " in refused.refused
        assert address in refused.refused


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
