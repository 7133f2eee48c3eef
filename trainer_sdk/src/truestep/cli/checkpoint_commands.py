"""``truestep checkpoints list | verify | diff``: what they print, and the exit code that says what was found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from truestep.checkpoints.catalogue import (
    CheckpointRecord,
    Trust,
    audits_passed,
    list_records,
    read_tombstone,
    trusted_for,
)
from truestep.checkpoints.errors import CheckpointCorruptError
from truestep.cli import FINDING, FINE
from truestep.cli.errors import CommandError
from truestep.cli.locations import locate
from truestep.cli.output import Meter, moment, print_json, print_table, reading, say, say_whole, working
from truestep.cli.verification import Verification, bytes_to_verify, verify_checkpoint
from truestep.contract.words import as_sentence, counted
from truestep.directives import ORDER_COMMAND, StartOrder, answers, read_order

if TYPE_CHECKING:
    from truestep.cli.difference import TensorDifference
    from truestep.contract import Tombstone

_DIFF_TAKES = "diff takes two checkpoints (directories step-...) or two files that torch.save wrote"
_NEWEST_SHOWN = 3


def show_list(uri: str, *, as_json: bool) -> int:
    """Print the checkpoints below a root. A finding: a checkpoint or tombstone that cannot be read."""
    place = locate(uri)
    if place.directory:
        raise CommandError(f"{place.uri} is one checkpoint; give the root above it: {place.storage.root_uri}")
    with working(f"reading the manifests below {place.uri}"):
        records = list_records(place.storage)
        tombstone, order = read_tombstone(place.storage), read_order(place.storage)
    if as_json:
        document = {
            "root": place.uri,
            "tombstone": tombstone,
            "order": order,
            "order_in_force": order is not None and not _why_order_is_over(order, tombstone),
            "checkpoints": [_list_entry(entry, records) for entry in records],
        }
        print_json(document)
    else:
        _print_list(place.uri, records)
        _print_where_to_start(place.uri, order, tombstone)
    return FINDING if any(record.trust is Trust.UNREADABLE for record in records) else FINE


def show_verification(uris: Sequence[str], *, weights: bool, as_json: bool) -> int:
    """Verify checkpoints, or all below a root. A finding: one that is damaged, unreadable or revoked."""
    results = []
    read = Meter()
    for place in [locate(uri, read) for uri in uris]:
        for record in place.records():
            with reading(record.directory, bytes_to_verify(record, weights=weights)) as read.advance:
                results.append(verify_checkpoint(place.storage, record, weights=weights))
            if not as_json:
                _print_verification(results[-1])
    if as_json:
        print_json(
            [{**vars(result), "intact": result.intact, "usable": result.usable} for result in results],
        )
    return FINE if all(result.usable for result in results) else FINDING


def show_difference(first: str, second: str, *, file: str, max_elements: int, as_json: bool) -> int:
    """Compare a file of two checkpoints, or two files. A finding: any difference."""
    from truestep.cli.tensors import require_torch

    require_torch("truestep checkpoints diff")
    from truestep.cli.difference import bytes_to_compare, compare

    names, leaves = [], []
    for argument, text in (("FIRST", first), ("SECOND", second)):
        name, content = _load_side(argument, text, file)
        names.append(name)
        leaves.append(content)
    try:
        with reading("comparing", bytes_to_compare(leaves[0])) as advance:
            differences = compare(leaves[0], leaves[1], max_elements=max_elements, on_compared=advance)
    except TypeError as error:
        raise CommandError(f"{names[0]} and {names[1]}: {error}") from error
    if as_json:
        print_json({"first": names[0], "second": names[1], "differences": differences})
    elif differences:
        for difference in differences:
            _print_difference(difference)
        say(f"A difference in {len(differences):,} of {counted(len({*leaves[0], *leaves[1]}), 'entry', 'entries')}.")
    else:
        say(f"{counted(len(leaves[0]), 'entry', 'entries')}, equal to the bit.")
    return FINDING if differences else FINE


def _load_side(argument: str, text: str, file: str) -> tuple[str, dict[str, Any]]:
    """(what it is called, its leaves) of a file, or of a checkpoint's `file`. argument: its name in the help."""
    from truestep.cli.tensors import is_in_shares, leaves_of, load_checkpoint_file, load_file, load_share

    if "://" not in text and Path(text).is_file():
        with working(f"reading {text}"):
            return text, leaves_of(load_file(Path(text)))
    if text.strip() and "://" not in text and not Path(text).is_dir():
        raise CommandError(f"{argument}: there is no {text}; {_DIFF_TAKES}")
    read = Meter()
    place = locate(text, read, argument=argument)
    if not place.directory:
        newest = ", ".join(entry.directory for entry in list_records(place.storage)[:_NEWEST_SHOWN])
        there = f"the newest there are {newest}" if newest else "there is none below it"
        raise CommandError(f"{argument}: {place.uri} is not one checkpoint; {_DIFF_TAKES}; {there}")
    record = place.record()
    if record.manifest is None:
        raise CommandError(f"{place.uri}: {record.reason}")
    if is_in_shares(record.manifest, file):
        with reading(text, sum(entry.bytes for entry in record.manifest.files)) as read.advance:
            return f"{place.uri}/{file}", leaves_of(load_share(place.storage, place.directory, record.manifest, file))
    entry = next((entry for entry in record.manifest.files if entry.path == file), None)
    if entry is None:
        listed = ", ".join(entry.path for entry in record.manifest.files)
        raise CommandError(f"{place.uri} has no {file}; its manifest lists {listed or 'no file'}")
    try:
        with reading(text, entry.bytes) as read.advance:
            return f"{place.uri}/{file}", leaves_of(load_checkpoint_file(place.storage, place.directory, entry))
    except CheckpointCorruptError as error:
        parts = urlsplit(place.uri)
        itself = f"{unquote(parts.path)}/{file}" if parts.scheme == "file" else f"a local copy of {place.uri}/{file}"
        raise CheckpointCorruptError(
            f"{error}. To see which bits differ, give as {argument} the file itself, {itself}: a file is compared as "
            "it is, whatever a manifest says"
        ) from error


def _list_entry(record: CheckpointRecord, records: Sequence[CheckpointRecord]) -> dict[str, Any]:
    manifest = record.manifest
    probability, risk = trusted_for(record, records)
    return {
        "uri": record.ref.uri,
        "step": record.ref.step,
        "trust": record.trust,
        "reason": record.reason,
        "manifest_sha256": record.ref.manifest_sha256,
        "clean_through": record.mark.clean_through if record.mark else None,
        "trusted_for_hit_probability": probability if record.mark else None,
        "risk": risk if record.mark else None,
        "audits_passed": audits_passed(record, records),
        "run_id": manifest.run_id if manifest else None,
        "world_size": manifest.world_size if manifest else None,
        "bytes": sum(file.bytes for file in manifest.files) if manifest else None,
        "checks": manifest.checks if manifest else None,
        "created_at": manifest.created_at if manifest else None,
    }


def _print_list(uri: str, records: list[CheckpointRecord]) -> None:
    if not records:
        say(f"No checkpoint below {uri}.")
    else:
        rows = []
        for record in records:
            manifest = record.manifest
            rows.append(
                [
                    record.directory,
                    str(record.trust),
                    f"{record.mark.clean_through:,}" if record.mark else "",
                    f"{trusted_for(record, records)[0]:.2f}" if record.mark else "",
                    size(sum(file.bytes for file in manifest.files)) if manifest else "",
                    manifest.created_at[:16].replace("T", " ") if manifest else "",
                ]
            )
        headings = [("checkpoint", "whole"), ("trust", "left"), ("clean to", "right"), ("for p", "right")]
        print_table(uri, [*headings, ("size", "right"), ("written (UTC)", "whole")], rows)
        _print_trust(records)
        for record in records:
            if record.reason:
                say(f"{record.directory}: {record.reason}")


def _why_order_is_over(order: StartOrder, tombstone: Tombstone | None) -> str:
    """Empty for an order in force; as a start would find it, which then writes it down."""
    if not order.ended and tombstone is not None and not answers(order.directive, tombstone):
        return f"alarm {tombstone.alarm_id} came later"
    return order.ended


def _print_where_to_start(uri: str, order: StartOrder | None, tombstone: Tombstone | None) -> None:
    if tombstone is not None:
        say(
            f"An alarm ended this run at step {tombstone.step} ({moment(tombstone.at)}, alarm {tombstone.alarm_id}).",
            style="yellow",
        )
    if order is not None:
        directive, why_over = order.directive, _why_order_is_over(order, tombstone)
        given = f"order {directive.incident_id} of {moment(directive.issued_at)}, given with `{ORDER_COMMAND}`"
        if not why_over:
            if order.followed_at:
                given += f", first followed {moment(order.followed_at)} by attempt {order.followed_by}"
            say(
                f"The next start resumes from {directive.checkpoint_uri}: {given}. A later directive of the recovery "
                "goes before it.",
                style="yellow",
            )
            return
        say(f"The {given}, for {directive.checkpoint_uri}, is over: {as_sentence(why_over)}")
    if tombstone is not None:
        say(
            "Training starts here again only by an order that answers this alarm: the recovery's resume directive, or "
            f"by hand: {ORDER_COMMAND} {uri}",
            style="yellow",
        )


def _print_trust(records: list[CheckpointRecord]) -> None:
    risks = sorted({f"{record.mark.risk:.0%}" for record in records if record.mark})
    if risks:
        say(
            "for p: trusted for faults that hit a step with this probability or more; one like that passed every "
            f"audit since with a risk of {' to '.join(risks)}. Rarer faults can lie inside: `truestep plan` says how "
            "far to go back for them."
        )


def _print_verification(result: Verification) -> None:
    say_whole(result.uri)
    total = size(sum(file.bytes for file in result.files))
    if result.intact:
        compared = f", {counted(result.weights_compared, 'tensor')} compared" if result.weights_compared else ""
        say(f"  intact, {result.trust}: {counted(len(result.files), 'file')}, {total}{compared}")
    else:
        say(f"  DAMAGED, {result.trust}", style="bold red")
    if result.reason:
        say(f"  {result.reason}")
    for problem in (
        *(file.problem and f"{file.path}: {file.problem}" for file in result.files),
        *result.weight_problems,
    ):
        if problem:
            say(f"  {problem}")


def _print_difference(difference: TensorDifference) -> None:
    from truestep.cli.difference import describe_bits

    if difference.kind != "bits":
        say(f"{difference.name}: {difference.kind}" + (f" ({difference.detail})" if difference.detail else ""))
        return
    say(
        f"{difference.name} differs in {difference.elements_differing:,} of {counted(difference.elements, 'element')} "
        f"({difference.dtype} {list(difference.shape)})"
    )
    rows = [
        [
            str(list(element.index)),
            f"{element.first:.9g}",
            f"{element.second:.9g}",
            describe_bits(difference.dtype, element.flipped_bits),
        ]
        for element in difference.examples
    ]
    if rows:
        print_table("", [("index", "whole"), ("first", "right"), ("second", "right"), ("flipped bits", "left")], rows)
    hidden = difference.elements_differing - len(difference.examples)
    if hidden and difference.bits_flipped:
        most = sorted(difference.bits_flipped.items(), key=lambda item: -item[1])[:4]
        bits = ", ".join(f"bit {bit} in {count:,}" for bit, count in most)
        say(f"  and {hidden:,} more; over all of them: {bits}")


def size(count_bytes: int) -> str:
    """A number of bytes as people read it, in powers of 1,000."""
    value = float(count_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
