"""Server of the live page of a running study: 127.0.0.1 only, GET only, a fixed list of routes.

No part of a request's path is used as a file system path: routes are keys of a table.
"""

from __future__ import annotations

import errno
import json
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from headtohead.common.errors import UserError, first_line
from headtohead.common.files import digest, finite, read_file
from headtohead.report.dashboard.status import REPORT, StatusReader, StudyStatus
from headtohead.report.figures import NIGHT, PAPER, as_svg
from headtohead.report.templates import asset, render

HOST = "127.0.0.1"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_REPORT_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The report has its scripts inside, and charts compile expressions; it can request nothing."""
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
_EVERY, _SELDOM = 3.0, 60.0
"""Seconds between two reads: longer if a read is expensive, so that watching uses at most a tenth of a core."""
_PATIENCE = 5.0
"""Seconds that requests wait for a read of the study before they are answered with the previous one."""
_THEMES = {"light": PAPER, "dark": NIGHT}
_HTML = "text/html; charset=utf-8"
_ICON = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="8" r="6" fill="#0072B2"/></svg>'


class Answer(NamedTuple):
    """The answer to a request."""

    kind: str
    content: bytes
    policy: str = _POLICY


class Watch:
    """The answers to requests; one read of the study is shared by all requests until it expires.

    The study is read in a thread of its own: a file system that does not answer blocks no request.
    """

    def __init__(self, path: Path) -> None:
        self.follower = StatusReader(path)
        self.lock, self.drawing = threading.Lock(), threading.Lock()
        self.status = StudyStatus({"again_after": _EVERY, "contests": []})
        self.read = threading.Event()
        """Set while no read is in progress."""
        self.read.set()
        self.began = self.seen = -math.inf
        self.pictures: dict[str, tuple[str, bytes]] = {}
        script = asset("theme.js") + asset("watch.js")
        self.fixed: dict[str, Answer] = {
            "/": Answer(_HTML, render("watch.html.jinja", ()).encode()),
            "/watch.js": Answer("text/javascript; charset=utf-8", script.encode()),
            "/icon.svg": Answer("image/svg+xml", _ICON.encode()),
            "/page.css": Answer("text/css; charset=utf-8", asset("page.css").encode()),
        }

    def answer(self, route: str) -> Answer | None:
        """Return the answer to a route, or None if there is no such route."""
        if route in self.fixed:
            return self.fixed[route]
        status = self._current()
        if route == "/state.json":
            return Answer("application/json", json.dumps(finite(status.facts), allow_nan=False).encode())
        if route == f"/{REPORT}":
            shown = status.facts.get("report")
            return Answer(_HTML, read_file(self.follower.path / REPORT), _REPORT_POLICY) if shown else None
        with self.drawing:
            return self._picture(route, status)

    def _current(self) -> StudyStatus:
        """Return the status of the study; the previous one if the study cannot be read in time."""
        with self.lock:
            if self.read.is_set() and time.monotonic() - self.seen >= 0.9 * self.status.facts["again_after"]:
                self.read.clear()
                self.began = time.monotonic()
                threading.Thread(target=self._look, daemon=True).start()
        if self.read.wait(max(0.0, self.began + _PATIENCE - time.monotonic())):
            return self.status
        return self._with_trouble(f"the study cannot be read; waiting for {self.follower.path}")

    def _look(self) -> None:
        spent = time.thread_time()
        try:
            status = self.follower.look()
            for contest, curves in zip(status.facts["contests"], status.curves, strict=True):
                # The page requests an image again only if its curves have changed.
                contest["version"] = digest(json.dumps(curves))[:12]
        # The study may be writing its files right now, or may have been moved or damaged.
        except Exception as error:
            status = self._with_trouble(first_line(error))
        self.seen = time.monotonic()
        status.facts["again_after"] = min(_SELDOM, max(_EVERY, 10 * (time.thread_time() - spent)))
        self.status = status
        self.read.set()

    def _with_trouble(self, message: str) -> StudyStatus:
        return replace(self.status, facts=self.status.facts | {"trouble": message})

    def _picture(self, route: str, status: StudyStatus) -> Answer | None:
        routes = {
            f"/curves/{index}/{axis}/{theme}.svg": (index, axis, theme)
            for index, axes in enumerate(status.curves)
            for axis in axes
            for theme in _THEMES
        }
        if route not in routes:
            return None
        index, axis, theme = routes[route]
        version = str(status.facts["contests"][index]["version"])
        if self.pictures.get(route, ("", b""))[0] != version:
            svg = as_svg(status.curves[index][axis], _THEMES[theme], width=680)
            self.pictures[route] = (version, svg.encode())
        return Answer("image/svg+xml", self.pictures[route][1])


class _Server(ThreadingHTTPServer):
    """A server that does not report clients that leave before their answer."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report errors other than those of the connection."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def server(path: Path, port: int) -> ThreadingHTTPServer:
    """Return a server on 127.0.0.1 for the study in `path`; port 0 picks a free port."""
    watch = Watch(path)

    class Handler(BaseHTTPRequestHandler):
        """Answers GET requests from the table of routes."""

        server_version, sys_version = "headtohead", ""
        timeout = 20

        def do_GET(self) -> None:
            """Answer one request."""
            # Reject other host names, so that DNS rebinding cannot read the study through the user's browser.
            own = (f"{HOST}:{found.server_port}", f"localhost:{found.server_port}")
            if self.headers.get("Host") not in own:
                self._send(HTTPStatus.FORBIDDEN, "text/plain", b"only 127.0.0.1 and localhost are served\n")
                return
            try:
                answer = watch.answer(self.path.partition("?")[0])
            except Exception as error:  # such as a chart of damaged numbers
                self._send(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", first_line(error).encode())
                return
            if answer is None:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"no such page\n")
            else:
                self._send(HTTPStatus.OK, *answer)

        def _send(self, status: HTTPStatus, kind: str, content: bytes, policy: str = _POLICY) -> None:
            self.send_response(status)
            own = {"Content-Type": kind, "Content-Length": str(len(content))}
            own["Content-Security-Policy"] = policy
            for name, value in (own | _HEADERS).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """Log nothing; the page sends a request every three seconds."""

    try:
        found = _Server((HOST, port), Handler)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            why = "is already in use" if error.errno == errno.EADDRINUSE else "is not permitted"
            raise UserError(
                f"port {port} {why}; choose another (--port {port + 1}), or 0 for any free port"
            ) from None
        raise
    return found


def serve(path: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of a study until Ctrl-C; a study that has not begun is waited for."""
    waiting = StatusReader(path).look().facts.get("waiting")  # raises for a damaged study before serving
    with server(path, port) as running:
        try:
            if waiting:
                say(str(waiting))
            say(f"watching {path} at http://{HOST}:{running.server_port}/ (Ctrl-C stops watching)")
            running.serve_forever()
        except KeyboardInterrupt:
            say("\nstopped watching; the study continues")
