"""The wheel: what it carries, what it requires, and what importing it pulls in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

SDK = Path(__file__).parents[2] / "trainer_sdk"
EXPORTS = [
    "Alarm",
    "Attachment",
    "BundleSettings",
    "ContractError",
    "CorruptionDetected",
    "Guard",
    "LeftError",
    "PeerFailedError",
    "Schedule",
    "ShardedGuard",
    "TruestepError",
    "Verdict",
    "VerdictCause",
    "VerdictKind",
    "VerifiedCheckpoints",
    "attach",
    "report_sdc",
    "resume",
    "train",
]


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the declared back end, without a network."""
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(command, cwd=SDK, check=True, capture_output=True, timeout=120)
    (built,) = directory.glob("truestep-*.whl")
    return built


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory)
    return directory


def python(site: Path, code: str) -> str:
    """Run code with the wheel's content, and not the checkout, on the path."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=site,
        env={**os.environ, "PYTHONPATH": str(site)},
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return result.stdout


def test_the_wheel_requires_nothing_and_offers_its_extras(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_string(archive.read(name).decode())
    requirements = metadata.get_all("Requires-Dist") or []
    assert [line for line in requirements if "extra ==" not in line] == []
    assert set(metadata.get_all("Provides-Extra") or []) >= {"aws", "cli"}
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "Checkpoints" in str(metadata.get_payload())


def test_the_wheel_carries_schemas_types_and_licence_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for name in ("alarm", "checkpoint", "resume", "directive", "manifest"):
        assert f"truestep/contract/schemas/{name}-v1.json" in names
    assert "truestep/py.typed" in names
    assert "truestep/fingerprint/native.c" in names, "the fast path's source"
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if "test" in name.lower()]


def test_importing_truestep_pulls_in_neither_torch_nor_boto3(unpacked: Path) -> None:
    code = (
        "import json, sys, truestep, truestep.contract, truestep.report, truestep.checkpoints.catalogue;"
        "print(json.dumps([truestep.__file__, sorted({'torch', 'boto3', 'botocore', 'numpy'} & set(sys.modules))]))"
    )
    location, loaded = json.loads(python(unpacked, code))
    assert Path(location).is_relative_to(unpacked)
    assert loaded == []


def test_without_torch_and_boto3_contract_report_and_catalogue_still_work(unpacked: Path) -> None:
    code = (
        "import sys; sys.modules.update(torch=None, boto3=None, botocore=None)\n"
        "from truestep.contract import DetailType, schema, directive_schema, manifest_schema\n"
        "from truestep.checkpoints import MissingExtraError, list_checkpoints\n"
        "print(schema(DetailType.ALARM)['title'], list_checkpoints('file:///nonexistent/root'))\n"
        "try: list_checkpoints('s3://bucket/prefix')\n"
        "except MissingExtraError as error: print(error)\n"
    )
    first, second = python(unpacked, code).splitlines()
    assert first == "Training Corruption Alarm []"
    assert "pip install 'truestep[aws]'" in second


def test_every_exported_name_exists_and_no_other_one_is_exported(unpacked: Path) -> None:
    code = (
        "import json, truestep; missing = [n for n in truestep.__all__ if getattr(truestep, n, None) is None];"
        "print(json.dumps([sorted(truestep.__all__), missing]))"
    )
    exported, missing = json.loads(python(unpacked, code))
    assert exported == EXPORTS
    assert missing == []


def test_a_name_that_does_not_exist_is_an_attribute_error(unpacked: Path) -> None:
    code = "import truestep\ntry: truestep.nonsense\nexcept AttributeError as error: print(error)"
    assert "no attribute 'nonsense'" in python(unpacked, code)


def test_no_export_is_hidden_by_a_module_of_the_same_name() -> None:
    script = (
        "import importlib, pkgutil, truestep, types\n"
        "optional = ('truestep.cli', 'truestep.fingerprint.triton')\n"
        "for module in pkgutil.walk_packages(truestep.__path__, 'truestep.'):\n"
        "    if not module.name.startswith(optional): importlib.import_module(module.name)\n"
        "hidden = [name for name in truestep.__all__ if isinstance(getattr(truestep, name), types.ModuleType)]\n"
        "assert not hidden, hidden\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
