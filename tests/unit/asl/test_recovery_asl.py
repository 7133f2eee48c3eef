"""The state machine's text: the table of docs/architecture.md, the rules for tasks, and what the linters say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lambdas.domain.outcome import Outcome
from lambdas.domain.workflow import RESUMABLE_STATES, status_in
from lambdas.settings import FUNCTION_VARIABLES

ROOT = Path(__file__).parents[3]
DEFINITION = ROOT / "state_machines" / "recovery.asl.json"
MACHINE: dict[str, Any] = json.loads(DEFINITION.read_text())
STATES: dict[str, dict[str, Any]] = MACHINE["States"]
TASKS = {name: state for name, state in STATES.items() if state["Type"] == "Task"}
NEVER_BLOCKS = {"SnapshotEvidence": "StopTraining", "ConfirmSuspect": "StartHealthCheck"}
TRANSIENT = {
    "Lambda.TooManyRequestsException",
    "Lambda.ServiceException",
    "Lambda.SdkClientException",
    "Lambda.AWSLambdaException",
    "TransientError",
}

CRASHED = {"Sandbox.Timedout", "Runtime.ExitError", "Lambda.Unknown"}


def documented() -> dict[str, tuple[str, bool, dict[str, str]]]:
    """State -> (function, whether it waits for a token, outcome -> next state), as the page's table says."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows: dict[str, tuple[str, bool, dict[str, str]]] = {}
    for state, token, function, outcomes in re.findall(r"^\| (\w+)( \*token\*)? \| (\w+) \| (.+) \|$", page, re.M):
        if state not in TASKS:
            continue
        branches: dict[str, str] = {}
        for branch in re.sub(r"\(.*?\)", "", outcomes).split(";"):
            words, _, target = branch.partition("->")
            for word in words.split(","):
                branches[word.strip()] = target.strip()
        rows[state] = (function, bool(token), branches)
    return rows


TABLE = documented()


def substituted() -> str:
    return re.sub(r"\$\{(\w+)Arn\}", r"arn:aws:lambda:us-east-1:123456789012:function:\1", DEFINITION.read_text())


def branches(task: str) -> dict[str, str]:
    """Outcome -> the task, or end, that the state machine goes to; a wait that leads back is ``wait``."""
    following = STATES[task]["Next"]
    if STATES[following]["Type"] != "Choice":
        return {}
    found: dict[str, str] = {}
    for choice in STATES[following]["Choices"]:
        for word in re.findall(r"outcome = '(\w+)'", choice["Condition"]):
            found[word] = choice["Next"]
    return found


def test_the_table_and_the_machine_have_the_same_states() -> None:
    assert set(TABLE) == set(TASKS)


@pytest.mark.parametrize("state", sorted(set(TASKS) - {"Escalate", "SnapshotEvidence"}))
def test_every_outcome_leads_where_the_table_says(state: str) -> None:
    _, _, rows = TABLE[state]
    found = branches(state)
    for word, target in rows.items():
        if word == "pending":
            wait = STATES[found["pending"]]
            assert (wait["Type"], wait["Seconds"], wait["Next"]) == (
                "Wait",
                "{% $states.input.wait_seconds %}",
                state,
            )
        elif target == "Escalate":
            assert found.get(word, STATES[STATES[state]["Next"]]["Default"]) == "Escalate"
        else:
            assert found[word] == target
    assert set(found) <= set(rows)
    assert set(rows) <= set(Outcome)


@pytest.mark.parametrize("state", sorted(TASKS))
def test_every_task_calls_its_function_and_the_token_states_pass_a_token(state: str) -> None:
    function, token, _ = TABLE[state]
    task = TASKS[state]
    camel = "".join(part.capitalize() for part in function.split("_"))
    assert task["Arguments"]["FunctionName"] == f"${{{camel}Arn}}"
    assert task["Resource"] == "arn:aws:states:::lambda:invoke" + (".waitForTaskToken" if token else "")
    assert ("$states.context.Task.Token" in json.dumps(task["Arguments"])) == token
    assert "$states.context.Execution.Id" in json.dumps(task["Arguments"]), "whether it may act is looked up by this"


def test_every_function_of_the_workflow_is_used() -> None:
    outside = {
        "receive_alarm", "record_training_event", "notice_end", "decide_approval", "show_console", "check_access",
    }  # fmt: skip
    assert {function for function, _, _ in TABLE.values()} == set(FUNCTION_VARIABLES) - outside


@pytest.mark.parametrize("state", sorted(TASKS))
def test_every_task_is_bounded_retries_only_transient_errors_and_is_caught(state: str) -> None:
    task = TASKS[state]
    assert isinstance(task["TimeoutSeconds"], int)
    token = task["Resource"].endswith(".waitForTaskToken")
    retriers = {tuple(sorted(one["ErrorEquals"])): one for one in task["Retry"]}
    heartbeat = retriers.pop(("States.HeartbeatTimeout",), None)
    assert (heartbeat is not None) == token
    if heartbeat is not None:
        # A state that waits is entered again every few minutes: what got lost is found then.
        assert task["HeartbeatSeconds"] <= 900
        assert task["HeartbeatSeconds"] * (heartbeat["MaxAttempts"] + 1) == task["TimeoutSeconds"]
    if state == "Escalate":
        deadline, anything = retriers.values()
        assert (deadline["ErrorEquals"], deadline["MaxAttempts"]) == (["States.Timeout", "DrivenElsewhereError"], 0)
        assert anything["ErrorEquals"] == ["States.ALL"]
        assert anything["MaxDelaySeconds"] * anything["MaxAttempts"] >= task["TimeoutSeconds"]
    else:
        transient, crash = retriers.values()
        assert set(transient["ErrorEquals"]) == TRANSIENT
        assert (transient["JitterStrategy"], transient["MaxAttempts"] <= 10) == ("FULL", True)
        assert set(crash["ErrorEquals"]) == CRASHED | (set() if token else {"States.Timeout"})
        assert crash["MaxAttempts"] == 2
    *refused, catch = task["Catch"]
    # The first state, and the one that every other leads to: its end is no failure, and calls nobody.
    ends = [(["DrivenElsewhereError"], "DrivenElsewhere")] if state in ("OpenIncident", "Escalate") else []
    assert [(one["ErrorEquals"], one["Next"]) for one in refused] == ends
    assert STATES["DrivenElsewhere"]["Type"] == "Succeed"
    assert catch["ErrorEquals"] == ["States.ALL"]
    assert catch["Next"] == ("Failed" if state == "Escalate" else NEVER_BLOCKS.get(state, "Escalate"))
    assert catch["Output"]["failed_state"] == state


def test_choices_look_only_at_what_a_function_decided() -> None:
    for name, state in STATES.items():
        for choice in state.get("Choices", []):
            fields = set(re.findall(r"\$states\.[\w.]+", choice["Condition"]))
            chosen = name in {"Start", "ResumeFrom"}
            allowed = {"$states.input.resume_from"} if chosen else {"$states.input.outcome"}
            assert fields == allowed
            assert not re.search(r"[<>]", choice["Condition"])


def test_a_word_that_no_choice_knows_escalates() -> None:
    for name, state in STATES.items():
        if state["Type"] == "Choice":
            assert state["Default"] == {"Start": "OpenIncident", "ResumeFrom": "Failed"}.get(name, "Escalate")


def test_a_person_can_go_on_from_every_state_that_the_domain_names_and_no_other() -> None:
    choices = STATES["ResumeFrom"]["Choices"]
    assert {choice["Next"] for choice in choices} == set(RESUMABLE_STATES)
    for choice in choices:
        assert f"= '{choice['Next']}'" in choice["Condition"]
    assert {status_in(state) for state in TASKS}


def test_a_successor_starts_where_a_person_chose_and_every_other_execution_at_the_first_state() -> None:
    assert MACHINE["StartAt"] == "Start"
    assert [choice["Next"] for choice in STATES["Start"]["Choices"]] == ["ResumeFrom"]


def test_every_state_can_be_reached() -> None:
    reached, open_ends = set[str](), [MACHINE["StartAt"]]
    while open_ends:
        name = open_ends.pop()
        if name in reached:
            continue
        reached.add(name)
        state = STATES[name]
        parts = [state, *state.get("Choices", []), *state.get("Catch", [])]
        open_ends += [part[key] for part in parts for key in ("Next", "Default") if key in part]
    assert reached == set(STATES)


def test_statelint_accepts_it(tmp_path: Path) -> None:
    path = tmp_path / "recovery.asl.json"
    path.write_text(substituted())
    linted = subprocess.run(
        [Path(sys.executable).parent / "statelint", path], capture_output=True, text=True, check=False, timeout=60
    )
    findings = [line.strip() for line in linted.stdout.splitlines() if line.strip().startswith("State Machine")]
    # The one thing that it does not know: in JSONata a Wait's Seconds may be an expression.
    unknown = re.compile(r'State Machine\.States\.WaitFor\w+\.Seconds is "\{% .* %\}" but should be an Integer')
    assert [line for line in findings if not unknown.fullmatch(line)] == []
    assert len(findings) == sum(1 for state in STATES.values() if state["Type"] == "Wait")


def test_cfn_lint_accepts_it(tmp_path: Path) -> None:
    names = sorted(set(re.findall(r"\$\{(\w+)\}", DEFINITION.read_text())))
    arn = "arn:aws:lambda:us-east-1:123456789012:function:f"
    template = {
        "AWSTemplateFormatVersion": "2010-09-09",
        "Resources": {
            "Recovery": {
                "Type": "AWS::StepFunctions::StateMachine",
                "Properties": {
                    "RoleArn": "arn:aws:iam::123456789012:role/r",
                    "DefinitionString": DEFINITION.read_text(),
                    "DefinitionSubstitutions": dict.fromkeys(names, arn),
                },
            }
        },
    }
    path = tmp_path / "template.json"
    path.write_text(json.dumps(template))
    command = [Path(sys.executable).parent / "cfn-lint", "--regions", "us-east-1", "--", path]
    linted = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert linted.returncode == 0, linted.stdout + linted.stderr
