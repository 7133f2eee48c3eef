"""Set-up: downloads what the functions import, once for Lambda and once for this machine, at the same versions.

    python -m infra.wheelhouse

fills ``build/wheelhouse/manylinux2014_aarch64`` (wheels from which synthesis builds the layer without network) and
``build/layer-host/python`` (the same packages installed for this interpreter, for the local stack).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import parse_wheel_filename

from infra.errors import PreparationError
from infra.paths import HOST_LAYER, PYTHON_VERSION, REPOSITORY, REQUIREMENTS, WHEEL_PLATFORMS, WHEELHOUSE


def pins(wheelhouse: Path) -> list[str]:
    """``name==version`` of every wheel, sorted."""
    parsed = (parse_wheel_filename(wheel.name) for wheel in wheelhouse.glob("*.whl"))
    return sorted(f"{name}=={version}" for name, version, _, _ in parsed)


def download_wheels(target: Path = WHEELHOUSE) -> None:
    """Download what ``lambdas/requirements.txt`` needs, for Lambda on Graviton; replaces ``target``."""
    with _replaced(target) as fresh:
        command = ["download", "--requirement", str(REQUIREMENTS), "--dest", str(fresh), "--only-binary=:all:"]
        command += ["--implementation", "cp", "--python-version", PYTHON_VERSION]
        for platform in WHEEL_PLATFORMS:
            command += ["--platform", platform]
        _pip(command)


def install_host_layer(wheelhouse: Path = WHEELHOUSE, target: Path = HOST_LAYER) -> None:
    """Install the wheelhouse's versions for this interpreter under ``target/python``; replaces ``target``."""
    with _replaced(target) as fresh:
        constraints = fresh / "constraints.txt"
        constraints.write_text("\n".join(pins(wheelhouse)) + "\n")
        command = ["install", "--requirement", str(REQUIREMENTS), "--constraint", str(constraints)]
        _pip([*command, "--only-binary=:all:", "--target", str(fresh / "python")])


class _replaced:  # noqa: N801 - read as a verb in the with statement
    """A new folder that takes the place of ``target`` when the block succeeds, so that a failure leaves the old one."""

    def __init__(self, target: Path) -> None:
        self._target = target
        target.parent.mkdir(parents=True, exist_ok=True)
        self._fresh = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))

    def __enter__(self) -> Path:
        return self._fresh

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            shutil.rmtree(self._target, ignore_errors=True)
            self._fresh.chmod(0o755)
            self._fresh.rename(self._target)
        else:
            shutil.rmtree(self._fresh)


def _pip(arguments: list[str]) -> None:
    finished = subprocess.run([sys.executable, "-m", "pip", "--quiet", "--quiet", *arguments], check=False)
    if finished.returncode:
        raise PreparationError(f"pip {arguments[0]} failed, see above; set-up needs a package index once")


def main() -> int:
    """Command line; returns the exit status."""
    if not REQUIREMENTS.is_file():
        print(f"{REQUIREMENTS.relative_to(REPOSITORY)} is missing; it pins what the functions import", file=sys.stderr)
        return 1
    try:
        download_wheels()
        install_host_layer()
    except PreparationError as error:
        print(error, file=sys.stderr)
        return 1
    count = len(pins(WHEELHOUSE))
    print(f"{count} packages in {WHEELHOUSE.relative_to(REPOSITORY)} and {HOST_LAYER.relative_to(REPOSITORY)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
