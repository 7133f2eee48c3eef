"""Kill -9 at random moments of saving, promoting and retaining checkpoints; after each, what is left is examined.

    python -m benchmarks.checkpoint_kills --kills 200 --results benchmarks/results/checkpoint_kills.json

Every other child is killed after a random time, the rest at a random file-system call (also inside a file's content
and before an fsync). Children save by ``torch.save``, by `torch.distributed.checkpoint`, and by the latter in the
background, in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import record
from truestep.checkpoints import Trust, VerifiedCheckpoints, list_checkpoints
from truestep.checkpoints.catalogue import directory_step
from truestep.checkpoints.storage import HashingWriter, open_storage
from truestep.cli.verification import verify_checkpoint
from truestep.collectives import CpuGroup
from truestep.contract import IdentityRow, NodeName, Rank, RunRef, Step, canonical_bytes
from truestep.fingerprint import fingerprint_model, fingerprint_optimizer
from truestep.protocols import ResumePoint, SaveEvidence
from truestep.report.outbox import Outbox
from truestep.report.reporter import EventReporter
from truestep.resumption import resume

STEPS_A_CHILD = 1000
LONGEST_SECONDS = 0.25
MOST_CALLS = 400
"""A few rounds of save, promote and retain."""
KEEP = 3
WAYS: tuple[dict[str, Any], ...] = ({}, {"distributed": True}, {"distributed": True, "asynchronous": True})
"""How children save, in turn."""
COUNTED_EVENTS = ("open", "os.", "shutil.")


class AloneGroup:
    """The collectives of one rank: starting Gloo in every child would take longer than what is tested."""

    def gather_rows(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """This rank's row."""
        return [json.loads(canonical_bytes(row))]

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        """What this rank, the source, passes."""
        assert data is not None
        assert source == 0
        return data


@dataclass
class AttachedRun:
    """What `attach` gives, without DDP."""

    cpu_group: AloneGroup | CpuGroup
    run: RunRef
    identities: tuple[IdentityRow, ...]
    resumed: ResumePoint | None = None
    rank: int = 0
    world_size: int = 1


class OneRun:
    """One start of a run of one rank."""

    def __init__(self, root_uri: str, seed: int, outbox: Path, **options: Any) -> None:
        """options: of `VerifiedCheckpoints`; distributed ones need a process group."""
        group = CpuGroup(dist.group.WORLD) if options and dist.group.WORLD is not None else AloneGroup()
        run = RunRef(run_id="run", attempt_id=uuid.uuid4().hex, world_size=1, checkpoint_root=root_uri)
        row = IdentityRow(rank=Rank(0), local_rank=0, node_name=NodeName("node-a"))
        self.attachment = AttachedRun(group, run, (row,))
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        reporter = EventReporter(row, run, Outbox(outbox), None)
        self.checkpoints = VerifiedCheckpoints(
            root_uri, self.attachment, self.model, self.optimizer, reporter=reporter, keep=KEEP, **options
        )

    def save(self, step: int) -> None:
        """Save what stands."""
        weights, table = fingerprint_model(self.model)
        optimizer, _ = fingerprint_optimizer(self.optimizer, self.model)
        evidence = SaveEvidence(
            step=Step(step),
            weights_fingerprint=weights,
            tensor_fingerprints=table,
            optimizer_fingerprint=optimizer,
            checks={},
        )
        self.checkpoints.save(evidence)


class Journal:
    """Lines that outlive the process that wrote them: what a child was about to do, and what it had done."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def note(self, what: str, attempt_id: str, step: int) -> None:
        """Append one line by one write."""
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, f"{what} {attempt_id} {step}\n".encode())
        os.close(descriptor)

    def steps(self, what: str) -> dict[str, int]:
        """Attempt -> the highest step noted under `what`."""
        highest: dict[str, int] = {}
        for line in self._path.read_text().splitlines() if self._path.exists() else ():
            name, attempt_id, step = line.split()
            if name == what:
                highest[attempt_id] = max(int(step), highest.get(attempt_id, -1))
        return highest


def save_without_end(root_uri: str, number: int, journal: Journal, arm: Callable[[], None]) -> None:
    """Save and promote one step after the other; `arm` is called when the first save begins."""
    torch.set_num_threads(1)
    first_step, options = number * STEPS_A_CHILD, WAYS[number // 2 % len(WAYS)]
    if options:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as directory:
        run = OneRun(root_uri, first_step, Path(directory, "outbox"), **options)
        attempt_id = run.attachment.run.attempt_id
        arm()
        for step in range(first_step, first_step + STEPS_A_CHILD):
            run.save(step)
            journal.note("audited", attempt_id, step)
            marked = run.checkpoints.promote(Step(step))
            if marked is not None:
                journal.note("trusted", attempt_id, marked.step)


def die_at_call(number: int) -> None:
    """End this process by SIGKILL at its `number`-th file-system call from now on."""
    left = number

    def count(event: str) -> None:
        nonlocal left
        if event.startswith(COUNTED_EVENTS):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def counted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            count("os.")
            return function(*arguments)

        return call

    sys.addaudithook(lambda event, _: count(event))
    os.fsync = counted(os.fsync)
    HashingWriter.write = counted(HashingWriter.write)  # type: ignore[method-assign]


def _serve(root_uri: str, journal: Journal) -> int:
    """For every line, ``number seconds S`` or ``number call N``: fork a child that saves, and see it die."""
    torch.set_num_threads(1)
    torch.optim.AdamW(nn.Linear(1, 1).parameters())  # the first optimizer imports for seconds; children inherit that
    for line in sys.stdin:
        number, kind, amount = line.split()
        read_end, write_end = os.pipe()
        child = os.fork()
        if child == 0:

            def arm(kind: str = kind, amount: str = amount, started: int = write_end) -> None:
                os.write(started, b".")
                if kind == "call":
                    die_at_call(int(amount))

            save_without_end(root_uri, int(number), journal, arm)
            os._exit(0)
        os.close(write_end)
        os.read(read_end, 1)
        if kind == "seconds":
            # Nothing more comes through the pipe unless the child dies by itself: this is a wait that notices that.
            select.select([read_end], [], [], float(amount))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(read_end)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return 0


@contextmanager
def killer(root_uri: str, journal_path: Path) -> Iterator[Callable[[int, str, str], None]]:
    """Yields a function that starts child `number` and returns once it was killed after ``seconds`` or at a ``call``.

    Raises `AssertionError` for a child that ended by itself.
    """
    command = [sys.executable, "-m", "benchmarks.checkpoint_kills", "--serve", root_uri, str(journal_path)]
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), str(root / "trainer_sdk" / "src")])
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        stdin, stdout = server.stdin, server.stdout

        def kill(number: int, kind: str, amount: str) -> None:
            stdin.write(f"{number} {kind} {amount}\n")
            stdin.flush()
            answer = stdout.readline().strip()
            assert answer == str(-signal.SIGKILL), f"child {number} ended with {answer!r}, it was to be killed"

        yield kill


def random_moment(chance: random.Random, number: int) -> tuple[str, str]:
    """When child `number` dies: by the clock and by the count of its calls in turn."""
    if number % 2:
        return "seconds", f"{chance.uniform(0.0, LONGEST_SECONDS):.6f}"
    return "call", str(chance.randint(1, MOST_CALLS))


def examine(root_uri: str, journal: Journal, number: int) -> Counter[str]:
    """What child `number` left. Raises `AssertionError` for what is torn, wrongly trusted or lost."""
    storage, records = open_storage(root_uri), list_checkpoints(root_uri)
    audited, trusted = journal.steps("audited"), journal.steps("trusted")
    for entry in records:
        assert entry.trust in (Trust.WRITTEN, Trust.TRUSTED), entry
        found = verify_checkpoint(storage, entry, weights=True)
        assert found.usable, found
        assert entry.manifest is not None
        if entry.trust is Trust.TRUSTED:
            assert entry.ref.step <= audited.get(entry.manifest.attempt_id, -1), f"wrongly trusted: {entry.ref}"
    with tempfile.TemporaryDirectory() as directory:
        run = OneRun(root_uri, 1, Path(directory))
        point = resume(run.attachment, run.checkpoints)
    newest = max(trusted.values(), default=-1)
    assert point.start_step > newest, f"step {newest} had become trusted, the next run starts at {point.start_step}"
    assert not any("refused" in sentence for sentence in point.skipped), point.skipped
    complete = {entry.directory for entry in records}
    own = [name for name in storage.directories("step-") if (directory_step(name) or 0) >= number * STEPS_A_CHILD]
    return Counter(
        {
            "checkpoints verified": len(records),
            "torn saves passed over": sum(name not in complete for name in own),
            "resumes from a trusted one": int(point.checkpoint is not None),
        }
    )


def examine_after_recovery(root_uri: str) -> None:
    """A later run clears what the killed ones left: half-written directories and temporary files."""
    with tempfile.TemporaryDirectory() as directory:
        run = OneRun(root_uri, 2, Path(directory))
        resume(run.attachment, run.checkpoints)
        names = open_storage(root_uri).directories("step-")
        step = max((directory_step(name) or 0 for name in names), default=0) + 1
        for later in range(step, step + KEEP):
            run.save(later)
        run.checkpoints.promote(Step(step + KEEP))
    left = open_storage(root_uri).directories("step-")
    assert len(left) == KEEP, left
    root = Path(root_uri.removeprefix("file://"))
    assert not list(root.rglob("*.tmp")), sorted(root.rglob("*.tmp"))


def kill_at_random_moments(root_uri: str, journal_path: Path, kills: int, seed: int) -> Counter[str]:
    """Kill children that save below `root_uri`; examine after each. Returns how often what was seen."""
    chance, journal, seen = random.Random(seed), Journal(journal_path), Counter[str]()  # noqa: S311
    with killer(root_uri, journal_path) as kill:
        for number in range(kills):
            kind, amount = random_moment(chance, number)
            kill(number, kind, amount)
            seen[f"killed by {kind}"] += 1
            seen.update(examine(root_uri, journal, number))
    examine_after_recovery(root_uri)
    return seen


def main() -> int:
    """Kill, examine, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("ROOT_URI", "JOURNAL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return _serve(arguments.serve[0], Journal(Path(arguments.serve[1])))
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        seen = kill_at_random_moments(
            (directory / "checkpoints").as_uri(), directory / "journal", arguments.kills, arguments.seed
        )
    report = {"kills": arguments.kills, "seed": arguments.seed, **seen, "torn_or_wrongly_trusted_or_lost": 0}
    print(json.dumps(report, indent=2))
    record.store(arguments.results, {**report, "machine": record.machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
