"""The recovery's definition, run: every Choice, Retry and Catch leads where docs/architecture.md says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.workflow.conftest import STATES, Workflow, folder_of
from tests.workflow.script import Answers, KeepsSilent, Raises, Reply, Returns

TASKS = [name for name, state in STATES.items() if state["Type"] == "Task"]
TOKEN_TASKS = {name for name in TASKS if STATES[name]["Resource"].endswith(".waitForTaskToken")}
RESUMABLE = [name for name in TASKS if name != "Escalate"]
MAX_ATTEMPTS = 6

# docs/architecture.md, section 2: state, outcome, next state.
TRANSITIONS = [
    ("OpenIncident", "proceed", "ResolveNode"),
    ("OpenIncident", "closed", "Done"),
    ("OpenIncident", "escalate", "Escalate"),
    ("ResolveNode", "resolved", "CordonNode"),
    ("ResolveNode", "ambiguous", "CordonNode"),
    ("ResolveNode", "node_gone", "SnapshotEvidence"),
    ("ResolveNode", "escalate", "Escalate"),
    ("CordonNode", "cordoned", "SnapshotEvidence"),
    ("CordonNode", "left_theirs", "SnapshotEvidence"),
    ("CordonNode", "node_gone", "SnapshotEvidence"),
    ("CordonNode", "escalate", "Escalate"),
    ("SnapshotEvidence", "recorded", "StopTraining"),
    ("StopTraining", "stopped", "ReadHistory"),
    ("StopTraining", "escalate", "Escalate"),
    ("ReadHistory", "read", "ConfirmSuspect"),
    ("ConfirmSuspect", "recorded", "StartHealthCheck"),
    ("ConfirmSuspect", "skipped", "StartHealthCheck"),
    ("StartHealthCheck", "started", "RequestApproval"),
    ("StartHealthCheck", "skipped", "RequestApproval"),
    ("StartHealthCheck", "deferred", "RequestApproval"),
    ("RequestApproval", "approved", "SettleHealthCheck"),
    ("RequestApproval", "rejected", "ReleaseNode"),
    ("RequestApproval", "expired", "Escalate"),
    ("SettleHealthCheck", "settled", "ReplaceNode"),
    ("ReplaceNode", "requested", "AwaitReplacement"),
    ("ReplaceNode", "already_replaced", "AwaitReplacement"),
    ("ReplaceNode", "node_gone", "AwaitReplacement"),
    ("ReplaceNode", "escalate", "Escalate"),
    ("AwaitReplacement", "ready", "ChooseCheckpoint"),
    ("AwaitReplacement", "escalate", "Escalate"),
    ("ReleaseNode", "released", "ChooseCheckpoint"),
    ("ReleaseNode", "left_alone", "ChooseCheckpoint"),
    ("ChooseCheckpoint", "chosen", "Relaunch"),
    ("ChooseCheckpoint", "escalate", "Escalate"),
    ("Relaunch", "relaunched", "VerifyRecovery"),
    ("Relaunch", "escalate", "Escalate"),
    ("VerifyRecovery", "verified", "CloseIncident"),
    ("VerifyRecovery", "escalate", "Escalate"),
    ("CloseIncident", "closed", "Done"),
]
POLLING = [
    ("StopTraining", "stopped", "ReadHistory"),
    ("ConfirmSuspect", "recorded", "StartHealthCheck"),
    ("SettleHealthCheck", "settled", "ReplaceNode"),
    ("AwaitReplacement", "ready", "ChooseCheckpoint"),
    ("Relaunch", "relaunched", "VerifyRecovery"),
]
# A failure of these blocks nothing: the recovery goes on without their result.
TOLERATED = {"SnapshotEvidence": "StopTraining", "ConfirmSuspect": "StartHealthCheck"}
HAPPY_PATH = [
    ("OpenIncident", "proceed"),
    ("ResolveNode", "resolved"),
    ("CordonNode", "cordoned"),
    ("SnapshotEvidence", "recorded"),
    ("StopTraining", "stopped"),
    ("ReadHistory", "read"),
    ("ConfirmSuspect", "recorded"),
    ("StartHealthCheck", "started"),
    ("RequestApproval", "approved"),
    ("SettleHealthCheck", "settled"),
    ("ReplaceNode", "requested"),
    ("AwaitReplacement", "ready"),
    ("ChooseCheckpoint", "chosen"),
    ("Relaunch", "relaunched"),
    ("VerifyRecovery", "verified"),
    ("CloseIncident", "closed"),
]


def function_of(state: str) -> str:
    """`Relaunch` -> `relaunch_training`, read from the definition."""
    name = STATES[state]["Arguments"]["FunctionName"]
    return folder_of(name.removeprefix("${").removesuffix("}"))


def go_to(workflow: Workflow, incident_id: str, state: str) -> None:
    """Plan the way to a state: escalate at once, and let a person choose it."""
    if state == "OpenIncident":
        return
    workflow.script.plan(incident_id, "open_incident", Returns("escalate"))
    workflow.script.plan(incident_id, "escalate", Answers(resume_from=state))


def test_the_happy_path_visits_every_state_once_and_tells_each_function_of_whom_and_by_whom(workflow: Workflow) -> None:
    incident = workflow.new_incident()
    for state, outcome in HAPPY_PATH:
        workflow.script.plan(incident, function_of(state), Returns(outcome))

    execution = workflow.start(incident)
    run = workflow.wait(execution)

    assert run.status == "SUCCEEDED", run.states
    tasks = [state for state in run.states if state in TASKS]
    assert tasks == [state for state, _ in HAPPY_PATH]
    for (state, _), invocation in zip(HAPPY_PATH, run.invocations, strict=True):
        expected = {"incident_id", "execution"} | ({"task_token"} if state in TOKEN_TASKS else set())
        assert set(invocation.event) == expected, state
        assert invocation.event["execution"] == execution


@pytest.mark.parametrize(("state", "outcome", "following"), TRANSITIONS)
def test_an_outcome_leads_to_the_documented_state(workflow: Workflow, state: str, outcome: str, following: str) -> None:
    incident = workflow.new_incident()
    go_to(workflow, incident, state)
    workflow.script.plan(incident, function_of(state), Returns(outcome))

    run = workflow.run(incident)

    assert run.after(state) == following
    assert run.status == ("SUCCEEDED" if following == "Done" else "FAILED")


def test_every_outcome_that_the_definition_knows_is_tested() -> None:
    tested = {(state, outcome) for state, outcome, _ in TRANSITIONS} | {(state, "pending") for state, _, _ in POLLING}
    for name, state in STATES.items():
        for choice in state.get("Choices", ()) if name.endswith("Outcome") else ():
            for outcome in choice["Condition"].split("'")[1::2]:
                assert (name.removesuffix("Outcome"), outcome) in tested


@pytest.mark.parametrize(("state", "outcome", "following"), POLLING)
def test_a_pending_state_is_asked_again_until_it_is_done(
    workflow: Workflow, state: str, outcome: str, following: str
) -> None:
    incident = workflow.new_incident()
    go_to(workflow, incident, state)
    function = function_of(state)
    workflow.script.plan(incident, function, Returns("pending", 5), Returns("pending", 5), Returns(outcome))

    run = workflow.run(incident)

    assert [call.function for call in run.invocations].count(function) == 3
    assert sum(name.startswith("WaitFor") for name in run.states) == 2
    assert following in run.states


@pytest.mark.parametrize("state", [name for name in RESUMABLE if name != "SnapshotEvidence"])
def test_an_unknown_outcome_escalates(workflow: Workflow, state: str) -> None:
    incident = workflow.new_incident()
    go_to(workflow, incident, state)
    workflow.script.plan(incident, function_of(state), Returns("no_such_outcome"))

    assert workflow.run(incident).after(state) == "Escalate"


@pytest.mark.parametrize("state", RESUMABLE)
def test_a_transient_error_is_retried_and_forgotten(workflow: Workflow, state: str) -> None:
    incident = workflow.new_incident()
    go_to(workflow, incident, state)
    transitions = {name: (outcome, following) for name, outcome, following in reversed(TRANSITIONS)}
    outcome, following = transitions[state]
    function = function_of(state)
    workflow.script.plan(incident, function, Raises("TransientError"), Raises("TransientError"), Returns(outcome))

    run = workflow.run(incident)

    assert [call.function for call in run.invocations].count(function) == 3
    assert run.states.count(state) == 1
    assert run.after(state) == following


@pytest.mark.parametrize("state", RESUMABLE)
def test_any_other_error_is_caught_at_once(workflow: Workflow, state: str) -> None:
    incident = workflow.new_incident()
    go_to(workflow, incident, state)
    function = function_of(state)
    workflow.script.plan(incident, function, Raises("ValueError"))

    run = workflow.run(incident)

    calls = [call.function for call in run.invocations]
    assert calls.count(function) == 1
    assert run.after(state) == TOLERATED.get(state, "Escalate")
    if state not in TOLERATED:
        told = [call.event for call in run.invocations if call.function == "escalate"][-1]
        assert told["incident_id"] == incident
        assert told["failed_state"] == state
        assert told["error"] == "ValueError"
        assert "as the script says" in told["cause"]


def test_a_function_that_was_killed_is_run_again(workflow: Workflow) -> None:
    incident = workflow.new_incident()
    killed = Raises("Runtime.ExitError"), Raises("Sandbox.Timedout")
    workflow.script.plan(incident, "open_incident", *killed, Returns("closed"))
    assert workflow.run(incident).status == "SUCCEEDED"


def test_escalate_reaches_people_whatever_its_first_errors_are(workflow: Workflow) -> None:
    incident = workflow.new_incident()
    errors = [Raises("ClientError")] * (MAX_ATTEMPTS + 2)
    workflow.script.plan(incident, "escalate", *errors, Answers(resume_from="CloseIncident"))
    workflow.script.plan(incident, "close_incident", Returns("closed"))
    assert workflow.run(incident).status == "SUCCEEDED"


@pytest.mark.parametrize("state", ["OpenIncident", "SnapshotEvidence", "RequestApproval", "Relaunch"])
def test_an_execution_that_does_not_drive_the_incident_ends_without_asking_anybody_and_without_an_alarm(
    workflow: Workflow, state: str
) -> None:
    incident = workflow.new_incident()
    for function in {function_of(name) for name in TASKS}:
        workflow.script.plan(incident, function, Raises("DrivenElsewhereError"))

    run = workflow.wait(workflow.start(incident, resume_from=state))

    # What the metrics ExecutionsFailed, TimedOut and Aborted count, this is not.
    assert (run.status, run.states[-1]) == ("SUCCEEDED", "DrivenElsewhere")
    assert run.output is not None
    assert run.output["outcome"] == "driven_elsewhere"
    assert "as the script says" in run.output["cause"]
    calls = [call.function for call in run.invocations]
    if state == "OpenIncident":
        # Where nothing is on record yet Escalate would be let in, and take the incident over.
        assert calls == ["open_incident"]
    else:
        assert (calls[0], calls[-1], calls.count("escalate")) == (function_of(state), "escalate", 1)


def test_retries_end_and_the_error_escalates(workflow: Workflow) -> None:
    incident = workflow.new_incident()
    workflow.script.plan(incident, "open_incident", *[Raises("TransientError")] * (MAX_ATTEMPTS + 1))

    run = workflow.run(incident)

    assert [call.function for call in run.invocations].count("open_incident") == MAX_ATTEMPTS + 1
    assert run.after("OpenIncident") == "Escalate"


def test_a_polling_state_has_all_its_retries_at_every_visit(workflow: Workflow) -> None:
    incident = workflow.new_incident()
    go_to(workflow, incident, "StopTraining")
    visit: list[Reply] = [*[Raises("TransientError")] * (MAX_ATTEMPTS - 1), Returns("pending", 1)]
    workflow.script.plan(incident, "stop_training", *visit, *visit, *visit, Returns("stopped"))

    run = workflow.run(incident)

    assert run.after("StopTraining") != "Escalate"
    assert "ReadHistory" in run.states


@pytest.mark.parametrize("state", RESUMABLE)
def test_a_person_can_resume_an_escalated_incident_from_any_state(workflow: Workflow, state: str) -> None:
    incident = workflow.new_incident()
    workflow.script.plan(incident, "open_incident", Raises("ValueError"))
    workflow.script.plan(incident, "escalate", Answers(resume_from=state))

    run = workflow.run(incident)

    assert run.after("Escalate") == state


@pytest.mark.parametrize(
    ("chosen", "first"), [("Relaunch", "Relaunch"), ("ReplaceNode", "ReplaceNode"), ("x", "Failed")]
)
def test_a_successor_begins_where_a_person_chose(workflow: Workflow, chosen: str, first: str) -> None:
    run = workflow.wait(workflow.start(workflow.new_incident(), resume_from=chosen))

    assert run.after("Start") == first
    assert "OpenIncident" not in run.states


def test_escalate_is_told_which_execution_waits(workflow: Workflow) -> None:
    incident = workflow.new_incident()
    workflow.script.plan(incident, "open_incident", Returns("escalate"), Returns("escalate"))
    workflow.script.plan(incident, "escalate", Answers(resume_from="OpenIncident"))
    execution = workflow.start(incident)
    workflow.wait(execution)

    told = [call.event for call in workflow.script.wait_for(incident, "escalate", count=2)]
    assert [event["execution"] for event in told] == [execution, execution]


def test_an_unknown_state_to_resume_from_fails_the_execution(workflow: Workflow) -> None:
    run = workflow.run(workflow.new_incident())

    assert run.status == "FAILED"
    assert run.after("Escalate") == "Failed"


def test_a_missed_heartbeat_asks_for_approval_again_with_a_new_token(workflow: Workflow) -> None:
    def shorten(states: dict[str, Any]) -> None:
        states["RequestApproval"]["HeartbeatSeconds"] = 1

    arn = workflow.variant("short-heartbeat", shorten)
    incident = workflow.new_incident()
    go_to(workflow, incident, "RequestApproval")
    workflow.script.plan(incident, "request_approval", KeepsSilent(), Answers("rejected"))
    run = workflow.wait(workflow.start(incident, state_machine_arn=arn))
    first, second = (
        call.event["task_token"] for call in workflow.script.wait_for(incident, "request_approval", count=2)
    )

    assert first != second
    # The engine forgets the tokens of an execution that has ended; while it runs the answer is TaskTimedOut.
    with pytest.raises(ClientError, match=r"TaskTimedOut|InvalidToken"):
        workflow.client.send_task_success(taskToken=first, output=json.dumps({"outcome": "rejected"}))
    assert run.after("RequestApproval") == "ReleaseNode"
    timed_out = [event["taskTimedOutEventDetails"] for event in run.events if "taskTimedOutEventDetails" in event]
    assert [details["error"] for details in timed_out] == ["States.HeartbeatTimeout"]


def test_an_approval_that_nobody_gives_escalates_and_that_too_ends(workflow: Workflow) -> None:
    def shorten(states: dict[str, Any]) -> None:
        for name in ("RequestApproval", "Escalate"):
            states[name] |= {"HeartbeatSeconds": 1, "TimeoutSeconds": 2}
            states[name]["Retry"] = []
            del states[name]["HeartbeatSeconds"]

    arn = workflow.variant("short-timeouts", shorten)
    incident = workflow.new_incident()
    go_to(workflow, incident, "RequestApproval")
    workflow.script.plan(incident, "request_approval", KeepsSilent())
    workflow.script.plan(incident, "escalate", KeepsSilent())

    run = workflow.wait(workflow.start(incident, state_machine_arn=arn))

    assert run.status == "FAILED"
    told = [call.event for call in run.invocations if call.function == "escalate"][-1]
    assert (told["failed_state"], told["error"]) == ("RequestApproval", "States.Timeout")
    assert run.states[-1] == "Failed"


def test_an_execution_that_waits_for_approval_can_be_stopped(workflow: Workflow) -> None:
    incident = workflow.new_incident()
    go_to(workflow, incident, "RequestApproval")
    workflow.script.plan(incident, "request_approval", KeepsSilent())
    execution = workflow.start(incident)
    workflow.script.wait_for(incident, "request_approval")

    workflow.client.stop_execution(executionArn=execution, error="Operator", cause="not needed")
    run = workflow.wait(execution)

    assert run.status == "ABORTED"
    described = workflow.client.describe_execution(executionArn=execution)
    assert (described["error"], described["cause"]) == ("Operator", "not needed")


def test_the_second_of_two_answers_is_refused(workflow: Workflow) -> None:
    incident = workflow.new_incident()
    go_to(workflow, incident, "RequestApproval")
    workflow.script.plan(incident, "request_approval", KeepsSilent())
    workflow.script.plan(incident, "settle_health_check", Returns("pending", 500))
    execution = workflow.start(incident)
    token = workflow.script.wait_for(incident, "request_approval")[0].event["task_token"]
    answer = {"incident_id": incident, "outcome": "approved"}

    workflow.client.send_task_success(taskToken=token, output=json.dumps(answer))
    with pytest.raises(ClientError, match="TaskTimedOut"):
        workflow.client.send_task_success(taskToken=token, output=json.dumps(answer | {"outcome": "rejected"}))

    assert workflow.wait(execution).after("RequestApproval") == "SettleHealthCheck"


def test_starting_an_incident_twice_gives_the_same_execution(workflow: Workflow) -> None:
    incident = workflow.new_incident()
    go_to(workflow, incident, "RequestApproval")
    workflow.script.plan(incident, "request_approval", KeepsSilent())

    first = workflow.start(incident)
    workflow.script.wait_for(incident, "request_approval")
    second = workflow.start(incident)

    assert first == second
    workflow.client.stop_execution(executionArn=first)
    assert workflow.wait(first).status == "ABORTED"
