"""How often a change of a tensor escapes each way of summing it up: XOR, one sum, two sums, the fingerprint.

    python -m benchmarks.misses --json benchmarks/results/misses.json

Every trial draws a tensor of normal weights, corrupts a copy, and asks whether the two have the same value. Sums are
those of the library; XOR is `torch.hash_tensor`. Ends with status 1 if one change escaped the fingerprint.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import machine, store
from truestep.fingerprint import Fingerprint, fingerprint_tensors

ELEMENTS = 512
SIGMA = 1e-3
INTEGERS = {torch.bfloat16: torch.int16, torch.float32: torch.int32}
METHODS = ("XOR", "plain sum", "plain + position", "fingerprint", "two sums, 64-bit lanes")
Corrupt = Callable[[torch.Tensor, torch.Generator], torch.Tensor]


def equal_flips(count: int, strides: Sequence[int] = (1, 8), *, top_bit: bool = False) -> Corrupt:
    """The same bit of `count` elements, each `stride` 32-bit words after the last; the bit and the start are random.

    Only bits that weights of this size have set about half of the time: mantissa and sign. top_bit: the highest bit of
    pairs of words instead.
    """

    def corrupt(tensors: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        trials, width = len(tensors), tensors.element_size()
        words = ELEMENTS * width // 4
        stride = torch.tensor(strides)[torch.randint(len(strides), (trials, 1), generator=generator)]
        start = (torch.rand(trials, 1, generator=generator) * (words - (count - 1) * stride)).long()
        start = start | 1 if top_bit else start  # the upper word of a pair
        half = torch.randint(4 // width, (trials, 1), generator=generator)
        places = (start + stride * torch.arange(count)) * (4 // width) + half
        mantissa = 7 if tensors.dtype is torch.bfloat16 else 23
        bit = torch.randint(mantissa + 1, (trials, 1), generator=generator)
        bit = torch.where((bit == mantissa) | top_bit, 8 * width - 1, bit)
        if top_bit and width == 2:
            places = places | 1
        changed = tensors.clone()
        integers = changed.view(INTEGERS[tensors.dtype])
        flipped = integers.gather(1, places).long() ^ (1 << bit)
        integers.scatter_(1, places, flipped.to(integers.dtype))
        return changed

    return corrupt


def swapped(tensors: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Two different elements trade places, an even number of elements apart."""
    trials = len(tensors)
    first = torch.randint(ELEMENTS // 2, (trials, 1), generator=generator)
    distance = 2 * torch.randint(1, ELEMENTS // 4, (trials, 1), generator=generator)
    places = torch.cat([first, first + distance], dim=1)
    changed = tensors.clone()
    changed.scatter_(1, places, tensors.gather(1, places).flip(1))
    return changed


PATTERNS: dict[str, Corrupt] = {
    "same bit in 2 elements": equal_flips(2, range(1, 65)),
    "same bit in 4 (1 or 8 words apart)": equal_flips(4),
    "same bit in 8": equal_flips(8),
    "same bit in 16": equal_flips(16),
    "two elements swapped": swapped,
    "top bit of 2 pairs of words": equal_flips(2, range(2, 130, 2), top_bit=True),
}


def missed(before: torch.Tensor, after: torch.Tensor) -> dict[str, float]:
    """Share of the changed rows that each method takes for unchanged."""
    integers = INTEGERS[before.dtype]
    changed = (before.view(integers) != after.view(integers)).any(dim=1)
    pairs = [(before[row], after[row]) for row in torch.nonzero(changed).flatten().tolist()]
    ours = [_fingerprints(side) for side in zip(*pairs, strict=True)]
    escapes = dict.fromkeys(METHODS, 0)
    for (old, new), one, other in zip(pairs, *ours, strict=True):
        escapes["XOR"] += bool(torch.hash_tensor(old.view(integers)) == torch.hash_tensor(new.view(integers)))
        escapes["plain sum"] += one.plain == other.plain
        escapes["plain + position"] += (one.plain, one.position) == (other.plain, other.position)
        escapes["fingerprint"] += one == other
        escapes["two sums, 64-bit lanes"] += _lane_sums(old) == _lane_sums(new)
    return {method: count / len(pairs) for method, count in escapes.items()}


def _fingerprints(tensors: Sequence[torch.Tensor]) -> list[Fingerprint]:
    table = fingerprint_tensors({str(index): tensor for index, tensor in enumerate(tensors)})
    return [Fingerprint.parse(table[str(index)]) for index in range(len(tensors))]


def _lane_sums(tensor: torch.Tensor) -> tuple[int, int]:
    """Plain and position-weighted sum of 64-bit lanes: cheaper, and the reason why the fingerprint has 32-bit words."""
    lanes = tensor.view(torch.int64)
    return int(lanes.sum()), int((lanes * torch.arange(1, len(lanes) + 1)).sum())


def main() -> int:
    """Run, print the table, store it where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000, help="a pattern and data type")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=None, help="write the table here as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    print(f"{'pattern':<36}{'dtype':<10}" + "".join(f"{method:>24}" for method in METHODS))
    for dtype in INTEGERS:
        for name, corrupt in PATTERNS.items():
            generator = torch.Generator().manual_seed(arguments.seed)
            before = (torch.randn(arguments.trials, ELEMENTS, generator=generator) * SIGMA).to(dtype)
            shares = missed(before, corrupt(before, generator))
            kind = str(dtype).removeprefix("torch.")
            print(f"{name:<36}{kind:<10}" + "".join(f"{share:>24.2%}" for share in shares.values()), flush=True)
            rows.append({"pattern": name, "dtype": kind, "missed": {m: round(s, 5) for m, s in shares.items()}})
    setting = {"trials": arguments.trials, "seed": arguments.seed, "elements": ELEMENTS, "sigma": SIGMA}
    store(arguments.json, {"machine": machine(), "setting": setting, "rows": rows})
    return int(any(row["missed"]["fingerprint"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
