"""The compiled kernel: when it is built, and that a missing or wrong one never changes a value."""

from __future__ import annotations

import logging
import shutil
import threading
from pathlib import Path

import pytest
import torch

from truestep.fingerprint import native
from truestep.fingerprint.eager import eager_sums
from truestep.fingerprint.native import NativeKernel

RAW = torch.arange(999, dtype=torch.int32).view(torch.uint8)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="no C compiler on this machine"
)


@needs_compiler
def test_it_is_built_once_enough_bytes_went_by() -> None:
    large = torch.zeros(1 << 20, dtype=torch.uint8)
    kernel = NativeKernel(build_after_bytes=2 * large.numel())
    assert kernel.sums([large]) is None
    assert kernel.sums([large]) is not None
    assert kernel.reason == ""


@needs_compiler
def test_it_is_built_once_enough_small_tensors_went_by() -> None:
    kernel = NativeKernel(build_after_bytes=2 << 16)
    assert kernel.sums([RAW]) is None
    sums = kernel.sums([RAW, RAW])
    assert sums is not None
    assert kernel.reason == ""
    assert torch.equal(sums, torch.stack([eager_sums(RAW)] * 2))


def test_without_a_compiler_torch_operations_do_the_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    kernel = NativeKernel(build_after_bytes=0)
    assert kernel.sums([RAW]) is None
    assert "no C compiler" in kernel.reason


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRUESTEP_NATIVE_FINGERPRINTS", "off")
    kernel = NativeKernel(build_after_bytes=0)
    assert kernel.sums([RAW]) is None
    assert "TRUESTEP_NATIVE_FINGERPRINTS" in kernel.reason


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 1\n", "#!/bin/sh\nexit 0\n"], ids=["fails", "writes nothing"])
def test_a_compiler_that_fails_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> None:
    compiler = tmp_path / "failing"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    kernel = NativeKernel(build_after_bytes=0)
    assert kernel.sums([RAW]) is None
    assert str(compiler) in kernel.reason


@needs_compiler
def test_a_kernel_that_gives_wrong_values_is_refused_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = tmp_path / "native.c"
    right = native._SOURCE.read_text()
    wrong = right.replace("value ^= value >> 33;", "value ^= (uint64_t)((int64_t)value >> 33);", 1)
    assert wrong != right
    source.write_text(wrong)
    monkeypatch.setattr(native, "_SOURCE", source)
    kernel = NativeKernel(build_after_bytes=0)
    with caplog.at_level(logging.WARNING):
        assert kernel.sums([RAW]) is None
    assert "wrong fingerprint" in caplog.text


@needs_compiler
def test_threads_that_come_while_it_is_built_are_served_by_torch_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    building, finish = threading.Event(), threading.Event()

    def slow(*_arguments: object) -> tuple[None, str]:
        building.set()
        finish.wait(30)
        return None, "slow"

    monkeypatch.setattr(native, "_built", slow)
    kernel = NativeKernel(build_after_bytes=0)
    builder = threading.Thread(target=kernel.build)
    builder.start()
    assert building.wait(30)
    assert kernel.sums([RAW]) is None
    finish.set()
    builder.join(30)
    assert kernel.reason == "slow"


@needs_compiler
def test_the_users_default_device_does_not_matter() -> None:
    raw, kernel = RAW.clone(), NativeKernel(build_after_bytes=0)
    with torch.device("meta"):
        sums = kernel.sums([raw])
    assert sums is not None
    assert torch.equal(sums[0], eager_sums(raw))
