"""The commands' names and options. Each imports what it needs when it runs, so that ``--help`` needs no torch."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer.exceptions import TyperException

from truestep import __version__
from truestep.cli import BAD_INPUT, FINDING, FINE, deployment_commands, incident_commands
from truestep.cli.output import complain, print_json, say
from truestep.contract.errors import TruestepError
from truestep.plan import Rollback, Workload

EXIT_CODES = "Exit codes: 0 fine, 1 something is damaged, revoked or different, 2 bad input, 130 interrupted."

_OUTPUT_IS_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)

application = typer.Typer(
    name="truestep",
    help="Catches GPUs that return wrong numbers without an error while PyTorch trains on them.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
checkpoints = typer.Typer(
    help="List, verify and compare checkpoints.\n\nWhich to trust, whether their bytes are intact, where two differ.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,
)
application.add_typer(checkpoints, name="checkpoints")
application.add_typer(incident_commands.incidents, name="incidents", epilog=EXIT_CODES)
deployment_commands.register(application)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document, also of an error, and nothing else.")]
Location = Annotated[str, typer.Argument(metavar="URI", help="s3://bucket/prefix, file:///directory or a directory.")]


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. What people or their surroundings get wrong is a sentence, never a traceback."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = application(args=given, prog_name="truestep", standalone_mode=False)
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in _OUTPUT_IS_FULL or error.filename is not None:
            raise
        complain(f"what was found cannot be written to standard output: {error.strerror}; give it another place")
        _drop_output()
        return BAD_INPUT
    except TyperException as error:
        return _refused(_usage_sentence(error), BAD_INPUT, given)
    except TruestepError as error:
        return _refused(str(error), FINDING if _is_damage(error) else BAD_INPUT, given)
    return code if isinstance(code, int) else FINE


def _drop_output() -> None:
    """What is still buffered would fail again at the end of the process, and take the exit code with it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _refused(message: str, code: int, given: Sequence[str]) -> int:
    """Say why on standard error; to a program, as the one document that it reads."""
    if "--json" in given:
        print_json({"error": message, "exit_code": code})
    elif message.startswith("Usage:"):
        typer.echo(message, err=True)
    else:
        complain(message)
    return code


def _usage_sentence(error: TyperException) -> str:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if message.startswith("Usage:") or context is None:
        return message
    return f"{message.rstrip('.')}; see {context.command_path} --help"


def _is_damage(error: TruestepError) -> bool:
    from truestep.checkpoints import CheckpointCorruptError

    return isinstance(error, CheckpointCorruptError)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"truestep {__version__}")
        raise typer.Exit(FINE)


@application.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Catches GPUs that return wrong numbers without an error while PyTorch trains on them."""


@application.command()
def plan(
    gpus: Annotated[int, typer.Option(help="GPUs of the job.")],
    step_seconds: Annotated[float, typer.Option(help="Time of one optimizer step without an audit.")],
    hit_probability: Annotated[
        float, typer.Option(help="p: how often a faulty GPU computes a pass wrong.")
    ] = Workload.hit_probability,
    audit_cost_steps: Annotated[float, typer.Option(help="Cost of an audit, in steps.")] = Workload.audit_cost_steps,
    check_cost_steps: Annotated[
        float, typer.Option(help="Cost of a weight comparison, in steps.")
    ] = Workload.check_cost_steps,
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = Workload.checkpoint_every,
    risk: Annotated[
        float, typer.Option(help="Accepted probability that the checkpoint resumed from is corrupt.")
    ] = Workload.risk,
    gpu_hours_per_fault: Annotated[float, typer.Option(help="Mean GPU-hours between faults.")] = 1.9e6,
    max_audit_every: Annotated[
        int, typer.Option(help="Upper bound of the audit interval, in steps.")
    ] = Workload.max_audit_every,
    rollback: Annotated[
        Rollback,
        typer.Option(help="Recovery to optimise for: to the first wrong update, or with a margin."),
    ] = Workload.rollback,
    plot: Annotated[
        Path | None, typer.Option(help="Also draw waste over the interval into this SVG file (needs pygal).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Choose the intervals of audits and checks.

    Says how often to audit and to compare weights, how many checkpoints to keep, and what that costs.
    """
    from truestep.cli.planning import show_plan
    from truestep.plan.errors import require_positive

    require_positive("gpu_hours_per_fault", gpu_hours_per_fault, "GPU-hours")
    workload = Workload(
        gpus=gpus,
        step_seconds=step_seconds,
        hit_probability=hit_probability,
        audit_cost_steps=audit_cost_steps,
        check_cost_steps=check_cost_steps,
        checkpoint_every=checkpoint_every,
        risk=risk,
        faults_per_gpu_hour=1 / gpu_hours_per_fault,
        max_audit_every=max_audit_every,
        rollback=rollback,
    )
    show_plan(workload, as_json=as_json, plot=plot)


@application.command()
def fingerprint(
    file: Annotated[Path, typer.Argument(help="A file that torch.save wrote: a state dict, or tensors in containers.")],
    as_json: Json = False,
) -> None:
    """Print the fingerprints of tensors in a file.

    One line a tensor, and the fingerprint over all of them last. Needs torch.
    """
    from truestep.cli.fingerprinting import show_fingerprints

    show_fingerprints(file, as_json=as_json)


@application.command()
def confirm(
    bundle: Annotated[str, typer.Argument(metavar="BUNDLE", help="The bundle_uri of an alarm's evidence.")],
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:3.")] = "cuda",
    repeat: Annotated[int, typer.Option(min=1, help="How often to run the computation.")] = 1000,
    model: Annotated[
        str, typer.Option(help="module:function that returns (model, compute_loss), where the bundle names none.")
    ] = "",
    allow_version_mismatch: Annotated[
        bool, typer.Option("--allow-version-mismatch", help="Run where versions or GPU differ; proves nothing then.")
    ] = False,
    allow_classes: Annotated[
        bool, typer.Option("--allow-classes", help="Read a batch with classes; runs code that the bundle names.")
    ] = False,
    locate: Annotated[
        bool, typer.Option(help="Also find the module at which a run first goes wrong; costs time.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Run a failing computation again on a suspect.

    Says how often and where the device differs from what the witnesses computed. Needs torch and the model's code.
    Exit code 1: it differs. No difference proves nothing.
    """
    from truestep.cli.confirmation import Request, show_confirmation

    request = Request(
        bundle=bundle,
        device=device,
        repeat=repeat,
        model=model,
        allow_version_mismatch=allow_version_mismatch,
        allow_classes=allow_classes,
        locate=locate,
    )
    raise typer.Exit(show_confirmation(request, as_json=as_json))


@application.command()
def doctor(
    script: Annotated[str, typer.Option(help="module:function that returns truestep.doctor.Examined.")],
    processes: Annotated[int, typer.Option(help="Processes on this machine, each standing for a node.")] = 3,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds after which to give up.")] = 300.0,
    as_json: Json = False,
) -> None:
    """Find out whether audits of a training script can work.

    Rebuilds batches, repeats passes and compares bits between processes over Gloo; names the batch, module or
    operation that breaks them. Needs torch. Exit code 1: something was found.
    """
    from truestep.cli.examination import show_examination

    raise typer.Exit(show_examination(script, processes=processes, timeout_seconds=timeout, as_json=as_json))


@checkpoints.command("list")
def list_command(uri: Location, as_json: Json = False) -> None:
    """List checkpoints and their trust.

    Newest first; a checkpoint without a manifest does not exist. Exit code 1: one cannot be read.
    """
    from truestep.cli.checkpoint_commands import show_list

    raise typer.Exit(show_list(uri, as_json=as_json))


@checkpoints.command("start-from")
def start_from(
    uri: Annotated[str, typer.Argument(metavar="URI", help="A checkpoint; or the root, for the newest trusted one.")],
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Do not hash its files first; the start does that anyway.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Order the next start of the job to resume from a checkpoint.

    From this one, or from what descends from it, and from nothing newer; also where an alarm has ended the run. For a
    job without a recovery workflow. Hashes its files, then writes resume.json below the checkpoint root. Exit code 1:
    it is damaged, and nothing was ordered.
    """
    from truestep.cli.starting import order

    order(uri, verify=not no_verify, as_json=as_json)


@checkpoints.command()
def verify(
    uris: Annotated[list[str], typer.Argument(metavar="URI", help="Checkpoints, or roots with checkpoints below.")],
    weights: Annotated[
        bool, typer.Option("--weights", help="Also load model.pt and compare every tensor's fingerprint (needs torch).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Hash checkpoints again.

    Compares every file with the manifest. Needs neither torch nor the model. Exit code 1: damaged or revoked.
    """
    from truestep.cli.checkpoint_commands import show_verification

    raise typer.Exit(show_verification(uris, weights=weights, as_json=as_json))


@checkpoints.command()
def diff(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="A checkpoint, or a file that torch.save wrote.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="What to compare it with.")],
    file: Annotated[str, typer.Option(help="Which file of the checkpoints.")] = "model.pt",
    max_elements: Annotated[int, typer.Option(min=0, help="Elements shown of each tensor.")] = 8,
    as_json: Json = False,
) -> None:
    """Name tensors, elements and bits that differ.

    Needs torch, not the model. Exit code 1: something differs.
    """
    from truestep.cli.checkpoint_commands import show_difference

    raise typer.Exit(show_difference(first, second, file=file, max_elements=max_elements, as_json=as_json))
