"""The record of Kubernetes requests: who asked for which verb on what, to be held against the shipped ClusterRole."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

from local_stack.cluster.kubernetes.auth import Caller
from local_stack.cluster.kubernetes.rbac import Access


class RequestRecord:
    """JSON lines `{time, user, groups, verb, group, resource, namespace, name, allowed}`. Thread-safe."""

    def __init__(self, path: Path) -> None:
        """path: started anew."""
        self._file = path.open("w", buffering=1, encoding="utf-8")
        self._lock = threading.Lock()

    def add(self, caller: Caller, access: Access, *, allowed: bool) -> None:
        """Append one request as it was authorised; discovery is not one."""
        entry = {
            "time": round(time.time(), 6),
            "user": caller.user,
            "groups": sorted(caller.groups),
            "verb": access.verb,
            "group": access.group,
            "resource": access.resource,
            "namespace": access.namespace,
            "name": access.name,
            "allowed": allowed,
        }
        with self._lock:
            if not self._file.closed:
                self._file.write(json.dumps(entry) + "\n")

    def close(self) -> None:
        """Close the file; later requests are not kept."""
        with self._lock:
            self._file.close()
