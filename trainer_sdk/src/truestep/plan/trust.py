"""How far a checkpoint can be trusted after an alarm, and how many to keep. Model: see `truestep.plan.latency`.

At an alarm at audit t the newest clean step is the previous audit, t - k. The recovery resumes from the newest
checkpoint at or before ``t - k - margin``, because audits can have passed a faulty GPU.
"""

from __future__ import annotations

import math

from truestep.plan.errors import require_count, require_probability
from truestep.plan.latency import audits_passed, detection_probability, log_missed_pass

_MOST_PLACES = 4096


def margin_steps(audit_every: int, hit_probability: float, risk: float) -> int:
    """Steps before the newest clean step at which a checkpoint is corrupt with probability at most `risk`.

    k ln(risk) / ln(1 - d(p)), rounded up; 0 where 1 - d(p) is at most `risk`, because the newest clean audit would have
    to miss too; and at k = 1, where no update is applied unaudited. The recovery applies it. Beyond that it is an upper
    bound: it credits the audits between checkpoint and alarm as a continuous rate, and not the newest one. The exact
    probability at this margin is `corruption_probability`, the least margin `exact_margin_steps`. Raises `PlanError`
    for inputs out of range.
    """
    require_count("audit_every", audit_every)
    require_probability("hit probability", hit_probability, one_allowed=True)
    require_probability("risk", risk, one_allowed=False)
    if (1 - hit_probability) ** 2 <= risk or audit_every == 1:
        return 0
    return math.ceil(audit_every * math.log(risk) / (2 * log_missed_pass(hit_probability)))


def exact_margin_steps(audit_every: int, hit_probability: float, risk: float) -> int:
    """The least margin at which `corruption_probability` is at most `risk`; about an interval under `margin_steps`.

    By bisection: the probability falls with the margin. Raises `PlanError` for inputs out of range.
    """
    low, high = 0, margin_steps(audit_every, hit_probability, risk)
    while low < high:
        middle = (low + high) // 2
        if corruption_probability(middle, audit_every, hit_probability) <= risk:
            high = middle
        else:
            low = middle + 1
    return low


def corruption_probability(margin: int, audit_every: int, hit_probability: float) -> float:
    """The probability that the state `margin` steps before the newest clean step is corrupt, given an alarm. Exact.

    Onsets are equally likely at every step, so an onset o found at audit t has the weight
    d (1-d)^(audits in [o, t)) / k; the state after step s is corrupt if one of the unaudited steps in [o, s] computed
    wrong, 1 - q^(their number), with q = 1-p (an audited step that passed is right). With m, r = divmod(margin, k) and
    z the unaudited steps since the last audit at or before s, summing over o:

        (1-d)^(m+1) (1 - d A / (k (1 - q^(k+1))))                                                            for r = 0
        (1-d)^(m+1) (z - q (1-q^z)/p) d/k  +  (1-d)^(m+2) (1 - q^z d A / (k (1 - q^(k+1)))),   z = k - r,    for r > 0

    where A = (1 - q^k)/p. Raises `PlanError` for inputs out of range.
    """
    require_count("margin", margin, minimum=0)
    require_count("audit_every", audit_every)
    d = detection_probability(hit_probability)
    if hit_probability == 1:
        return 0.0
    k, p, q = audit_every, hit_probability, 1 - hit_probability
    log_q = math.log1p(-p)
    a = -math.expm1(k * log_q) / p
    untouched = d * a / (k * -math.expm1((k + 1) * log_q))
    intervals, rest = divmod(margin, k)
    if rest == 0:
        return audits_passed(intervals + 1, p) * max(0.0, 1 - untouched)
    unaudited = k - rest
    recent = (unaudited + q * math.expm1(unaudited * log_q) / p) * d / k
    earlier = 1 - math.exp(unaudited * log_q) * untouched
    return audits_passed(intervals + 1, p) * recent + audits_passed(intervals + 2, p) * earlier


def chosen_checkpoint_corruption_probability(
    margin: int, audit_every: int, checkpoint_every: int, hit_probability: float
) -> float:
    """The probability that the checkpoint from which the recovery resumes is corrupt.

    The mean of `corruption_probability` over the places that the audits' grid takes in the checkpoints' grid: the
    checkpoint lies 0 to `checkpoint_every` - 1 steps before the newest step allowed. Exact up to 4,096 such places;
    of more, each run of neighbours counts with its most corrupt one, so that the result is at most 1/4,096 too high.
    """
    require_count("checkpoint_every", checkpoint_every)
    require_count("audit_every", audit_every)
    distances = _checkpoint_distances(margin, audit_every, checkpoint_every)
    distances = distances[:: -(-len(distances) // _MOST_PLACES)]
    risks = [corruption_probability(margin + distance, audit_every, hit_probability) for distance in distances]
    return math.fsum(risks) / len(risks)


def expected_checkpoint_distance_steps(margin: int, audit_every: int, checkpoint_every: int) -> float:
    """Mean steps from the newest step allowed, ``t - k - margin``, back to the newest checkpoint at or before it.

    Checkpoints lie at steps s with (s+1) % C == 0 and audits at t with (t+1) % k == 0, so the distance is
    (j k - margin) mod C for every j alike: with g = gcd(k, C) its mean is (C - g)/2 + (-margin mod g). The usual "half
    a checkpoint interval" is the case of g = 1, up to half a step; with k = C and no margin nothing is lost.
    """
    common = math.gcd(audit_every, checkpoint_every)
    return (checkpoint_every - common) / 2 + -margin % common


def retention(margin: int, audit_every: int, checkpoint_every: int) -> int:
    """How many newest checkpoints to keep so that one at or before ``t - k - margin`` is always among them.

    1 + ceil((k + margin - 1) / C): an alarm at t is raised before the checkpoint of step t is written, so at most
    that many checkpoints lie in the k + margin - 1 steps between. What `VerifiedCheckpoints(keep=...)` takes.
    """
    require_count("margin", margin, minimum=0)
    require_count("audit_every", audit_every)
    require_count("checkpoint_every", checkpoint_every)
    return 1 + -(-(audit_every + margin - 1) // checkpoint_every)


def _checkpoint_distances(margin: int, audit_every: int, checkpoint_every: int) -> range:
    common = math.gcd(audit_every, checkpoint_every)
    return range(-margin % common, checkpoint_every, common)
