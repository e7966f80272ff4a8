"""The viewer that `astraflow run` offers: a listening socket, and a process that starts on a connection.

    launching process:  listens on loopback; on a connection, starts the viewer and serves the empty page
                        until the viewer is ready
    viewer process:     accepts from the same socket; reads the run folder; exits after ten idle minutes

If nobody opens the viewer, it costs the run only one open socket. If the viewer has exited, for whatever
reason, the next connection starts it again.
"""

import asyncio
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import cast

from astraflow.addons.view.viewer_page import PAGE_HEADERS, page_files
from astraflow.processes.program import PRIVATE_VARIABLE, TOKEN_VARIABLE
from astraflow.report.view import RunPage, ShownRun
from astraflow.service.kept_process import Care, KeptProcess
from astraflow.service.process import LIFE_FD_VARIABLE, PARENT_FD_VARIABLE
from astraflow.service.readable import until_readable

__all__ = ["DEFAULT_PORT", "LazyViewer", "free_listener", "make_viewer", "startup_page"]

_HOST = "127.0.0.1"
DEFAULT_PORT = 7433
"""Used if it is free and no other port is given, so that a link to the page stays valid."""
_PAUSE_S = 2.0
"""Pause before a viewer is restarted, so that a viewer that fails immediately doesn't occupy a CPU."""
_GRACE_S = 1.0
_POLL_S = 0.02
_ACCEPT_PAUSE_S = 0.1
_READ_S = 5.0
"""Longest pause allowed within a client's request."""
_MODULE = "astraflow.addons.view.process"


class LazyViewer(RunPage):
    """The page of a live run. Example: `await LazyViewer(run_dir, log_path).open(print)`."""

    def __init__(self, run_dir: Path, log_path: Path) -> None:
        self._run_dir = run_dir
        self._log_path = log_path
        self._stack = contextlib.AsyncExitStack()
        self.url = ""
        """Address of the page while it is open."""

    async def open(self, note: Callable[[str], None]) -> None:
        """Starts to listen. Raises: OSError if no loopback port can be bound."""
        listener = self._stack.enter_context(free_listener(_HOST, DEFAULT_PORT))
        self.url = f"http://{_HOST}:{listener.getsockname()[1]}"
        task = asyncio.create_task(self._serve(listener), name="lazy viewer")
        self._stack.push_async_callback(_cancel, task)
        note(f"see the run at {self.url}")

    async def close(self, deadline_s: float) -> None:
        """Ends the viewer."""
        del deadline_s
        await self._stack.aclose()

    async def _serve(self, listener: socket.socket) -> None:
        """Starts a viewer whenever a connection arrives and none runs, until cancelled."""
        while True:
            await until_readable(listener.fileno())  # the connection stays in the backlog for the viewer
            try:
                await self._run_viewer(listener)
            except OSError as err:
                with contextlib.suppress(OSError), self._log_path.open("a", encoding="utf-8") as log:
                    log.write(f"the viewer cannot be started: {err}\n")
            await asyncio.sleep(_PAUSE_S)

    async def _run_viewer(self, listener: socket.socket) -> None:
        """Runs one viewer until it ends; ends it when cancelled. Raises: OSError."""
        ready_fd, tells_fd = os.pipe()  # closes when the viewer is ready or has ended
        fds = (listener.fileno(), tells_fd)
        private = {TOKEN_VARIABLE, PRIVATE_VARIABLE, LIFE_FD_VARIABLE, PARENT_FD_VARIABLE}
        env = {name: value for name, value in os.environ.items() if name not in private}
        # -P keeps the current folder, which may contain any modules, off the import path.
        argv = [sys.executable, "-P", "-m", _MODULE, str(self._run_dir), *map(str, fds)]
        try:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            with self._log_path.open("ab", buffering=0) as log:
                process = await KeptProcess.start(
                    argv, env=env, stdout=log, stderr=log, fds=fds, care=Care(grace_s=_GRACE_S)
                )
            os.close(tells_fd)
            tells_fd = -1
            try:
                with startup_page(listener):
                    await until_readable(ready_fd)  # at end of file: the viewer is ready or has ended
                await process.ended.wait()
            finally:
                await process.end()
        finally:
            for each in (ready_fd, tells_fd):
                if each >= 0:
                    os.close(each)


def free_listener(host: str, port: int) -> socket.socket:
    """Opens a socket that listens on the port or, if that is taken, on a free one.

    Raises: OSError if no port of the host can be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in (port, 0):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as `HttpServer` does
        try:
            listener.bind((host, candidate))
            listener.listen()
        except OSError:
            listener.close()
            continue
        listener.setblocking(False)
        return listener
    raise OSError(f"no port of {host} can be bound; is it an address of this machine?")


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def make_viewer(run: ShownRun) -> LazyViewer | None:
    """Makes the viewer of a run; returns None if its recipe has `view: false`."""
    return LazyViewer(run.folder.path, run.folder.logs / "viewer.log") if run.has_link else None


# --- while the viewer starts ----------------------------------------------------------------------


@contextmanager
def startup_page(listener: socket.socket) -> Generator[None]:
    """Serves the page while the viewer is still starting, which takes seconds on a busy machine.

    The empty page loads immediately. Its requests for data wait until the viewer accepts connections. Then a
    redirect to the same address sends them to the viewer.
    """
    server = _StartupServer(listener)
    thread = threading.Thread(target=server.serve_forever, args=(_POLL_S,), name="startup page", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _StartupServer(ThreadingHTTPServer):
    """Accepts from the socket that the viewer also accepts from. A slow client doesn't block others."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.getsockname()[:2], _StartupHandler, bind_and_activate=False)
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
            self.is_over.wait(_ACCEPT_PAUSE_S)
            raise

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignores clients that disconnect in the middle of a request."""
        del request, client_address


class _StartupHandler(BaseHTTPRequestHandler):
    timeout = _READ_S

    def do_GET(self) -> None:
        server = cast("_StartupServer", self.server)
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
