"""What of a training's pod the confirmation's Job is made of: what it computes with, and none of its secrets. Pure.

Image and pull secrets, service account (the bundle's bucket is open to it), users and groups (shared files are),
runtime class, tolerations, CPU and memory; the volumes that hold the bundle, the checkpoints, the working directory or
PYTHONPATH, read-only; the variables that kernels, imports and AWS clients read; and references to the ConfigMaps whose
every key is a variable (`envFrom`), for the Job runs in their namespace. A variable is a secret where its name says so,
where a Secret has its value, where its value holds a login or gives something a secret's name, or where it refers to
one that is. Only where the bundle
lies in S3 and the training gets its AWS keys as variables from a Secret are the references to these keys kept, because
nothing else opens the bucket. Never host network or privileges.

References to other variables are resolved here, by the training's pod: the Job's has neither its name nor those.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from lambdas.domain.records import Workload
from truestep.contract import canonical_bytes

WORKLOAD_BYTES: Final = 16_384

_VARIABLES = {
    "PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "VIRTUAL_ENV", "CONDA_PREFIX",
    "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3",
    # Python's own by name: an application's begin so as well.
    "PYTHONPATH", "PYTHONHOME", "PYTHONPLATLIBDIR", "PYTHONSAFEPATH", "PYTHONNOUSERSITE", "PYTHONUSERBASE",
    "PYTHONHASHSEED", "PYTHONOPTIMIZE", "PYTHONMALLOC", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONINTMAXSTRDIGITS",
    "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONUNBUFFERED", "PYTHONWARNINGS", "PYTHONFAULTHANDLER",
    "PYTHON_GIL", "PYTHON_JIT", "PYTHON_CPU_COUNT",
}  # fmt: skip
_VARIABLE_PREFIXES = ("OMP_", "MKL_", "CUBLAS_", "CUDNN_", "NVIDIA_TF32", "TORCH", "PYTORCH_", "TRITON_")
_KEYS = {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"}
_TELLING = (
    "KEY|TOKEN|SECRET|CREDENTIAL|AUTH|PASSW|PASSPHRASE|PWD|DSN|JWT|SIGNATURE|(?<![A-Z])(PASS|PAT|SAS|SIG)(?![A-Z])"
)
"""Parts of names that are given to secrets."""
_SECRET_NAME = re.compile(_TELLING, re.IGNORECASE)
_SECRET_VALUES = {
    # A login's name or password may hold a slash or a colon, so that an address with an @ anywhere is taken for one.
    "it holds a login": re.compile(r"://\S*@|\bBearer\s", re.IGNORECASE),
    # ?sig=..., --password=..., "api_key": ..., --token ...; but not a directory called tokenizers.
    "it holds what its name there says is a secret": re.compile(
        rf"""(^|[?&;,\s{{("'-]) [\w.-]* ({_TELLING}) [\w.-]* (["']?\s*= | ["']\s*:)
          | (^|\s) - [\w-]* ({_TELLING}) [\w-]* \s""",
        re.IGNORECASE | re.VERBOSE,
    ),
}
_REFERENCE = re.compile(r"\$\$|\$\(([-._a-zA-Z][-._a-zA-Z0-9]*)\)")
_LABEL = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_FIELDS = (
    "metadata.name", "metadata.namespace", "metadata.uid", "spec.nodeName", "spec.serviceAccountName", "status.hostIP",
    "status.podIP",
)  # fmt: skip
_POD_FIELDS = ("imagePullSecrets", "serviceAccountName", "runtimeClassName", "tolerations", "securityContext")
_CONTAINER_FIELDS = ("image", "imagePullPolicy", "workingDir")
_USER_FIELDS = ("runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile")
_AMOUNTS = ("cpu", "memory", "ephemeral-storage")
_VOLUMES = ("persistentVolumeClaim", "configMap", "hostPath", "nfs", "csi")
_SECRET_DRIVER = re.compile("secret", re.IGNORECASE)
"""A CSI driver that mounts secrets, as secrets-store.csi.k8s.io does."""


def workload_of(pod: Mapping[str, Any], *, bundle_uri: str, checkpoint_root: str) -> Workload:
    """What the confirmation needs of a training pod; with `refused` alone where no Job can be made of it."""
    spec = pod["spec"]
    container, gpu_resource = _training_container(spec["containers"])
    environment = _environment(container, pod, keys=bundle_uri.startswith("s3://"))
    config_maps, left_out = _whole_config_maps(container)
    try:
        paths = [unquote(urlsplit(uri).path) for uri in (bundle_uri, checkpoint_root) if uri.startswith("file://")]
    except ValueError as error:
        # Only the confirmation needs it: the suspect is cordoned all the same.
        said = f"the alarm's addresses, bundle {bundle_uri[:200]!r} and checkpoints {checkpoint_root[:200]!r}, are none"
        return Workload(pod={}, container={}, refused=f"{said}: {error}")
    paths += [str(container.get("workingDir") or ""), *environment.values.get("PYTHONPATH", "").split(":")]
    try:
        mounts, volumes = _mounts(container.get("volumeMounts") or [], spec.get("volumes") or [], paths, environment)
    except _UnknownValueError as error:
        return Workload(pod={}, container={}, refused=str(error))
    context = container.get("securityContext") or {}
    resources = container.get("resources") or {}
    workload = Workload(
        pod={**{name: spec[name] for name in _POD_FIELDS if spec.get(name)}, "volumes": volumes},
        container={
            **{name: container[name] for name in _CONTAINER_FIELDS if container.get(name)},
            **({"envFrom": config_maps} if config_maps else {}),
            "env": environment.kept,
            "volumeMounts": mounts,
            "securityContext": {
                **{name: context[name] for name in _USER_FIELDS if name in context},
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": list((context.get("capabilities") or {}).get("drop") or [])},
            },
            "resources": {
                which: {name: amount for name, amount in (resources.get(which) or {}).items() if name in _AMOUNTS}
                for which in ("requests", "limits")
            },
        },
        gpu_resource=gpu_resource,
        left_out=(*environment.left_out, *left_out),
    )
    size = len(canonical_bytes(workload))
    if size <= WORKLOAD_BYTES:
        return workload
    said = f"the training pod's specification takes {size} bytes, more than the {WORKLOAD_BYTES} that are recorded"
    return Workload(pod={}, container={}, refused=said)


class _UnknownValueError(Exception):
    """A reference to a variable whose value is not known here, or is not to be written down; the message says why."""


@dataclass
class _Environment:
    """The variables of a container, read in their order."""

    kept: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    values: dict[str, str] = field(default_factory=dict)
    """Of those that are known and no secrets."""
    unknown: dict[str, str] = field(default_factory=dict)
    """Name -> why its value is not known."""
    has_more: bool = False
    """Whole ConfigMaps or Secrets are variables too: any name may be one."""

    def expanded(self, text: str) -> str:
        """The text with its ``$(NAME)`` resolved as Kubernetes does. Raises `_UnknownValueError`."""

        def value(found: re.Match[str]) -> str:
            name = found.group(1)
            if name is None:
                return "$"
            if name in self.unknown or (self.has_more and name not in self.values):
                why = self.unknown.get(name, "the pod has it from envFrom, or not at all")
                raise _UnknownValueError(f"it refers to {name}: {why}")
            return self.values.get(name, found.group())

        return _REFERENCE.sub(value, text)


def _environment(container: Mapping[str, Any], pod: Mapping[str, Any], *, keys: bool) -> _Environment:
    """keys: keep references to AWS keys in a Secret."""
    found = _Environment(has_more=bool(container.get("envFrom")))
    for variable in container.get("env") or []:
        name, source = variable["name"], variable.get("valueFrom") or {}
        value, why = _value(variable, pod, found.expanded)
        found.values.pop(name, None)
        found.unknown.pop(name, None)
        if value is None:
            found.unknown[name] = why
        else:
            found.values[name] = value
        if keys and name in _KEYS and "secretKeyRef" in source:
            found.kept.append({"name": name, "valueFrom": {"secretKeyRef": source["secretKeyRef"]}})
        elif name not in _VARIABLES and not name.startswith(_VARIABLE_PREFIXES):
            continue
        elif value is not None:
            # What is resolved already must not be resolved again.
            found.kept.append({"name": name, "value": value.replace("$", "$$")})
        elif reference := _harmless_reference(name, source):
            found.kept.append({"name": name, "valueFrom": reference})
        else:
            found.left_out.append(f"{name}: {why}"[:200])
    return found


def _whole_config_maps(container: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """References to the ConfigMaps whose every key is a variable; and which of the rest stays behind, with the reason.

    What is in them cannot be looked at here. A name or a prefix that says so makes all of it a secret.
    """
    kept, left_out = [], []
    for source in container.get("envFrom") or []:
        prefix, reference = source.get("prefix") or "", source.get("configMapRef")
        if reference is None:
            secret = (source.get("secretRef") or {}).get("name", "of an unknown kind")
            left_out.append(f"all of Secret {secret}: its values are secrets"[:200])
        elif _SECRET_NAME.search(prefix + reference["name"]):
            left_out.append(f"all of ConfigMap {prefix}{reference['name']}: its name says that it is a secret"[:200])
        else:
            kept.append({"configMapRef": reference, **({"prefix": prefix} if prefix else {})})
    return kept, left_out


def _value(
    variable: Mapping[str, Any], pod: Mapping[str, Any], expanded: Callable[[str], str]
) -> tuple[str | None, str]:
    """The variable's value, or None and why it is not known or not to be written down."""
    name, source = variable["name"], variable.get("valueFrom") or {}
    if _SECRET_NAME.search(name):
        return None, "its name says that it is a secret"
    if "fieldRef" in source:
        path = source["fieldRef"]["fieldPath"]
        field_value = _field(pod, path)
        return field_value, "" if field_value is not None else f"the pod has no {path}"
    for kind, place in (("secretKeyRef", "a Secret"), ("configMapKeyRef", "a ConfigMap")):
        if kind in source:
            return None, f"its value is in {place}"
    if source:
        return None, f"its value comes from {', '.join(source)}"
    try:
        value = expanded(str(variable.get("value") or ""))
    except _UnknownValueError as error:
        return None, str(error)
    why = next((why for why, secret in _SECRET_VALUES.items() if secret.search(value)), "")
    return (None, why) if why else (value, "")


def _harmless_reference(name: str, source: Mapping[str, Any]) -> dict[str, Any]:
    """The reference as the Job's container can have it, where what it refers to is no secret; else empty."""
    if _SECRET_NAME.search(name):
        return {}
    if "configMapKeyRef" in source:
        return {"configMapKeyRef": source["configMapKeyRef"]}
    if "resourceFieldRef" in source:
        # Without the container's name it is the Job's own, which has the same CPU and memory.
        kept = {key: value for key, value in source["resourceFieldRef"].items() if key != "containerName"}
        return {"resourceFieldRef": kept}
    return {}


def _field(pod: Mapping[str, Any], path: str) -> str | None:
    """The pod's field, as the downward API names it."""
    if found := _LABEL.fullmatch(path):
        return str((pod["metadata"].get(found.group(1)) or {}).get(found.group(2), ""))
    if path not in _FIELDS:
        return None
    value: Any = pod
    for part in path.split("."):
        value = (value or {}).get(part)
    return None if value is None else str(value)


def _training_container(containers: list[Mapping[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """The container that asks for GPUs, else the first; and the name of what it asks for."""
    for container in containers:
        resources = container.get("resources") or {}
        for name in {**(resources.get("requests") or {}), **(resources.get("limits") or {})}:
            if name.endswith("/gpu"):
                return container, name
    return containers[0], ""


def _mounts(
    mounts: Iterable[Mapping[str, Any]],
    volumes: Iterable[Mapping[str, Any]],
    paths: Iterable[str],
    environment: _Environment,
) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]]:
    """The mounts below which one of the paths lies, read-only, and their volumes. Raises `_UnknownValueError`."""
    usable = {
        volume["name"]: volume
        for volume in volumes
        if any(kind in volume for kind in _VOLUMES)
        and not _SECRET_DRIVER.search((volume.get("csi") or {}).get("driver") or "")
    }
    wanted = [path for path in paths if path.startswith("/")]
    kept = [
        {**_plain_mount(mount, environment), "readOnly": True}
        for mount in mounts
        if mount["name"] in usable and any(_below(path, mount["mountPath"]) for path in wanted)
    ]
    return kept, [usable[name] for name in dict.fromkeys(mount["name"] for mount in kept)]


def _plain_mount(mount: Mapping[str, Any], environment: _Environment) -> dict[str, Any]:
    """The mount with the directory that its expression names in the training's pod. Raises `_UnknownValueError`."""
    expression = mount.get("subPathExpr")
    if not expression:
        return dict(mount)
    try:
        directory = environment.expanded(expression)
    except _UnknownValueError as error:
        raise _UnknownValueError(
            f"the training pod's mount {mount['mountPath']} has subPathExpr {expression!r}, which the Job cannot have: "
            f"{error}"
        ) from error
    return {name: value for name, value in mount.items() if name != "subPathExpr"} | {"subPath": directory}


def _below(path: str, mount_path: str) -> bool:
    return f"{path}/".startswith(f"{mount_path.rstrip('/')}/")
