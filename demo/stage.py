"""The stage that every story needs: an empty directory, the synthesised template."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from demo.view import View
from local_stack.access_keys import ADMINISTRATOR, SECRET_ACCESS_KEY
from local_stack.stack import LocalStack

CONTEXT = Path(__file__).with_name("context.json")
REPOSITORY = Path(__file__).parent.parent
MARKER = ".truestep-demo"
"""Says that a state directory may be emptied by the next demo."""


class StoryError(Exception):
    """The story cannot go on; the message says where it stopped and what was last seen."""


class RejectedError(StoryError):
    """A person said no to a story that tells of an approval: it ends there, and nothing has failed."""

    def __init__(self) -> None:
        super().__init__(
            "You rejected the replacement: that is recorded with your reason, and the node is released.\n"
            "The story is one of an approval and stops here, before the job is relaunched and trains again: a fault "
            "that lasts would be caught again at the next audit.\n\n"
            "A rejection to its end, with a job that resumes: make demo SCENARIO=reject"
        )


def empty(state_dir: Path) -> None:
    """Make the directory anew. Raises `StoryError` rather than delete what no earlier demo has made."""
    if state_dir.exists():
        if any(state_dir.iterdir()) and not (state_dir / MARKER).exists():
            raise StoryError(
                f"{state_dir} is not empty and no demo has made it: name another directory in TRUESTEP_DEMO_STATE_DIR"
            )
        shutil.rmtree(state_dir)
    state_dir.mkdir(parents=True)
    (state_dir / MARKER).touch()


def synthesise(template_dir: Path, view: View, policy: Mapping[str, Any]) -> None:
    """Synthesise the recovery's template for the demo's cluster; `app.py` is the same that `cdk deploy` runs.

    policy: fields that differ from those in ``context.json``.
    """
    document = json.loads(CONTEXT.read_text())
    document["truestep"]["policy"] |= policy
    context = template_dir.with_name("context.json")
    context.write_text(json.dumps(document, indent=2))
    command = [sys.executable, "app.py", "--context", str(context), "--output", str(template_dir)]
    # CDK's own validation takes longer than all else; `make check` has it.
    environment = {**os.environ, "CDK_VALIDATION": "false"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise StoryError(f"app.py did not synthesise:\n{done.stderr[-3000:]}")
    view.line("synthesised the CloudFormation template: no account, no network, no Docker")


def in_a_terminal(stack: LocalStack, state_dir: Path, incident_id: str) -> str:
    """The command that approves from another terminal, as against a deployed stack; writes the files that it reads."""
    stage = json.loads(CONTEXT.read_text())["truestep"]["stage"]
    outputs, environment = state_dir / "outputs.json", state_dir / "terminal.env"
    outputs.write_text(json.dumps({f"truestep-{stage}": dict(stack.outputs)}, indent=2))
    values = {
        "AWS_ENDPOINT_URL": stack.endpoint_url,
        "AWS_REGION": stack.region,
        "AWS_ACCESS_KEY_ID": ADMINISTRATOR,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
    }
    environment.write_text("".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items()))
    command = Path(sys.executable).with_name("truestep")
    words = [str(command), "incidents", "approve", incident_id, "--stage", stage, "--outputs", str(outputs)]
    # In a shell of its own: these credentials must not replace anybody's real ones.
    return f"( . {shlex.quote(str(environment))} && {shlex.join(words)} )"
