"""A small GPT-2 with the Hugging Face `Trainer`, guarded by truestep: a GPU goes bad, and training comes back.

    torchrun --nproc-per-node 3 examples/huggingface/train.py --root file:///tmp/hf-run [--fault-step 8]

Run by `python -m examples.story huggingface`, which runs it three times: clean, with a fault, and resumed.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[2]))

import truestep
from examples.command_line import arguments_of, conclude
from truestep.fingerprint import fingerprint_model
from truestep.inject import Fault, arm
from truestep.integrations.huggingface import TruestepCallback

FAULTY_RANK = 1


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same in every process."""

    def __init__(self, count: int, tokens: int, vocabulary: int) -> None:
        self.tokens = torch.randint(0, vocabulary, (count, tokens), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_trainer(output: str, steps: int, accumulate: int) -> Trainer:
    """Dropout, shuffled data, a warm-up and a schedule: all of it must come back exactly."""
    torch.manual_seed(7)
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    arguments = TrainingArguments(
        output,
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=accumulate,
        learning_rate=1e-3,
        warmup_steps=4,
        seed=7,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to=[],
        logging_strategy="no",
        disable_tqdm=True,
    )
    return Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Sequences(64, 16, 64))


def run(root: str, *, steps: int, accumulate: int = 1, fault_step: int | None = None) -> dict[str, Any]:
    """Train from the newest trusted checkpoint on; what came out, the same on every rank but for the alarm's copies."""
    with tempfile.TemporaryDirectory() as output:
        trainer = make_trainer(output, steps, accumulate)
        guard = TruestepCallback(trainer, root, truestep.Schedule(audit_every=6, check_every=2))
        if fault_step is not None and int(os.environ["RANK"]) == FAULTY_RANK:
            fault = Fault(site="module_output", target="transformer.h.1.mlp", bit=20, first_step=fault_step)
            arm(trainer.model_wrapped, trainer.optimizer, fault)
        alarm = guard.train()
    return {"start_step": guard.start.start_step, "alarm": alarm, "weights": fingerprint_model(trainer.model)[0]}


def main() -> None:
    """Train; the first rank writes what came out, or every rank holds after an alarm."""
    options = arguments_of(__doc__ or "")
    torch.set_num_threads(1)
    outcome = run(options.root, steps=options.steps, accumulate=options.accumulate, fault_step=options.fault_step)
    conclude(outcome, options.result)


if __name__ == "__main__":
    main()
