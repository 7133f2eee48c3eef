"""From a finding to an alarm that every rank holds alike, and that one rank sends."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import NoReturn

from truestep.attachment import Membership
from truestep.bundle.writing import EvidenceBundles, Occasion
from truestep.checks.finding import Finding
from truestep.contract import Alarm, Check, Rank, Step, TruestepError, Verdict, VerdictKind, alarm_id, to_json
from truestep.contract.alarm import NODES_OF_RUN
from truestep.protocols import CheckpointStore

SHOWN_WITNESSES = 16
NO_AUDITS = "no audits: finite errors of forward and backward not covered"

_COPIES = "a stored copy differs, which no computation repeats: `differences` has the element and its bits"
_NO_BUNDLE = {
    Check.NONFINITE: "no two other nodes have a finite result that a repetition could be compared with",
    Check.RING_REPLAY: "no replay contradicts its record from the same inputs",
    Check.WEIGHTS: _COPIES,
    Check.OPTIMIZER_STATE: _COPIES,
    Check.REDUCTION: "one device alone cannot repeat a sum over all ranks: test all-reduces on pairs of these nodes",
    Check.UPDATE_REPLAY: "`truestep confirm` repeats a forward and backward, and this was an update: stress the GPU "
    "instead, and count what else it was named for",
}
"""Why an alarm has nothing that `truestep confirm` could run again."""


class CorruptionDetected(TruestepError):  # noqa: N818 - a finding, not a failure of this code
    """A check found corruption. Raised on every rank at the same call, after the alarm was written and sent."""

    def __init__(self, alarm: Alarm) -> None:
        super().__init__(f"{alarm.check} at step {alarm.step}: {alarm.verdict.reason}")
        self.alarm = alarm


class AlarmDesk:
    """Makes, sends and raises the one alarm of a run."""

    def __init__(
        self,
        attachment: Membership,
        store: Callable[[], CheckpointStore | None],
        coverage: Callable[[], str],
        bundles: EvidenceBundles | None = None,
    ) -> None:
        """store: where the newest trusted checkpoint is known, if anywhere. coverage: what audits of this run compare.
        bundles: what keeps failing passes.
        """
        self._attachment = attachment
        self._store = store
        self._coverage = coverage
        self._bundles = bundles
        self._raised: Alarm | None = None

    def raise_again(self) -> None:
        """Raise the alarm if there was one: a run that caught it must not train on."""
        if self._raised is not None:
            raise CorruptionDetected(self._raised)

    def raise_alarm(self, finding: Finding, step: Step, clean_through: Step | None) -> NoReturn:
        """Collective. The lowest rank that is not a suspect writes and sends the alarm before anyone raises."""
        attachment = self._attachment
        verdict = finding.verdict
        agreed = attachment.cpu_group.agrees(to_json(verdict))
        if not agreed:
            verdict = _disagreement()
        # One clock reading for all, so that every rank's copy of the alarm is the same.
        at_milliseconds = attachment.cpu_group.extremes([time.time_ns() // 1_000_000])[0][0]
        store = self._store()
        identifier = alarm_id(attachment.run, finding.check, step, verdict.suspects)
        evidence = {**finding.evidence, "coverage": self._coverage(), NODES_OF_RUN: len(set(attachment.nodes.values()))}
        # Before the alarm, which carries the bundle's address; last of what is collective, because it may go wrong.
        evidence |= self._kept(finding, identifier, step, agreed=agreed)
        self._raised = Alarm(
            alarm_id=identifier,
            run=attachment.run,
            check=finding.check,
            step=step,
            verdict=verdict,
            suspects=tuple(attachment.identities[rank] for rank in verdict.suspects),
            witnesses=tuple(attachment.identities[rank] for rank in verdict.witnesses[:SHOWN_WITNESSES]),
            evidence=evidence,
            clean_through=clean_through,
            checkpoint=store.newest_trusted if store is not None else None,
            detected_at=datetime.fromtimestamp(at_milliseconds / 1000, UTC).isoformat(timespec="milliseconds"),
        )
        if attachment.rank == reporting_rank(verdict, attachment.world_size):
            attachment.reporter.alarm(self._raised)
        raise CorruptionDetected(self._raised)

    def _kept(self, finding: Finding, identifier: str, step: Step, *, agreed: bool) -> dict[str, str]:
        """What the alarm says of a bundle: its address, or why there is none. Collective."""
        if finding.failing is None or self._bundles is None:
            return {"bundle_missing": _NO_BUNDLE[finding.check]}
        if not agreed:
            return {"bundle_missing": "the ranks drew different conclusions, so none knows what the others would keep"}
        return self._bundles.write(
            Occasion(alarm_id=identifier, step=step, verdict=finding.verdict, failing=finding.failing)
        )


def reporting_rank(verdict: Verdict, world_size: int) -> Rank:
    """The lowest rank that is not a suspect; 0 where all are."""
    return next((Rank(rank) for rank in range(world_size) if rank not in verdict.suspects), Rank(0))


def _disagreement() -> Verdict:
    return Verdict(
        kind=VerdictKind.AMBIGUOUS,
        rule="ranks_disagree",
        reason="the ranks drew different conclusions from the same evidence: a host computes wrongly; nobody is named",
        settle="read each rank's log of this step",
    )
