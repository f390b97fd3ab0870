"""Ports on which processes of tests may listen."""

from __future__ import annotations

import random
import socket

EPHEMERAL = 32768  # Linux gives ports from here on to outgoing connections, by default


def unused_port() -> int:
    """Returns a port of 127.0.0.1 on which nothing listens, outside of those that other processes get by chance.

    Lightning chooses a port that is free at that moment. On a busy machine a connection may take it before rank 0
    listens on it.
    """
    while True:
        port = random.SystemRandom().randrange(10000, EPHEMERAL)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
