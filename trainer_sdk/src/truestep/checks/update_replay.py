"""Update replay: another node repeats the optimizer's update of a random sample of tensors, bit for bit.

On audit steps every rank keeps, for its sample, what the update started from (weight, gradient, optimizer state,
hyperparameters) as the optimizer itself found it, and the fingerprint of what it left behind. A rank on another node
runs the same optimizer class on the shipped copies and compares. Who is wrong is settled as in the ring replay audit:
third nodes repeat every mismatching update, and `judge_audit` decides.

That holds for records which their own rank repeats. A record that even its own rank's second run contradicts is either
a fault that came once, or the user's own rule for that tensor (a hook that clamps it, a setting read from the
parameter), which no replay knows and only the ranks that drew the tensor show: third nodes would convict a healthy
rank. So the replay accuses nobody of it. The copies of weights and optimizer state decide; where they agree, the tensor
is left out from then on. Under ZeroRedundancyOptimizer there are no copies, and it is left out at once.

An optimizer whose update cannot be repeated from these (LBFGS, one that mixes tensors or keeps state elsewhere) shows
at once: every rank's own second run differs from its own record. The check then says so and ends for this run.
"""

from __future__ import annotations

import io
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from truestep.attachment import Attachment
from truestep.checks.finding import SHOWN_NAMES, Finding
from truestep.checks.topology import Ring, arbitration_plan
from truestep.contract import Check, NodeName, Rank, Step
from truestep.fingerprint import combine, fingerprint_nested, is_data
from truestep.fingerprint.state import fingerprint_leaves
from truestep.judge import AuditEvidence, Recorded, Replayed, judge_audit, mismatching_edges
from truestep.serialization import save_unchecked

_log = logging.getLogger(__name__)

SAMPLED_TENSORS = 8
SAMPLED_BYTES = 1 << 24
"""Weights that a rank ships in one audit at most; with gradient and Adam's state four times that. A larger tensor is
never sampled: the comparison of weights and optimizer state covers it."""
SHOWN_EDGES = 8


@dataclass
class _Sample:
    """One rank's sampled tensors, before and after the update."""

    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Name -> weight, gradient, state, index of its group; copies, taken as the update begins."""
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Index of a parameter group -> its hyperparameters."""
    results: dict[str, str] = field(default_factory=dict)
    """Name -> fingerprint of weight and state after the update; empty where there was none."""

    def to_bytes(self) -> bytes:
        stream = io.BytesIO()
        save_unchecked({"tensors": self.tensors, "groups": self.groups}, stream)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Sample:
        # The same trust as for the audit's inputs: bytes of a rank of this job, over its own process group.
        return cls(**torch.load(io.BytesIO(data), map_location=_to_own_device, weights_only=False))

    def inputs(self) -> str:
        """Fingerprint of what the update starts from."""
        return fingerprint_nested([self.tensors, self.groups])


class UpdateReplay:
    """Replays updates of one optimizer. Every method is called by every rank."""

    def __init__(
        self,
        attachment: Attachment,
        optimizer: torch.optim.Optimizer,
        ring: Ring,
        names: Mapping[int, str],
    ) -> None:
        """names: id of a parameter -> its name."""
        self._attachment = attachment
        self._cpu = attachment.cpu_group
        # ZeroRedundancyOptimizer steps the optimizer of the parameters that this rank owns.
        inner = getattr(optimizer, "optim", None)
        self._optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
        self._copied = self._optimizer is optimizer
        self._left_out: set[str] = set()
        """Names of tensors that follow a rule which no replay knows; the same on every rank."""
        self._ring = ring
        self._names = names
        self._sample: _Sample | None = None
        self._handles: list[Any] = []
        self.enabled = True
        """False once the optimizer's update turned out not to be repeatable."""

    def watch(self, step: Step) -> None:
        """Record the next update, which is that of `step`."""
        self.forget()
        if not self.enabled:
            return
        self._handles = [
            self._optimizer.register_step_pre_hook(lambda *_: self._before(step)),
            self._optimizer.register_step_post_hook(lambda *_: self._after()),
        ]

    def forget(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._sample = [], None

    def run(self, step: Step, number: int, compare_copies: Callable[[], Finding | None]) -> tuple[bool, Finding | None]:
        """(whether every update was repeated, what was found). Collective, after the update of a watched step.

        number: of the audit, for the ring's rotation. An update that a GradScaler skipped is not replayed.
        compare_copies: compares weights and optimizer state now; collective, entered by all ranks or by none.
        """
        sample = self._sample or _Sample()
        self.forget()
        me = self._attachment.rank
        payload = sample.to_bytes()
        before = self._cpu.gather_rows({"inputs": sample.inputs(), "result": _combined(sample.results)})
        if not any(row["result"] for row in before):
            return False, None
        recorded = {
            Rank(rank): Recorded(
                rank=Rank(rank),
                node=NodeName(self._attachment.nodes[Rank(rank)]),
                inputs=row["inputs"],
                result=row["result"],
            )
            for rank, row in enumerate(before)
        }
        producer = self._ring.producer(me, number)
        shipped = self._cpu.exchange(self._ring.transfers(number), payload)
        ring = self._gather([self._attempt(producer, shipped[producer])])
        edges = mismatching_edges(recorded, ring)
        if not edges:
            return self._settle_failures(ring, step), None
        evidence, names = self._arbitrate(recorded, ring, edges, sample, payload, shipped[producer])
        own = {replay.producer: replay for replay in evidence.reruns if replay.producer == replay.replayer}
        unrepeated = {rank for rank, record in recorded.items() if own[rank].result != record.result}
        if len(unrepeated) == len(recorded):
            self._disable("no rank's own second run repeats its update")
            return False, None
        if any(edge.producer in unrepeated for edge in edges):
            finding = compare_copies() if self._copied else None
            if finding is not None:
                return False, finding
            self._leave_out({name for edge in edges for name in names[edge.producer]})
        rest = [edge for edge in edges if edge.producer not in unrepeated]
        if not rest:
            return False, None
        return False, self._judge(_without(evidence, unrepeated), rest, shipped[producer])

    def _arbitrate(
        self,
        recorded: Mapping[Rank, Recorded],
        ring: Sequence[Replayed],
        edges: Sequence[Replayed],
        sample: _Sample,
        payload: bytes,
        from_producer: bytes,
    ) -> tuple[AuditEvidence, list[list[str]]]:
        """(third nodes' and second runs, by rank the tensors that its own second run did not repeat)."""
        me = self._attachment.rank
        plan = arbitration_plan(self._ring, edges)
        transfers = [(int(source), int(arbiter)) for source, arbiters in plan.items() for arbiter in arbiters]
        shipped = self._cpu.exchange(transfers, payload)
        arbitration = self._gather([self._attempt(Rank(source), data) for source, data in sorted(shipped.items())])
        again = {**shipped, int(me): payload}
        again.update({int(edge.producer): from_producer for edge in edges if edge.replayer == me})
        tables: dict[int, dict[str, str]] = {}
        reruns = self._gather([self._attempt(Rank(source), data, tables) for source, data in sorted(again.items())])
        mine = tables.get(int(me), {})
        names = [name for name, result in sample.results.items() if mine.get(name) != result]
        rows = self._cpu.gather_rows({"names": names})
        evidence = AuditEvidence(recorded=recorded, ring=ring, arbitration=arbitration, reruns=reruns)
        return evidence, [row["names"] for row in rows]

    def _leave_out(self, names: set[str]) -> None:
        self._left_out |= names
        if self._attachment.rank == 0:
            _log.warning(
                "the update of %s is not repeated by %s from weight, gradient and state, not even on the rank that "
                "made it%s: it follows a rule of its own (a hook, a setting read from the parameter), or a fault came "
                "once; update replay leaves it out in this run, and nobody is accused",
                ", ".join(sorted(names)),
                type(self._optimizer).__name__,
                ", and every rank holds the same weights and optimizer state" if self._copied else "",
            )

    def _judge(self, evidence: AuditEvidence, edges: Sequence[Replayed], from_producer: bytes) -> Finding:
        verdict = judge_audit(evidence, subject="updates of the weights")
        if verdict is None:
            raise AssertionError("a mismatching edge gives a verdict")
        document = {
            "mismatching_edges": len(edges),
            "edges": [asdict(edge) for edge in edges[:SHOWN_EDGES]],
            "arbiters": [asdict(replay) for replay in evidence.arbitration[: 2 * SHOWN_EDGES]],
            "sampled_tensors": self._sampled_of(edges[0].producer, from_producer, edges),
        }
        return Finding(check=Check.UPDATE_REPLAY, verdict=verdict, evidence=document)

    def _sampled_of(self, producer: Rank, from_producer: bytes, edges: Sequence[Replayed]) -> list[str]:
        """Names of the first mismatching sample, from the rank that replayed it. Collective."""
        mine = [edge for edge in edges if edge.producer == producer and edge.replayer == self._attachment.rank]
        names = sorted(_Sample.from_bytes(from_producer).tensors)[:SHOWN_NAMES] if mine else []
        return [name for row in self._cpu.gather_rows({"names": names}) for name in row["names"]]

    def _settle_failures(self, ring: Sequence[Replayed], step: Step) -> bool:
        failed = [replay for replay in ring if replay.failed]
        if len(failed) == len(ring):
            self._disable(failed[0].failed)
        elif failed and self._attachment.rank == 0:
            _log.error("step %d: %d update replays failed, first: %s", step, len(failed), failed[0].failed)
        return not failed and not self._ring.alone

    def _disable(self, why: str) -> None:
        self.enabled = False
        if self._attachment.rank == 0:
            _log.warning(
                "updates of %s cannot be replayed (%s): update replay is off in this run; the comparison of weights "
                "and optimizer state still covers the optimizer",
                type(self._optimizer).__name__,
                why,
            )

    def _gather(self, attempts: Sequence[Replayed]) -> list[Replayed]:
        rows = self._cpu.gather_rows({"attempts": [asdict(attempt) for attempt in attempts]})
        return [Replayed(**entry) for row in rows for entry in row["attempts"]]

    def _attempt(self, producer: Rank, data: bytes, tables: dict[int, dict[str, str]] | None = None) -> Replayed:
        """tables: gets what `replay_update` gave, by producer."""
        me = self._attachment.rank
        try:
            sample = _Sample.from_bytes(data)
            inputs = sample.inputs()
            table = replay_update(self._optimizer, sample.tensors, sample.groups) if sample.tensors else {}
        except Exception as error:
            return Replayed(producer=producer, replayer=me, failed=f"{type(error).__name__}: {error}"[:500])
        if tables is not None:
            tables[int(producer)] = table
        return Replayed(producer=producer, replayer=me, inputs=inputs, result=_combined(table))

    @torch.no_grad()
    def _before(self, step: Step) -> None:
        sample = self._sample = _Sample()
        for index, parameter in self._chosen(step):
            sample.tensors[self._name(parameter)] = {
                "weight": parameter.detach().clone(),
                "gradient": None if parameter.grad is None else parameter.grad.detach().clone(),
                "state": _data(self._optimizer.state.get(parameter, {})),
                "group": index,
            }
            sample.groups[index] = _data(_settings(self._optimizer.param_groups[index]))

    @torch.no_grad()
    def _after(self) -> None:
        if self._sample is None or not self._sample.tensors:
            return
        sampled = {
            name: parameter
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if (name := self._name(parameter)) in self._sample.tensors
        }
        self._sample.results = _fingerprint(self._optimizer, {name: sampled[name] for name in self._sample.tensors})

    def _chosen(self, step: Step) -> list[tuple[int, torch.Tensor]]:
        """(index of its group, parameter). Another sample in every step and on every rank: the more is covered."""
        candidates = [
            (index, parameter)
            for index, group in enumerate(self._optimizer.param_groups)
            for parameter in group["params"]
            if parameter.grad is not None
            and not parameter.grad.is_sparse
            and self._name(parameter) not in self._left_out
        ]
        chooser = random.Random(step * 1_000_003 + self._attachment.rank)  # noqa: S311 - reproducible, not secret
        chosen: list[tuple[int, torch.Tensor]] = []
        size = 0
        for index, parameter in chooser.sample(candidates, len(candidates)):
            size += parameter.numel() * parameter.element_size()
            if size > SAMPLED_BYTES:
                size -= parameter.numel() * parameter.element_size()
            elif len(chosen) < SAMPLED_TENSORS:
                chosen.append((index, parameter))
        return chosen

    def _name(self, parameter: torch.Tensor) -> str:
        return self._names.get(id(parameter), "?")


def replay_update(
    optimizer: torch.optim.Optimizer, tensors: Mapping[str, Mapping[str, Any]], groups: Mapping[int, Mapping[str, Any]]
) -> dict[str, str]:
    """Name -> fingerprint of weight and state after one update of all tensors by a fresh optimizer of the same class.

    tensors: name -> weight, gradient, state and index of the group, as they were before it. groups: their
    hyperparameters that are data; functions are taken from the groups of `optimizer`. Changes nothing of it.
    """
    weights = {name: torch.nn.Parameter(entry["weight"].detach().clone()) for name, entry in tensors.items()}
    for name, weight in weights.items():
        gradient = tensors[name]["gradient"]
        weight.grad = None if gradient is None else gradient.detach().clone()
    fresh = type(optimizer).__new__(type(optimizer))
    # The way a copied or unpickled optimizer comes to life; constructors of subclasses may ask for anything.
    fresh.__setstate__(
        {
            "defaults": dict(optimizer.defaults),
            "state": {weights[name]: _copy(entry["state"]) for name, entry in tensors.items() if entry["state"]},
            "param_groups": [
                {
                    **_code(_settings(optimizer.param_groups[index])),
                    **_copy(group),
                    "params": [weights[name] for name in tensors if tensors[name]["group"] == index],
                }
                for index, group in sorted(groups.items())
            ],
        }
    )
    # __setstate__ leaves `state` a plain dict; optimizers rely on missing entries being made.
    state = fresh.state
    fresh.state = type(optimizer.state)(dict)
    fresh.state.update(state)
    fresh.step()
    return _fingerprint(fresh, weights)


def _fingerprint(optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Name -> fingerprint of weight and state; by place in between, because a name may begin with another."""
    leaves = fingerprint_leaves(
        [
            {"weight": weight.detach(), "state": dict(sorted(optimizer.state.get(weight, {}).items()))}
            for weight in weights.values()
        ]
    )
    parts: dict[str, dict[str, str]] = {}
    for path, leaf in leaves.items():
        place, _, rest = path.partition("]")
        parts.setdefault(place, {})[rest] = leaf
    return {name: combine(parts[f"[{place}"]) for place, name in enumerate(weights)}


def _combined(table: Mapping[str, str]) -> str:
    return combine(table) if table else ""


def _without(evidence: AuditEvidence, producers: set[Rank]) -> AuditEvidence:
    def kept(replays: Sequence[Replayed]) -> list[Replayed]:
        return [replay for replay in replays if replay.producer not in producers]

    return replace(
        evidence, ring=kept(evidence.ring), arbitration=kept(evidence.arbitration), reruns=kept(evidence.reruns)
    )


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _data(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copy(value) for key, value in settings.items() if is_data(value)}


def _code(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if not is_data(value)}


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_copy(item) for item in value)
    return value


def _to_own_device(storage: Any, location: str) -> Any:
    return storage if location == "cpu" else storage.cuda(torch.cuda.current_device())
