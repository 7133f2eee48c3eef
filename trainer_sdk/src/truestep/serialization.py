"""`torch.save` for content that has a checksum of its own."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["save_unchecked"]


def save_unchecked(value: Any, stream: Any) -> None:
    """Write `value` to a stream in torch.save's format, without the CRC-32 of every record.

    That CRC costs as much as SHA-256 (0.6 s a gigabyte), and whoever calls this hashes the bytes anyway: CRC-32 misses
    one of 4 * 10^9 damages, SHA-256 none. torch.load ignores the CRC and reads the file; zip tools complain of it.
    """
    # In torch 2.13 the setting belongs to this thread's context: what the user saves meanwhile keeps its CRC.
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(value, stream)
    finally:
        torch.serialization.set_crc32_options(before)
