"""`python -m local_stack.cloud.server --fd FD --edge-port PORT`: moto on a socket that is already open.

Prints one JSON line when it serves. Every call that moto's workflow engine or its event rules make goes to the edge.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import warnings


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="listening socket inherited from the parent")
    parser.add_argument("--edge-port", type=int, required=True)
    parser.add_argument("--region", default="us-east-1")
    parser.add_argument("--time-scale", type=float, default=1.0)
    arguments = parser.parse_args()
    # Its imports and botocore's models stay: Python need not look through them for garbage all the time.
    gc.set_threshold(100_000, 20, 50)
    # moto reads these when it is imported, and so does the client that its engine makes.
    os.environ["MOTO_PORT"] = str(arguments.edge_port)
    os.environ["AWS_DEFAULT_REGION"] = arguments.region
    _serve(arguments.fd, arguments.time_scale)


def _serve(listening_fd: int, time_scale: float) -> None:
    from local_stack.cloud.lean_imports import leave_out_batch

    leave_out_batch()
    from moto.core.config import default_user_config
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    from local_stack.cloud import moto_gaps
    from local_stack.process import announce

    warnings.filterwarnings("ignore", category=DeprecationWarning, module="moto")
    moto_gaps.install(time_scale=time_scale)
    default_user_config["stepfunctions"] = {"execute_state_machine": True}
    listening = socket.socket(fileno=listening_fd)
    host, port = listening.getsockname()
    server = make_server(
        host,
        port,
        DomainDispatcherApplication(create_backend_app),
        threaded=True,
        request_handler=MotoRequestHandler,
        fd=listening_fd,
    )
    announce(port=port)
    server.serve_forever()


if __name__ == "__main__":
    main()
