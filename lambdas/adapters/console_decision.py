"""A decision that somebody gives by starting the state machine ``approve`` in the Step Functions console.

People on call may invoke decide_approval, since the command does, so that an invocation proves nothing of who calls: a
decision that came in it could be anybody's, in the name of an execution that never was. So none comes in it. The
function is given the ARN of an execution and asks Step Functions for it: it must be one of ``approve``, it must still
run, and its input is the decision. Such an execution exists only where somebody was allowed ``states:StartExecution``
on this one state machine, and CloudTrail has who. Whoever invokes the function with the ARN of an execution that runs
repeats what that execution does itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from lambdas.adapters.executions import StepFunctions
from lambdas.domain.errors import LinkError, TransientError
from truestep.contract import parse_json

_FIELDS: Final = {"incident_id": str, "decision": str, "comment": str, "acknowledge": bool}
_EXAMPLE: Final = '{"incident_id": "inc-...", "decision": "approve", "comment": "seen the charts"}'


@dataclass(frozen=True, kw_only=True)
class ConsoleDecision:
    """What the input of an execution of ``approve`` says, as the page's form would."""

    incident_id: str
    form: dict[str, str]
    by: str


def console_decision(executions: StepFunctions, execution: str, *, approve_arn: str) -> ConsoleDecision:
    """The decision that the execution of this ARN was started with. approve_arn: of the state machine ``approve``.

    Raises `LinkError` where it is another state machine's, is over, or says no decision; `TransientError` where Step
    Functions does not know it, as it may for a moment after the start.
    """
    if not execution.startswith(approve_arn.replace(":stateMachine:", ":execution:", 1) + ":"):
        raise LinkError("who decides is not proved: only an execution of the state machine approve decides so")
    found = executions.find(execution)
    if found is None:
        raise TransientError(f"Step Functions does not know the execution {execution}")
    if found.state_machine_arn != approve_arn or not found.running:
        raise LinkError(f"{execution} is over, and decides nothing any more: start the state machine approve again")
    given = _given(found.given)
    form = {"decision": given["decision"], "comment": given.get("comment", "")}
    if given.get("acknowledge"):
        form["acknowledge"] = "yes"
    return ConsoleDecision(incident_id=given["incident_id"], form=form, by=f"by console, execution {execution}")


def _given(text: str) -> dict[str, Any]:
    try:
        given = parse_json(text)
        json.dumps(given, ensure_ascii=False).encode()
    except ValueError:
        # Half a surrogate pair passes JSON, and no service takes it.
        raise LinkError("nothing was decided: the input is not JSON in Unicode") from None
    if not isinstance(given, dict):
        raise LinkError(f"nothing was decided: the input is no object; give {_EXAMPLE}")
    unknown = sorted(set(given) - set(_FIELDS))
    if unknown:
        raise LinkError(f"nothing was decided: there is no field {unknown[0][:60]!r}; there are {', '.join(_FIELDS)}")
    for name, kind in _FIELDS.items():
        if not isinstance(given.get(name, kind()), kind):
            raise LinkError(f"nothing was decided: {name} is {'true or false' if kind is bool else 'text'}")
    if not given.get("incident_id") or given.get("decision") not in ("approve", "reject"):
        raise LinkError(f'nothing was decided: give incident_id, and decision "approve" or "reject": {_EXAMPLE}')
    return given
