"""One run of everything that the deployed functions do. All tests here look at its record."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

from local_stack import LocalStack
from local_stack.cluster_settings import ClusterSettings
from local_stack.template import StackTemplate, load_assembly
from tests.least_privilege.roles import Roles
from tests.least_privilege.story import Story
from tests.least_privilege.world import REPOSITORY, Prometheus, World, settings


@pytest.fixture(scope="session")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    """The deployment of `settings`, after the story was told."""
    if not (REPOSITORY / "build" / "layer-host" / "python").is_dir():
        pytest.fail("the functions' dependencies are not in build/layer-host: run make setup")
    directory = tmp_path_factory.mktemp("least-privilege")
    prometheus = Prometheus()
    context = directory / "context.json"
    context.write_text(json.dumps(settings(prometheus.url)))
    command = [sys.executable, "app.py", "--context", str(context), "--output", str(directory / "cdk.out")]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    cluster = ClusterSettings(provisioning_seconds=0.2, health_check_seconds=0.2)
    try:
        with LocalStack(directory / "state", directory / "cdk.out", cluster=cluster, time_scale=0.1) as stack:
            prometheus.edge_url = stack.endpoint_url
            told = Story(World(stack), directory / "cdk.out")
            told.tell()
            yield told
    finally:
        prometheus.close()


@pytest.fixture(scope="session")
def template(story: Story) -> StackTemplate:
    """What was deployed."""
    (stack,) = load_assembly(story.assembly)
    return stack


@pytest.fixture(scope="session")
def roles(story: Story, template: StackTemplate) -> Roles:
    """The roles as they were deployed, and what they did."""
    return Roles(story.stack, template)
