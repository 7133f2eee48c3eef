"""The training script that runs in every pod: an ordinary DDP loop with truestep in it.

    python -m demo.training --steps 60

Prints one JSON line a step on rank 0, and ``final.json`` into ``TRUESTEP_FINAL_DIR`` when it is through.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import truestep
from demo.corpus import micro_batch
from demo.model import ByteGpt, GptConfig, next_byte_loss
from truestep import inject
from truestep.fingerprint import fingerprint_model

SEQUENCES = 8
SEED = 1234


def main() -> int:
    arguments = _arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    code = run(arguments, dist.get_rank())
    # Where the model is gone: DDP's reducer must not outlive a Gloo group (torch 2.13 can then wait for itself).
    dist.destroy_process_group()
    return code


def run(arguments: argparse.Namespace, rank: int) -> int:
    """Train until the last step, or an alarm; returns the process's exit code."""
    torch.manual_seed(SEED)
    config = GptConfig()
    ddp_model = DistributedDataParallel(ByteGpt(config))
    optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=arguments.learning_rate)
    torch.manual_seed(SEED + 1 + rank)

    attachment = truestep.attach(ddp_model)
    checkpoints = truestep.VerifiedCheckpoints(
        os.environ["TRUESTEP_CHECKPOINT_ROOT"], attachment, ddp_model.module, optimizer
    )
    point = truestep.resume(attachment, checkpoints)
    inject.from_environment(ddp_model, optimizer)
    say(rank, event="start", start_step=point.start_step, nodes=[row.node_name for row in attachment.identities])

    def rebuild(step: int, owner: int) -> tuple[Tensor, Tensor]:
        return micro_batch(step, owner, sequences=SEQUENCES, context=config.context)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(point.start_step, arguments.steps):
            yield rebuild(step, rank)

    schedule = truestep.Schedule(
        audit_every=arguments.audit_every,
        check_every=arguments.check_every,
        checkpoint_every=arguments.checkpoint_every,
    )
    alarm = truestep.train(
        ddp_model,
        attachment,
        optimizer,
        batches(),
        next_byte_loss,
        rebuild,
        checkpoints,
        schedule,
        start_step=point.start_step,
        bundles=truestep.BundleSettings(model="demo.model:build"),
        on_step=lambda step, loss: say(rank, event="step", step=step, loss=round(float(loss), 4)),
    )
    if alarm:
        say(rank, event="alarm", step=alarm.step, reason=alarm.verdict.reason)
        truestep.report_sdc(alarm)
        return 1
    finish(rank, ddp_model, arguments.steps)
    return 0


def finish(rank: int, ddp_model: DistributedDataParallel, steps: int) -> None:
    """Write the final weights' fingerprint where the story can compare it."""
    combined, _ = fingerprint_model(ddp_model.module)
    say(rank, event="final", step=steps - 1, fingerprint=combined)
    if rank == 0:
        directory = Path(os.environ["TRUESTEP_FINAL_DIR"])
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "final.json").write_text(json.dumps({"steps": steps, "fingerprint": combined}))


def say(rank: int, **fields: object) -> None:
    """One JSON line on rank 0's standard output."""
    if rank == 0:
        print(json.dumps(fields), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--audit-every", type=int, default=10)
    parser.add_argument("--check-every", type=int, default=5)
    parser.add_argument("--checkpoint-every", type=int, default=5)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
