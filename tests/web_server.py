"""A small web server for tests of downloads: ranges, versions, connections that break."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WebServer:
    """Serves `files` by path; the switches below change how."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.tags = True
        self.cut_after = 0
        """Break the connection after this many bytes; 0: never."""
        self.cuts = 0
        """How many more responses are cut."""
        self.requests: list[tuple[str, str]] = []
        """Path and Range header of every request."""
        self.url = ""


@contextmanager
def web_server() -> Iterator[WebServer]:
    """Yield a server on a free port of this machine."""
    site = WebServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range", "")
            site.requests.append((self.path, asked))
            content = site.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            tag = f'"{sha256(content).hexdigest()[:8]}"'
            start = 0
            if asked and site.ranges and self.headers.get("If-Range", tag) == tag:
                start = int(re.findall(r"bytes=(\d+)-", asked)[0])
                if start >= len(content):
                    self.send_error(416)
                    return
                self.send_response(206)
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            else:
                self.send_response(200)
            if site.tags:
                self.send_header("ETag", tag)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            body = content[start:]
            if site.cut_after and site.cuts:
                site.cuts -= 1
                body = body[: site.cut_after]
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
