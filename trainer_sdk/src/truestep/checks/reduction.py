"""Whether the averaged gradient is the average of what the ranks contributed, though all of them received the same.

Every bucket is cut into blocks of `BLOCK` elements. Each rank takes two sums in float64 over each block of its local
gradient: one with random signs w, and one of the squares. The sums of all ranks are averaged over the CPU group and the
signed one is compared with the same sum over the reduced block. Their difference is sum(w_i * e_i), where e_i is the
rounding error of element i. For n ranks, unit roundoff u and any order of the additions (Higham, Accuracy and Stability
of Numerical Algorithms, section 4.2; a scaling by 1/n and n - 1 additions, one rounding more for the constant):

    |e_i| <= g * a_i + (n + 1) * smallest,   g = (n + 1) u / (1 - (n + 1) u),   a_i = mean over ranks of |gradient_i|

The signs are independent of the errors, so the difference has a standard deviation of at most sqrt(sum e_i^2), and
sum a_i^2 is at most the mean of the ranks' squares. That bound itself is the sensor's tolerance: errors that reach it
in every element at once do not happen (docs/detection.md has what was measured), and a hit accuses nobody. The worst
block is gathered from every rank and compared element by element with the bound above, which no correct reduction
exceeds. Only that makes an alarm.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from truestep.attachment import Attachment
from truestep.checks.finding import Finding
from truestep.collectives import tensor_bytes
from truestep.contract import Check, Step
from truestep.judge import judge_wrong_sum

_log = logging.getLogger(__name__)

BLOCK = 1024
"""Elements under one pair of sums: 16 bytes a block travel, 0.4% of a float32 gradient."""
SHOWN_ELEMENTS = 16
_CHUNK_BLOCKS = 64
"""Blocks widened to float64 at a time: 512 KiB."""


@dataclass(frozen=True, kw_only=True)
class Rounding:
    """What one rounding of the reduction may do."""

    unit: float
    """Largest relative error."""
    smallest: float
    """Largest absolute error where the result underflows."""

    def element_bound(self, ranks: int) -> tuple[float, float]:
        """(relative to the mean magnitude, absolute) error of an average over `ranks`."""
        relative = (ranks + 1) * self.unit
        return relative / (1 - relative), (ranks + 1) * self.smallest


def rounding_of(user_hook: Any, dtype: torch.dtype) -> Rounding | None:
    """How gradients of `dtype` are rounded by the hook that averages them; None where its average is not a plain sum.

    user_hook: as given to `attach`, without its state.
    """
    compressed = {
        None: dtype,
        default_hooks.allreduce_hook: dtype,
        default_hooks.fp16_compress_hook: torch.float16,
        default_hooks.bf16_compress_hook: torch.bfloat16,
    }
    if user_hook not in compressed or not dtype.is_floating_point:
        return None
    limits = torch.finfo(compressed[user_hook])
    # float16 keeps its subnormals everywhere; the wider exponents may be flushed to zero by an accelerator.
    smallest = limits.smallest_normal * (limits.eps if limits.bits == 16 and limits.eps < 2**-8 else 1.0)
    return Rounding(unit=limits.eps / 2, smallest=smallest)


@dataclass
class _Bucket:
    """One bucket of a watched step."""

    rounding: Rounding
    signs: torch.Tensor
    local: torch.Tensor
    """The local gradient before the reduction, in host memory."""
    local_sums: torch.Tensor
    reduced_sums: torch.Tensor | None = None
    reduced_share: torch.Tensor | None = None
    """This rank's share of the reduced blocks: every rank has received the same, so one copy in the job is enough."""


class ReductionWatch:
    """Sees every bucket of one step before and after its reduction. Called from the communication hook's threads."""

    def __init__(self, step: Step, rank: int, ranks: int, user_hook: Any) -> None:
        """user_hook: as for `rounding_of`."""
        self._step, self._rank, self._ranks, self._hook = step, rank, ranks, user_hook
        self._buckets: dict[int, _Bucket] = {}
        self._lock = threading.Lock()

    @torch.no_grad()
    def before(self, index: int, buffer: torch.Tensor) -> None:
        """The bucket's local gradient, before anything scales or sends it."""
        rounding = None if buffer.is_sparse else rounding_of(self._hook, buffer.dtype)
        if rounding is None or not buffer.numel():
            return
        signs = random_signs(self._step, index).to(buffer.device)
        local = buffer.detach().clone() if buffer.device.type == "cpu" else buffer.detach().to("cpu")
        bucket = _Bucket(rounding=rounding, signs=signs, local=local, local_sums=block_sums(buffer, signs))
        with self._lock:
            self._buckets[index] = bucket

    @torch.no_grad()
    def after(self, index: int, buffer: torch.Tensor) -> None:
        """The averaged gradient, before anyone clips or unscales it."""
        bucket = self._buckets.get(index)
        if bucket is None:
            return
        bucket.reduced_sums = block_sums(buffer, bucket.signs)
        share = [_block(buffer, number) for number in range(self._rank, _blocks(buffer.numel()), self._ranks)]
        bucket.reduced_share = torch.cat(share).to("cpu") if share else buffer.new_empty(0, device="cpu")

    def buckets(self) -> list[tuple[int, _Bucket]]:
        """(index, bucket) of every bucket that was seen whole, in order."""
        with self._lock:
            return [(index, self._buckets[index]) for index in sorted(self._buckets)]


def judge_reduction(watch: ReductionWatch, step: Step, attachment: Attachment) -> Finding | None:
    """Compare the sums of a watched step. Collective: an all-reduce of 16 bytes a block, and more only on a hit."""
    cpu = attachment.cpu_group
    buckets = watch.buckets()
    if not buckets:
        return None
    mean = cpu.sums(torch.cat([bucket.local_sums.cpu() for _, bucket in buckets]) / cpu.size)
    reduced = torch.cat([_seen(bucket).cpu() for _, bucket in buckets])
    bounds = [bucket.rounding.element_bound(cpu.size) for _, bucket in buckets]
    counts = [len(bucket.local_sums) for _, bucket in buckets]
    excess = (reduced[:, 0] - mean[:, 0]).abs() / _tolerance(mean[:, 1], bounds, counts)
    worst = int(excess.argmax())
    if not cpu.any_true(float(excess[worst]) > 1.0):
        return None
    rows = cpu.gather_rows({"block": worst, "excess": min(float(excess[worst]), 1e300)})
    chosen = max(rows, key=lambda row: (row["excess"], -row["block"]))
    place = int(chosen["block"])
    for (index, bucket), count in zip(buckets, counts, strict=True):
        if place < count:
            return _verify(step, index, bucket, place, float(chosen["excess"]), attachment)
        place -= count
    raise AssertionError("the worst block lies in a bucket")


def random_signs(step: int, index: int) -> torch.Tensor:
    """+1 or -1 for each element of a block, float64; the same on every rank, other ones in every step and bucket."""
    generator = torch.Generator().manual_seed((step * 1_000_003 + index) * 2 + 1)
    return torch.randint(0, 2, (BLOCK,), generator=generator).mul_(2).sub_(1).double()


def block_sums(buffer: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """[blocks, 2] in float64: the sum with `signs`, and the sum of the squares, of each block; the tail is a block."""
    flat = buffer.detach().reshape(-1)
    whole = flat.numel() // BLOCK * BLOCK
    rows = flat[:whole].view(-1, BLOCK)
    starts = range(0, len(rows), _CHUNK_BLOCKS)
    parts = [_sums(rows[start : start + _CHUNK_BLOCKS], signs) for start in starts]
    if whole < flat.numel():
        parts.append(_sums(flat[whole:].view(1, -1), signs[: flat.numel() - whole]))
    return torch.cat(parts)


def _sums(rows: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    wide = rows.double()
    return torch.stack([wide @ signs, wide.square().sum(dim=1)], dim=1)


def _tolerance(squares: torch.Tensor, bounds: Sequence[tuple[float, float]], counts: Sequence[int]) -> torch.Tensor:
    """What the signed sum of each block may be off. squares: mean over ranks of each block's sum of squares."""
    sizes = torch.tensor(counts)
    relative = torch.tensor([bound for bound, _ in bounds], dtype=torch.float64).repeat_interleave(sizes)
    absolute = torch.tensor([bound for _, bound in bounds], dtype=torch.float64).repeat_interleave(sizes)
    size = squares.sqrt()
    summation = BLOCK**1.5 * 2.0**-52 * size  # of the sums in float64 themselves
    tolerance: torch.Tensor = relative * size + absolute * math.sqrt(BLOCK) + summation
    return tolerance


def _verify(
    step: Step, index: int, bucket: _Bucket, number: int, excess: float, attachment: Attachment
) -> Finding | None:
    """Element by element, from every rank's own copy of the block. Collective."""
    cpu = attachment.cpu_group
    own = _block(bucket.local, number)
    gathered = torch.stack([_from_bytes(data, own.dtype) for data in cpu.gather_bytes(tensor_bytes(own))]).double()
    share = bucket.reduced_share
    held = share is not None and number % cpu.size == cpu.rank
    kept = tensor_bytes(_block(share, number // cpu.size)) if held and share is not None else b""
    received = _from_bytes(cpu.broadcast_bytes(kept, number % cpu.size), own.dtype).double()
    relative, absolute = bucket.rounding.element_bound(cpu.size)
    expected = gathered.mean(dim=0)
    bound = relative * gathered.abs().mean(dim=0) + absolute
    wrong = torch.nonzero((received - expected).abs() > bound).flatten().tolist()
    if not wrong:
        _log.info("step %d: block %d of bucket %d exceeded its sum's tolerance and is right", step, number, index)
        return None
    evidence = {
        "bucket": index,
        "parameters_of_this_bucket": list(attachment.sensor.bucket_parameters(index))[:SHOWN_ELEMENTS],
        "first_element": number * BLOCK,
        "sum_over_tolerance": excess,
        "elements": len(wrong),
        "first": [
            {
                "element": number * BLOCK + place,
                "received": float(received[place]),
                "average_of_local": float(expected[place]),
                "bound": float(bound[place]),
                "local": gathered[:SHOWN_ELEMENTS, place].tolist(),
            }
            for place in wrong[:SHOWN_ELEMENTS]
        ],
    }
    return Finding(check=Check.REDUCTION, verdict=judge_wrong_sum(step, len(wrong)), evidence=evidence)


def _seen(bucket: _Bucket) -> torch.Tensor:
    if bucket.reduced_sums is None:
        raise AssertionError("a bucket's reduction ends before backward returns")
    return bucket.reduced_sums


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _block(buffer: torch.Tensor, number: int) -> torch.Tensor:
    return buffer.detach().reshape(-1)[number * BLOCK : (number + 1) * BLOCK]


def _from_bytes(data: bytes, dtype: torch.dtype) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype)
