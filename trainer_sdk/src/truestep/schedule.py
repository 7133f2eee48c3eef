"""When which check runs. A step `s` is due for a period `k` when `(s + 1) % k == 0`: for k = 10 that is 9, 19, 29,
..."""

from __future__ import annotations

from dataclasses import dataclass, field

from truestep.audit_steps import AuditEvery, AuditSteps, audit_steps
from truestep.contract import Step


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Periods of the checks, in optimizer steps. Raises `ValueError` for a period that is not a positive integer."""

    audit_every: AuditEvery | None
    """Ring replay audit: a period; or the audited steps, 0-based, and none after the last; or `callable(step)`, which
    must answer the same for a step on every rank and every time. None: never, so that nothing covers finite compute
    faults and no checkpoint becomes trusted."""
    deterministic_audits: bool = True
    """Deterministic kernels on audit steps, so that gradients compare bit for bit. False: audits compare losses only,
    and a loss-only audit never promotes a checkpoint."""
    check_every: int = 10
    """Weight comparison; also made before every checkpoint."""
    checkpoint_every: int | None = None
    """Checkpoint; None: every `check_every` steps."""

    _audits: AuditSteps = field(init=False, repr=False, compare=False)

    reduction_every: int | None = None
    """Reduction check: the averaged gradient against what the ranks contributed; None: on audit steps."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_audits", audit_steps(self.audit_every))
        for name in ("check_every", "checkpoint_every", "reduction_every"):
            period = getattr(self, name)
            if period is None and name != "check_every":
                continue
            if not isinstance(period, int) or isinstance(period, bool) or period < 1:
                raise ValueError(f"Schedule.{name} is {period!r}; give a number of steps of at least 1")
        if not isinstance(self.deterministic_audits, bool):
            raise TypeError(f"Schedule.deterministic_audits is {self.deterministic_audits!r}; give True or False")

    def audits(self, step: Step) -> bool:
        """Whether `step` is audited before its update."""
        return self._audits.includes(step)

    def audit_number(self, step: Step) -> int:
        """0-based number of the audit at `step`; what the ring distance rotates with. Only for an audited step."""
        if not self.audits(step):
            raise ValueError(f"step {step} is not audited")
        return self._audits.number(step)

    def checks_reduction(self, step: Step) -> bool:
        """Whether the averaged gradient of `step` is compared with what the ranks contributed."""
        return self.audits(step) if self.reduction_every is None else (step + 1) % self.reduction_every == 0

    def compares_weights(self, step: Step) -> bool:
        """Whether the weights are compared after the update of `step`."""
        return (step + 1) % self.check_every == 0 or self.saves(step)

    def saves(self, step: Step) -> bool:
        """Whether a checkpoint is due after the update of `step`."""
        return (step + 1) % (self.checkpoint_every or self.check_every) == 0

    def due(self, step: Step) -> int:
        """One number for everything that is due at `step`: ranks whose numbers differ would wait for one another."""
        number = self.audit_number(step) + 1 if self.audits(step) else 0
        flags = self.checks_reduction(step) << 2 | self.compares_weights(step) << 1 | self.saves(step)
        return number << 3 | flags
