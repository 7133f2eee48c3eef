"""The arithmetic of a fingerprint, without torch: what the sums are, how they are printed and combined."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MASK64 = (1 << 64) - 1
KEY = 0x9E3779B97F4A7C15
"""Odd constant (2^64 / golden ratio) that a pair's position is multiplied by before it enters the mix."""
FMIX_1 = 0xFF51AFD7ED558CCD
FMIX_2 = 0xC4CEB9FE1A85EC53
"""murmur3's 64-bit finalizer (Appleby): invertible, so a change of one pair always changes its term."""

_PRINTED = re.compile(r"v1:([0-9a-f]{16})([0-9a-f]{16})([0-9a-f]{16})")


def fmix64(value: int) -> int:
    """murmur3's 64-bit finalizer of an unsigned 64-bit integer."""
    value ^= value >> 33
    value = value * FMIX_1 & MASK64
    value ^= value >> 33
    value = value * FMIX_2 & MASK64
    return value ^ value >> 33


def signed(value: int) -> int:
    """The int64 with the same bits as `value` modulo 2^64."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


@dataclass(frozen=True)
class Fingerprint:
    """Three sums modulo 2^64, each an unsigned integer."""

    plain: int
    position: int
    mix: int

    @classmethod
    def from_sums(cls, plain: int, position: int, mix: int, *, length_bytes: int) -> Fingerprint:
        """Close the sums over the data (signed or unsigned) with its length, as one more word behind the data."""
        words, pairs = -(-length_bytes // 4), -(-length_bytes // 8)
        return cls(
            (plain + length_bytes) & MASK64,
            (position + length_bytes * (words + 1)) & MASK64,
            (mix + fmix64(length_bytes ^ (pairs + 1) * KEY & MASK64)) & MASK64,
        )

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Read the printed form. Raises `ValueError` for another format."""
        match = _PRINTED.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a fingerprint of format v1 (v1: and 48 hex digits)")
        plain, position, mix = (int(group, 16) for group in match.groups())
        return cls(plain, position, mix)

    def __str__(self) -> str:
        return f"v1:{self.plain:016x}{self.position:016x}{self.mix:016x}"


def combine(named: Mapping[str, Fingerprint | str] | Iterable[tuple[str, Fingerprint | str]]) -> str:
    """One fingerprint over named ones, the same for any order of the names. Printed form."""
    items = named.items() if isinstance(named, Mapping) else named
    totals = [0, 0, 0]
    for name, value in items:
        digest = hashlib.sha256(f"{name}\0{value}".encode()).digest()
        for index in range(3):
            totals[index] += int.from_bytes(digest[8 * index : 8 * index + 8], "little")
    return str(Fingerprint(*(total & MASK64 for total in totals)))


def word(text: str) -> int:
    """An int64 that stands for `text` in a min/max all-reduce."""
    return signed(int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"))
