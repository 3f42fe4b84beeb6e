"""Ports of this host that tests use."""

import socket


def free_port() -> int:
    """Nobody listens there, a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
