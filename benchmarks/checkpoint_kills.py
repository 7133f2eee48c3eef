"""Kill -9 at random moments of saving, promoting and retaining checkpoints; after each, what is left is examined.

    python -m benchmarks.checkpoint_kills --kills 200 --results benchmarks/results/checkpoint_kills.json

Of runs of one rank, and of several over Gloo, of which one is killed and the others then find out. Every other victim
dies after a random time, the rest at a random file-system call (also inside a file's content and before an fsync). The
starts save by each of the ways in turn. Every start resumes from what the killed ones left before it saves.
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
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import record
from benchmarks.checkpoint_run import NEED_A_GROUP, WAYS, OneRun
from truestep.checkpoints import Trust, list_checkpoints
from truestep.checkpoints.catalogue import directory_step
from truestep.checkpoints.files import rng_name
from truestep.checkpoints.own_functions import is_own
from truestep.checkpoints.storage import HashingWriter, open_storage
from truestep.cli.verification import verify_checkpoint
from truestep.contract import Rank, Step
from truestep.resumption import resume

STEPS_A_START = 1000
LONGEST_SECONDS = 0.25
MOST_CALLS = 400
"""A few rounds of save, promote and retain on rank 0."""
MOST_CALLS_ELSEWHERE = 60
KEEP = 3
COUNTED_EVENTS = ("open", "os.", "shutil.")
NOTICED_SECONDS = 5.0
"""Survivors of a killed rank that have not ended by then are ended, as a launcher would, and counted: Gloo has been
seen to wait in a broadcast from and to the living until its timeout."""
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""What Gloo says on a rank beside a killed one. Any other end of a survivor is a finding."""
WRONG = 3
"""Exit code of a rank that found something wrong; 1 is that of one that lost its peer."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the run, and the death of one of its ranks."""

    number: int
    ranks: int
    way: str
    victim: int
    kind: str
    """``seconds`` or ``call``; ``never``: it saves what retention keeps, and ends."""
    amount: float = 0


class Journal:
    """Lines that outlive the process that wrote them: what a rank was about to do, and what it had done."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, what: str, attempt_id: str, step: int) -> None:
        """Append one line by one write."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, f"{what} {attempt_id} {step}\n".encode())
        os.close(descriptor)

    def noted(self, what: str) -> list[tuple[str, int]]:
        """(attempt, step) of every line noted under `what`."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [(attempt, int(step)) for name, attempt, step in map(str.split, lines) if name == what]

    def highest(self, what: str) -> dict[str, int]:
        """Attempt -> the highest step noted under `what`."""
        found: dict[str, int] = {}
        for attempt_id, step in self.noted(what):
            found[attempt_id] = max(step, found.get(attempt_id, -1))
        return found


def run_rank(root_uri: str, start: Start, rank: int, journal: Journal, arm: Callable[[], None]) -> None:
    """Resume, then save and promote one step after the other; `arm` is called when the first save begins."""
    torch.set_num_threads(1)
    if start.ranks > 1:
        store = dist.FileStore(f"{journal.path}.store-{start.number}", start.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=start.ranks)
    elif start.way in NEED_A_GROUP:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # A save in the background may still report into it when the connection is lost.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        run = OneRun(root_uri, start.number, Path(directory, "outbox"), keep=KEEP, **WAYS[start.way])
        attempt_id = run.attachment.run.attempt_id
        point = resume(run.attachment, run.checkpoints)
        assert not any("refused" in sentence for sentence in point.skipped), point.skipped
        journal.note(f"resumed-{start.number}", attempt_id, point.start_step)
        arm()
        first_step = start.number * STEPS_A_START
        for step in range(first_step, first_step + (STEPS_A_START if start.kind != "never" else KEEP)):
            run.save(step)
            if rank == 0:
                journal.note("audited", attempt_id, step)
            marked = run.checkpoints.promote(Step(step))
            if marked is not None and rank == 0:
                journal.note("trusted", attempt_id, marked.step)
        run.checkpoints.finish()
        run.checkpoints.promote(Step(first_step + KEEP))


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


def _child(root_uri: str, start: Start, rank: int, journal: Journal, armed: int) -> None:
    """What a forked process does; never returns."""

    def arm() -> None:
        if rank == start.victim:
            os.write(armed, b".")
            if start.kind == "call":
                die_at_call(int(start.amount))

    code = 0
    try:
        run_rank(root_uri, start, rank, journal, arm)
    except AssertionError:
        traceback.print_exc()
        code = WRONG
    except Exception as error:
        lost = any(words in str(error) for words in LOST_PEER)
        print(f"start {start.number}, rank {rank}: {type(error).__name__}: {error}", file=sys.stderr)
        code = 1 if lost else WRONG
    finally:
        sys.stderr.flush()
        os._exit(code)


def _serve(root_uri: str, journal: Journal) -> int:
    """For every line, a `Start` as JSON: fork its ranks, see the victim die, and the others find out."""
    torch.set_num_threads(1)
    torch.optim.AdamW(nn.Linear(1, 1).parameters())  # the first optimizer imports for seconds; children inherit that
    for line in sys.stdin:
        start = Start(**json.loads(line))
        read_end, write_end = os.pipe()
        children: list[int] = []
        for rank in range(start.ranks):
            child = os.fork()
            if child == 0:
                _child(root_uri, start, rank, journal, write_end)
            children.append(child)
        os.close(write_end)
        os.read(read_end, 1)
        victim = children[start.victim]
        if start.kind == "seconds":
            # Nothing more comes through the pipe unless all die by themselves: this is a wait that notices that.
            select.select([read_end], [], [], start.amount)
            os.kill(victim, signal.SIGKILL)
        codes, late = {victim: _exit_code(victim)}, 0
        deadline = time.monotonic() + NOTICED_SECONDS
        for child in children:
            if child != victim:
                late += not _ended(child, deadline - time.monotonic())
                codes[child] = _exit_code(child)
        os.close(read_end)
        print(json.dumps({"codes": [codes[child] for child in children], "late": late}), flush=True)
    return 0


def _exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _ended(child: int, seconds: float) -> bool:
    """Whether a child ended by itself in time; else it is killed."""
    descriptor = os.pidfd_open(child)
    try:
        ended = bool(select.select([descriptor], [], [], max(0.0, seconds))[0])
    finally:
        os.close(descriptor)
    if not ended:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    return ended


@contextmanager
def killer(root_uri: str, journal_path: Path) -> Iterator[Callable[[Start], int]]:
    """Yields a function that makes a `Start` and returns, after all its ranks have ended, how many had to be ended.

    Raises `AssertionError` for a victim that ended by itself, and for a rank that found something wrong.
    """
    command = [sys.executable, "-m", "benchmarks.checkpoint_kills", "--serve", root_uri, str(journal_path)]
    root = Path(__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), str(root / "trainer_sdk" / "src")])
    with (
        journal_path.with_suffix(".errors").open("a+") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        ) as server,
    ):
        assert server.stdin is not None
        assert server.stdout is not None
        stdin, stdout = server.stdin, server.stdout

        def kill(start: Start) -> int:
            stdin.write(json.dumps(asdict(start)) + "\n")
            stdin.flush()
            answer = json.loads(stdout.readline() or "{}")
            dead = 0 if start.kind == "never" else -signal.SIGKILL
            codes = answer.get("codes", [])
            good = len(codes) == start.ranks and codes[start.victim] == dead
            others = {code for rank, code in enumerate(codes) if rank != start.victim}
            good = good and others <= ({0} if start.kind == "never" else {1, -signal.SIGKILL})
            assert good, f"{start} ended with {answer}:\n{journal_path.with_suffix('.errors').read_text()[-4000:]}"
            return int(answer["late"])

        yield kill


def random_start(chance: random.Random, number: int, ranks: int) -> Start:
    """Who dies when: by the clock and by the count of its calls in turn."""
    way = list(WAYS)[number // 2 % len(WAYS)]
    victim = chance.randrange(ranks)
    if number % 2:
        kind, amount = "seconds", round(chance.uniform(0.0, LONGEST_SECONDS * min(ranks, 2)), 6)
    else:
        kind, amount = "call", chance.randint(1, MOST_CALLS if victim == 0 else MOST_CALLS_ELSEWHERE)
    return Start(number=number, ranks=ranks, way=way, victim=victim, kind=kind, amount=amount)


def examine(root_uri: str, journal: Journal, start: Start, newest_trusted: int) -> Counter[str]:
    """What a start found and left. Raises `AssertionError` for what is torn, wrongly trusted or lost.

    newest_trusted: the newest step that had become trusted before it, or -1.
    """
    resumed = [step for _, step in journal.noted(f"resumed-{start.number}")]
    assert len(resumed) == start.ranks, f"{resumed}: not every rank resumed"
    assert len(set(resumed)) == 1, f"the ranks resumed at {resumed}"
    assert resumed[0] > newest_trusted, f"step {newest_trusted} had become trusted, the next start was at {resumed[0]}"
    storage, records = open_storage(root_uri), list_checkpoints(root_uri)
    audited = journal.highest("audited")
    for entry in records:
        assert entry.trust in (Trust.WRITTEN, Trust.TRUSTED), entry
        assert entry.manifest is not None
        listed = {file.path for file in entry.manifest.files}
        assert listed >= {rng_name(Rank(rank)) for rank in range(start.ranks)}, listed
        found = verify_checkpoint(storage, entry, weights=not is_own(entry.manifest))
        assert found.usable, found
        if entry.trust is Trust.TRUSTED:
            assert entry.ref.step <= audited.get(entry.manifest.attempt_id, -1), f"wrongly trusted: {entry.ref}"
    complete = {entry.directory for entry in records}
    own = [name for name in storage.directories("step-") if (directory_step(name) or 0) >= start.number * STEPS_A_START]
    return Counter(
        {
            "checkpoints verified": len(records),
            "torn saves passed over": sum(name not in complete for name in own),
            "resumes from a trusted one": int(resumed[0] > 0),
        }
    )


def kill_at_random_moments(root_uri: str, journal_path: Path, kills: int, seed: int, ranks: int = 1) -> Counter[str]:
    """Kill one rank of each start; examine after each. Returns how often what was seen."""
    chance, journal, seen = random.Random(seed), Journal(journal_path), Counter[str]()  # noqa: S311
    with killer(root_uri, journal_path) as kill:
        for number in range(kills + 1):
            last = Start(number=number, ranks=ranks, way="whole", victim=0, kind="never")
            start = last if number == kills else random_start(chance, number, ranks)
            newest_trusted = max(journal.highest("trusted").values(), default=-1)
            seen["survivors that had to be ended"] += kill(start)
            seen.update(examine(root_uri, journal, start, newest_trusted))
            if number < kills:
                seen[f"killed by {start.kind}"] += 1
    left = open_storage(root_uri).directories("step-")
    assert len(left) == KEEP, f"the last start left {left}"
    hidden = [path for path in Path(root_uri.removeprefix("file://")).rglob(".*") if path.name != ".metadata"]
    assert not hidden, f"what killed ones left is still there: {hidden}"
    return seen


def main() -> int:
    """Kill, examine, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="for each number of ranks")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--serve", nargs=2, metavar=("ROOT_URI", "JOURNAL"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return _serve(arguments.serve[0], Journal(Path(arguments.serve[1])))
    seen = {}
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory() as name:
            root_uri, journal = Path(name, "checkpoints").as_uri(), Path(name, "journal")
            seen[str(ranks)] = kill_at_random_moments(root_uri, journal, arguments.kills, arguments.seed, ranks)
    report = {
        "kills": arguments.kills,
        "seed": arguments.seed,
        "by_number_of_ranks": seen,
        "torn_or_wrongly_trusted_or_lost": 0,
    }
    print(json.dumps(report, indent=2))
    record.store(arguments.results, {**report, "machine": record.machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
