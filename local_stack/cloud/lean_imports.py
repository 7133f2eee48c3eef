"""Start-up cost: the engine's Batch task pulls in moto's Batch, which pulls in EC2 and its catalogue of instances.

That is half of moto's import time, for services that the recovery has not. `moto.batch` becomes a package whose modules
can be imported, but whose own body, the import of the Batch service, does not run.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def leave_out_batch() -> None:
    """Call before the engine is imported. Does nothing where Batch is loaded already."""
    moto = importlib.util.find_spec("moto")
    if "moto.batch" in sys.modules or moto is None or moto.origin is None:
        return
    package = ModuleType("moto.batch")
    package.__path__ = [str(Path(moto.origin).parent / "batch")]
    sys.modules["moto.batch"] = package
