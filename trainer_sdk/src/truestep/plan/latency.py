"""How long a faulty GPU computes before an audit finds it. Exact expressions; the model is stated once, here.

From its onset on, a faulty GPU corrupts each pass (one forward and backward) with probability p, independently. Every
k-th step is an audit, in which the GPU runs two passes that are compared: its own and a neighbour's micro-batch. The
onset is equally likely at each of the k steps of an interval. Steps are counted from the onset through the audit that
finds the fault, both included, so a fault whose first step is an audit and is found there has latency 1.
"""

from __future__ import annotations

import math

from truestep.plan.errors import require_count, require_probability


def detection_probability(hit_probability: float) -> float:
    """d(p) = 1 - (1-p)^2: the probability that one audit finds a faulty GPU.

    Both of its passes are compared, and one wrong pass is enough. Raises `PlanError` for p outside (0, 1].
    """
    require_probability("hit probability", hit_probability, one_allowed=True)
    return -math.expm1(2 * log_missed_pass(hit_probability))


def expected_latency_steps(audit_every: int, hit_probability: float) -> float:
    """Mean steps from onset through detection: k (1/d - 1/2) + 1/2.

    L = U + k (G - 1) with U uniform on 1..k (steps up to the first audit) and G geometric with mean 1/d (audits
    needed), so E[L] = (k+1)/2 + k (1/d - 1). The closed form in use, k (1/d - 1/2), is its continuous approximation:
    half a step short, which matters only for k of a few steps. Raises `PlanError` for inputs out of range.
    """
    require_count("audit_every", audit_every)
    d = detection_probability(hit_probability)
    return audit_every * (1 / d - 0.5) + 0.5


def latency_exceeds(steps: int, audit_every: int, hit_probability: float) -> float:
    """P(L > steps), exactly: (1-d)^m (1 - d r/k) with m, r = divmod(steps, k).

    After m whole intervals m audits have passed a faulty GPU; the next one came within the first r steps of the next
    interval with probability r/k. Raises `PlanError` for inputs out of range.
    """
    require_count("steps", steps, minimum=0)
    require_count("audit_every", audit_every)
    d = detection_probability(hit_probability)
    intervals, rest = divmod(steps, audit_every)
    return audits_passed(intervals, hit_probability) * (1 - d * rest / audit_every)


def latency_quantile_steps(audit_every: int, hit_probability: float, risk: float) -> int:
    """The smallest number of steps that the latency exceeds with probability at most `risk`.

    Solves `latency_exceeds` for the whole intervals first, then within one. Raises `PlanError` for inputs out of range.
    """
    require_count("audit_every", audit_every)
    require_probability("risk", risk, one_allowed=False)
    d = detection_probability(hit_probability)
    if hit_probability == 1:
        return math.ceil(audit_every * (1 - risk))
    intervals = math.floor(math.log(risk) / (2 * log_missed_pass(hit_probability)))
    within = (1 - risk / audits_passed(intervals, hit_probability)) * audit_every / d
    # Rounding can put the solution a step to either side of the exact one.
    steps = max(0, intervals * audit_every + math.ceil(within) - 1)
    while latency_exceeds(steps, audit_every, hit_probability) > risk:
        steps += 1
    return steps


def expected_clean_steps(audit_every: int, hit_probability: float) -> float:
    """Mean number of steps from the onset on, before detection, up to which every update is still right.

    Sum over i >= 1 of the probability that the first i steps all computed right and the audits among them passed,
    q^(i + audits among them) with q = 1-p: an audited step passes only if both of its passes are right. Averaged over
    the onset, with A = (1 - q^k)/p: q (k - A) / (k p) + q^2 A^2 / (k (1 - q^(k+1))). 0 at p = 1.
    """
    require_count("audit_every", audit_every)
    require_probability("hit probability", hit_probability, one_allowed=True)
    if hit_probability == 1:
        return 0.0
    k, p, q = audit_every, hit_probability, 1 - hit_probability
    log_q = math.log1p(-p)
    a = -math.expm1(k * log_q) / p
    return q * (k - a) / (k * p) + (q * a) ** 2 / (k * -math.expm1((k + 1) * log_q))


def expected_corrupted_steps(audit_every: int, hit_probability: float) -> float:
    """Mean steps from the first wrong update through detection: what a recovery that knew it would have to repeat.

    `expected_latency_steps` less `expected_clean_steps`. The step of the detecting audit counts, as its update is
    dropped, so the least is 1.
    """
    latency = expected_latency_steps(audit_every, hit_probability)
    # With an audit of every step the two differ by exactly 1, which rounding would lose at a small p.
    return 1.0 if audit_every == 1 else max(1.0, latency - expected_clean_steps(audit_every, hit_probability))


def audits_passed(audits: int, hit_probability: float) -> float:
    """(1-d)^n = (1-p)^(2n): the probability that n audits in a row miss a faulty GPU. 1 for n = 0."""
    return math.exp(2 * audits * log_missed_pass(hit_probability)) if audits else 1.0


def log_missed_pass(hit_probability: float) -> float:
    """ln(1-p); minus infinity at p = 1."""
    return -math.inf if hit_probability == 1 else math.log1p(-hit_probability)
