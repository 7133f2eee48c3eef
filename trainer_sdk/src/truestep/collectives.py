"""Every call of torch.distributed that the SDK makes.

Evidence travels over a CPU (Gloo) group, so that a faulty accelerator or interconnect does not carry the proof against
itself, and with a CRC a row. Every method is a collective: all ranks of the group call it, in the same order.
"""

from __future__ import annotations

import ctypes
import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.nn.parallel import DistributedDataParallel

from truestep.contract import TruestepError, canonical_bytes, sha256_hex
from truestep.fingerprint import word

_MAXIMA, _NEVER_SENT = 0x7275, 0x6573
"""Tags of messages, so that no other pair of a send and a receive is meant."""
TRANSPORT_ATTEMPTS = 3
"""A row whose CRC is wrong is sent again this many times in all, by every rank together."""


class EvidenceTransportError(TruestepError):
    """Evidence arrived with a wrong CRC on every attempt: the hosts' network or memory corrupts data."""


class CpuGroup:
    """A Gloo group over the ranks of a data-parallel group. `rank` and `size` count within the group."""

    def __init__(self, data_parallel: dist.ProcessGroup, *, timeout: timedelta = timedelta(minutes=10)) -> None:
        """Collective over the data-parallel group. timeout: after which a collective whose peer is gone raises."""
        members = dist.get_process_group_ranks(data_parallel)
        self.group: dist.ProcessGroup = dist.new_group(
            members, timeout=timeout, backend="gloo", use_local_synchronization=True
        )
        self.rank = dist.get_rank(data_parallel)
        self.size = len(members)
        self.explain_failure: Callable[[], None] = _nothing_known
        """Called when a wait fails; raises an error that says more where it is known which peer is gone."""

    def gather_rows(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Every rank's row (plain JSON), in rank order. Raises `EvidenceTransportError` on every rank or on none."""
        return [json.loads(data) for data in self.gather_bytes(canonical_bytes(row))]

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in rank order; lengths may differ. Raises `EvidenceTransportError` on every rank or on
        none."""
        for _ in range(TRANSPORT_ATTEMPTS):
            arrived = self._gather_once(data)
            if not self.any_true(arrived is None) and arrived is not None:
                return arrived
        raise self._corrupted()

    def broadcast_bytes(self, data: bytes | None, source: int) -> bytes:
        """`data` of rank `source`; what the others pass is ignored."""
        for _ in range(TRANSPORT_ATTEMPTS):
            payload = data if self.rank == source and data is not None else b""
            header = torch.tensor([len(payload), zlib.crc32(payload)], dtype=torch.int64)
            dist.broadcast(header, group=self.group, group_src=source)
            length, crc = header.tolist()
            body = _to_tensor(payload) if self.rank == source else torch.empty(length, dtype=torch.uint8)
            dist.broadcast(body, group=self.group, group_src=source)
            arrived = _to_bytes(body)
            if not self.any_true(zlib.crc32(arrived) != crc):
                return arrived
        raise self._corrupted()

    def broadcast_tensor(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """A CPU copy of rank `source`'s tensor; the others pass theirs, of the same shape and dtype."""
        raw = tensor.detach().cpu().contiguous().clone()
        dist.broadcast(raw.reshape(-1).view(torch.uint8), group=self.group, group_src=source)
        return raw

    def exchange(self, transfers: Sequence[tuple[int, int]], payload: bytes) -> dict[int, bytes]:
        """Point-to-point: each (source, destination) moves the source's payload. Returns source -> payload for this
        rank.

        transfers: the same on every rank, without duplicates. Raises `EvidenceTransportError` on every rank or on none.
        """
        headers = self._gather_int64([len(payload), zlib.crc32(payload)])
        for _ in range(TRANSPORT_ATTEMPTS):
            received = self._exchange_once(transfers, payload, [length for length, _ in headers])
            bad = any(zlib.crc32(data) != headers[source][1] for source, data in received.items())
            if not self.any_true(bad):
                return received
        raise self._corrupted()

    def extremes(self, values: Sequence[int]) -> list[tuple[int, int]]:
        """(minimum, maximum) over ranks of each int64 value; ceil(log2(world size)) messages of 16 bytes a value."""
        # max(~v) is ~min(v): one maximum serves both, and unlike -v it cannot overflow.
        both = torch.tensor([*values, *(~value for value in values)], dtype=torch.int64)
        with self._explained():
            result = self._maxima(both).tolist()
        return [(~low, high) for high, low in zip(result[: len(values)], result[len(values) :], strict=True)]

    def interrupt(self) -> None:
        """Make every wait of this rank in this group raise `RuntimeError`, now and from now on. From any thread.

        Gloo has no call for it, but closes all of a group's connections where one wait runs out of time.
        """
        if self.size > 1:
            neighbour = (self.rank + 1) % self.size
            with suppress(RuntimeError):
                self.group.recv([torch.empty(1, device="cpu")], neighbour, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of a float64 CPU tensor; one all-reduce of its size."""
        total = values.clone()
        dist.all_reduce(total, op=dist.ReduceOp.SUM, group=self.group)
        return total

    def any_true(self, flag: bool) -> bool:
        """Whether the flag is set on at least one rank."""
        return self.extremes([int(flag)])[0][1] == 1

    def agrees(self, document: Any) -> bool:
        """Whether every rank holds the same JSON document, by its hash."""
        low, high = self.extremes([word(sha256_hex(document))])[0]
        return low == high

    def barrier(self) -> None:
        """Return once every rank has called it."""
        dist.barrier(group=self.group)

    def _gather_once(self, data: bytes) -> list[bytes] | None:
        headers = self._gather_int64([len(data), zlib.crc32(data)])
        longest = max(length for length, _ in headers)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = _to_tensor(data)
        bodies = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(bodies, mine, group=self.group)
        rows = [_to_bytes(body[:length]) for body, (length, _) in zip(bodies, headers, strict=True)]
        intact = all(zlib.crc32(row) == crc for row, (_, crc) in zip(rows, headers, strict=True))
        return rows if intact else None

    def _maxima(self, mine: torch.Tensor) -> torch.Tensor:
        """By dissemination: after k rounds a rank knows the maxima of itself and 2**k - 1 ranks before it. That some
        are counted twice in the last round changes no maximum.

        Gloo's all-reduce sends 2 (n - 1) messages after one another, around a ring, and wakes a second thread: at two
        ranks eleven times the processor time, at three twice. Every step does this once or twice.
        """
        distances = [1 << k for k in range((self.size - 1).bit_length())]
        arriving = [torch.empty_like(mine) for _ in distances]
        receipts = [
            self.group.recv([space], (self.rank - distance) % self.size, _MAXIMA)
            for space, distance in zip(arriving, distances, strict=True)
        ]
        sent: list[dist.Work] = []
        for distance, theirs, receipt in zip(distances, arriving, receipts, strict=True):
            sent.append(self.group.send([mine], (self.rank + distance) % self.size, _MAXIMA))
            receipt.wait()
            mine = torch.maximum(mine, theirs)
        for work in sent:
            work.wait()
        return mine

    def _gather_int64(self, values: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(values, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self._explained():
            dist.all_gather(rows, mine, group=self.group)
        return [row.tolist() for row in rows]

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Around the first collective of an exchange: whoever fails has not entered it."""
        try:
            yield
        except RuntimeError:
            self.explain_failure()
            raise

    def _exchange_once(
        self, transfers: Sequence[tuple[int, int]], payload: bytes, lengths: Sequence[int]
    ) -> dict[int, bytes]:
        body = _to_tensor(payload)
        works: list[dist.Work | None] = []
        arriving: dict[int, torch.Tensor] = {}
        for source, destination in transfers:
            if source == destination:
                continue
            if destination == self.rank:
                arriving[source] = torch.empty(lengths[source], dtype=torch.uint8)
                works.append(dist.irecv(arriving[source], group=self.group, group_src=source))
            if source == self.rank:
                works.append(dist.isend(body, group=self.group, group_dst=destination))
        for work in works:
            if work is not None:
                work.wait()
        received = {source: _to_bytes(data) for source, data in arriving.items()}
        if (self.rank, self.rank) in transfers:
            received[self.rank] = payload
        return received

    @staticmethod
    def _corrupted() -> EvidenceTransportError:
        return EvidenceTransportError(
            f"evidence arrived with a wrong checksum {TRANSPORT_ATTEMPTS} times over the CPU group; "
            "check the hosts' network and memory before training goes on"
        )


def data_parallel_group(ddp_model: DistributedDataParallel, group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """The group that the model averages over. Raises `ValueError` where `group` is another one."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised; call init_process_group before attach")
    own = ddp_model.process_group
    if group is not None and dist.get_process_group_ranks(group) != dist.get_process_group_ranks(own):
        raise ValueError(
            "dp_group has other ranks than the group that the DDP model averages over; pass the same group"
        )
    return own


def group_store(group: dist.ProcessGroup) -> Store:
    """A connection of its own to the group's store where the store can be cloned: no call waits behind another's."""
    store: Store = group.get_group_store()
    try:
        clone: Store = store.clone()  # type: ignore[attr-defined] # torch's own stubs lack it
    except (NotImplementedError, RuntimeError):
        return store
    return clone


def average_bucket(buffer: torch.Tensor, group: dist.ProcessGroup) -> torch.futures.Future[torch.Tensor]:
    """Start the all-reduce of a bucket's mean. Bit-identical to DDP without a hook, which multiplies by 1/world too."""
    size = dist.get_world_size(group)
    # A sparse gradient is divided by DDP itself, not multiplied: at three ranks the last bit differs.
    share = buffer.div_(size) if buffer.is_sparse else buffer.mul_(1.0 / size)
    work = dist.all_reduce(share, group=group, async_op=True)
    if work is None:
        raise RuntimeError("this process is not in the data-parallel group")
    future: torch.futures.Future[list[torch.Tensor]] = work.get_future()
    return future.then(lambda done: done.value()[0])


def _nothing_known() -> None:
    """Nobody is known to be gone."""


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """The raw bytes of a tensor's elements in logical order, wherever it is."""
    return _to_bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8))


def _to_bytes(raw: torch.Tensor) -> bytes:
    # NumPy is optional, and bytes(tensor.untyped_storage()) takes 4 s a megabyte.
    raw = raw.contiguous()
    return ctypes.string_at(raw.data_ptr(), raw.numel()) if raw.numel() else b""
