"""The deployed template with its real handlers, from alarms about a running job to what people decide."""

from __future__ import annotations

import html
import json

import pytest

from lambdas.domain.incident import job_of
from local_stack.access_keys import ADMINISTRATOR, EVENTBRIDGE, access_key_of_role
from tests.least_privilege import training_pod
from tests.least_privilege.story import Story
from truestep.contract import Alarm

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


def test_an_alarm_quarantines_its_node_and_stops_the_job_before_a_person_is_asked(story: Story) -> None:
    cordoned = story.seen["cordoned"]
    assert cordoned.spec.unschedulable is True
    assert "truestep.ai/quarantine" in {taint.key for taint in cordoned.spec.taints}
    assert story.seen["pods_while_asking"] == []
    assert cordoned.metadata.name in story.seen["page"]
    assert "this GPU" in story.seen["picture"]


def test_of_two_suspects_the_one_that_repeats_its_fault_is_named_and_the_other_is_given_back(story: Story) -> None:
    (suspect,), (cleared,) = story.rejected["suspects"], story.rejected["cleared"]
    confirmation = story.rejected["confirmation"]
    assert (confirmation["status"], round(confirmation["hit_probability"], 3)) == ("reproduced", 0.839)
    assert confirmation["named"] == suspect["node_name"] == story.seen["cordoned"].metadata.name
    gpus = {node["node_name"]: node["gpus"] for node in confirmation["nodes"]}
    shown = {name: [(gpu["runs"], gpu["differing"]) for gpu in found] for name, found in gpus.items()}
    (healthy,) = set(shown) - {suspect["node_name"], cleared["node_name"]}
    assert shown == {suspect["node_name"]: [(20, 20)], cleared["node_name"]: [(20, 0)], healthy: [(20, 0)]}
    (gpu,) = gpus[suspect["node_name"]]
    assert ([gpu["gpu_uuid"]], gpu["first"]) == (suspect["gpu_uuids"], "forward blocks.0")
    assert story.rejected["recommendation"]["cause"] == "hardware"
    node = story.seen["cleared"]
    assert not node.spec.unschedulable
    assert "truestep.ai/quarantine" not in {taint.key for taint in node.spec.taints or []}
    assert story.world.item(f"NODE#{cleared['claim_key']}", "CLAIM") == {}


def test_the_confirmations_jobs_are_gone_before_a_person_is_asked_and_their_reports_are_kept(story: Story) -> None:
    assert story.seen["jobs_while_asking"] == []
    bucket, _, key = story.rejected["confirmation"]["evidence"].removeprefix("s3://").partition("/")
    kept = json.loads(story.stack.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read())
    assert kept["nodes"] == story.rejected["confirmation"]["nodes"]
    assert "runs (hit rate 100%, first at forward blocks.0)" in html.unescape(story.seen["page"])


def test_a_rejection_releases_the_node_and_replaces_nothing(story: Story) -> None:
    states = story.world.visited(story.rejected["incident_id"])
    assert not story.seen["released"].spec.unschedulable
    assert states.index("RequestApproval") < states.index("ReleaseNode") < states.index("VerifyRecovery")
    assert "ReplaceNode" not in states


def test_the_alarm_after_the_relaunch_is_an_incident_of_its_own_and_the_earlier_one_stops(story: Story) -> None:
    assert story.approved["follows"] == story.rejected["incident_id"]
    assert "Escalate" in story.world.visited(story.rejected["incident_id"])


def test_a_decision_in_the_console_is_refused_in_red_and_says_why(story: Story) -> None:
    assert [(one["status"], one["error"]) for one in story.seen["refused"]] == [("FAILED", "NotRecorded")] * 3
    no_reason, unknown, second = (one["cause"] for one in story.seen["refused"])
    assert "a rejection needs a reason" in no_reason
    assert unknown == "no incident inc-nowhere is in the table"
    assert "the first decision stands" in second


def test_a_decision_in_the_console_is_recorded_with_its_execution(story: Story) -> None:
    console = story.seen["approval"]
    decision = story.approved["approval"]["decision"]
    assert (decision["approved"], decision["comment"]) == (True, "a test")
    assert decision["decided_by"] == f"by console, execution {console['executionArn']}"
    assert console["status"] == "SUCCEEDED"
    assert json.loads(console["output"]) == {
        "incident_id": story.approved["incident_id"],
        "notice": f"approved at {decision['at']}, {decision['decided_by']}",
    }


def test_an_execution_that_somebody_stopped_is_escalated_by_itself_and_people_are_told(story: Story) -> None:
    stop = story.seen["told_of_the_end"]
    assert "Since then somebody stopped the execution" in stop["cause"]
    told = [message for message in story.stack.sns_messages() if stop["cause"] in message["Message"]]
    assert len(told) == 1
    assert "Recovery needs help" in told[0]["Subject"]


def test_an_execution_that_somebody_started_beside_it_ends_green_and_says_which_one_drives(story: Story) -> None:
    beside = story.seen["started_beside"]
    assert beside["status"] == "SUCCEEDED"
    output = json.loads(beside["output"])
    assert (output["incident_id"], output["outcome"]) == (story.rejected["incident_id"], "driven_elsewhere")
    assert f"execution {story.rejected['incident_id']} drives incident" in output["cause"]


def test_a_choice_starts_one_successor_and_so_does_one_that_the_aborted_execution_never_took(story: Story) -> None:
    incident_id = story.rejected["incident_id"]
    executions = [one for one in story.stack.executions() if one["name"].startswith(incident_id)]
    assert executions[0]["name"] == incident_id
    assert [one["status"] for one in executions] == ["ABORTED", "ABORTED", "SUCCEEDED"]
    said = [entry["reason"] for entry in story.rejected["timeline"] if entry["outcome"] == "restarted"]
    chosen = ("OpenIncident", "CloseIncident")
    assert said == [
        f"the execution that waited had ended: a new one, {successor['name']}, goes on from {state}"
        for successor, state in zip(executions[1:], chosen, strict=True)
    ]


def test_a_choice_whose_delivery_was_lost_is_delivered_by_the_reminder(story: Story) -> None:
    states = story.world.visited(story.rejected["incident_id"])
    # Aborted at the first Escalate and the third; what follows is the successor's.
    assert states[states.index("Escalate") :] == [
        "Escalate",
        *("Start", "ResumeFrom", "OpenIncident", "Escalate"),
        *("ResumeFrom", "OpenIncident", "Escalate"),
        *("Start", "ResumeFrom", "CloseIncident", "CloseIncidentOutcome", "Done"),
    ]
    assert "has taken this job over" in story.seen["told_of_the_end"]["cause"]


def test_an_approval_replaces_the_node_once_and_the_incident_closes_when_the_run_is_verified(story: Story) -> None:
    replaced = [call for call in story.stack.calls() if call["operation"] == "BatchReplaceClusterNodes"]
    assert [call["status"] for call in replaced] == [200]
    (suspect,) = story.approved["suspects"]
    assert suspect["replacement"]["new_instance_id"] not in ("", suspect["instance_id"])
    assert story.approved["checkpoint"]["checkpoint"]["step"] == training_pod.TRUSTED_STEP
    assert story.approved["verification"]["verified_step"] == 29
    assert story.world.visited(story.approved["incident_id"])[-1] == "Done"


def test_the_check_that_was_deferred_runs_after_the_approval(story: Story) -> None:
    deferred = [entry for entry in story.approved["timeline"] if entry["state"] == "StartHealthCheck"]
    assert [entry["outcome"] for entry in deferred] == ["deferred"]
    assert story.approved["health_check"]["status"] == "passed"


def test_the_checkpoint_in_the_suspect_window_is_revoked(story: Story) -> None:
    listed = story.stack.client("s3").list_objects_v2(Bucket=training_pod.BUCKET)["Contents"]
    revoked = [entry["Key"] for entry in listed if entry["Key"].endswith("revoked.json")]
    assert revoked == [f"{training_pod.PREFIX}/step-{training_pod.SUSPECT_STEP:08d}/revoked.json"]


def test_the_console_shows_what_really_happened(story: Story) -> None:
    shown = html.unescape(story.seen["console"])
    (suspect,) = story.approved["suspects"]
    for text in (
        "No incident is open",
        "0 nodes in quarantine. The circuit breaker allows 2 in the cluster",
        f"Step {training_pod.TRUSTED_STEP}: ",
        suspect["gpu_uuids"][0],
        f"{suspect['node_name']}: approved, the node was replaced; closed ",
        "rejected, the node was given back; closed ",
    ):
        assert text in shown


def test_a_drill_goes_the_whole_way_and_leaves_no_trace_but_its_incident(story: Story) -> None:
    states = story.world.visited(story.rehearsed["incident_id"])
    assert states[-1] == "Done"
    assert {"CordonNode", "RequestApproval", "ChooseCheckpoint", "Relaunch", "VerifyRecovery"} <= set(states)
    assert story.rehearsed["alarm"]["drill"] is True
    assert story.rehearsed["dry_run"] is True
    table = story.stack.outputs["TableName"]
    items = story.stack.client("dynamodb").scan(TableName=table)["Items"]
    traces = {item["PK"]["S"] for item in items if story.rehearsed["incident_id"] in str(item)}
    job = job_of(Alarm.from_json(story.rehearsed["alarm"]))
    assert job.drill
    assert traces == {f"INCIDENT#{story.rehearsed['incident_id']}", f"JOB#{job}"}
    assert story.seen["node_after"].spec == story.seen["node_before"].spec
    assert story.rehearsed["incident_id"] not in str(story.seen["node_after"])


def test_a_drill_asks_for_no_change_outside_its_incident(story: Story) -> None:
    calls, requests, _ = story.seen["during_drill"]
    by_functions = [request for request in requests if "/" in request["user"]]
    assert {request["verb"] for request in by_functions} == {"get", "list"}
    own = [call for call in calls if call["access_key"] not in (ADMINISTRATOR, EVENTBRIDGE)]
    writing = [call for call in own if not call["operation"].startswith(("Get", "List", "Describe", "Query"))]
    assert {(call["service"], call["operation"]) for call in writing} == {
        ("dynamodb", "PutItem"),
        ("dynamodb", "UpdateItem"),
        ("dynamodb", "DeleteItem"),
        ("dynamodb", "TransactWriteItems"),
        ("kms", "GenerateMac"),
        ("lambda", "Invoke"),
        ("s3", "PutObject"),
        ("sns", "Publish"),
        ("states", "SendTaskSuccess"),
        ("states", "StartExecution"),
    }
    evidence = f"{story.stack.outputs['EvidenceBucketName']}/incidents/{story.rehearsed['incident_id']}/"
    assert all(call["resource"].startswith(evidence) for call in writing if call["service"] == "s3")


def test_whoever_reads_only_the_subject_of_a_drills_message_knows_that_it_is_one(story: Story) -> None:
    *_, messages = story.seen["during_drill"]
    subjects = [message["Subject"] for message in messages]
    assert len(subjects) == 2, "the question, and the end"
    assert all(subject.startswith("DRILL: ") for subject in subjects)
    assert all("nothing was detected" in message["Message"] for message in messages)


def test_check_access_finds_everything_in_place(story: Story) -> None:
    (findings,) = story.seen["access"].values()
    assert [finding["check"] for finding in findings] == [
        "Kubernetes permissions",
        "Kubernetes permissions in research",
        "HyperPod",
        f"Checkpoints {training_pod.BUCKET}/runs",
    ]
    assert [finding["detail"] for finding in findings if not finding["ok"]] == []


def test_a_drill_of_another_cluster_names_those_that_are_served(story: Story) -> None:
    done = story.command("drill", "--cluster-arn", "arn:aws:sagemaker:eu-west-1:1:cluster/x", "--node", "any")
    assert done.returncode == 2
    assert story.world.cluster_arn in json.loads(done.stdout)["error"]


def test_a_drill_of_a_node_that_is_not_there_goes_on_and_says_what_it_did_not_rehearse(story: Story) -> None:
    done = story.command("drill", "--cluster-arn", story.world.cluster_arn, "--node", "nowhere")
    assert done.returncode == 1, done.stderr
    answer = json.loads(done.stdout)
    assert answer["status"] == "closed"
    assert "no such node" in answer["shortcoming"]


@pytest.mark.parametrize("output", ["StateMachineArn", "ApproveStateMachineArn"])
def test_a_state_machine_calls_its_functions_with_its_own_role(output: str, story: Story) -> None:
    arn = story.stack.outputs[output]
    role = story.stack.client("stepfunctions").describe_state_machine(stateMachineArn=arn)["roleArn"]
    callers = {call["access_key"] for call in story.stack.calls() if call["operation"] == "Invoke"}
    assert access_key_of_role(role) in callers
