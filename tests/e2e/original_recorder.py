"""Runs in pods, before the agent: hands every connection on to it and writes down what the operator sent.

Usage: original_recorder.py PORT AGENT_PORT FILE. The file gets one JSON line for each request: {"head": ..., "body": ...}.
Standard library only.
"""

import asyncio
import json
import sys
from contextlib import suppress
from functools import partial
from typing import TextIO


async def serve(agent_port: int, record: TextIO, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hand on one connection until either side closes it."""
    try:
        upstream, downstream = await asyncio.open_connection("127.0.0.1", agent_port)
    except OSError:
        writer.close()  # the agent is not there yet
        return
    answers = asyncio.ensure_future(hand_on_answers(upstream, writer))
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b":", 1) for line in head.split(b"\r\n")[1:] if b":" in line)
            body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
            record.write(json.dumps({"head": head.decode(), "body": body.decode()}) + "\n")
            downstream.write(head + body)
            await downstream.drain()
    answers.cancel()
    for side in (writer, downstream):
        side.close()


async def hand_on_answers(upstream: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Hand on what the agent answers, and its closing of the connection."""
    with suppress(OSError):
        while data := await upstream.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(port: int, agent_port: int, record: TextIO) -> None:
    """Serve until killed; the pod's end is ours."""
    server = await asyncio.start_server(partial(serve, agent_port, record), "", port)
    await server.serve_forever()


with open(sys.argv[3], "a", buffering=1) as recorded:
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]), recorded))
