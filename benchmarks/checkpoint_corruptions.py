"""Damage every file of a trusted checkpoint in many places: each is refused by name and the next older one used.

python -m benchmarks.checkpoint_corruptions --positions 500 --results benchmarks/results/checkpoint_corruptions.json
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.checkpoint_run import WAYS, OneRun
from truestep.contract import Step
from truestep.resumption import resume

OLDER, NEWER = 4, 9
OURS = ("rng-00000.pt", "manifest.json", "trusted.json")
FILES = {
    "whole": ("model.pt", "optimizer.pt", *OURS),
    "shares": (".metadata", "__0_0.distcp", *OURS),
    "functions": ("files/weights", "files/moments/all", "files/rank-0", *OURS),
}

Contents = dict[str, bytes]
"""File name -> content, of the newer checkpoint's directory."""


def damages(older: Contents, newer: Contents, positions: int, seed: int) -> Iterator[tuple[str, str, Contents]]:
    """(kind, file that must be named, what the newer checkpoint's directory then holds)."""
    chance = random.Random(seed)  # noqa: S311
    for name, content in sorted(newer.items()):
        for _ in range(positions):
            flipped = bytearray(content)
            flipped[chance.randrange(len(content))] ^= chance.randrange(1, 256)
            yield "byte changed", name, {**newer, name: bytes(flipped)}
        for length in sorted({0, len(content) - 1, *(chance.randrange(len(content)) for _ in range(8))}):
            yield "truncated", name, {**newer, name: content[:length]}
        yield "lengthened", name, {**newer, name: content + b"\0"}
        if name != "trusted.json":  # without it there is no claim of trust
            yield "missing", name, {other: held for other, held in newer.items() if other != name}
        yield "the older one's", name, {**newer, name: older[name]}
    first, second, *_ = sorted(set(newer) - set(OURS))
    yield "swapped", first, {**newer, first: newer[second], second: newer[first]}
    both = {name: older[name] for name in ("manifest.json", "trusted.json")}
    yield "manifest and mark of the older one", "manifest.json", {**newer, **both}


def damage_everywhere(directory: Path, positions: int, seed: int, way: str) -> Counter[str]:
    """Try every damage on checkpoints below `directory`. Raises `AssertionError` for the first that is not refused.

    way: of `FILES`; needs a process group of one.
    """
    root = directory / way
    run = OneRun(root.as_uri(), 1, directory / "outbox", **WAYS[way])
    run.save(OLDER)
    run.optimizer.zero_grad()
    run.model(torch.randn(4, 8)).square().mean().backward()
    run.optimizer.step()
    run.save(NEWER)
    run.checkpoints.promote(Step(NEWER))
    older, newer = (_contents(root / f"step-{step:08d}") for step in (OLDER, NEWER))
    assert set(newer) == set(FILES[way]), sorted(newer)
    target, seen = root / f"step-{NEWER:08d}", Counter[str]()
    again = OneRun(root.as_uri(), 2, directory / "outbox")
    again.checkpoints.reporter.resumed = lambda *_: None  # type: ignore[method-assign]  # its fsyncs take longest
    for kind, name, contents in damages(older, newer, positions, seed):
        _replace(target, contents)
        point = resume(again.attachment, again.checkpoints)
        assert point.checkpoint is not None, (kind, name)
        assert point.checkpoint.step == OLDER, f"{kind} {name}: step {point.checkpoint.step} was resumed from"
        (sentence,) = point.skipped
        assert f"/{name}" in sentence, f"{kind} {name}: {sentence}"
        seen[f"{name}, {kind}"] += 1
    _replace(target, newer)
    restored = resume(again.attachment, again.checkpoints).checkpoint
    assert restored is not None
    assert restored.step == NEWER, "the undamaged one is refused too: the trials above show nothing"
    return seen


def _contents(directory: Path) -> Contents:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def _replace(directory: Path, contents: Contents) -> None:
    for name in set(_contents(directory)) - set(contents):
        (directory / name).unlink()
    for name, content in contents.items():
        path = directory / name
        if not path.exists() or path.read_bytes() != content:
            path.write_bytes(content)


def main() -> int:
    """Damage, count, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=500, help="random single-byte changes of each file")
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--results", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("truestep").setLevel(logging.ERROR)  # every refusal is also logged
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        seen = {way: damage_everywhere(Path(directory), arguments.positions, arguments.seed, way) for way in FILES}
        dist.destroy_process_group()
    in_all = sum(counts.total() for counts in seen.values())
    report = {"seed": arguments.seed, "refused_by_name": seen, "in_all": in_all, "accepted": 0}
    print(json.dumps(report, indent=2))
    record.store(arguments.results, {**report, "machine": record.machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
