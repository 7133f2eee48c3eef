"""``truestep drill`` and ``truestep check-access``: does the deployed recovery work?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from truestep.cli import FINDING
from truestep.cli.output import awaited, print_json, print_table, say
from truestep.contract.words import as_sentence, plainly

Stage = Annotated[str, typer.Option(help="Stage of the deployment; its stack is truestep-<stage>.")]
Outputs = Annotated[
    Path | None, typer.Option(help="File of cdk deploy --outputs-file; without it CloudFormation is asked.")
]
Region = Annotated[str | None, typer.Option(help="AWS region; without it that of the environment.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, also of an error, and nothing else.")]


def register(application: typer.Typer) -> None:
    """Add the commands."""
    application.command("check-access")(check_access)
    application.command()(drill)


def check_access(stage: Stage = "prod", outputs: Outputs = None, region: Region = None, as_json: Json = False) -> None:
    """Ask the deployed recovery whether it reaches its clusters.

    A function of the stack looks, with its network and role: Kubernetes, HyperPod, checkpoints. Exit code 1: something
    is missing.
    """
    from truestep.cli.deployment import find_deployment, invoke

    deployment = find_deployment(stage, outputs, region)
    clusters = invoke(deployment, deployment.outputs["CheckAccessFunction"], {})["clusters"]
    if as_json:
        print_json(clusters)
    else:
        for arn, findings in clusters.items():
            rows = [["ok" if one["ok"] else "MISSING", one["check"], one["detail"]] for one in findings]
            print_table(arn, [("", "left"), ("check", "left"), ("found", "left")], rows)
    if not all(one["ok"] for findings in clusters.values() for one in findings):
        raise typer.Exit(FINDING)


def drill(
    cluster_arn: Annotated[str, typer.Option(help="HyperPod cluster that the drill is about.")],
    node: Annotated[str, typer.Option(help="Any node of it, as Kubernetes names it; nothing happens to it.")],
    namespace: Annotated[
        str | None, typer.Option(help="Training namespace of the made-up job; needed where the cluster has several.")
    ] = None,
    timeout_seconds: Annotated[float, typer.Option(min=1, help="How long to follow the incident.")] = 900,
    stage: Stage = "prod",
    outputs: Outputs = None,
    region: Region = None,
    as_json: Json = False,
) -> None:
    """Send a marked test alarm through the whole recovery.

    Everything runs dry: read, decided, announced and recorded, nothing changed. What stays is the incident, marked as a
    drill. Exit code 1: it did not go all the way.
    """
    from truestep.cli.deployment import find_deployment
    from truestep.cli.drill import drill_alarm, follow, send, shortcoming

    deployment = find_deployment(stage, outputs, region)
    alarm = drill_alarm(deployment, cluster_arn, node, namespace)
    send(deployment, alarm)
    told = 0
    incident = {}
    for incident in awaited(follow(deployment, alarm, timeout_seconds), "following the drill"):
        for entry in incident["timeline"][told:]:
            if not as_json:
                say(f"{entry['state']}: {plainly(entry['outcome'])}. {as_sentence(entry['reason'])}")
        told = len(incident["timeline"])
    missing = shortcoming(incident)
    if as_json:
        shown = {name: incident[name] for name in ("incident_id", "status", "dry_run", "timeline")}
        print_json({**shown, "shortcoming": missing})
    else:
        say(f"Drill {incident['incident_id']} is {incident['status']}. {missing}".rstrip())
    if missing:
        raise typer.Exit(FINDING)
