"""The circuit breaker in sentences: what is held, which share of its group that is, and what the limit is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from lambdas.domain.policy import Policy
from lambdas.domain.records import SuspectNode
from truestep.contract.words import counted


def group_sizes(suspects: Iterable[SuspectNode]) -> dict[str, int]:
    """Instance group -> its nodes, of the suspects that were found in one."""
    return {suspect.instance_group: suspect.group_nodes for suspect in suspects if suspect.group_nodes}


def quarantine_sentence(policy: Policy, quarantined: Collection[str], suspects: Collection[SuspectNode]) -> str:
    """What is in quarantine, and what the breaker allows. quarantined: keys of the claims of a cluster's nodes.

    suspects: of the open incidents that are known; a group that none of them belongs to has no figures here.
    """
    sizes = group_sizes(suspects)
    held = Counter(
        {s.claim_key: s.instance_group for s in suspects if s.claim_key in quarantined and s.group_nodes}.values()
    )
    shares = [f"{held[name]} of {size} in {name} ({held[name] / size:.0%})" for name, size in sorted(sizes.items())]
    present = ": " + ", ".join(shares) if held else ""
    which = f" ({', '.join(sorted(quarantined))})" if quarantined else ""
    limits = ", ".join(f"{policy.quarantine_limit(size)} for {name}" for name, size in sorted(sizes.items()))
    return (
        f"{counted(len(quarantined), 'node')} in quarantine{which}{present}. The circuit breaker allows "
        f"{policy.max_quarantined_nodes} in the cluster at once, and no more than {policy.max_quarantined_percent:g}% "
        f"of the suspect's instance group (rounded down, but always one){f': {limits}' if limits else ''}."
    )


def full_groups(policy: Policy, count: int, sizes: Mapping[str, int]) -> list[str]:
    """Groups in which a further suspect's node would not be quarantined, though the cluster's own limit allows it."""
    return sorted(name for name, size in sizes.items() if count >= policy.quarantine_limit(size))
