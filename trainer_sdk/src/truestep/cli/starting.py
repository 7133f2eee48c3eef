"""``truestep checkpoints start-from``: the next start's checkpoint, where no recovery orders it."""

from __future__ import annotations

from truestep.checkpoints.catalogue import CheckpointRecord, Trust, list_records, trust_statement
from truestep.checkpoints.errors import CheckpointCorruptError
from truestep.cli.errors import CommandError
from truestep.cli.locations import Place, locate
from truestep.cli.output import Meter, print_json, reading, say, working
from truestep.cli.verification import bytes_to_verify, verify_checkpoint
from truestep.directives import ORDER_NAME, order_start


def order(uri: str, *, verify: bool, as_json: bool) -> None:
    """Write the order, and say what it means. Raises `CommandError` where there is nothing to start from.

    verify: hash the checkpoint's files first; raises `CheckpointCorruptError` for a damaged one, and orders nothing.
    """
    read = Meter()
    place = locate(uri, read)
    with working(f"reading the manifests below {place.storage.root_uri}"):
        records = list_records(place.storage)
        record = place.record() if place.directory else _newest_trusted(place, records)
    if verify and record.trust in (Trust.WRITTEN, Trust.TRUSTED):
        with reading(record.directory, bytes_to_verify(record, weights=False)) as read.advance:
            _require_intact(place, record)
    given = order_start(place.storage, record)
    if as_json:
        print_json(given)
        return
    trust = trust_statement(record, records) or (
        "NOT trusted: no audit has passed since it was written, so that it may hold the fault"
    )
    say(f"The next start resumes from {record.ref.uri} with step {record.ref.step + 1}; {trust}.")
    say(
        f"No checkpoint above step {given.directive.max_step} is used, but those that this resumed run saves. Start "
        "the job again. The order holds until a later alarm or a later order of the recovery; removing "
        f"{place.storage.root_uri}/{ORDER_NAME} takes it back."
    )


def _require_intact(place: Place, record: CheckpointRecord) -> None:
    found = verify_checkpoint(place.storage, record)
    problems = "; ".join(f"{file.path}: {file.problem}" for file in found.files if file.problem)
    if problems:
        raise CheckpointCorruptError(
            f"{record.ref.uri} is DAMAGED: {problems}. A start would refuse it, so nothing was ordered; name another "
            f"that `truestep checkpoints verify {place.storage.root_uri}` finds intact"
        )


def _newest_trusted(place: Place, records: list[CheckpointRecord]) -> CheckpointRecord:
    for record in records:
        if record.trust is Trust.TRUSTED:
            return record
    if not records:
        raise CommandError(f"no checkpoint below {place.uri}: none of its directories has a manifest.json")
    raise CommandError(
        f"no checkpoint below {place.uri} is trusted; name one of those that `truestep checkpoints list {place.uri}` "
        "shows, if you know that it is clean, or remove tombstone.json there to start at step 0"
    )
