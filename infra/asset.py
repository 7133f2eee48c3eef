"""The code asset and the dependency layer: made from files on disk, always the same bytes, no Docker or network."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jsii
from aws_cdk import AssetHashType, BundlingOptions, ILocalBundling
from aws_cdk import aws_lambda as lambda_

from infra.catalogue import FUNCTIONS
from infra.errors import PreparationError
from infra.paths import (
    LAMBDAS,
    LAYERS,
    PYTHON_VERSION,
    REPOSITORY,
    REQUIREMENTS,
    SDK_PACKAGE,
    WHEEL_PLATFORMS,
    WHEELHOUSE,
)

# What ships is listed, so that notes, caches and editors' leftovers cannot change the hash.
_SHIPPED_SUFFIXES = frozenset({".py", ".json", ".html", ".css", ".svg", ".typed"})


def code_files() -> dict[str, Path]:
    """Path inside the asset -> file on disk: the handlers, and the torch-free part of the SDK.

    Raises PreparationError where a function of the catalogue has no handler.
    """
    files = {f"lambdas/{name}": path for name, path in _shipped(LAMBDAS)}
    missing = [spec.folder for spec in FUNCTIONS if f"lambdas/{spec.folder}/handler.py" not in files]
    if missing:
        raise PreparationError(
            f"no lambdas/<folder>/handler.py for: {', '.join(missing)}; "
            "write the handler, or take the function out of infra/catalogue.py"
        )
    files |= {f"truestep/contract/{name}": path for name, path in _shipped(SDK_PACKAGE / "contract")}
    files |= {f"truestep/{name}": SDK_PACKAGE / name for name in ("__init__.py", "py.typed")}
    return dict(sorted(files.items()))


def code_asset() -> lambda_.AssetCode:
    """Code shared by all functions; its hash is that of the files' names and contents."""
    files = code_files()
    digest = _digest((name, path.read_bytes()) for name, path in files.items())
    # With a hash of our own CDK skips bundling where the output folder has the asset already.
    return lambda_.Code.from_asset(
        str(LAMBDAS),
        asset_hash=digest,
        asset_hash_type=AssetHashType.CUSTOM,
        bundling=BundlingOptions(image=lambda_.Runtime.PYTHON_3_13.bundling_image, local=_Copy(files)),
    )


def layer_asset() -> lambda_.AssetCode:
    """Dependencies of all functions, installed under ``python/`` from the wheelhouse.

    Raises PreparationError where the wheelhouse is missing.
    """
    wheels = sorted(WHEELHOUSE.glob("*.whl"))
    if not REQUIREMENTS.is_file():
        raise PreparationError(f"{REQUIREMENTS.relative_to(REPOSITORY)} is missing; it pins what the functions import")
    if not wheels:
        raise PreparationError(
            f"no wheels in {WHEELHOUSE.relative_to(REPOSITORY)}; download them with: python -m infra.wheelhouse"
        )
    contents = [("requirements.txt", REQUIREMENTS.read_bytes())]
    contents += [(wheel.name, hashlib.sha256(wheel.read_bytes()).digest()) for wheel in wheels]
    digest = _digest(contents)
    return lambda_.Code.from_asset(
        str(_installed_layer(digest)), asset_hash=digest, asset_hash_type=AssetHashType.CUSTOM
    )


def _without_pip_configuration() -> dict[str, str]:
    """Environment in which pip sees only its arguments: no setting of the machine changes the layer."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return clean | {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def _shipped(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if path.is_file() and path.suffix in _SHIPPED_SUFFIXES and not {"__pycache__", "tests"} & set(name.parts):
            yield name.as_posix(), path


def _digest(parts: Iterable[tuple[str, bytes]]) -> str:
    total = hashlib.sha256()
    for name, content in parts:
        total.update(f"{name}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def _installed_layer(digest: str) -> Path:
    """``build/layer/<digest>``, installed at the first call; two processes at once both end with a whole one."""
    layer = LAYERS / digest
    if layer.is_dir():
        return layer
    LAYERS.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".installing-", dir=LAYERS) as scratch:
        fresh = Path(scratch, "layer")
        _pip_install(fresh / "python")
        try:
            fresh.rename(layer)
        except OSError:
            if not layer.is_dir():
                raise
    return layer


def _pip_install(target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-compile", "--no-cache-dir"]
    command += ["--find-links", str(WHEELHOUSE), "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", PYTHON_VERSION, "--target", str(target), "--requirement", str(REQUIREMENTS)]
    for platform in WHEEL_PLATFORMS:
        command += ["--platform", platform]
    finished = subprocess.run(command, env=_without_pip_configuration(), capture_output=True, text=True, check=False)
    if finished.returncode:
        raise PreparationError(
            "the wheelhouse does not satisfy lambdas/requirements.txt; run python -m infra.wheelhouse again\n"
            + finished.stderr
        )
    # Entry points carry the path of this interpreter, and Lambda runs none.
    shutil.rmtree(target / "bin", ignore_errors=True)
    for record in target.glob("*.dist-info/RECORD"):
        lines = record.read_text(encoding="utf-8").splitlines(keepends=True)
        record.write_text("".join(line for line in lines if not line.startswith("../../bin/")), encoding="utf-8")


@jsii.implements(ILocalBundling)
class _Copy:
    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def try_bundle(self, output_dir: str, options: Any = None, **_: Any) -> bool:
        del options
        for name, source in self._files.items():
            target = Path(output_dir, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        return True
