"""One HTTP/1.1 request from a connection, for the servers that answer over h11."""

from __future__ import annotations

import asyncio

import h11

_READ_BYTES = 65536


async def receive_request(
    connection: h11.Connection, reader: asyncio.StreamReader
) -> tuple[h11.Request, bytes] | tuple[None, bytes]:
    """The next request and its whole body; None where the peer has closed."""
    request: h11.Request | None = None
    body = bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            return request, bytes(body)
        else:
            return None, b""
