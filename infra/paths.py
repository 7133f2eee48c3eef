"""Where synthesis finds what it reads, and for which platform the functions are packaged."""

from __future__ import annotations

from pathlib import Path
from typing import Final

REPOSITORY: Final = Path(__file__).resolve().parent.parent
LAMBDAS: Final = REPOSITORY / "lambdas"
REQUIREMENTS: Final = LAMBDAS / "requirements.txt"
SDK_PACKAGE: Final = REPOSITORY / "trainer_sdk" / "src" / "truestep"
DEFINITION: Final = REPOSITORY / "state_machines" / "recovery.asl.json"
APPROVE_DEFINITION: Final = REPOSITORY / "state_machines" / "approve.asl.json"
KUBERNETES_MANIFESTS: Final = REPOSITORY / "infra" / "kubernetes"

PLATFORM: Final = "manylinux2014_aarch64"
PYTHON_VERSION: Final = "3.13"
# Lambda's Python 3.13 runs on Amazon Linux 2023 (glibc 2.34), so wheels for glibc 2.28 load too.
WHEEL_PLATFORMS: Final = (PLATFORM, "manylinux_2_28_aarch64")
WHEELHOUSE: Final = REPOSITORY / "build" / "wheelhouse" / PLATFORM
LAYERS: Final = REPOSITORY / "build" / "layer"
HOST_LAYER: Final = REPOSITORY / "build" / "layer-host"
