"""Headless Chromium for tests of pages; a test that needs it is skipped, and says so, on a machine without."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

DARK = "--blink-settings=preferredColorScheme=0"
WIDTHS = (400, 800, 1280, 1920)


def browse(folder: Path, url: str, *flags_given: str) -> tuple[str, list[str]]:
    """Return Chromium's output and its console lines; its profile is kept in `folder`."""
    names = ("chromium", "chromium-browser", "google-chrome")
    if not (path := next((found for name in names if (found := shutil.which(name))), None)):
        pytest.skip("no Chromium on this machine (Debian: apt install chromium)")
    flags = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        *("--hide-scrollbars", "--enable-logging=stderr", "--virtual-time-budget=15000"),
        f"--user-data-dir={folder / 'profile'}",
    ]
    command = [path, *flags, *flags_given, url]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return found.stdout, [line for line in found.stderr.splitlines() if "CONSOLE" in line]


def message(dom: str) -> Any:
    """Return the JSON that a script has written into `<pre id="found">`."""
    text = re.search(r'<pre id="found">(.*?)</pre>', dom, flags=re.DOTALL)
    assert text is not None, dom[-2000:]
    return json.loads(html.unescape(text[1]))


def framed(
    folder: Path, page: str, script: str, widths: Sequence[int], *flags: str
) -> tuple[list[Any], list[str]]:
    """Return what `script` posts from the page in a frame of each width, and the console lines.

    Headless windows cannot be as narrow as a phone. The frames lie on each other: Chromium draws none that is out of sight.
    """
    (folder / "inner.html").write_text(page + script)
    style = "position:fixed;left:0;top:0;height:3000px;border:0;width"
    frames = "".join(f'<iframe src="inner.html" style="{style}:{width}px"></iframe>' for width in widths)
    (folder / "frames.html").write_text(
        f"""<body>{frames}<pre id="found"></pre><script>const all = []; addEventListener("message", (event) => {{
        all.push(event.data);
        document.getElementById("found").textContent = JSON.stringify(all); }});</script></body>"""
    )
    url = f"file://{folder / 'frames.html'}"
    dom, console = browse(folder, url, "--window-size=1920,3000", "--dump-dom", *flags)
    return message(dom), console


# Posts what is cut or overlaps: boxes outside the page, text outside its chart or shortened, lines of text on each other.
MEASURE = r"""<script type="module">
const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
if (document.querySelector("script.definition")) while (document.documentElement.dataset.drawn !== "all") await wait(0.1);
for (const part of document.querySelectorAll("details")) part.open = true;
await wait(0.5);
const found = { width: innerWidth, page: document.documentElement.scrollWidth, cut: [], overlapping: [] };
const name = (node) => `${node.closest("[id]")?.id ?? ""} ${node.tagName} ${node.textContent.trim().slice(0, 40)}`;
const visible = [...document.querySelectorAll("body *")].filter((node) => node.checkVisibility());
for (const node of visible.filter((node) => !node.ownerSVGElement)) {
  const box = node.getBoundingClientRect();
  const hidden = getComputedStyle(node).overflowX !== "visible" && node.scrollWidth > node.clientWidth + 1;
  if (box.width && (box.right > innerWidth + 1 || box.left < -1 || hidden)) found.cut.push(name(node));
}
const overlap = (a, b) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
  && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4;
function compare(nodes, boxes) {
  nodes.forEach((node, index) => nodes.slice(Math.max(0, index - 200), index).forEach((other, place) => {
    const before = boxes[Math.max(0, index - 200) + place];
    if (boxes[index].some((a) => before.some((b) => overlap(a, b)))) found.overlapping.push(`${name(other)} | ${name(node)}`);
  }));
}
for (const svg of document.querySelectorAll(".chart svg")) {
  const place = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].filter((node) => node.textContent && getComputedStyle(node).opacity > 0);
  const boxes = texts.map((node) => node.getBoundingClientRect());
  texts.forEach((node, index) => {
    const { left, right, top, bottom } = boxes[index];
    const outside = left < place.left - 1 || right > place.right + 1 || top < place.top - 1 || bottom > place.bottom + 1;
    if (outside || node.textContent.endsWith("…")) found.cut.push(name(node));
  });
  compare(texts, boxes.map((box) => [box]));
}
const text = (node) => [...node.childNodes].filter((part) => part.nodeType === 3 && part.textContent.trim());
const written = visible.filter((node) => !node.closest("svg") && text(node).length);
const range = document.createRange();
const lines = (part) => { range.selectNodeContents(part); return [...range.getClientRects()]; };
compare(written, written.map((node) => text(node).flatMap(lines)));
found.paper = getComputedStyle(document.body).backgroundColor;
const label = document.querySelector("svg .role-axis-label text");
found.ink = label && getComputedStyle(label).fill;
parent.postMessage(found, "*");
</script>"""
