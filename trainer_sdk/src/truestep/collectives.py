"""Every call of torch.distributed that the SDK makes.

Evidence travels over a CPU (Gloo) group, so that a faulty accelerator or interconnect does not carry the proof against
itself, and with a CRC a row. Every method is a collective: all ranks of the group call it, in the same order. One that
failed half way leaves nothing to go on from: every later one on that group raises `RuntimeError` at once, on every
rank.
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
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from truestep.contract import TruestepError, canonical_bytes, sha256_hex
from truestep.fingerprint import word

_MAXIMA, _NEVER_SENT = 0x7275, 0x6573
"""Tags of messages, so that no other pair of a send and a receive is meant."""
_FAN_OUT = 4
"""Children of a rank in the tree of `_Maxima`: 1,024 ranks are five levels."""
_NUMBERS = 16
"""int64 a message of the tree; their number is the same in every message, as a receive is asked for ahead of time."""
TRANSPORT_ATTEMPTS = 3
"""A row whose CRC is wrong is sent again this many times in all, by every rank together."""


class EvidenceTransportError(TruestepError):
    """Evidence arrived with a wrong CRC on every attempt: the hosts' network or memory corrupts data."""


class CpuGroup:
    """A Gloo group over the ranks of a data-parallel group. `rank` and `size` count within the group."""

    def __init__(self, data_parallel: dist.ProcessGroup, *, timeout: timedelta = timedelta(minutes=10)) -> None:
        """Collective over the data-parallel group. timeout: after which a collective whose peer is gone raises."""
        members = dist.get_process_group_ranks(data_parallel)
        with _equally_many_groups(data_parallel, len(members)):
            self.group: dist.ProcessGroup = dist.new_group(
                members, timeout=timeout, backend="gloo", use_local_synchronization=True
            )
        self.rank = dist.get_rank(data_parallel)
        self.size = len(members)
        self.explain_failure: Callable[[], None] = _nothing_known
        """Called when a wait fails; raises an error that says more where it is known which peer is gone."""
        self._given_up = ""
        """The error over which a collective was left half way; empty before."""
        self._maxima = _Maxima(self.group, self.rank, self.size)

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
            with self._whole_or_given_up():
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
        with self._whole_or_given_up():
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
        """(minimum, maximum) over ranks of each int64 value; at most 5 messages of 128 bytes a rank and 8 values."""
        result: list[tuple[int, int]] = []
        for start in range(0, len(values), _NUMBERS // 2):
            some = values[start : start + _NUMBERS // 2]
            # max(~v) is ~min(v): one maximum serves both, and unlike -v it cannot overflow.
            with self._whole_or_given_up():
                found = self._maxima.of([*some, *(~value for value in some)])
            result += [(~low, high) for high, low in zip(found[: len(some)], found[len(some) :], strict=True)]
        return result

    def interrupt(self) -> None:
        """Make every wait of this rank in this group raise `RuntimeError`, now and from now on. From any thread.

        Gloo has no call for it, but closes all of a group's connections where one wait runs out of time. A wait for a
        rank whose connection is closed already fails before that, and closes no other one.
        """
        for other in range(self.size):
            if other != self.rank:
                with suppress(RuntimeError):
                    self.group.recv([torch.empty(1, device="cpu")], other, _NEVER_SENT).wait(timedelta(milliseconds=1))

    def sums(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over ranks of a float64 CPU tensor; one all-reduce of its size."""
        total = values.clone()
        with self._whole_or_given_up():
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
        with self._whole_or_given_up():
            dist.barrier(group=self.group)

    def _gather_once(self, data: bytes) -> list[bytes] | None:
        headers = self._gather_int64([len(data), zlib.crc32(data)])
        longest = max(length for length, _ in headers)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = _to_tensor(data)
        bodies = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        with self._whole_or_given_up():
            dist.all_gather(bodies, mine, group=self.group)
        rows = [_to_bytes(body[:length]) for body, (length, _) in zip(bodies, headers, strict=True)]
        intact = all(zlib.crc32(row) == crc for row, (_, crc) in zip(rows, headers, strict=True))
        return rows if intact else None

    def _gather_int64(self, values: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(values, dtype=torch.int64)
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        with self._whole_or_given_up():
            dist.all_gather(rows, mine, group=self.group)
        return [row.tolist() for row in rows]

    @contextmanager
    def _whole_or_given_up(self) -> Iterator[None]:
        """Around what the ranks do together. A failure closes this rank's connections, and so passes on from rank to
        rank: whoever waits for one that has failed would otherwise wait until the group's time-out.

        Only a later call closes them after another error than a lost connection, as a Ctrl-C is: what this rank says
        of that error reaches the others first, and says more.
        """
        if self._given_up:
            self.interrupt()
            self.explain_failure()
            raise RuntimeError(
                f"an exchange between the ranks failed before ({self._given_up}), so they can exchange nothing more: "
                "start the processes again"
            )
        try:
            yield
        except BaseException as error:
            # Its text alone: the error's frames hold the caller's model.
            self._given_up = f"{type(error).__name__}: {error}"[:500]
            if isinstance(error, RuntimeError):
                self.interrupt()
                self.explain_failure()
            raise

    def _exchange_once(
        self, transfers: Sequence[tuple[int, int]], payload: bytes, lengths: Sequence[int]
    ) -> dict[int, bytes]:
        body = _to_tensor(payload)
        works: list[dist.Work | None] = []
        arriving: dict[int, torch.Tensor] = {}
        with self._whole_or_given_up():
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


class _Maxima:
    """Maxima over all ranks of a Gloo group: up a tree of ranks, and down again.

    Gloo's thread spins while another holds a connection's lock, which a rank does while it writes to it. Where both
    ends write at the same time on busy cores, that thread takes the core from the one that holds the lock, until the
    scheduler's next tick: 2 to 5 ms, in half of all steps, as ranks that come out of an all-reduce write at the same
    time. So a connection carries one direction at a time: a rank writes to another only while that one waits for it, or
    computes. A receive writes too, to say that it is there, so it is asked for in front of the message that the other
    end waits for.
    """

    def __init__(self, group: dist.ProcessGroup, rank: int, size: int) -> None:
        self._group = group
        self._parent = (rank - 1) // _FAN_OUT if rank else None
        first = _FAN_OUT * rank + 1
        self._children = range(first, min(first + _FAN_OUT, size))
        self._from_children = [torch.empty(_NUMBERS, dtype=torch.int64) for _ in self._children]
        self._from_parent = torch.empty(_NUMBERS, dtype=torch.int64)
        self._arriving = self._receive_from_children()

    def of(self, mine: Sequence[int]) -> list[int]:
        """Of each int64 of `mine`, at most `_NUMBERS`. Raises `RuntimeError` where a connection is lost."""
        highest = torch.zeros(_NUMBERS, dtype=torch.int64)
        highest[: len(mine)] = torch.tensor(mine, dtype=torch.int64)
        for receipt, theirs in zip(self._arriving, self._from_children, strict=True):
            receipt.wait()
            highest = torch.maximum(highest, theirs)
        sent: list[dist.Work] = []
        if self._parent is not None:
            answer = self._group.recv([self._from_parent], self._parent, _MAXIMA)
            sent.append(self._group.send([highest], self._parent, _MAXIMA))
            answer.wait()
            highest = self._from_parent
        self._arriving = self._receive_from_children()
        sent += [self._group.send([highest], child, _MAXIMA) for child in self._children]
        for work in sent:
            work.wait()
        return highest[: len(mine)].tolist()

    def _receive_from_children(self) -> list[dist.Work]:
        """For the next call: what a child sends then is known to be wanted, and needs no question and answer."""
        spaces = zip(self._from_children, self._children, strict=True)
        return [self._group.recv([space], child, _MAXIMA) for space, child in spaces]


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


@contextmanager
def _equally_many_groups(members: dist.ProcessGroup, size: int) -> Iterator[None]:
    """Collective over `members`. Inside, torch takes every rank to be in as many process groups as the one in most.

    A group that its members make among themselves is named after their ranks and the number of groups that a process is
    in (torch 2.13, `_hash_ranks_to_str`). Ranks in unequally many would wait for one another under different names.
    """
    names: Any = distributed_c10d._world.pg_names
    numbers: list[int] = [0] * size
    dist.all_gather_object(numbers, len(names), group=members)
    stand_ins = {object(): f"truestep/{number}" for number in range(len(names), max(numbers))}
    names.update(stand_ins)
    try:
        yield
    finally:
        for stand_in in stand_ins:
            del names[stand_in]


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
