"""Running the failing computation again on the suspects: whether to, and what the runs show. Pure.

A node's runs count by the reference that a majority of ranks had computed in the audit. Where the audit settled none,
the rank's result that the healthy node gives is the reference; without that, a device that repeats one rank's result
says nothing of whose result is right.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from lambdas.domain.incident import Incident, parse_iso
from lambdas.domain.policy import Policy
from lambdas.domain.records import Confirmation, ConfirmationStatus, ConfirmedNode, SuspectNode
from truestep.contract import DeviceReport, VerdictKind, wilson_interval
from truestep.contract.words import counted

STATE: Final = "ConfirmSuspect"
MOST_SUSPECTS: Final = 4
"""More nodes are not confirmed at once: an alarm that accuses so many accuses nobody."""


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What one node's runs showed."""

    node: ConfirmedNode
    wrong: tuple[DeviceReport, ...]
    runs: int
    """On all of its GPUs."""
    complete: bool
    """Every GPU was run, to the end."""
    absent: tuple[str, ...] = ()
    """UUIDs of the node's accused GPUs that were not among those that ran."""
    caught: bool = True
    """An accused GPU is among those in `wrong`, or all of them ran: what differs bears on the accusation."""

    @property
    def clean(self) -> bool:
        """Ran everywhere, on what is accused too, and nothing differed."""
        return self.complete and not self.wrong and not self.absent


def bundle_of(incident: Incident) -> str:
    """URI of the alarm's evidence bundle; empty without one.

    An alarm that did not wait for its bundle to the end says where it may be complete by now.
    """
    given = [incident.alarm.evidence.get(name) for name in ("bundle_uri", "bundle_expected")]
    return next((uri for uri in given if isinstance(uri, str) and uri), "")


def unfinished(incident: Incident) -> str:
    """Why the alarm names no finished bundle though there may be one by now; empty where it does, or none will come."""
    evidence = incident.alarm.evidence
    if evidence.get("bundle_uri") or not bundle_of(incident):
        return ""
    return f"the alarm went out without it: {evidence.get('bundle_failed') or 'it does not say why'}"


def to_confirm(incident: Incident) -> tuple[SuspectNode, ...]:
    """The suspects whose nodes are there."""
    return tuple(suspect for suspect in incident.suspects if suspect.present)


def not_run(incident: Incident, policy: Policy) -> str:
    """Why the failing computation is not run again; empty where it is. Skipping says nothing for or against anybody."""
    uri, suspects = bundle_of(incident), to_confirm(incident)
    if not uri:
        evidence = incident.alarm.evidence
        why = evidence.get("bundle_failed") or evidence.get("bundle_missing")
        return "the alarm carries no evidence bundle to run again" + (f": {why}" if isinstance(why, str) else "")
    if not suspects:
        return "no suspect node is in the cluster any more"
    names = ", ".join(suspect.node_name for suspect in suspects)
    by_hand = f"`truestep confirm {uri}` on {names} would settle the cause"
    if incident.dry_run:
        return f"dry run: no Job was started; {by_hand}"
    if not policy.confirm_runs:
        return f"the policy's confirm_runs is 0; {by_hand}"
    if incident.workload is None:
        return f"no suspect's pod was there any more, or certain, when its specification was to be recorded; {by_hand}"
    if incident.workload.refused:
        return f"{incident.workload.refused}; {by_hand}"
    if len(suspects) > MOST_SUSPECTS:
        return f"{len(suspects)} nodes are suspected, and at most {MOST_SUSPECTS} are confirmed at once; {by_hand}"
    return ""


def wanted_anew(incident: Incident) -> bool:
    """Whether a person let the incident go on from here after the confirmation that is on record."""
    stop, known = incident.escalation, incident.confirmation
    if stop is None or known is None or stop.resume_from != STATE:
        return False
    return not known.at or parse_iso(known.at) < parse_iso(stop.at)


def cut_short(incident: Incident) -> Incident:
    """The incident without a confirmation that claims to be running: nobody waits for its Jobs any more."""
    known = incident.confirmation
    if known is None or known.status is not ConfirmationStatus.RUNNING:
        return incident
    reason = "it was left before the runs had ended, and shows nothing; the execution's history says why"
    return incident.evolve(confirmation=_as(known, ConfirmationStatus.SKIPPED, reason))


def finished(nodes: Iterable[ConfirmedNode]) -> bool:
    """Whether nothing is waited for any more: the healthy node's runs mean nothing without a suspect's."""
    nodes = tuple(nodes)
    suspects = [node for node in nodes if node.suspect]
    return all(node.ended for node in suspects) and (
        not any(device.runs for node in suspects for device in node.gpus) or all(node.ended for node in nodes)
    )


def conclude(incident: Incident, confirmation: Confirmation) -> Confirmation:
    """What the ended runs show. Where the alarm had several suspects, `named` is the one they single out.

    Unless a difference was found on the suspects alone, the reason says what of the environment the Jobs went without.
    """
    found = _conclusion(incident, confirmation)
    missing = incident.workload.left_out if incident.workload else ()
    if not missing or found.status is ConfirmationStatus.REPRODUCED:
        return found
    return _as(found, found.status, f"{found.reason}; left out of the Job: {', '.join(missing)[:300]}")


def _conclusion(incident: Incident, confirmation: Confirmation) -> Confirmation:
    nodes = _by_one_reference(confirmation.nodes)
    confirmation = dataclasses.replace(confirmation, nodes=nodes)
    accused = {suspect.node_name: suspect.gpu_uuids for suspect in incident.suspects}
    shown = [_shown(node, accused.get(node.node_name, ()) if node.suspect else ()) for node in nodes]
    suspects = [one for one in shown if one.node.suspect]
    healthy = next((one for one in shown if not one.node.suspect), None)
    if not any(one.runs for one in suspects):
        why = "; ".join(f"{one.node.node_name}: {_problem(one)}" for one in suspects)
        why = "; ".join(filter(None, (why, unfinished(incident))))
        return _as(confirmation, ConfirmationStatus.SKIPPED, f"it could not be run again ({why}); this shows nothing")
    if healthy is not None and healthy.wrong:
        return _as(
            confirmation,
            ConfirmationStatus.SOFTWARE,
            f"healthy node {_found(healthy)} as well; {_told(suspects)}. That is software, or a model that is built "
            "differently here, not one GPU",
        )
    wrong = [one for one in suspects if one.wrong]
    beside = _beside(healthy)
    ambiguous = incident.alarm.verdict.kind is VerdictKind.AMBIGUOUS
    if not wrong and not any(one.runs and not one.absent for one in suspects):
        said = f"what is accused could not be run again ({_told(suspects)}); this shows nothing"
        return _as(confirmation, ConfirmationStatus.SKIPPED, said)
    if not wrong:
        unsettled = _unsettled(suspects, healthy) if ambiguous else ""
        said = f"{_told(suspects)}; {beside}. {unsettled or 'No difference proves nothing: a fault may be rarer, or '}"
        said += "" if unsettled else "need the heat or the neighbours of the real job"
        return _as(confirmation, ConfirmationStatus.NOT_REPRODUCED, said)
    if ambiguous and (len(wrong) > 1 or not all(one.clean for one in suspects if not one.wrong)):
        return _as(
            confirmation,
            ConfirmationStatus.UNSETTLED,
            f"{_told(suspects)}; {beside}. That singles out none of the suspects",
        )
    wrong = [one for one in wrong if one.caught]
    if not wrong:
        said = f"{_told(suspects)}; {beside}. That is not what the alarm accuses"
        return _as(confirmation, ConfirmationStatus.UNSETTLED, said)
    said = f"{_told(suspects)}; {beside}"
    if ambiguous and len(suspects) > 1:
        said += f". Of the alarm's suspects {wrong[0].node.node_name} alone computes it wrongly"
    confirmation = dataclasses.replace(
        confirmation,
        named=wrong[0].node.node_name if ambiguous else "",
        hit_probability=_hit_probability(incident, wrong),
    )
    return _as(confirmation, ConfirmationStatus.REPRODUCED, said)


def cleared_by(incident: Incident, confirmation: Confirmation) -> tuple[SuspectNode, ...]:
    """The suspects to give back: another one was named. Those whose node is gone stay on record."""
    if confirmation.status is not ConfirmationStatus.REPRODUCED or not confirmation.named:
        return ()
    return tuple(suspect for suspect in to_confirm(incident) if suspect.node_name != confirmation.named)


def _as(confirmation: Confirmation, status: ConfirmationStatus, reason: str) -> Confirmation:
    return dataclasses.replace(confirmation, status=status, reason=reason)


def _by_one_reference(nodes: tuple[ConfirmedNode, ...]) -> tuple[ConfirmedNode, ...]:
    """The nodes with `differing` counted against the healthy node's result where the audit had settled none."""
    if any(node.settled for node in nodes):
        return nodes
    given: Counter[str] = Counter()
    for device in (device for node in nodes if not node.suspect for device in node.gpus):
        given.update(device.gave)
    if not given:
        return nodes
    # A healthy node that does not always give it differs by it, and is no referee: that is software.
    rank = given.most_common(1)[0][0]
    return tuple(
        dataclasses.replace(
            node,
            settled=True,
            gpus=tuple(
                dataclasses.replace(device, differing=device.runs - device.gave.get(rank, 0)) for device in node.gpus
            ),
        )
        for node in nodes
    )


def _shown(node: ConfirmedNode, accused: Iterable[str]) -> Shown:
    wrong = tuple(device for device in node.gpus if device.differing or device.weights_differ)
    ran = {device.gpu_uuid for device in node.gpus if device.runs}
    absent = tuple(gpu for gpu in accused if gpu not in ran)
    return Shown(
        node=node,
        wrong=wrong,
        absent=absent,
        caught=not absent or any(device.gpu_uuid in accused for device in wrong),
        runs=sum(device.runs for device in node.gpus),
        complete=bool(node.gpus) and all(device.runs and not device.problem for device in node.gpus),
    )


def _told(shown: Iterable[Shown]) -> str:
    return "; ".join(_found(one) for one in shown)


def _found(shown: Shown) -> str:
    """The node and what its runs showed."""
    name = shown.node.node_name or "a healthy node"
    if not shown.runs:
        return f"{name} was not run: {_problem(shown)}"
    missed = f", but {_missed(shown.absent)}" if shown.absent else ""
    if not shown.wrong:
        gpus = counted(len(shown.node.gpus), "GPU")
        left = "" if shown.complete else f" ({_problem(shown)})"
        return f"{name} differs in 0 of {counted(shown.runs, 'run')} on {gpus}{left}{missed}"
    return f"{name} differs: {', '.join(_wrong_gpu(device) for device in shown.wrong)}{missed}"


def _missed(gpus: tuple[str, ...]) -> str:
    which = ", ".join(gpus[:4])
    return (
        f"accused GPU {which} was not among those that ran"
        if len(gpus) == 1
        else (f"accused GPUs {which} were not among those that ran")
    )


def _wrong_gpu(device: DeviceReport) -> str:
    which = device.gpu_uuid or device.device
    if not device.differing:
        return f"{which} does not hold the weights that are copied to it"
    share = 100 * device.differing / device.runs
    rate = f"{share:.0f}%" if share in (0, 100) else f"{share:.2g}%"
    first = f", first at {device.first}" if device.first else ""
    return f"{which} in {device.differing:,} of {counted(device.runs, 'run')} (hit rate {rate}{first})"


def _problem(shown: Shown) -> str:
    problems = [shown.node.problem, *(f"{one.device}: {one.problem}" for one in shown.node.gpus if one.problem)]
    return next(filter(None, problems), "no reason is known")[:200]


def _beside(healthy: Shown | None) -> str:
    if healthy is None:
        return "no healthy node was asked"
    if not healthy.runs:
        return f"a healthy node was not run for comparison ({_problem(healthy)})"
    return f"healthy node {_found(healthy)}"


def _unsettled(suspects: list[Shown], healthy: Shown | None) -> str:
    if any(one.node.settled for one in suspects) or (healthy is not None and healthy.node.settled):
        return ""
    return "Each repeats its own result, and nothing says whose is right: the verdict stays ambiguous"


def _hit_probability(incident: Incident, wrong: list[Shown]) -> float | None:
    """Of the accused GPU where it is among those that differ, else of the one that differs most often.

    The lower end of the 95% interval: the share that was observed flatters few runs, 1 of 1 would leave no margin.
    """
    accused = {gpu for suspect in incident.suspects for gpu in suspect.gpu_uuids}
    devices = [device for one in wrong for device in one.wrong if device.differing]
    named = [device for device in devices if device.gpu_uuid in accused] or devices
    return max((wilson_interval(device.differing, device.runs)[0] for device in named), default=None)
