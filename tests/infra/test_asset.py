"""The asset holds the handlers and the torch-free contract; the layer what they import, for Lambda's processor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

from infra import asset
from infra.catalogue import FUNCTIONS
from infra.errors import PreparationError
from infra.paths import HOST_LAYER, REPOSITORY, SDK_PACKAGE, WHEELHOUSE
from infra.wheelhouse import pins

from .conftest import Template

IMPORT_EVERY_HANDLER = """
import importlib, sys

class RefuseTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "numpy"):
            raise ImportError(f"{name} is not in Lambda")

sys.meta_path.insert(0, RefuseTorch())
for path in sys.argv[1:]:
    module, _, attribute = path.rpartition(".")
    assert callable(getattr(importlib.import_module(module), attribute)), path
first_party = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("lambdas", "truestep")]
print("\\n".join(sorted({module.__file__ for module in first_party if getattr(module, "__file__", None)})))
"""


def test_every_handler_imports_from_the_asset_and_the_layer_alone(template: Template) -> None:
    folders = [str(template.code_folder), str(HOST_LAYER / "python")]
    # -S: the site-packages of this environment stay out, so what is missing from the layer is missing. -B: nothing is
    # written into the asset.
    finished = subprocess.run(
        [sys.executable, "-S", "-B", "-c", IMPORT_EVERY_HANDLER, *(spec.handler for spec in FUNCTIONS)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(folders)},
        cwd=template.code_folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert finished.returncode == 0, finished.stderr
    loaded = finished.stdout.split()
    assert len(loaded) > len(FUNCTIONS)
    assert all(Path(path).is_relative_to(template.code_folder) for path in loaded)


def test_of_the_sdk_only_the_contract_ships(template: Template) -> None:
    shipped = {path.relative_to(template.code_folder).parts for path in template.code_folder.rglob("*.py")}
    assert {parts[0] for parts in shipped} == {"lambdas", "truestep"}
    sdk = {parts[1] for parts in shipped if parts[0] == "truestep"}
    assert sdk == {"__init__.py", "contract"}


def test_the_event_schemas_ship_with_the_contract(template: Template) -> None:
    expected = {path.name for path in (SDK_PACKAGE / "contract" / "schemas").glob("*.json")}
    shipped = {path.name for path in (template.code_folder / "truestep" / "contract" / "schemas").glob("*.json")}
    assert shipped == expected != set()


def test_nothing_generated_ships(template: Template) -> None:
    names = {path.name for path in template.code_folder.rglob("*")}
    assert not {name for name in names if name == "__pycache__" or name.endswith((".pyc", ".md", ".txt"))}


def test_what_no_handler_imports_does_not_change_the_asset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = handlers_in(tmp_path, monkeypatch)
    before = set(asset.code_files())
    (folder / "open_incident" / "__pycache__").mkdir()
    (folder / "open_incident" / "__pycache__" / "handler.py").touch()
    (folder / "open_incident" / "handler.py~").touch()
    (folder / "notes.md").touch()
    assert set(asset.code_files()) == before


def test_a_function_without_a_handler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = handlers_in(tmp_path, monkeypatch)
    (folder / "open_incident" / "handler.py").unlink()
    with pytest.raises(PreparationError, match=r"handler\.py for: open_incident; "):
        asset.code_files()


def handlers_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for spec in FUNCTIONS:
        (tmp_path / spec.folder).mkdir()
        (tmp_path / spec.folder / "handler.py").touch()
    monkeypatch.setattr(asset, "LAMBDAS", tmp_path)
    return tmp_path


def test_native_parts_of_the_layer_are_for_graviton(template: Template) -> None:
    libraries = list(template.layer_folder.rglob("*.so*"))
    assert libraries
    for library in libraries:
        header = library.read_bytes()[:20]
        assert header[:4] == b"\x7fELF"
        assert int.from_bytes(header[18:20], "little") == 0xB7, f"{library.name} is not for aarch64"


def test_the_layer_has_no_path_of_the_machine_that_made_it(template: Template) -> None:
    assert not (template.layer_folder / "python" / "bin").exists()
    records = [path.read_text() for path in template.layer_folder.rglob("RECORD")]
    assert records
    assert not [record for record in records if str(REPOSITORY) in record or "/bin/" in record]


def test_layer_and_wheelhouse_and_this_machine_have_the_same_versions(template: Template) -> None:
    expected = pins(WHEELHOUSE)
    assert expected
    for folder in (template.layer_folder / "python", HOST_LAYER / "python"):
        installed = (path.name.removesuffix(".dist-info").split("-") for path in folder.glob("*.dist-info"))
        assert sorted(f"{canonicalize_name(name)}=={version}" for name, version in installed) == expected


def test_layer_and_code_are_small(template: Template) -> None:
    """A cold start unpacks both."""
    folders = (template.layer_folder, template.code_folder)
    total = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
    assert total < 60_000_000


def test_an_empty_wheelhouse_says_how_to_fill_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (REPOSITORY / "build").mkdir(exist_ok=True)
    monkeypatch.setattr(asset, "WHEELHOUSE", REPOSITORY / "build" / "wheelhouse" / "no-such-platform")
    with pytest.raises(PreparationError, match=r"python -m infra\.wheelhouse"):
        asset.layer_asset()


def test_a_wheelhouse_that_lacks_a_package_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = tmp_path / "wheelhouse"
    house.mkdir()
    wheel = next(WHEELHOUSE.glob("boto3-*.whl"))
    (house / wheel.name).write_bytes(wheel.read_bytes())
    monkeypatch.setattr(asset, "WHEELHOUSE", house)
    monkeypatch.setattr(asset, "LAYERS", tmp_path / "layer")
    with pytest.raises(PreparationError, match=r"(?s)infra\.wheelhouse again.*No matching distribution"):
        asset.layer_asset()
    assert list((tmp_path / "layer").iterdir()) == []
