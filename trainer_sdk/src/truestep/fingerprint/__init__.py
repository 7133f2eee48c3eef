"""Fingerprints of tensors: three 64-bit sums over raw bit patterns, the same on every device and layout.

- *plain*: sum of the 32-bit words; *position*: sum of word * (index + 1). Together they see any change of one or two
  words.
- *mix*: sum over pairs of words of fmix64(pair XOR (index + 1) * key): closes the hole of the linear sums (equal and
  opposite flips in groups of four with signs + - - +).

Sums are associative, so chunks, shards and launches add up. Format: ``v1:`` and three times 16 hex digits.

`reference` is the definition; `native` (C), `triton` (CUDA) and `eager` (torch operations) give its values faster.
"""

from truestep.fingerprint.flips import Flip, flipped_bit
from truestep.fingerprint.state import (
    agreeing_buffers,
    fingerprint_model,
    fingerprint_nested,
    fingerprint_optimizer,
    fingerprint_weights,
    is_data,
    named_buffers,
    named_state,
    optimizer_state_tensors,
    slots_of,
)
from truestep.fingerprint.sums import Fingerprint, combine, word
from truestep.fingerprint.table import FingerprintTable
from truestep.fingerprint.tensors import (
    PendingFingerprints,
    begin_fingerprints,
    fingerprint_tensor,
    fingerprint_tensors,
    pending_sums,
    settle_sums,
)

__all__ = [
    "Fingerprint",
    "FingerprintTable",
    "Flip",
    "PendingFingerprints",
    "agreeing_buffers",
    "begin_fingerprints",
    "combine",
    "fingerprint_model",
    "fingerprint_nested",
    "fingerprint_optimizer",
    "fingerprint_tensor",
    "fingerprint_tensors",
    "fingerprint_weights",
    "flipped_bit",
    "is_data",
    "named_buffers",
    "named_state",
    "optimizer_state_tensors",
    "pending_sums",
    "settle_sums",
    "slots_of",
    "word",
]
