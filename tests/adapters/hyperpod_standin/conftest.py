from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.adapters.kubernetes_standin.running_cluster import RunningCluster, running_cluster


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningCluster]:
    """A fresh cluster; settings come by indirect parametrisation."""
    with running_cluster(tmp_path, **getattr(request, "param", {})) as running:
        yield running


@pytest.fixture
def sagemaker(cluster: RunningCluster) -> Iterator[Any]:
    client = cluster.sagemaker()
    yield client
    client.close()
