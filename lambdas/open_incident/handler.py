"""State OpenIncident: takes the incident up, unless there is nothing to do or nothing that may be done.

Here alone an execution may follow another one that it is no successor of: somebody started it by hand after that one
had ended, which Step Functions is asked.
"""

from __future__ import annotations

from lambdas.adapters.aws import client
from lambdas.adapters.executions import StepFunctions
from lambdas.adapters.runtime import Answer, Work, workflow_handler
from lambdas.domain.incident import Incident, IncidentStatus
from lambdas.domain.outcome import Outcome
from lambdas.settings import Settings


def open_incident(work: Work) -> Answer:
    """``proceed``; ``closed`` for an incident that is closed; ``escalate`` where the alarm names no candidate."""
    incident = work.incident
    if incident.status is IncidentStatus.CLOSED:
        return work.answer(Outcome.CLOSED, f"the incident was closed at {incident.closed_at}")
    if not incident.suspects:
        reason = "the verdict names no candidate, so there is no node to quarantine; stop the job and look at its log"
        return work.answer(Outcome.ESCALATE, reason)
    if not incident.alarm.drill:
        # A GPU that a drill names has done nothing: it must not look like a repeat offender one day.
        work.store.record_gpus(incident)
    nodes = ", ".join(suspect.node_name for suspect in incident.suspects)
    dry = " (dry run: nothing will be changed)" if incident.dry_run else ""
    return work.answer(Outcome.PROCEED, f"{incident.alarm.verdict.kind} verdict against {nodes}{dry}")


def running_driver(incident: Incident, execution: str, settings: Settings) -> str:
    """ARN of another execution of the incident that still runs; empty where this one may take it up."""
    executions = StepFunctions(client("stepfunctions"), settings.state_machine_arn)
    return executions.running(incident.incident_id, incident.execution, besides=execution)


handler = workflow_handler("open_incident", "OpenIncident", open_incident, driven_by=running_driver)
