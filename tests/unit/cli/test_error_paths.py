"""Every command reads well on 80 columns, and what people or their surroundings get wrong is a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.cli.conftest import Printed
from truestep.cli.application import application, checkpoints
from truestep.cli.incident_commands import incidents

Truestep = Callable[..., Printed]
ARN = "arn:aws:sagemaker:us-east-1:123456789012:cluster/abcdefghijkl"
NAMES = ("EventBusName", "TableName", "StateMachineArn", "CheckAccessFunction", "ConsoleFunction", "DecideFunction")
OUTPUTS = dict.fromkeys(NAMES, "x") | {
    "ClusterArns": ARN,
    "TrainingSources": "truestep.training.abcdefghijkl.default",
}
DRILL = ("drill", "--cluster-arn", ARN, "--node", "node-1", "--outputs", "outputs.json")
NOWHERE = "http://127.0.0.1:9"
REFUSAL = (
    b"<ErrorResponse><Error><Code>AccessDenied</Code><Message>User x may not do that</Message></Error></ErrorResponse>"
)


def commands() -> list[list[str]]:
    """Every command, as it is typed."""
    named = {command.name or command.callback.__name__ for command in application.registered_commands}
    below = {command.name or command.callback.__name__ for command in checkpoints.registered_commands}
    decisions = {command.name or command.callback.__name__ for command in incidents.registered_commands}
    return [
        *([], ["checkpoints"], ["incidents"]),
        *sorted([name] for name in named),
        *sorted(["checkpoints", name] for name in below),
        *sorted(["incidents", name] for name in decisions),
    ]


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    """An AWS that refuses everything."""

    class Handler(BaseHTTPRequestHandler):
        def refuse(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.send_response(403)
            self.send_header("Content-Length", str(len(REFUSAL)))
            self.end_headers()
            self.wfile.write(REFUSAL)

        def log_message(self, *_: Any) -> None:
            return

    for method in ("GET", "HEAD", "POST", "PUT"):
        setattr(Handler, f"do_{method}", Handler.refuse)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusing: str) -> Callable[[str], None]:
    """Chooses the AWS that a command meets: ``none`` (no region, no credentials), ``refuses`` or ``away``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("outputs.json").write_text(json.dumps({"truestep-prod": OUTPUTS}))
    Path("broken.json").write_text("{")
    Path("deeper").mkdir()
    Path("deeper/mine.py").write_text("def raises():\n    raise KeyError('tokens')\n")
    Path("junk.pt").write_text("junk")
    Path("train.py").write_text("import torch\n")
    torch.save(Fraction(1, 2), "object.pt")
    Path("pieces.py").write_text("def raises():\n    raise KeyError('tokens')\n\ndef wrong():\n    return 3\n")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")

    def choose(kind: str) -> None:
        if kind != "none":
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
            monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")
            monkeypatch.setenv("AWS_REGION", "us-east-1")
            monkeypatch.setenv("AWS_ENDPOINT_URL", refusing if kind == "refuses" else NOWHERE)

    return choose


def fits(text: str) -> list[str]:
    """Lines of more than 80 columns, but for words that are longer themselves and stay whole to be copied."""
    return [line for line in text.splitlines() if len(line) > 80 and len(max(line.split(), key=len)) < 60]


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_fits_80_columns_and_explains_every_option(truestep: Truestep, command: list[str]) -> None:
    printed = truestep(*command, "--help")
    assert printed.code == 0
    assert fits(printed.out) == []
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    "command", [one for one in commands() if one not in ([], ["checkpoints"], ["incidents"])], ids=" ".join
)
def test_every_command_can_print_json(truestep: Truestep, command: list[str]) -> None:
    assert "--json" in truestep(*command, "--help").out


def test_the_exit_codes_are_in_the_help(truestep: Truestep) -> None:
    assert "0 fine, 1 something is damaged, revoked or different, 2 bad input, 130" in truestep("--help").words


CASES = [
    (("nonsense",), "none", "No such command 'nonsense'; see truestep --help"),
    (("plan",), "none", "Missing option '--gpus'; see truestep plan --help"),
    (("plan", "--gpus", "x", "--step-seconds", "5"), "none", "'--gpus'"),
    (("plan", "--gpus", "0", "--step-seconds", "5"), "none", "give a whole number of at least 1"),
    (("plan", "--gpus", "8", "--step-seconds", "nan"), "none", "finite number above 0"),
    (("plan", "--gpus", "8", "--step-seconds", "1", "--plot", "/nowhere/a.svg"), "none", "directory that exists"),
    (("fingerprint", "nowhere"), "none", "is not a file"),
    (("fingerprint", "junk.pt"), "none", "give a file that torch.save wrote"),
    (("fingerprint", "train.py"), "none", "train.py was not written by torch.save, or is damaged; give a file"),
    (("fingerprint", "object.pt"), "none", "object.pt holds fractions.Fraction, which is neither a tensor"),
    (("confirm", "nowhere"), "none", "give the bundle_uri"),
    (("confirm", "ftp://bucket/x"), "none", "neither"),
    (("confirm", "."), "none", "it has no bundle.json"),
    (("confirm", "s3://bucket/x"), "refuses", "check the bucket's name and region"),
    (("doctor", "--script", "nocolon"), "none", "give module:function"),
    (("check-access",), "none", "no AWS region: give --region"),
    (("check-access", "--region", "us-east-1"), "none", "no AWS credentials"),
    (("check-access",), "refuses", "--stage and --region of the deployment"),
    (("check-access",), "away", "Could not connect"),
    (("check-access", "--outputs", "nowhere"), "refuses", "cannot read outputs from nowhere"),
    (("check-access", "--outputs", "broken.json"), "refuses", "cannot read outputs from broken.json"),
    (("check-access", "--outputs", "outputs.json"), "refuses", "needs lambda:InvokeFunction"),
    (("check-access", "--outputs", "outputs.json"), "away", "Could not connect"),
    (("drill",), "none", "Missing option '--cluster-arn'; see truestep drill --help"),
    ((*DRILL[:2], "x", *DRILL[3:]), "refuses", "this deployment does not serve 'x'"),
    (DRILL, "refuses", "needs events:PutEvents"),
    (DRILL, "away", "Could not connect"),
    (("incidents", "list"), "refuses", "needs dynamodb:Query"),
    (("incidents", "list", "--outputs", "nowhere"), "none", "cannot read outputs from nowhere"),
    (("incidents", "console"), "refuses", "needs lambda:InvokeFunction"),
    (("incidents", "list"), "away", "Could not connect"),
    (("incidents", "show", "inc-1"), "refuses", "needs dynamodb:GetItem"),
    (("incidents", "approve", "inc-1"), "refuses", "needs lambda:InvokeFunction"),
    (("incidents", "approve", "inc-1"), "none", "no AWS region"),
    (("incidents", "resume", "inc-1"), "none", "Missing option '--from'"),
    (("checkpoints", "list", "nowhere"), "none", "give a checkpoint root"),
    (("checkpoints", "list", "ftp://x"), "none", "is neither s3://bucket/prefix nor"),
    (("checkpoints", "list", "s3://bucket/x"), "refuses", "check the bucket's name and region"),
    (("checkpoints", "list", "s3://bucket/x"), "away", "Could not connect"),
    (("checkpoints", "verify", "nowhere"), "none", "give a checkpoint root"),
    (("checkpoints", "diff", "nowhere", "junk.pt"), "none", "FIRST: there is no nowhere; diff takes two checkpoints"),
]


@pytest.mark.parametrize(
    ("arguments", "aws", "words"), CASES, ids=[f"{' '.join(words[:4])}, AWS {aws}" for words, aws, _ in CASES]
)
def test_a_mistake_is_a_sentence_that_says_what_to_do(
    truestep: Truestep, surroundings: Callable[[str], None], arguments: tuple[str, ...], aws: str, words: str
) -> None:
    surroundings(aws)
    if arguments[0] == "incidents" and "--outputs" not in arguments:
        arguments = (*arguments, "--outputs", "outputs.json")
    printed = truestep(*arguments)
    assert (printed.code, printed.out) == (2, "")
    assert words in printed.complaint
    assert "Traceback" not in printed.err
    assert fits(printed.err) == []
    for_programs = truestep(*arguments, "--json")
    assert (for_programs.code, for_programs.err) == (2, "")
    document = json.loads(for_programs.out)
    assert (words in document["error"], document["exit_code"]) == (True, 2)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("pieces:raises", "pieces:raises raised KeyError: 'tokens', at "),
        ("pieces:wrong", "return truestep.doctor.Examined("),
        ("missing:pieces", "no module 'missing'"),
        ("deeper/mine.py:raises", "mine:raises raised KeyError: 'tokens', at "),
    ],
)
def test_the_doctor_says_what_is_wrong_with_a_script_and_where(
    truestep: Truestep, surroundings: Callable[[str], None], script: str, words: str
) -> None:
    surroundings("none")
    printed = truestep("doctor", "--script", script, "--processes", "2")
    assert (printed.code, printed.out) == (2, "")
    assert words in printed.complaint
    assert "Traceback" not in printed.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_full_disk_behind_standard_output_is_no_finding(form: list[str]) -> None:
    command = [sys.executable, "-m", "truestep.cli", "plan", "--gpus", "8", "--step-seconds", "1", *form]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert "cannot be written to standard output: No space left on device" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_an_error_of_our_own_is_no_mistake_of_the_users(truestep: Truestep, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("truestep.cli.planning.show_plan", bug)
    with pytest.raises(ZeroDivisionError):
        application(["plan", "--gpus", "8", "--step-seconds", "1"], standalone_mode=False)
