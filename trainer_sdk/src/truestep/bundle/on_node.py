"""The confirmation as the recovery runs it: a bundle repeated on every GPU of a node at once, told in one short report.

    python3 -m truestep.bundle.on_node s3://bucket/run/bundles/<alarm id> --gpus 8 --report /dev/termination-log

It needs no more than the training has: no command line's dependencies, no Kubernetes API. Each GPU has a process of its
own, so that one which dies takes no other's result along, and all work at the same time, as in training.

Exit codes as ``truestep confirm``: 0 nothing differed, 1 something did, 2 nothing could be run.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from truestep.bundle.contents import BUNDLE_NAME, BundleError, BundleManifest
from truestep.bundle.place import locate, read_manifest
from truestep.contract import (
    DeviceReport,
    NodeReport,
    TruestepError,
    canonical_bytes,
    from_json,
    parse_json,
    report_bytes,
)

if TYPE_CHECKING:
    from truestep.bundle.confirming import Confirmation

MARKER_POLL_SECONDS = 1.0
FINE, FINDING, FAILED = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; the exit code."""
    asked = _parser().parse_args(arguments)
    if asked.device:
        # One of the processes that the other branch starts.
        report = repeat_on(asked.bundle, asked.device, repeat=asked.repeat, seconds=asked.seconds)
        Path(asked.report).write_bytes(canonical_bytes(report))
        return FINE
    whole = confirm_node(asked)
    Path(asked.report).write_bytes(report_bytes(whole))
    print(canonical_bytes(whole).decode(), flush=True)
    if any(device.differing or device.weights_differ for device in whole.devices):
        return FINDING
    return FINE if any(device.runs for device in whole.devices) else FAILED


def confirm_node(asked: argparse.Namespace) -> NodeReport:
    """Repeat the bundle on all GPUs at once. What cannot be run is in the report, never an exception."""
    began = time.monotonic()
    try:
        manifest = await_manifest(asked.bundle, seconds=asked.wait)
    except TruestepError as error:
        return NodeReport(problem=str(error))
    on_cpu = manifest.device_type == "cpu"
    devices = ["cpu"] if on_cpu else [f"cuda:{index}" for index in range(max(1, asked.gpus))]
    with tempfile.TemporaryDirectory(prefix="truestep-confirm-") as scratch:
        files = {device: Path(scratch) / device for device in devices}
        running = {device: _start(asked, device, file) for device, file in files.items()}
        reports = tuple(
            _ended(device, running[device], file, asked.limit - (time.monotonic() - began), asked.limit)
            for device, file in files.items()
        )
    return NodeReport(alarm_id=manifest.alarm_id, settled=manifest.reference is not None, devices=reports)


def await_manifest(uri: str, *, seconds: float) -> BundleManifest:
    """The bundle's marker, waited for: a shared file system may show it later than the alarm, which was sent after it.

    Raises `BundleError` where it does not come, or cannot be read.
    """
    storage, directory = locate(uri)
    ends = time.monotonic() + seconds
    while (manifest := read_manifest(storage, directory)) is None:
        if time.monotonic() >= ends:
            raise BundleError(
                f"{uri} has no {BUNDLE_NAME} after {seconds:g} s: it was not written to its end, or was deleted"
            )
        time.sleep(MARKER_POLL_SECONDS)  # a storage has no event to wait for
    return manifest


def repeat_on(uri: str, device: str, *, repeat: int, seconds: float) -> DeviceReport:
    """Repeat the bundle on one device of this process. What cannot be run is in the report."""
    try:
        from truestep.bundle.confirming import confirm, load_factory, usable_device
        from truestep.bundle.reading import open_bundle

        bundle = open_bundle(uri)
        if not bundle.manifest.model:
            return DeviceReport(
                device=device,
                problem="the bundle does not say how its model is built: give the guard "
                "BundleSettings(model='module:function')",
            )
        model, compute_loss = load_factory(bundle.manifest.model)
        found = confirm(bundle, model, compute_loss, usable_device(device), repeat=repeat, seconds=seconds)
    except Exception as error:  # a driver's error is as much a result as ours
        said = str(error) if isinstance(error, TruestepError) else f"{type(error).__name__}: {error}"
        return DeviceReport(device=device, problem=said)
    return device_report(device, found)


def device_report(device: str, found: Confirmation) -> DeviceReport:
    """The short form of a confirmation."""
    return DeviceReport(
        device=device,
        gpu_uuid=found.gpu_uuid,
        runs=found.runs,
        differing=found.differing,
        as_recorded=found.as_recorded,
        gave=found.repeated,
        first=next(iter(found.first_modules), ""),
        weights_differ=bool(found.weights_changed),
        problem=found.raised,
    )


def _start(asked: argparse.Namespace, device: str, report: Path) -> subprocess.Popen[bytes]:
    options = ["--device", device, "--repeat", str(asked.repeat), "--seconds", str(asked.seconds)]
    command = [sys.executable, "-m", "truestep.bundle.on_node", asked.bundle, *options, "--report", str(report)]
    # What it prints belongs to the log; only the file is believed.
    return subprocess.Popen(command)


def _ended(
    device: str, process: subprocess.Popen[bytes], report: Path, left_seconds: float, limit_seconds: float
) -> DeviceReport:
    """What the device's process reported, or why it did not. Kills it once the time is over."""
    try:
        code = process.wait(max(0.0, left_seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return DeviceReport(device=device, problem=f"it had not ended after {limit_seconds:g} s and was killed")
    try:
        return replace(from_json(DeviceReport, parse_json(report.read_bytes())), device=device)
    except (OSError, ValueError, TruestepError):
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        return DeviceReport(device=device, problem=f"its process ended {how} without a result; read the pod's log")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python3 -m truestep.bundle.on_node", description=__doc__)
    parser.add_argument("bundle", help="bundle_uri of an alarm's evidence")
    parser.add_argument("--repeat", type=int, default=1000, help="runs on each GPU")
    parser.add_argument("--seconds", type=float, default=600, help="start no other run after so long")
    parser.add_argument("--limit", type=float, default=1350, help="seconds after which what still runs is killed")
    parser.add_argument("--wait", type=float, default=120, help="seconds to wait for the bundle's marker")
    parser.add_argument("--gpus", type=int, default=1, help="GPUs of the node; each has a process")
    parser.add_argument("--device", default="", help=argparse.SUPPRESS)
    parser.add_argument("--report", required=True, help="file for the report, as JSON of at most 4096 bytes")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
