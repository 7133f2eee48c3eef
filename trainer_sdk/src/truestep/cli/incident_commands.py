"""``truestep incidents``: what is going on, and a decision from the terminal."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from truestep.cli.deployment_commands import Json, Outputs, Region, Stage
from truestep.cli.output import moment, print_json, say, say_whole
from truestep.contract.words import as_sentence, plainly

incidents = typer.Typer(
    help="List, show and decide incidents of the recovery.\n\nWho decides is proved to AWS, and stands in the record.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Incident = Annotated[str, typer.Argument(metavar="INCIDENT", help="Its id, as messages and list show it.")]


@incidents.command("list")
def list_command(
    everything: Annotated[bool, typer.Option("--all", help="Closed ones too.")] = False,
    stage: Stage = "prod",
    outputs: Outputs = None,
    region: Region = None,
    as_json: Json = False,
) -> None:
    """List incidents, newest first."""
    from truestep.cli.deployment import find_deployment
    from truestep.cli.incidents import list_incidents

    found = list_incidents(find_deployment(stage, outputs, region), closed=everything)
    if as_json:
        print_json(found)
    elif not found:
        say("No incident." if everything else "No open incident; --all shows the closed ones.")
    else:
        for one in found:
            say(_title(one), style="bold")
            say(f"  {_job(one)} on {_nodes(one)}, opened {moment(one['opened_at'])}")


@incidents.command()
def show(
    incident_id: Incident, stage: Stage = "prod", outputs: Outputs = None, region: Region = None, as_json: Json = False
) -> None:
    """Show one incident: verdict, advice, and everything that happened."""
    from truestep.cli.deployment import find_deployment
    from truestep.cli.incidents import load_incident

    incident = load_incident(find_deployment(stage, outputs, region), incident_id)
    if as_json:
        print_json(incident)
    else:
        _print(incident, _options(stage, outputs, region))


@incidents.command()
def console(stage: Stage = "prod", outputs: Outputs = None, region: Region = None, as_json: Json = False) -> None:
    """Print a link to the deployment's console.

    A page to read: open incidents, quarantined nodes, trusted checkpoints, GPUs. The link works for an hour, shows
    everything and decides nothing; treat it as a password.
    """
    from truestep.cli.deployment import find_deployment
    from truestep.cli.incidents import console_link

    link = console_link(find_deployment(stage, outputs, region))
    if as_json:
        print_json(link)
    else:
        say_whole(link["url"])
        say(f"Works until {moment(link['expires_at'])}, and decides nothing.")


@incidents.command()
def approve(
    incident_id: Incident,
    comment: Annotated[str, typer.Option(help="For the record.")] = "",
    lose_other_pods: Annotated[
        bool, typer.Option("--lose-other-pods", help="Accept that other jobs' pods on the node are lost.")
    ] = False,
    stage: Stage = "prod",
    outputs: Outputs = None,
    region: Region = None,
    as_json: Json = False,
) -> None:
    """Approve the replacement of the quarantined node.

    Destroys the instance and its volumes, for good. Training then resumes from a trusted checkpoint.
    """
    form = {"decision": "approve", "comment": comment, **({"acknowledge": "yes"} if lose_other_pods else {})}
    _decide(incident_id, form, stage, outputs, region, as_json)


@incidents.command()
def reject(
    incident_id: Incident,
    reason: Annotated[str, typer.Option(help="For the record.")],
    stage: Stage = "prod",
    outputs: Outputs = None,
    region: Region = None,
    as_json: Json = False,
) -> None:
    """Reject the accusation: the node is given back.

    Training then resumes from a trusted checkpoint, possibly on the same GPU.
    """
    _decide(incident_id, {"decision": "reject", "comment": reason}, stage, outputs, region, as_json)


@incidents.command()
def resume(
    incident_id: Incident,
    state: Annotated[str, typer.Option("--from", help="State to go on from, e.g. the one where it stopped.")],
    stage: Stage = "prod",
    outputs: Outputs = None,
    region: Region = None,
    as_json: Json = False,
) -> None:
    """Let a recovery that stopped go on. Cure the reason first."""
    _decide(incident_id, {"decision": "resume", "resume_from": state}, stage, outputs, region, as_json)


def _decide(
    incident_id: str, form: dict[str, str], stage: str, outputs: Path | None, region: str | None, as_json: bool
) -> None:
    from truestep.cli.deployment import find_deployment
    from truestep.cli.incidents import decide

    incident = decide(find_deployment(stage, outputs, region), incident_id, form)
    if as_json:
        print_json(incident)
    else:
        last, decision = incident["timeline"][-1], (incident["approval"] or {}).get("decision")
        why = as_sentence(last["reason"])
        if form["decision"] in ("approve", "reject") and decision:
            why = f"Recorded as decided by {decision['decided_by']}"
            why += f", with the comment: {decision['comment']}" if decision["comment"] else "."
        say(f"{incident_id}: {plainly(last['outcome'])}. {why}")


def _options(stage: str, outputs: Path | None, region: str | None) -> str:
    """The options that lead to the same deployment again, with a space in front, as a shell takes them."""
    given = [*(["--stage", stage] if stage != "prod" else []), *(["--outputs", str(outputs)] if outputs else [])]
    given += ["--region", region] if region else []
    return f" {shlex.join(given)}" if given else ""


def _print(incident: dict[str, Any], options: str) -> None:
    alarm, name = incident["alarm"], incident["incident_id"]
    say(_title(incident), style="bold")
    say(as_sentence(alarm["verdict"]["reason"]))
    say(f"Job {_job(incident)}, step {alarm['step']}, opened {moment(incident['opened_at'])}")
    for suspect in incident["suspects"]:
        gpus = ", ".join(suspect["gpu_uuids"]) or "GPU unknown"
        say(f"Suspect {suspect['node_name']} ({suspect['instance_id'] or 'instance not resolved'}): {gpus}")
    if incident["recommendation"]:
        say(f"Advice: {as_sentence(incident['recommendation']['reason'])}")
    if incident["status"] == "awaiting_approval" and incident["approval"] and not incident["approval"]["decision"]:
        say(f"A decision is asked for by {moment(incident['approval']['expires_at'])}:", style="bold")
        say_whole(f"  truestep incidents approve {name}{options}")
        say_whole(f"  truestep incidents reject {name} --reason '...'{options}")
    if incident["escalation"] and not incident["escalation"]["resume_from"]:
        stop = incident["escalation"]
        why = ": ".join(part for part in (stop["error"], stop["cause"]) if part)
        say(as_sentence(f"Stopped at {stop['failed_state']}: {why}"), style="yellow")
        say("Cure the reason, then:")
        say_whole(f"  truestep incidents resume {name} --from {stop['failed_state']}{options}")
    say("Timeline:")
    for entry in incident["timeline"]:
        say(f"  {moment(entry['at'])} {entry['state']}: {plainly(entry['outcome'])}. {as_sentence(entry['reason'])}")


def _title(incident: dict[str, Any]) -> str:
    return f"{incident['incident_id']}  {plainly(incident['status'])}{' (dry run)' if incident['dry_run'] else ''}"


def _nodes(incident: dict[str, Any]) -> str:
    return ", ".join(suspect["node_name"] for suspect in incident["suspects"]) or "none"


def _job(incident: dict[str, Any]) -> str:
    return f"{incident['job']['namespace']}/{incident['job']['name']}"
