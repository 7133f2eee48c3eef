from __future__ import annotations

from collections.abc import Iterator

import pytest
from lightkube import Client

from tests.adapters.kubernetes_standin.running_cluster import RunningCluster, running_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Shared by a file's tests: each uses names of its own."""
    with running_cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest.fixture
def kubernetes(cluster: RunningCluster) -> Iterator[Client]:
    with cluster.lightkube() as client:
        yield client
