"""A proxy that forwards connections and records the bytes."""

import contextlib
import socket
import threading
from types import TracebackType
from typing import Self


class Eavesdropper:
    """Listens on `port` and forwards connections to `target`."""

    def __init__(self, target: int = 0) -> None:
        self.target = target
        self._heard = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]

    @property
    def heard(self) -> bytes:
        """All bytes so far, in both directions."""
        return bytes(self._heard)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(("127.0.0.1", self.target), timeout=60)
                except OSError:
                    client.close()
                    continue
                server.settimeout(None)
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    self._threads.append(threading.Thread(target=self._pass_on, args=(source, sink), daemon=True))
                    self._threads[-1].start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(65536):
                self._heard += received
                sink.sendall(received)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=10)
        for one in (self._listener, *self._open):
            one.close()
