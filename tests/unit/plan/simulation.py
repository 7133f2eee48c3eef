"""The model of `truestep.plan.latency`, played step by step: nothing here knows the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Steps = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fates:
    """One entry a faulty GPU. Steps are counted from a grid in which step t is an audit if (t+1) % k == 0."""

    onset: Steps
    first_error: Steps
    """First step whose update was wrong; the detecting step where there was none before it."""
    detected: Steps

    @property
    def latency(self) -> Steps:
        steps: Steps = self.detected - self.onset + 1
        return steps

    @property
    def corrupted(self) -> Steps:
        steps: Steps = self.detected - self.first_error + 1
        return steps


def play(trials: int, audit_every: int, hit_probability: float, seed: int) -> Fates:
    """Let `trials` faulty GPUs compute until an audit finds them."""
    random = np.random.default_rng(seed)
    onset = random.integers(0, audit_every, trials)
    first_error = np.full(trials, -1)
    detected = np.full(trials, -1)
    step = 0
    while (detected < 0).any():
        at_work = (onset <= step) & (detected < 0)
        own = at_work & (random.random(trials) < hit_probability)
        if (step + 1) % audit_every == 0:
            neighbours = at_work & (random.random(trials) < hit_probability)
            found = own | neighbours
            detected[found] = step
            # The alarm drops the update, so an error in it harms nobody.
            own &= ~found
        first_error[own & (first_error < 0)] = step
        step += 1
    return Fates(onset, np.where(first_error < 0, detected, first_error), detected)


@dataclass(frozen=True)
class Economy:
    """What a long run spent and kept, one entry between two faults."""

    time: npt.NDArray[np.float64]
    kept: npt.NDArray[np.float64]

    @property
    def waste(self) -> float:
        return float(self.time.sum() / self.kept.sum() - 1)

    @property
    def standard_error(self) -> float:
        """Of `waste`, by the delta method for a ratio of means."""
        ratio = self.time.sum() / self.kept.sum()
        residual = self.time - ratio * self.kept
        return float(residual.std(ddof=1) / math.sqrt(len(self.time)) / self.kept.mean())


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run whose clean stretches are skipped over and whose faulty ones are played."""

    audit_every: int
    checkpoint_every: int
    check_every: int
    audit_cost: float
    check_cost: float
    hit_probability: float
    faults_per_step: float
    margin: int | None
    """None: the recovery knows the first wrong update."""

    def run(self, faults: int, seed: int) -> Economy:
        random = np.random.default_rng(seed)
        step, time, kept = 10**9, np.empty(faults), np.empty(faults)
        for index in range(faults):
            start = step
            onset = step + int(random.geometric(self.faults_per_step)) - 1
            first_error, detected = self._until_detection(onset, random)
            newest = first_error - 1 if self.margin is None else detected - self.audit_every - self.margin
            checkpoint = newest - (newest + 1) % self.checkpoint_every
            time[index] = self._time(start, detected + 1)
            step = checkpoint + 1
            kept[index] = step - start
        return Economy(time, kept)

    def _until_detection(self, onset: int, random: np.random.Generator) -> tuple[int, int]:
        step, first_error = onset, None
        while True:
            wrong = random.random() < self.hit_probability
            if (step + 1) % self.audit_every == 0:
                if wrong or random.random() < self.hit_probability:
                    return step if first_error is None else first_error, step
            elif wrong and first_error is None:
                first_error = step
            step += 1

    def _time(self, start: int, stop: int) -> float:
        """Cost of the steps in [start, stop)."""
        audits = stop // self.audit_every - start // self.audit_every
        checks = stop // self.check_every - start // self.check_every
        return stop - start + audits * self.audit_cost + checks * self.check_cost


def standard_error(sample: Steps) -> float:
    """Of the sample's mean."""
    return float(sample.std(ddof=1) / math.sqrt(len(sample)))
