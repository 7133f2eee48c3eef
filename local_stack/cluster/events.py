"""Kubernetes Events: what the controllers say about an object, counted where they say it again."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from local_stack.cluster.kubernetes.registry import Registry, now_rfc3339
from local_stack.cluster.kubernetes.resources import EVENTS
from local_stack.cluster.kubernetes.store import Json


def record_event(
    registry: Registry, subject: Json, reason: str, message: str, *, component: str, warning: bool = False
) -> None:
    """Record that `reason` happened to `subject`; the same message again raises the count."""
    metadata = subject["metadata"]
    namespace = metadata.get("namespace") or "default"
    identity = json.dumps([metadata["uid"], reason, message, component])
    name = f"{metadata['name']}.{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    now = now_rfc3339()

    def counted(event: Json) -> Json:
        return {**event, "count": event.get("count", 1) + 1, "lastTimestamp": now}

    with registry.store.transaction():
        if registry.find(EVENTS, namespace, name) is not None:
            registry.update(EVENTS, namespace, name, counted)
            return
        event: dict[str, Any] = {
            "metadata": {"name": name, "namespace": namespace},
            "involvedObject": {
                "apiVersion": subject.get("apiVersion", "v1"),
                "kind": subject["kind"],
                "name": metadata["name"],
                "namespace": metadata.get("namespace", ""),
                "uid": metadata["uid"],
                "resourceVersion": metadata.get("resourceVersion", ""),
            },
            "reason": reason,
            "message": message,
            "type": "Warning" if warning else "Normal",
            "source": {"component": component},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        registry.create(EVENTS, namespace, event)
