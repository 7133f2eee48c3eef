"""One example three times: clean, with a GPU that goes bad, and resumed from the newest trusted checkpoint.

    python -m examples.story huggingface
    python -m examples.story lightning

Prints what was seen; status 1 unless the resumed run ends with the weights of the clean one, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

FAULT_STEP = 8
RANKS = 3


def run(example: str, directory: Path, name: str, *arguments: str) -> dict[str, Any]:
    """Run an example's script on three ranks; what it wrote."""
    script = Path(__file__).parent / example / "train.py"
    result = directory / f"{name}.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {
        **os.environ,
        "TRUESTEP_OUTBOX_DIR": str(directory / "outbox"),
        "TRUESTEP_DIRECTIVE": str(directory / "no-directive.json"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [*command, str(script), "--result", str(result), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{example}, {name}, failed:\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    outcome: dict[str, Any] = json.loads(result.read_text())
    return outcome


def tell(example: str, directory: Path, *further: str) -> dict[str, dict[str, Any]]:
    """The three runs' outcomes. further: arguments of the example's script."""
    root = (directory / "checkpoints").as_uri()
    clean = run(example, directory, "clean", "--root", (directory / "clean").as_uri(), *further)
    faulty = run(example, directory, "faulty", "--root", root, "--fault-step", str(FAULT_STEP), *further)
    resumed = run(example, directory, "resumed", "--root", root, *further)
    return {"clean": clean, "faulty": faulty, "resumed": resumed}


def main() -> int:
    """Run one example and say what was seen."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("example", choices=["huggingface", "lightning"])
    with tempfile.TemporaryDirectory() as directory:
        seen = tell(parser.parse_args().example, Path(directory))
    clean, faulty, resumed = seen["clean"], seen["faulty"], seen["resumed"]
    equal = resumed["weights"] == clean["weights"]
    print(f"clean run:    {clean['weights']}")
    print(
        f"faulty run:   alarm at step {faulty['alarm_step']}, bad from step {FAULT_STEP} on: {faulty.get('suspects')}"
    )
    print(f"resumed run:  {resumed['weights']}, from step {resumed['start_step']}")
    print("bit-identical to the clean run" if equal else "NOT the clean run's weights")
    return int(not equal)


if __name__ == "__main__":
    raise SystemExit(main())
