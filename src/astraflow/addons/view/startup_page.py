"""Serves the viewer's page while the viewer is still starting, which takes seconds on a busy machine.

The empty page loads immediately. Its requests for data wait until the viewer accepts connections. Then a
redirect to the same address sends them to the viewer.
"""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self, cast

from astraflow.addons.view.viewer_page import PAGE_HEADERS, page_files

__all__ = ["StartupPage"]

_POLL_S = 0.02
_PAUSE_S = 0.1
_READ_S = 5.0
"""Longest pause allowed within a client's request."""


class StartupPage:
    """Serves on a listening socket until its block ends. Example: `with StartupPage(listener): ...`."""

    def __init__(self, listener: socket.socket) -> None:
        self._server = _Server(listener)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="startup page", daemon=True
        )

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.is_over.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    """Accepts from the socket that the viewer also accepts from. A slow client doesn't block others."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        # The base class has made its own socket. Use a duplicate of the listener instead, so that closing the
        # server leaves the listener open for the viewer.
        self.socket.close()
        self.socket = listener.dup()
        self.files = page_files()
        self.is_over = threading.Event()

    def get_request(self) -> tuple[socket.socket, object]:
        """Accepts a connection. After an error, e.g. too many open files, pauses before the next attempt."""
        try:
            return super().get_request()
        except OSError:
            self.is_over.wait(_PAUSE_S)
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores clients that disconnect in the middle of a request."""
        del request, client_address


class _Handler(BaseHTTPRequestHandler):
    timeout = _READ_S

    def do_GET(self) -> None:
        server = cast("_Server", self.server)
        if (file := server.files.get(self.path.partition("?")[0])) is not None:
            media_type, content = file
            self._answer(200, {"content-type": media_type}, content)
        elif self.path.startswith("/api/"):
            server.is_over.wait()
            self._answer(307, {"location": self.path}, b"")
        else:
            self._answer(404, {}, b"")

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing: the launcher's terminal is for the run."""

    def _answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in {**PAGE_HEADERS, **headers, "content-length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)
