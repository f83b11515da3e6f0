"""A TCP proxy on loopback that breaks connections in the middle of an answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

_BLOCK = 65536


class CuttingProxy:
    """Passes bytes on between clients and a server, and counts.

    Attributes:
        cuts: for every connection, in order, how many bytes of the server's answer come through before it is broken; None, and
            whatever comes after the last, is never broken.
        sent: bytes that came through, by connection.
        asked: the heads of the requests, by connection.
        on_cut: called before a connection is broken.
    """

    def __init__(self, address: str, cuts: Iterator[int | None], on_cut: Callable[[], None] = lambda: None):
        parts = urlsplit(address)
        self._server = (parts.hostname, parts.port)
        self.cuts, self.on_cut = cuts, on_cut
        self.sent: list[int] = []
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            number, cut = len(self.sent), next(self.cuts, None)
            self.sent.append(0)
            self.asked.append("")
            server = socket.create_connection(self._server)
            threading.Thread(target=self._up, args=(number, client, server), daemon=True).start()
            threading.Thread(target=self._down, args=(number, client, server, cut), daemon=True).start()

    def _up(self, number: int, client: socket.socket, server: socket.socket) -> None:
        try:
            while block := client.recv(_BLOCK):
                self.asked[number] += block.decode("latin-1")
                server.sendall(block)
        except OSError:
            pass  # one side has been broken
        finally:
            _end(server)

    def _down(self, number: int, client: socket.socket, server: socket.socket, cut: int | None) -> None:
        try:
            while block := server.recv(_BLOCK):
                allowed = block if cut is None else block[: cut - self.sent[number]]
                client.sendall(allowed)
                self.sent[number] += len(allowed)
                if self.sent[number] == cut:
                    self.on_cut()
                    return
        except OSError:
            pass  # one side has been broken
        finally:
            _end(client)
            _end(server)


def _end(connection: socket.socket) -> None:
    """Close it even while another thread waits for it to say something."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # the other side was quicker
    connection.close()
