"""From a pod's spec to a process: volumes as directories, environment, command.

There are no mount namespaces here, so a container's paths are rewritten instead: every argument and environment value
that is a mount path, or lies below one (also after `file://`), becomes the path of the directory that stands for it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_stack.cluster.kubernetes.store import Json

DIRECTIVE_VARIABLE = "TRUESTEP_DIRECTIVE"
DIRECTIVE_DEFAULT = "/etc/truestep/resume.json"
TERMINATION_LOG = "termination-log"
"""In the pod's directory: what the container leaves at its `terminationMessagePath`."""
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")
_FIELD_WITH_KEY = re.compile(r"^metadata\.(labels|annotations)\['([^']+)'\]$")


class SandboxError(Exception):
    """The pod cannot be started as it is written; the message says what to change."""


ConfigMapReader = Callable[[str], "Json | None"]


@dataclass(frozen=True, kw_only=True)
class PodProcess:
    """What to run for a pod."""

    argv: tuple[str, ...]
    environment: dict[str, str]
    """What the pod itself sets, resolved and rewritten; the node's own variables come on top."""
    working_directory: Path


def _inside(root: Path, relative: str) -> Path:
    path = (root / relative).resolve()
    if not path.is_relative_to(root.resolve()):
        raise SandboxError(f"path {relative!r} leaves the volume")
    return path


class PodSandbox:
    """The directory of one pod, and the shared directories of its volumes.

    root: private to the pod. shared: holds one directory a claim or host path, seen by all pods.
    read_config_map: name -> ConfigMap of the pod's namespace, or None.
    """

    def __init__(self, pod: Json, *, root: Path, shared: Path, read_config_map: ConfigMapReader) -> None:
        self._pod = pod
        self._root = root
        self._shared = shared
        self._read_config_map = read_config_map

    def prepare(self) -> PodProcess:
        """Create the directories, project the ConfigMaps and resolve the container. Raises SandboxError."""
        containers = self._pod["spec"]["containers"]
        if len(containers) != 1 or self._pod["spec"].get("initContainers"):
            raise SandboxError("the local kubelet runs exactly one container a pod, and no init containers")
        container = containers[0]
        working_directory = self._root / "work"
        working_directory.mkdir(parents=True, exist_ok=True)
        volumes = {volume["name"]: self._volume(volume) for volume in self._pod["spec"].get("volumes") or []}
        mounts = {
            mount["mountPath"].rstrip("/"): _inside(volumes[mount["name"]], mount.get("subPath", ""))
            for mount in container.get("volumeMounts") or []
        }
        last_words = self._root / TERMINATION_LOG
        last_words.touch()
        mounts[container.get("terminationMessagePath", "/dev/termination-log")] = last_words
        environment = self._environment(container)
        if any(DIRECTIVE_DEFAULT.startswith(f"{mount_path}/") for mount_path in mounts):
            # The training process's own default is a path that only a mount namespace could redirect.
            environment.setdefault(DIRECTIVE_VARIABLE, DIRECTIVE_DEFAULT)
        environment = {name: rewrite(value, mounts) for name, value in environment.items()}
        command = [*(container.get("command") or []), *(container.get("args") or [])]
        if not container.get("command"):
            raise SandboxError(f"container {container['name']}: give a command; images are not pulled here")
        argv = [rewrite(_expand(argument, environment), mounts) for argument in command]
        if argv[0] in ("python", "python3"):
            argv[0] = sys.executable
        if directory := container.get("workingDir"):
            working_directory = Path(rewrite(directory, mounts))
            if not working_directory.is_dir():
                raise SandboxError(f"workingDir {directory} is no directory here; mount a volume there")
        return PodProcess(argv=tuple(argv), environment=environment, working_directory=working_directory)

    def _volume(self, volume: Json) -> Path:
        name = volume["name"]
        if claim := volume.get("persistentVolumeClaim"):
            path = _inside(self._shared, claim["claimName"])
        elif host := volume.get("hostPath"):
            path = _inside(self._shared, "host" + "/" + host["path"].strip("/"))
        elif "emptyDir" in volume:
            path = self._root / "volumes" / name
        elif source := volume.get("configMap"):
            path = self._root / "volumes" / name
            self._project(source, path)
        else:
            kinds = ", ".join(key for key in volume if key != "name")
            raise SandboxError(
                f"volume {name} ({kinds}): only persistentVolumeClaim, hostPath, emptyDir and configMap work here"
            )
        path.mkdir(parents=True, exist_ok=True)
        return path

    def _project(self, source: Json, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        config_map = self._read_config_map(source["name"])
        if config_map is None:
            if not source.get("optional"):
                raise SandboxError(f'configmap "{source["name"]}" not found')
            return
        data = config_map.get("data") or {}
        items = source.get("items") or [{"key": key, "path": key} for key in data]
        for item in items:
            if item["key"] in data:
                target = _inside(path, item["path"])
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(data[item["key"]])
            elif not source.get("optional"):
                raise SandboxError(f'configmap "{source["name"]}" has no key {item["key"]}')

    def _environment(self, container: Json) -> dict[str, str]:
        environment: dict[str, str] = {}
        for source in container.get("envFrom") or []:
            environment.update(self._environment_from(source))
        for variable in container.get("env") or []:
            name = variable["name"]
            if "valueFrom" in variable:
                value = self._referenced(variable["valueFrom"], name)
                if value is not None:
                    environment[name] = value
            else:
                environment[name] = _expand(variable.get("value", ""), environment)
        return environment

    def _environment_from(self, source: Json) -> dict[str, str]:
        reference = source.get("configMapRef")
        if reference is None:
            raise SandboxError("envFrom: only configMapRef works here")
        config_map = self._read_config_map(reference["name"])
        if config_map is None:
            if reference.get("optional"):
                return {}
            raise SandboxError(f'configmap "{reference["name"]}" not found')
        return {source.get("prefix", "") + key: value for key, value in (config_map.get("data") or {}).items()}

    def _referenced(self, source: Json, name: str) -> str | None:
        if field := source.get("fieldRef"):
            return self._field(field["fieldPath"])
        if reference := source.get("configMapKeyRef"):
            data = (self._read_config_map(reference["name"]) or {}).get("data") or {}
            if reference["key"] not in data and not reference.get("optional"):
                raise SandboxError(f'configmap "{reference["name"]}" has no key {reference["key"]}')
            return data.get(reference["key"])
        raise SandboxError(f"env {name}: only fieldRef and configMapKeyRef work here")

    def _field(self, path: str) -> str:
        metadata = self._pod["metadata"]
        known: Mapping[str, Any] = {
            "metadata.name": metadata["name"],
            "metadata.namespace": metadata["namespace"],
            "metadata.uid": metadata["uid"],
            "spec.nodeName": self._pod["spec"].get("nodeName", ""),
            "spec.serviceAccountName": self._pod["spec"].get("serviceAccountName", "default"),
            "status.hostIP": "127.0.0.1",
            "status.podIP": "127.0.0.1",
        }
        if path in known:
            return str(known[path])
        if match := _FIELD_WITH_KEY.match(path):
            return str((metadata.get(match[1]) or {}).get(match[2], ""))
        raise SandboxError(f"fieldRef {path} is not one of {', '.join(known)}, metadata.labels['...']")


def rewrite(value: str, mounts: Mapping[str, Path]) -> str:
    """The value with a leading mount path replaced by the directory that stands for it; the longest mount wins."""
    prefix = "file://" if value.startswith("file://") else ""
    path = value[len(prefix) :]
    for mount_path in sorted(mounts, key=len, reverse=True):
        if path == mount_path or path.startswith(f"{mount_path}/"):
            return f"{prefix}{mounts[mount_path]}{path[len(mount_path) :]}"
    return value


def _expand(text: str, environment: Mapping[str, str]) -> str:
    """`$(NAME)` as Kubernetes expands it: unknown names stay as they are, `$$` is a dollar."""

    def value(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return environment.get(match[1], match[0])

    return _REFERENCE.sub(value, text)
