"""The cluster server: `python -m local_stack.cluster.server --state-dir DIR --config FILE.json`.

Prints one JSON line when it serves: `port` and `url` (control and HyperPod, HTTP), `kubernetes_url` (the first
cluster's, HTTPS).
Ends, with all pods, on SIGTERM or SIGINT.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path

from local_stack.cluster.cluster import LocalCluster
from local_stack.cluster.config import Config, ConfigError, load_config
from local_stack.cluster.control import ControlApi
from local_stack.cluster.http_server import LoopbackServer
from local_stack.cluster.hyperpod.api import HyperPodApi
from local_stack.process import announce


class ClusterServer:
    """All clusters of a configuration and the control listener, in this process.

    state_dir: kept between runs: objects, instances, certificates, volumes and logs, one folder a cluster.
    """

    def __init__(self, config: Config, state_dir: Path) -> None:
        state_dir = state_dir.resolve()
        self.clusters = [
            LocalCluster(cluster, config, state_dir / cluster.eks_cluster_name) for cluster in config.clusters
        ]
        control = ControlApi(self.clusters, HyperPodApi([cluster.hyperpod for cluster in self.clusters]))
        self._listener = LoopbackServer(control.handle)

    @property
    def url(self) -> str:
        """Base URL of the control listener, which also speaks HyperPod's operations."""
        return self._listener.url

    @property
    def port(self) -> int:
        """Port of the control listener."""
        return int(self._listener.server_address[1])

    def start(self) -> None:
        """Serve. Raises ConfigError where the state directory was made with another configuration."""
        try:
            for cluster in self.clusters:
                cluster.start()
        except BaseException:
            self.stop()
            raise
        self._listener.start()

    def stop(self) -> None:
        """Stop everything, pods first."""
        self._listener.stop()
        for cluster in self.clusters:
            cluster.stop()


def main(arguments: list[str] | None = None) -> int:
    """Run the server until it is told to stop. Exit code 2 for a configuration that cannot be used."""
    parser = argparse.ArgumentParser(description="Kubernetes and HyperPod on one machine")
    parser.add_argument("--state-dir", type=Path, required=True, help="directory for objects, certificates, volumes")
    parser.add_argument("--config", type=Path, required=True, help="JSON file: clusters, seed, delays, rbac_dir")
    options = parser.parse_args(arguments)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s", stream=sys.stderr)
    try:
        server = ClusterServer(load_config(options.config), options.state_dir)
        server.start()
    except (ConfigError, OSError, ValueError) as error:
        print(f"cluster server: {error}", file=sys.stderr)
        return 2
    announce(port=server.port, url=server.url, kubernetes_url=server.clusters[0].url)
    stop.wait()
    server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
