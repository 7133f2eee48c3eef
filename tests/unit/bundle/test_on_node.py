"""The confirmation as the recovery runs it: every device in a process of its own, one report that always fits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.bundle.computation import ALARM, Witness
from truestep.bundle import on_node
from truestep.contract import REPORT_BYTES, DeviceReport, NodeReport, read_report, report_bytes
from truestep.inject import FAULT_VARIABLE

FLIP = {"site": "module_output", "target": "blocks.0", "element": 3, "bit": 20}


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    return Witness().write(tmp_path_factory.mktemp("root"))["bundle_uri"]


def reported(report: Path, uri: str, *options: str) -> tuple[int, NodeReport]:
    code = on_node.main([uri, "--report", str(report), "--repeat", "4", *options])
    content = report.read_bytes()
    assert len(content) <= REPORT_BYTES
    return code, read_report(json.loads(content))


def test_a_faulty_node_is_shown_with_its_runs_and_the_place(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAULT_VARIABLE, json.dumps(FLIP))
    monkeypatch.setenv("TRUESTEP_SIMULATED_GPU_UUID", "GPU-faulty")
    code, found = reported(tmp_path / "report", uri, "--gpus", "8")
    (device,) = found.devices  # the bundle was computed on a CPU, of which a node has one
    assert code == 1
    assert (found.alarm_id, found.settled, found.problem) == (ALARM, True, "")
    assert (device.device, device.gpu_uuid, device.runs, device.differing) == ("cpu", "GPU-faulty", 4, 4)
    assert device.first == "forward blocks.0"
    assert not device.problem


def test_a_device_stops_when_its_time_is_over(uri: str) -> None:
    found = on_node.repeat_on(uri, "cpu", repeat=10_000, seconds=0.0)
    assert (found.runs, found.differing, found.problem) == (1, 0, "")
    assert sum(found.gave.values()) == 1, "it gave what a rank had recorded"


def test_without_its_marker_a_bundle_is_waited_for_and_then_named(tmp_path: Path) -> None:
    code, found = reported(tmp_path / "report", (tmp_path / "bundles/gone").as_uri(), "--wait", "0")
    assert code == 2
    assert "no bundle.json after 0 s" in found.problem


def test_a_device_that_is_not_there_is_a_sentence_and_so_is_a_process_that_dies(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "cuda:7" in on_node.repeat_on(uri, "cuda:7", repeat=1, seconds=1.0).problem
    monkeypatch.setattr(on_node.sys, "executable", "/bin/false")
    code, found = reported(tmp_path / "report", uri)
    assert code == 2
    assert found.devices[0].problem == "its process ended with exit code 1 without a result; read the pod's log"


def test_a_process_that_hangs_is_killed(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    found = on_node._ended("cuda:0", process, tmp_path / "none", 0.0, 30.0)
    assert found.problem == "it had not ended after 30 s and was killed"
    assert process.returncode == -9


def test_a_report_of_sixteen_devices_fits_whatever_they_say_and_keeps_every_count() -> None:
    gpu = "GPU-12345678-1234-1234-1234-123456789abc"
    devices = tuple(
        DeviceReport(
            device=f"cuda:{index}",
            gpu_uuid=gpu,
            runs=1000,
            differing=1000,
            gave={"0": 1000},
            first="forward " + "block." * 40,
            problem="ü" * 500,
        )
        for index in range(16)
    )
    content = report_bytes(NodeReport(alarm_id=ALARM, settled=True, devices=devices))
    assert len(content) <= REPORT_BYTES
    kept = read_report(json.loads(content)).devices
    assert [(device.device, device.gpu_uuid, device.differing) for device in kept] == [
        (device.device, gpu, 1000) for device in devices
    ]


def test_a_long_sentence_is_cut_and_the_report_still_parses() -> None:
    content = report_bytes(NodeReport(problem="x" * 10_000))
    assert read_report(json.loads(content)).problem.endswith("…")
