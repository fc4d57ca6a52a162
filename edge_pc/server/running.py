"""Runs a server until Ctrl-C."""

from __future__ import annotations

import socket
from types import FrameType

import uvicorn

from edge_pc.errors import OptionError
from edge_pc.server.app import Server

# Seconds that connections have to end after the answers in them were ended.
_GRACE_SECONDS = 5


class _Uvicorn(uvicorn.Server):
    """Ends the answers as soon as it is told to end: it would wait for them."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._server.scheduler.stop()
        super().handle_exit(sig, frame)


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one.

    Raises:
        OptionError: the host or the port cannot be used.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        # asyncio sends small parts of an answer at once only where the protocol is named: 40 ms each otherwise.
        made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen()
    except OSError as exc:
        raise OptionError(
            f"the server cannot listen at {host}, port {port}: {exc.strerror or exc}",
            hint="another program may use the port: choose another with --port",
        ) from exc
    return made


def is_local(host: str) -> bool:
    """Whether only programs on this machine can reach this host."""
    return host in ("127.0.0.1", "localhost", "::1")


def uvicorn_of(server: Server) -> uvicorn.Server:
    """What runs the server: `run(sockets=[…])`."""
    config = uvicorn.Config(
        server.app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    return _Uvicorn(config, server)
