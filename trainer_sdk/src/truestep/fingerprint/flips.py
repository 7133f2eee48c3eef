"""What a change of a fingerprint says of the data: whether it was one flipped bit, and which."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from truestep.fingerprint.sums import KEY, MASK64, Fingerprint, fmix64, signed
from truestep.fingerprint.tensors import raw_bytes


@dataclass(frozen=True, kw_only=True)
class Flip:
    """One bit of a tensor that is another one than before."""

    element: int
    """Flat index."""
    bit: int
    """Within the element; 0 is the lowest."""
    bits: int
    """The element as it is now, as an unsigned integer."""
    bits_before: int


def flipped_bit(tensor: torch.Tensor, before: Fingerprint, after: Fingerprint) -> Flip | None:
    """The flip that takes data of fingerprint `before` to data of fingerprint `after`; None where it was not one bit.

    tensor: holds the data of either.
    The two linear sums leave one place (bit = change of *plain*, word = change of *position* over that), and the mix of
    that one pair proves it, but for a chance of 2^-64. Eight bytes and an element are read.
    """
    change = signed(after.plain - before.plain)
    bit = abs(change).bit_length() - 1
    if abs(change) != 1 << max(bit, 0) or bit >= 32:
        return None
    word, rest = divmod(signed(after.position - before.position), change)
    if rest or not 1 <= word <= -(-tensor.nbytes // 4):
        return None
    raw, (number, upper) = raw_bytes(tensor), divmod(word - 1, 2)
    pair = _integer(raw, 8 * number, 8)
    key = (number + 1) * KEY & MASK64
    here, there = fmix64(pair ^ key), fmix64(pair ^ 1 << 32 * upper + bit ^ key)
    if (after.mix - before.mix) & MASK64 not in ((here - there) & MASK64, (there - here) & MASK64):
        return None
    size = tensor.element_size()
    element, bit = divmod(32 * (word - 1) + bit, 8 * size)
    held, mask = _integer(raw, size * element, size), 1 << bit
    # The sum of the words has grown where the bit is set now.
    now = held | mask if change > 0 else held & ~mask
    return Flip(element=element, bit=bit, bits=now, bits_before=now ^ mask)


def _integer(raw: torch.Tensor, start: int, count: int) -> int:
    return int.from_bytes(bytes(raw[start : start + count].tolist()), "little")
