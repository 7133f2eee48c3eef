"""Adapters for what the recovery needs and moto 5.2.5 lacks; one module a gap, each with a test.

They reach into moto's insides, so they are pinned to one version: `install` refuses any other.
"""

from __future__ import annotations

import moto

from local_stack.cloud.moto_gaps import (
    event_targets,
    execution_events,
    execution_races,
    jsonata_evaluation,
    kms_mac,
    retry_counts,
    stop_execution,
    task_credentials,
    task_token_wait,
    task_tokens,
    waiting_time,
)

PINNED_MOTO = "5.2.5"


class MotoVersionError(RuntimeError):
    """The installed moto is not the one that the adapters were written against."""


def install(*, time_scale: float = 1.0) -> None:
    """Close every gap, in this process; call once, before moto serves.

    time_scale: factor of the waits and retry intervals of executions (not of timeouts); 1 is real time.
    Raises MotoVersionError for any other moto than the pinned one.
    """
    if moto.__version__ != PINNED_MOTO:
        raise MotoVersionError(
            f"moto {moto.__version__} is installed, but the adapters are written against {PINNED_MOTO}: install "
            f"moto=={PINNED_MOTO}, or run tests/adapters/local_cloud on the new version and move the pin"
        )
    for gap in (
        jsonata_evaluation,
        task_token_wait,
        task_tokens,
        stop_execution,
        retry_counts,
        execution_races,
        execution_events,
        task_credentials,
        event_targets,
        kms_mac,
    ):
        gap.install()
    waiting_time.install(time_scale)
