"""The edge, on a socket that is open already; prints one JSON line when it serves.

python -m local_stack.edge.server --fd FD --cloud-port PORT --state-dir DIR
"""

from __future__ import annotations

import argparse
import asyncio
import socket
from pathlib import Path

import uvicorn

from local_stack.edge.application import Edge
from local_stack.process import announce


class _AnnouncingServer(uvicorn.Server):
    """Tells the parent when it accepts connections."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, then announce."""
        await super().startup(sockets)
        if self.started and sockets:
            announce(port=sockets[0].getsockname()[1])


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="listening socket inherited from the parent")
    parser.add_argument("--cloud-port", type=int, required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--account-id", default="123456789012")
    arguments = parser.parse_args()
    listening = socket.socket(fileno=arguments.fd)
    edge = Edge(
        edge_port=listening.getsockname()[1],
        cloud_port=arguments.cloud_port,
        state_directory=arguments.state_dir,
        region=arguments.region,
        account_id=arguments.account_id,
    )
    configuration = uvicorn.Config(
        edge,
        lifespan="on",
        log_level="warning",
        access_log=False,  # links carry signatures, which are as good as a key
        server_header=False,
        timeout_keep_alive=60,
        timeout_graceful_shutdown=1,
    )
    asyncio.run(_AnnouncingServer(configuration).serve([listening]))


if __name__ == "__main__":
    main()
