"""ChooseCheckpoint: the newest trusted checkpoint before the suspect window; what is newer than clean is revoked."""

from __future__ import annotations

from lambdas.adapters.cluster_ports import catalogue_of
from lambdas.adapters.revocation import revoke_all
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.checkpoint_choice import Choice, choose_checkpoint, newest_clean_step, sentences, without
from lambdas.domain.outcome import Outcome
from lambdas.domain.records import CheckpointChoice
from lambdas.ports import CheckpointCatalog
from truestep.contract import CheckpointRef

STATE = "ChooseCheckpoint"


def act(work: Work) -> Answer:
    """Answers chosen, or escalate with every candidate and what speaks against it; never falls back to the latest."""
    alarm = work.incident.alarm
    if alarm.drill:
        return work.answer(Outcome.CHOSEN, "drill: it has no run, so there is nothing to resume")
    measured = work.incident.confirmation.hit_probability if work.incident.confirmation else None
    margin = work.policy.margin_steps(measured)
    catalogue = catalogue_of(work)
    choice = _choose(work, catalogue, margin)
    if not work.incident.rejected:
        # A rejected accusation says nothing against what was trained meanwhile, and a revocation is for good.
        revoke_all(work, catalogue, choice)
    if choice.chosen is None:
        listed = "; ".join(sentences(choice)[:6]) or "there are no checkpoints at all"
        return work.answer(Outcome.ESCALATE, f"{choice.reason}: {listed}")
    chosen = CheckpointChoice(
        checkpoint=choice.chosen,
        reason=choice.reason,
        lost_steps=max(0, alarm.step - choice.chosen.step),
        margin_steps=margin,
        hit_probability=work.policy.hit_probability(measured),
        risk=work.policy.risk,
        refused=sentences(choice, newer_than=choice.chosen.step)[:50],
    )
    return work.answer(Outcome.CHOSEN, choice.reason, incident=work.incident.evolve(checkpoint=chosen))


def _choose(work: Work, catalogue: CheckpointCatalog, margin_steps: int) -> Choice:
    """Choose until the chosen one's files are all there: each failure takes one candidate out."""
    incident, alarm = work.incident, work.incident.alarm
    candidates = catalogue.candidates(alarm.run.checkpoint_root, work.store.checkpoints(incident.job))
    clean = newest_clean_step(alarm)
    while True:
        choice = choose_checkpoint(
            candidates,
            run_id=alarm.run.run_id,
            alarm_id=alarm.alarm_id,
            clean_through=clean,
            margin_steps=margin_steps,
        )
        chosen: CheckpointRef | None = choice.chosen
        problem = catalogue.missing_files(chosen) if chosen is not None else ""
        if chosen is None or not problem:
            return choice
        candidates = without(candidates, chosen, problem)


handler = workflow_handler("choose_checkpoint", STATE, act)
