"""What the ranks of the distributed tests do. Every function runs in its own process and returns plain JSON."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from truestep import rng
from truestep.attachment import Attachment, attach
from truestep.checks.ring_replay import AuditSetupError
from truestep.contract import Alarm, CheckpointRef, Step, to_json
from truestep.fingerprint import fingerprint_model, fingerprint_optimizer
from truestep.guard import CorruptionDetected, Guard
from truestep.inject import ArmedFault, Fault, arm
from truestep.protocols import ResumePoint, SaveEvidence
from truestep.rng import RngState
from truestep.schedule import Schedule
from truestep.training_loop import train

VOCABULARY = 32
TOKENS = 12


class Block(nn.Module):
    """Attention and MLP with dropout."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, stream: Tensor) -> Tensor:
        normed = self.norm(stream)
        attended, _ = self.attention(normed, normed, normed, need_weights=False)
        stream = stream + attended
        result: Tensor = stream + self.mlp(stream)
        return result


class Transformer(nn.Module):
    """Tied embedding, two blocks: what most users train, in the small."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embedding(tokens)))
        return logits


class ConvolutionalWithBatchNorm(nn.Module):
    """Has running statistics that differ between ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.convolution = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.norm(self.convolution(self.embedding(tokens).transpose(1, 2))).relu()
        logits: Tensor = self.head(features.transpose(1, 2))
        return logits


MODELS = {"transformer": Transformer, "batch_norm": ConvolutionalWithBatchNorm}


def micro_batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The data of any step and rank."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(0, VOCABULARY, (4, TOKENS + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def next_token_loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Cross-entropy of the next token."""
    inputs, targets = batch
    return functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


class Run:
    """A model, its optimizer, and what a fault did to it."""

    def __init__(self, rank: int, model: str = "transformer", *, attached: bool = True, **ddp: Any) -> None:
        self.rank = rank
        torch.manual_seed(7)
        self.ddp = DistributedDataParallel(MODELS[model](), **ddp)
        self.optimizer = torch.optim.AdamW(self.ddp.parameters(), lr=1e-3)
        self.attachment: Attachment | None = attach(self.ddp) if attached else None
        torch.manual_seed(100 + rank)
        self.losses: list[float] = []

    def batches(self, steps: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's data."""
        for step in range(start, steps):
            yield micro_batch(step, self.rank)

    def train_plainly(self, steps: int, start: int = 0) -> None:
        """The loop without truestep."""
        for batch in self.batches(steps, start):
            self.optimizer.zero_grad(set_to_none=True)
            loss = next_token_loss(self.ddp, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.losses.append(loss.item())

    def train(self, steps: int, schedule: Schedule, start: int = 0, **options: Any) -> Alarm | None:
        """The loop with it."""
        assert self.attachment is not None
        return train(
            self.ddp,
            self.attachment,
            self.optimizer,
            self.batches(steps, start),
            options.get("compute_loss", next_token_loss),
            options.get("rebuild_batch", micro_batch),
            options.get("checkpoints"),
            schedule,
            start_step=start,
            on_step=lambda _, loss: self.losses.append(loss.item()),
        )

    def state(self) -> dict[str, Any]:
        """Everything that must be equal between two runs that claim to be."""
        buffers = {name: buffer.tolist() for name, buffer in self.ddp.module.named_buffers()}
        return {
            "weights": fingerprint_model(self.ddp)[0],
            "optimizer": fingerprint_optimizer(self.optimizer, self.ddp)[0],
            "losses": self.losses,
            "buffers": buffers,
            "random": torch.rand(1).item(),
        }


def plain_run(rank: int, model: str, steps: int) -> dict[str, Any]:
    """Plain DDP."""
    run = Run(rank, model, attached=False)
    run.train_plainly(steps)
    return run.state()


def audited_run(rank: int, model: str, steps: int, audit_every: int | None) -> dict[str, Any]:
    """The same, guarded."""
    run = Run(rank, model)
    alarm = run.train(steps, Schedule(audit_every=audit_every, check_every=10))
    return {**run.state(), "alarm": None if alarm is None else alarm.to_json()}


def faulty_run(
    rank: int, faulty_rank: int | None, fault: dict[str, Any], steps: int, **schedule: Any
) -> dict[str, Any]:
    """Train with a fault in one rank (None: in every rank)."""
    run = Run(rank)
    armed: ArmedFault | None = None
    if faulty_rank is None or rank == faulty_rank:
        armed = arm(run.ddp, run.optimizer, Fault.from_json(fault))
    saved: list[int] = []
    alarm = run.train(steps, Schedule(**schedule), checkpoints=saved.append)
    return {
        "alarm": None if alarm is None else alarm.to_json(),
        "firings": 0 if armed is None else armed.firings,
        "saved": saved,
        "steps": len(run.losses),
        "outbox": sorted(path.name for path in Path(_outbox()).glob("*")) if Path(_outbox()).exists() else [],
    }


def interrupted_run(
    rank: int, steps: int, stop: int | None, start: int, directory: str, warm_up: bool = True
) -> dict[str, Any]:
    """Train to `stop` and save, or resume at `start` from what such a run saved."""
    if not warm_up:
        Guard.warm_up = lambda _self, _batch: None  # type: ignore[method-assign, assignment]
    run = Run(rank)
    schedule = Schedule(audit_every=5, check_every=5)
    path = Path(directory) / f"rank-{rank}.pt"
    if start:
        saved = torch.load(path, weights_only=True)
        run.ddp.module.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        rng.restore(RngState.from_document(saved["rng"]))
        assert run.attachment is not None
        run.attachment.resumed = ResumePoint(start_step=Step(start))
    alarm = run.train(stop or steps, schedule, start)
    assert alarm is None
    if stop:
        state = {"model": run.ddp.module.state_dict(), "optimizer": run.optimizer.state_dict()}
        torch.save({**state, "rng": rng.capture().to_document()}, path)
    return run.state()


def _outbox() -> str:
    return os.environ["TRUESTEP_OUTBOX_DIR"]


class RememberingStore:
    """A `CheckpointStore` that keeps what it was asked, for tests of the guard alone."""

    def __init__(self) -> None:
        self.root_uri = Path(_outbox()).with_name("checkpoints").as_uri()
        self.saved: list[SaveEvidence] = []
        self.promoted: list[int] = []
        self.newest_trusted: CheckpointRef | None = None

    def save(self, evidence: SaveEvidence) -> CheckpointRef:
        """Remember it."""
        self.saved.append(evidence)
        return self._ref(evidence.step)

    def promote(self, clean_through: Step) -> CheckpointRef | None:
        """The newest saved one becomes trusted."""
        self.promoted.append(clean_through)
        steps = [evidence.step for evidence in self.saved if evidence.step <= clean_through]
        self.newest_trusted = self._ref(max(steps)) if steps else None
        return self.newest_trusted

    def _ref(self, step: Step) -> CheckpointRef:
        return CheckpointRef(uri=f"{self.root_uri}/step-{step:08d}", step=step, manifest_sha256="0" * 64)


class RememberingReporter:
    """A `Reporter` that keeps what it was told."""

    def __init__(self) -> None:
        self.alarms: list[str] = []
        self.verified_steps: list[int] = []

    def alarm(self, alarm: Alarm) -> None:
        """Remember its id."""
        self.alarms.append(alarm.alarm_id)

    def verified(self, resumed: ResumePoint, step: Step) -> None:
        """Remember the step."""
        self.verified_steps.append(step)

    def flush(self, timeout_seconds: float) -> bool:
        """Nothing waits."""
        return True


def trusted_run(rank: int, fault_step: int) -> dict[str, Any]:
    """A resumed run with checkpoints every 3 and audits every 4 steps; rank 0 goes bad at `fault_step`."""
    run = Run(rank)
    assert run.attachment is not None
    reporter, store = RememberingReporter(), RememberingStore()
    run.attachment.reporter = reporter
    reference = CheckpointRef(uri="file:///x/step-00000000", step=Step(0), manifest_sha256="0" * 64)
    run.attachment.resumed = ResumePoint(start_step=Step(1), checkpoint=reference, incident_id="incident")
    if rank == 0:
        arm(run.ddp, run.optimizer, Fault(site="module_output", target="blocks.1.mlp.2", bit=20, first_step=fault_step))
    alarm = run.train(24, Schedule(audit_every=4, check_every=3), start=1, checkpoints=store)
    assert alarm is not None
    return {
        "alarm": alarm.to_json(),
        "saved": [evidence.step for evidence in store.saved],
        "checks": [dict(evidence.checks) for evidence in store.saved],
        "evidence": [to_json(evidence) for evidence in store.saved],
        "promoted": store.promoted,
        "sent": reporter.alarms,
        "verified": reporter.verified_steps,
    }


def own_loop(rank: int, variant: str, faulty_rank: int | None) -> dict[str, Any]:
    """Loops that are not `train`: accumulation, loss scaling, a user's communication hook."""
    torch.manual_seed(7)
    ddp = DistributedDataParallel(Transformer())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    hook = fp16_compress_hook if variant == "user_hook" else None
    guarded = faulty_rank != -1
    if guarded:
        attach(ddp, comm_hook=(None, hook) if hook else None)
    elif hook:
        ddp.register_comm_hook(None, hook)
    torch.manual_seed(100 + rank)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, enabled=variant == "scaler")
    schedule = Schedule(audit_every=2, check_every=4)
    guard = Guard(ddp, optimizer, schedule, compute_loss=next_token_loss, grad_scaler=scaler) if guarded else None
    fault = Fault(site="module_output", target="blocks.1.mlp.2", element=5, bit=20, first_step=6)
    armed = arm(ddp, optimizer, fault) if faulty_rank == rank else None
    alarm = None
    try:
        for step in range(12):
            _own_step(step, rank, ddp, optimizer, scaler, guard, 3 if variant == "accumulation" else 1)
    except CorruptionDetected as detected:
        alarm = detected.alarm
    return {
        "weights": fingerprint_model(ddp)[0],
        "alarm": None if alarm is None else alarm.to_json(),
        "firings": 0 if armed is None else armed.firings,
        "clean_through": guard.clean_through if guard else None,
    }


def _own_step(
    step: int,
    rank: int,
    ddp: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    guard: Guard | None,
    micro_batches: int,
) -> None:
    optimizer.zero_grad(set_to_none=True)
    batches = [micro_batch(step * 10 + index, rank) for index in range(micro_batches)]
    if guard:
        guard.start_step(step, batches[0] if micro_batches == 1 else None, micro_batches=micro_batches)
    loss = None
    for index, batch in enumerate(batches):
        around = guard.micro_batch(index, batch) if guard and micro_batches > 1 else nullcontext(lambda _: None)
        with ddp.no_sync() if index < micro_batches - 1 else nullcontext(), around as done:
            loss = next_token_loss(ddp, batch)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            done(loss)
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
    if guard:
        guard.before_update(loss)
    scaler.step(optimizer)
    scaler.update()
    if guard:
        guard.after_update()


def misbehaving_run(rank: int, behaviour: str) -> dict[str, Any]:
    """Runs in which something else than a device is wrong."""
    run = Run(rank)
    calls = [0]

    def rebuild(step: int, owner: int) -> tuple[Tensor, Tensor]:
        return micro_batch(step + (behaviour == "rebuild_differs"), owner)

    def loss(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        replaying = not isinstance(model, DistributedDataParallel)
        if replaying and (behaviour == "no_replay_runs" or (behaviour == "one_replay_fails" and rank == 1)):
            raise RuntimeError("out of memory")
        value = next_token_loss(model, batch)
        if behaviour == "nondeterministic_kernel":
            value = value + 0 * torch.zeros(4).put_(torch.tensor([0]), torch.ones(1)).sum()
        if behaviour == "never_repeats":
            calls[0] += 1
            value = value * (1 + (1000 * rank + calls[0]) * 2**-20)
        return value

    if behaviour == "reduction_differs" and rank == 1:
        assert run.attachment is not None
        sensor = run.attachment.sensor
        original = sensor._reduced_bucket

        def corrupted(index: int, value: Any) -> Tensor:
            buffer = value[0] if isinstance(value, (list, tuple)) else value
            buffer.view(torch.int32)[3] ^= 1
            return original(index, buffer)

        sensor._reduced_bucket = corrupted  # type: ignore[method-assign]
    store = RememberingStore()
    error = ""
    alarm = None
    try:
        alarm = run.train(
            9, Schedule(audit_every=4, check_every=2), compute_loss=loss, rebuild_batch=rebuild, checkpoints=store
        )
    except AuditSetupError as refused:
        error = str(refused)
    return {
        "alarm": None if alarm is None else alarm.to_json(),
        "error": error,
        "promoted": store.promoted,
        "steps": len(run.losses),
    }
