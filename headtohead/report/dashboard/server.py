"""Server of the live page of a running study: 127.0.0.1 only, GET only, a fixed list of routes.

No part of a request's path is used as a file system path: routes are keys of a table.
"""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from headtohead.common.errors import UserError
from headtohead.common.files import digest, finite
from headtohead.report.dashboard.status import StatusReader, StudyStatus
from headtohead.report.figures import NIGHT, PAPER, as_svg
from headtohead.report.templates import asset, templates

HOST = "127.0.0.1"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_EVERY, _SELDOM = 3.0, 60.0
"""Seconds between two reads: longer if a read is expensive, so that watching uses at most a tenth of a core."""
_THEMES = {"light": PAPER, "dark": NIGHT}
_ICON = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><circle cx="8" cy="8" r="6" fill="#0072B2"/></svg>'
Answer = tuple[str, bytes]


class Watch:
    """The answers to requests; one read of the study is shared by all requests until it expires."""

    def __init__(self, path: Path) -> None:
        self.follower = StatusReader(path)
        self.lock = threading.Lock()
        self.status: StudyStatus = StudyStatus({})
        self.seen, self.pause = -1e9, _EVERY
        self.pictures: dict[str, tuple[str, bytes]] = {}
        page = templates().get_template("watch.html.jinja").render()
        self.fixed: dict[str, Answer] = {
            "/": ("text/html; charset=utf-8", page.encode()),
            "/watch.js": (
                "text/javascript; charset=utf-8",
                (asset("theme.js") + asset("watch.js")).encode(),
            ),
            "/icon.svg": ("image/svg+xml", _ICON.encode()),
            "/page.css": ("text/css; charset=utf-8", asset("page.css").encode()),
        }

    def answer(self, route: str) -> Answer | None:
        """Return content type and content of a route, or None if there is no such route."""
        if route in self.fixed:
            return self.fixed[route]
        with self.lock:
            self._refresh()
            if route == "/state.json":
                text = json.dumps(finite(self.status.facts), allow_nan=False)
                return "application/json", text.encode()
            return self._picture(route)

    def _refresh(self) -> None:
        if time.monotonic() - self.seen < self.pause * 0.9:
            return
        spent = time.thread_time()
        try:
            self.status = self.follower.look()
        except (
            UserError,
            OSError,
        ) as error:  # the study may be writing its files right now, or may have been moved
            self.status.facts["trouble"] = str(error)
        for index, contest in enumerate(self.status.facts.get("contests", ())):
            shown = self.status.curves[index]
            # The page requests an image again only if its curves have changed.
            contest["version"] = digest(json.dumps(shown))[:12]
        self.seen = time.monotonic()
        self.pause = min(_SELDOM, max(_EVERY, 10 * (time.thread_time() - spent)))
        self.status.facts["again_after"] = self.pause

    def _picture(self, route: str) -> Answer | None:
        routes = {
            f"/curves/{index}/{axis}/{theme}.svg": (index, axis, theme)
            for index, axes in enumerate(self.status.curves)
            for axis in axes
            for theme in _THEMES
        }
        if route not in routes:
            return None
        index, axis, theme = routes[route]
        version = str(self.status.facts["contests"][index]["version"])
        if self.pictures.get(route, ("", b""))[0] != version:
            svg = as_svg(self.status.curves[index][axis], _THEMES[theme], width=680)
            self.pictures[route] = (version, svg.encode())
        return "image/svg+xml", self.pictures[route][1]


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
            answer = watch.answer(self.path.partition("?")[0])
            if answer is None:
                self._send(HTTPStatus.NOT_FOUND, "text/plain", b"no such page\n")
            else:
                self._send(HTTPStatus.OK, *answer)

        def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Referrer-Policy", "no-referrer")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: Any) -> None:
            """Log nothing; the page sends a request every three seconds."""

    try:
        found = ThreadingHTTPServer((HOST, port), Handler)
    except OSError as error:
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            why = "is already in use" if error.errno == errno.EADDRINUSE else "is not permitted"
            raise UserError(
                f"port {port} {why}; choose another (--port {port + 1}), or 0 for any free port"
            ) from None
        raise
    found.daemon_threads = True
    return found


def serve(path: Path, port: int, say: Callable[[str], None]) -> None:
    """Serve the page of a study until Ctrl-C."""
    StatusReader(path).look()  # raises for a damaged study before serving
    with server(path, port) as running:
        try:
            say(f"watching {path} at http://{HOST}:{running.server_port}/ (Ctrl-C stops watching)")
            running.serve_forever()
        except KeyboardInterrupt:
            say("\nstopped watching; the study continues")
