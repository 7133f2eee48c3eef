"""The loop of every controller: look at the whole state, act, wait for the next change."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod

from local_stack.cluster.kubernetes.errors import ApiError
from local_stack.cluster.kubernetes.registry import Registry

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 1.0


class Controller(ABC):
    """Level-triggered: `reconcile` sees the state, not the change, so a missed or doubled notification does no harm."""

    def __init__(self, registry: Registry, name: str) -> None:
        self.registry = registry
        self._poked = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def reconcile(self) -> float | None:
        """Bring the world closer to what the objects say. Returns seconds until it wants to look again, or None."""

    def start(self) -> None:
        """Run until the store is closed."""
        self._thread.start()

    def poke(self) -> None:
        """Look again now, though no object changed."""
        self._poked.set()
        self.registry.store.wake()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the loop to end after the store was closed."""
        if self._thread.is_alive():
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        store = self.registry.store
        while not store.closed:
            self._poked.clear()
            delay: float | None = _RETRY_SECONDS
            try:
                seen = store.version
                delay = self.reconcile()
            except ApiError as error:
                logger.debug("%s: %s; looking again", self._thread.name, error)
            except Exception:
                if store.closed:
                    return
                logger.exception("%s failed; looking again in %g s", self._thread.name, _RETRY_SECONDS)
            store.wait_beyond(seen, delay, self._poked.is_set)
