"""``truestep checkpoints``: run on checkpoints that the SDK wrote, intact, damaged, revoked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from moto.server import ThreadedMotoServer

from tests.unit.cli.conftest import Printed, SavedRun, flip_bit_of_file
from truestep.checkpoints import CheckpointError
from truestep.contract import (
    MANIFEST_NAME,
    REVOKED_NAME,
    TOMBSTONE_NAME,
    CheckpointManifest,
    FileEntry,
    RevocationMark,
    Step,
    Tombstone,
    canonical_bytes,
    from_json,
)
from truestep.identity import run_reference

Truestep = Callable[..., Printed]
Start = Callable[..., SavedRun]


def rewrite_model(checkpoint: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the weights and let the manifest's hash of the file follow: damage from before the file was written."""
    state = torch.load(checkpoint / "model.pt", weights_only=True)
    change(state)
    torch.save(state, checkpoint / "model.pt")
    content = (checkpoint / "model.pt").read_bytes()
    manifest = json.loads((checkpoint / MANIFEST_NAME).read_bytes())
    for entry in manifest["files"]:
        if entry["path"] == "model.pt":
            entry.update(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())
    (checkpoint / MANIFEST_NAME).write_bytes(canonical_bytes(manifest))


def flip(state: dict[str, torch.Tensor], name: str, index: tuple[int, ...], bit: int) -> None:
    state[name].view(torch.int32)[index] ^= -(1 << 31) if bit == 31 else 1 << bit


def revoke(checkpoint: Path) -> None:
    sha256 = hashlib.sha256((checkpoint / MANIFEST_NAME).read_bytes()).hexdigest()
    mark = RevocationMark(manifest_sha256=sha256, step=Step(9), incident_id="inc-1", reason="inside the window")
    (checkpoint / REVOKED_NAME).write_bytes(canonical_bytes(mark))


def test_list_shows_newest_first_with_its_trust(truestep: Truestep, root: Path, saved: tuple[Path, Path]) -> None:
    printed = truestep("checkpoints", "list", str(root))
    assert printed.code == 0
    lines = [line for line in printed.out.splitlines() if line.startswith("step-")]
    assert [line.split()[:2] for line in lines] == [["step-00000019", "written"], ["step-00000009", "trusted"]]
    assert lines[1].split()[2:4] == ["14", "0.78"]
    assert all(re.search(r" \d{4}-\d{2}-\d{2} \d{2}:\d{2}$", line.rstrip()) for line in lines), "times on one line"
    assert all(len(line) <= 80 for line in printed.out.splitlines() if "://" not in line)
    assert "risk of 5%" in printed.words


def test_every_audit_that_passes_later_widens_the_faults_that_a_checkpoint_is_trusted_for(
    truestep: Truestep, root: Path, start: Start
) -> None:
    run = start(root.as_uri())
    for step in (9, 19, 29):
        run.save(step)
        run.checkpoints.promote(Step(step))
    document = json.loads(truestep("checkpoints", "list", str(root), "--json").out)
    found = [(entry["step"], entry["audits_passed"], entry["risk"]) for entry in document["checkpoints"]]
    assert found == [(29, 1, 0.05), (19, 2, 0.05), (9, 3, 0.05)]
    for entry in document["checkpoints"]:
        passed = (1 - entry["trusted_for_hit_probability"]) ** (2 * entry["audits_passed"])
        assert passed == pytest.approx(0.05, rel=0.01)
        assert passed <= 0.05


def test_a_checkpoint_in_shares_is_listed_verified_and_compared_without_the_model(
    truestep: Truestep, root: Path, start: Start
) -> None:
    run = start(root.as_uri(), distributed=True)
    first, second = run.save(9), run.save(19)
    assert truestep("checkpoints", "verify", first, "--weights").code == 0
    differences = json.loads(truestep("checkpoints", "diff", first, second, "--json").out)["differences"]
    assert {entry["name"] for entry in differences} >= {"0.weight", "2.weight"}
    share = next((root / "step-00000009").glob("*.distcp"))
    flip_bit_of_file(share, share.stat().st_size // 2)
    printed = truestep("checkpoints", "verify", first, "--weights")
    assert printed.code == 1
    assert share.name in printed.words


def test_a_run_takes_an_absolute_path_as_its_root_as_the_commands_do(
    truestep: Truestep, tmp_path: Path, start: Start
) -> None:
    root = tmp_path / "my run"
    run = start(f"{root}/")
    assert run.save(9) == f"{root.as_uri()}/step-00000009"
    assert truestep("checkpoints", "list", str(root)).out.startswith(f"{root.as_uri()}\n")
    declared = run_reference("run", "attempt", 1, {"TRUESTEP_CHECKPOINT_ROOT": str(root)})
    assert declared.checkpoint_root == root.as_uri(), "events carry a URI"
    with pytest.raises(CheckpointError, match="'my run' is neither"):
        start("my run")


def test_list_as_json_holds_what_a_program_needs(truestep: Truestep, root: Path, saved: tuple[Path, Path]) -> None:
    printed = truestep("checkpoints", "list", root.as_uri(), "--json")
    document = json.loads(printed.out)
    newest, trusted = document["checkpoints"]
    assert (newest["step"], newest["trust"], newest["clean_through"]) == (19, "written", None)
    assert (trusted["step"], trusted["trust"], trusted["clean_through"]) == (9, "trusted", 14)
    assert trusted["manifest_sha256"] == hashlib.sha256((saved[0] / MANIFEST_NAME).read_bytes()).hexdigest()
    assert document["tombstone"] is None


def test_list_names_the_incident_that_revoked_and_the_alarm_that_ended_the_run(
    truestep: Truestep, root: Path, saved: tuple[Path, Path]
) -> None:
    revoke(saved[0])
    stone = Tombstone(alarm_id="alarm-7", step=Step(29), run_id="run", attempt_id="a", at="2026-01-01T00:00:00Z")
    (root / TOMBSTONE_NAME).write_bytes(canonical_bytes(stone))
    printed = truestep("checkpoints", "list", str(root))
    assert printed.code == 0
    assert "revoked by incident inc-1: inside the window" in printed.words
    assert "ended this run at step 29 (2026-01-01 00:00:00 UTC, alarm alarm-7)" in printed.words
    assert f"or by hand: truestep checkpoints start-from {root.as_uri()}" in printed.words


def test_list_shows_the_order_in_force_and_says_when_an_alarm_has_ended_it(
    truestep: Truestep, root: Path, saved: tuple[Path, Path]
) -> None:
    stone = Tombstone(alarm_id="alarm-7", step=Step(29), run_id="run", attempt_id="a", at="2026-01-01T00:00:00Z")
    (root / TOMBSTONE_NAME).write_bytes(canonical_bytes(stone))
    order = json.loads(truestep("checkpoints", "start-from", str(root), "--json").out)
    printed = truestep("checkpoints", "list", str(root))
    name, issued = order["directive"]["incident_id"], order["directive"]["issued_at"]
    assert f"The next start resumes from {saved[0].as_uri()}: order {name} of {issued[:10]}" in printed.words
    assert "given with `truestep checkpoints start-from`. A later" in printed.words
    assert "starts here again only" not in printed.words
    document = json.loads(truestep("checkpoints", "list", str(root), "--json").out)
    assert (document["order"], document["order_in_force"]) == (order, True)

    (root / TOMBSTONE_NAME).write_bytes(canonical_bytes(dataclasses.replace(stone, alarm_id="alarm-8")))
    printed = truestep("checkpoints", "list", str(root))
    assert "is over: alarm alarm-8 came later" in printed.words.replace("Alarm", "alarm")
    assert "Training starts here again only by an order that answers this alarm" in printed.words
    assert not json.loads(truestep("checkpoints", "list", str(root), "--json").out)["order_in_force"]


def test_list_of_an_unreadable_manifest_is_a_finding(truestep: Truestep, root: Path, saved: tuple[Path, Path]) -> None:
    (saved[1] / MANIFEST_NAME).write_text("{")
    printed = truestep("checkpoints", "list", str(root))
    assert printed.code == 1
    assert "unreadable" in printed.out
    assert "trusted" in printed.out


def test_list_of_an_empty_root_is_fine_and_says_so(truestep: Truestep, root: Path) -> None:
    root.mkdir()
    printed = truestep("checkpoints", "list", str(root))
    assert (printed.code, "No checkpoint below" in printed.out) == (0, True)


def test_verify_passes_intact_checkpoints_of_a_whole_root(
    truestep: Truestep, root: Path, saved: tuple[Path, Path]
) -> None:
    printed = truestep("checkpoints", "verify", str(root), "--json")
    assert printed.code == 0
    results = json.loads(printed.out)
    assert [result["step"] for result in results] == [19, 9]
    assert all(result["intact"] and result["usable"] for result in results)
    assert {file["path"] for file in results[0]["files"]} == {"model.pt", "optimizer.pt", "rng-00000.pt"}


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "rng-00000.pt"])
def test_verify_finds_one_flipped_bit_and_names_the_file(
    truestep: Truestep, saved: tuple[Path, Path], name: str
) -> None:
    flip_bit_of_file(saved[1] / name, -100)
    printed = truestep("checkpoints", "verify", str(saved[0]), str(saved[1]))
    assert printed.code == 1
    assert "step-00000009 intact, trusted" in printed.words
    assert "step-00000019 DAMAGED, written" in printed.words
    assert f"{name}:" in printed.out
    assert "SHA-256" in printed.out


def test_verify_finds_a_missing_and_a_shortened_file(truestep: Truestep, saved: tuple[Path, Path]) -> None:
    (saved[0] / "optimizer.pt").unlink()
    content = (saved[0] / "model.pt").read_bytes()
    (saved[0] / "model.pt").write_bytes(content[:-1])
    printed = truestep("checkpoints", "verify", str(saved[0]))
    assert printed.code == 1
    assert "optimizer.pt is missing, its manifest lists it" in printed.words
    assert f"has {len(content) - 1} bytes, its manifest says {len(content)}" in printed.words


def test_verify_counts_a_revoked_checkpoint_as_a_finding_though_its_bytes_are_intact(
    truestep: Truestep, saved: tuple[Path, Path]
) -> None:
    revoke(saved[0])
    printed = truestep("checkpoints", "verify", str(saved[0]), "--json")
    (result,) = json.loads(printed.out)
    assert (printed.code, result["intact"], result["usable"]) == (1, True, False)


def test_verify_does_not_read_a_path_that_leads_out_of_the_checkpoint(
    truestep: Truestep, saved: tuple[Path, Path]
) -> None:
    outside = saved[0].parent / "secret"
    outside.write_bytes(b"secret")
    document = json.loads((saved[0] / MANIFEST_NAME).read_bytes())
    manifest = from_json(CheckpointManifest, document)
    entry = FileEntry(path="../secret", bytes=6, sha256=hashlib.sha256(b"secret").hexdigest())
    document["files"] = json.loads(canonical_bytes([*manifest.files, entry]))
    (saved[0] / MANIFEST_NAME).write_bytes(canonical_bytes(document))
    (saved[0] / "trusted.json").unlink()
    printed = truestep("checkpoints", "verify", str(saved[0]))
    assert printed.code == 1
    assert "../secret: leads out of the checkpoint; not read" in printed.words


def test_verify_of_weights_finds_damage_from_before_the_file_was_written(
    truestep: Truestep, saved: tuple[Path, Path]
) -> None:
    rewrite_model(saved[1], lambda state: flip(state, "2.weight", (0, 3), 5))
    assert truestep("checkpoints", "verify", str(saved[1])).code == 0
    printed = truestep("checkpoints", "verify", "--weights", str(saved[1]))
    assert printed.code == 1
    assert "tensor 2.weight in model.pt differs" in printed.words
    assert "0.weight" not in printed.out


def test_verify_of_weights_passes_an_intact_checkpoint(truestep: Truestep, saved: tuple[Path, Path]) -> None:
    printed = truestep("checkpoints", "verify", "--weights", str(saved[1]))
    assert printed.code == 0
    assert "6 tensors compared" in printed.words


def test_verify_hashes_on_a_machine_without_torch(saved: tuple[Path, Path]) -> None:
    import subprocess
    import sys

    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from truestep.cli import main\n"
        f"main(['checkpoints', 'verify', {str(saved[1])!r}])"
    )
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "intact" in done.stdout


def test_diff_names_tensor_index_and_bits(truestep: Truestep, saved: tuple[Path, Path], tmp_path: Path) -> None:
    first, second = saved[1] / "model.pt", tmp_path / "other.pt"
    state = torch.load(first, weights_only=True)
    value = float(state["0.weight"][4, 2])
    flip(state, "0.weight", (4, 2), 30)
    flip(state, "0.weight", (4, 2), 31)
    torch.save(state, second)
    printed = truestep("checkpoints", "diff", str(first), str(second), "--json")
    assert printed.code == 1
    (difference,) = json.loads(printed.out)["differences"]
    assert (difference["name"], difference["kind"], difference["dtype"]) == ("0.weight", "bits", "float32")
    assert (difference["elements"], difference["elements_differing"]) == (30, 1)
    (element,) = difference["examples"]
    assert (element["index"], element["flipped_bits"]) == ([4, 2], [30, 31])
    assert element["first"] == value
    human = truestep("checkpoints", "diff", str(first), str(second))
    assert "0.weight differs in 1 of 30 elements (float32 [5, 6])" in human.words
    assert "exponent 30; sign 31" in human.words


def test_diff_between_two_checkpoints_loads_them_by_their_manifests(
    truestep: Truestep, saved: tuple[Path, Path]
) -> None:
    printed = truestep("checkpoints", "diff", str(saved[0]), saved[1].as_uri(), "--max-elements", "2")
    assert printed.code == 1
    assert "0.weight differs in 30 of 30 elements" in printed.words
    assert "and 28 more; over all of them: bit" in printed.words
    assert "1.num_batches_tracked differs in 1 of 1 element (int64 [])" in printed.words


def test_diff_of_a_checkpoint_with_itself_is_fine(truestep: Truestep, saved: tuple[Path, Path]) -> None:
    printed = truestep("checkpoints", "diff", str(saved[0]), str(saved[0]))
    assert (printed.code, "equal to the bit" in printed.words) == (0, True)


def test_diff_of_another_file_reaches_into_its_containers(truestep: Truestep, saved: tuple[Path, Path]) -> None:
    printed = truestep("checkpoints", "diff", str(saved[0]), str(saved[1]), "--file", "optimizer.pt", "--json")
    names = {difference["name"] for difference in json.loads(printed.out)["differences"]}
    assert {"state/0/exp_avg", "state/0/step"} <= names
    assert "param_groups/0/lr" not in names


def test_diff_of_a_damaged_checkpoint_is_a_finding_and_names_the_file(
    truestep: Truestep, saved: tuple[Path, Path]
) -> None:
    content = (saved[1] / "model.pt").read_bytes()
    (saved[0] / "copy.pt").write_bytes(content)
    weight = torch.load(saved[1] / "model.pt", weights_only=True)["0.weight"]
    flip_bit_of_file(saved[1] / "model.pt", content.index(weight.numpy().tobytes()))
    printed = truestep("checkpoints", "diff", str(saved[0] / "copy.pt"), str(saved[1]))
    assert (printed.code, printed.out) == (1, "")
    assert "model.pt has SHA-256" in printed.complaint
    file = str(saved[1] / "model.pt")
    assert f"give as SECOND the file itself, {file}:" in printed.complaint
    flipped = truestep("checkpoints", "diff", str(saved[0] / "copy.pt"), file)
    assert (flipped.code, flipped.complaint) == (1, "")
    assert "0.weight differs in 1 of 30 elements" in flipped.words
    assert "mantissa 0" in flipped.words


def test_diff_says_which_files_a_checkpoint_has(truestep: Truestep, saved: tuple[Path, Path]) -> None:
    printed = truestep("checkpoints", "diff", str(saved[0]), str(saved[1]), "--file", "extra.pt")
    assert printed.code == 2
    assert "has no extra.pt; its manifest lists " in printed.complaint
    assert all(name in printed.complaint for name in ("model.pt", "optimizer.pt", "rng-00000.pt"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("list", "/nowhere/at/all"), "/nowhere/at/all is not a directory; give a checkpoint root or a checkpoint"),
        (("list", "file://relative/dir"), "file:// takes three slashes and an absolute path; give file:///"),
        (("list", "gs://bucket/run"), "file:///absolute/directory nor a directory; give one of these as URI"),
        (("diff", "{checkpoint}", "s3:///run"), "nor a directory; give one of these as SECOND"),
        (("list", ""), "URI is empty, as by a variable of the shell that is not set"),
        (("diff", "{checkpoint}", " "), "SECOND is empty"),
        (("diff", "/nope", "/nope2"), "FIRST: there is no /nope; diff takes two checkpoints (directories step-...) or"),
        (("diff", "{empty}", "{checkpoint}"), "is not one checkpoint; diff takes two checkpoints"),
        (("verify", "{root}/step-00000123"), "step-00000123 is not a directory"),
        (("verify", "{empty}"), "no checkpoint below"),
        (("verify", "{unfinished}"), "is not a checkpoint: it has no manifest.json"),
        (("list", "{checkpoint}"), "is one checkpoint; give the root above it"),
        (("diff", "{root}", "{checkpoint}"), "wrote; the newest there are step-00000019, step-00000009"),
    ],
)
def test_bad_input_is_refused_in_one_sentence_without_a_traceback(
    truestep: Truestep, root: Path, saved: tuple[Path, Path], arguments: tuple[str, ...], words: str
) -> None:
    places = {"root": root, "checkpoint": saved[0], "empty": root / "empty", "unfinished": root / "step-00000029"}
    places["empty"].mkdir()
    places["unfinished"].mkdir()
    printed = truestep("checkpoints", *(argument.format(**places) for argument in arguments))
    assert (printed.code, printed.out) == (2, "")
    assert words in printed.complaint
    assert "Traceback" not in printed.err
    assert all(len(line) <= 80 or " " not in line for line in printed.err.splitlines())


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A bucket of an in-process S3 server that boto3 finds through the environment."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    import boto3

    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="checkpoints")
    yield "s3://checkpoints/runs/gpt"
    server.stop()


def test_commands_work_on_a_bucket(truestep: Truestep, start: Start, bucket: str) -> None:
    run = start(bucket)
    first, second = run.save(9), run.save(19)
    assert truestep("checkpoints", "list", bucket + "/").code == 0
    assert truestep("checkpoints", "verify", bucket).code == 0
    run.checkpoints.storage.replace("step-00000019/model.pt", b"damaged")
    printed = truestep("checkpoints", "verify", first, second)
    assert printed.code == 1
    assert f"{second} DAMAGED" in printed.words
    assert truestep("checkpoints", "list", "s3://no-such-bucket/run").code == 2
