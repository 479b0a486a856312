from __future__ import annotations

import html.parser
import json
import lzma
import re
import shutil
import struct
import threading
from pathlib import Path

import markupsafe
import pytest

from headtohead import Study, judge, open_study
from tests.browser import DARK, MEASURE, WIDTHS, browse, framed, message

pytest.importorskip("altair")
from headtohead.report import gather
from headtohead.report.page import warnings
from headtohead.study.judge.headline import headline
from headtohead.study.store.manifest import Contest, Solved

HOSTILE = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


PROBES = ["positions", "indicators:2", "maps", "tasks:copa", "skip:512", "decode"]
# claims, forest, curves, cost, seeds, positions, tasks, indicators, maps, skip, stability
CHARTS = 11
EFFECTS = ((HOSTILE, "supported", 0.4), ("a - b", "contradicted", -1.5), ("a - c", "open", 0.1))


@pytest.fixture(scope="module")
def folder(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study whose arm, study and corpus names are hostile."""
    root = tmp_path_factory.mktemp("report")
    text = root / "<b onclick=alert(1)>corpus.txt"
    text.write_text(story.read_text())
    arms = ["standard", {"arm": "sharing:tie=kv", "name": HOSTILE}, "even(prefix_mean)"]
    tasks(root / "data")
    settings = {"tokens": 5120, "batch": 256, "seeds": 3, "lr": 5e-3, "probes": PROBES}
    Study(arms, name=HOSTILE, corpus=f"file:{text}", **settings).run(
        root / "out", workers=1, quiet=True, data_dir=root / "data"
    )
    claim = {
        "id": "p.1",
        "statement": HOSTILE,
        "published": "some",
        "measured": [
            {"what": "x", "n": 3, "p": None},
            *(
                {"what": what, "difference": value, "published": [0.2], "direction": word}
                for what, word, value in EFFECTS
            ),
        ],
    }
    claim |= {"direction": "contradicted", "size": "open", "scale": "reduced scale", "reason": HOSTILE}
    (root / "out" / "claims.json").write_text(json.dumps([claim]))
    open_study(root / "out").write()
    return root / "out"


def tasks(folder: Path) -> None:
    """Write a small data file for the task copa."""
    (folder / "zeroshot").mkdir(parents=True)
    rows = [{"query": f"the cat {index}", "choices": ["sat", "ran"], "gold": index % 2} for index in range(6)]
    with lzma.open(folder / "zeroshot" / "copa.jsonl.xz", "wt") as stream:
        stream.write("".join(json.dumps(row) + "\n" for row in rows))


class Tags(html.parser.HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_the_page_is_one_file_without_network_requests(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    parser = Tags()
    parser.feed(page)
    assert not [
        attrs for _, attrs in parser.tags if "src" in attrs or (attrs.get("href") or "").startswith("http")
    ]
    assert not [tag for tag, _ in parser.tags if tag in ("link", "img", "iframe", "base")]
    assert "default-src 'none'" in page
    assert (folder / "report.html").stat().st_size < 5_000_000


def test_hostile_names_are_text(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    body = re.sub(r"<script type=\"(module|application/json)\".*?</script>", "", page, flags=re.DOTALL)
    assert "<script>" not in body
    assert 'onerror="document' not in body
    assert "&lt;script&gt;document.title" in body
    for definition in re.findall(
        r'<script type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL
    ):
        assert "<" not in definition
        json.loads(definition)


def test_the_page_holds_every_panel_and_section(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    definitions = [
        json.loads(text)
        for text in re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', page, flags=re.DOTALL)
    ]
    assert len(definitions) in (CHARTS - 1, CHARTS)  # stability has a chart only if an arm reached the target
    everything = json.dumps(definitions)
    for name in ("uniform", "unigram", "bigram", "xz"):
        assert f'"{name} ' in everything
    for words in (
        "Settings that differ between arms",
        "Warnings",
        "Environment",
        "feed-forward width",
        "When to use it",
        "Quality against cost",
        "Claims of the paper",
        "Attention indicators by layer",
        "Attention maps of selected heads",
        "Zero-shot tasks.",
        "Skipped layers",
        "Stability and sample efficiency",
        '<span class="chip contradicted">contradicted</span>',
    ):
        assert words in page
    assert "parameters are not matched (shape as_is)" in page


def test_the_page_begins_with_who_won_the_facts_and_the_cost_beside_each_verdict(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    head, _, rest = page.partition("</header>")
    result = open_study(folder)
    assert f'<p class="headline">{headline(result.verdicts)}</p>' in head
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", head))
    assert facts.pop("dataset") == markupsafe.escape("<b onclick=alert(1)>corpus.txt")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", facts.pop("date"))
    assert facts == {"size": "nano", "tokens per run": "5.12k", "seeds": "3 paired", "rules": "equal tokens"}
    table = rest.partition("</table>")[0]
    assert "<figure" not in table
    names = re.findall(r"<th\b[^>]*>(.*?)</th>", table)
    assert names[:8] == [
        *("arm", "verdict", "bits per byte", "difference", "95 % interval"),
        *("cache", "FLOPs", "tokens/s"),
    ]
    cells = [re.findall(r"<td\b[^>]*>(.*?)</td>", row, re.DOTALL) for row in table.split("<tr")[2:]]
    assert [row[names.index("cache")] for row in cells] == ["0.50x", "0.50x", "512"]
    assert all(re.fullmatch(r"[\d.]+(x|k|M)?", cell) for row in cells for cell in row[5:8])


def test_a_page_of_many_arms_draws_some_and_lists_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(folder, tmp_path / "out")
    monkeypatch.setattr(gather, "MAX_DRAWN", 2)
    result = open_study(tmp_path / "out")
    result.write()
    best, other = sorted(result.verdicts, key=lambda row: row.mean or 0.0)
    assert (tmp_path / "out" / "verdicts.json").read_bytes() == (folder / "verdicts.json").read_bytes()
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Figures show 2 of 3 arms" in page
    charts = "".join(re.findall(r'<script type="application/json"[^>]*>.*?</script>', page, flags=re.DOTALL))
    assert best.label.replace("<", "\\u003c").replace('"', '\\"') in charts
    assert other.label.replace("<", "\\u003c").replace('"', '\\"') not in charts
    table = page.partition("<summary>Table of all verdicts</summary>")[2].partition("</details>")[0]
    assert all(f"<b>{markupsafe.escape(row.label)}</b>" in table for row in (best, other))
    assert "<details><summary>Table of all verdicts" not in (folder / "report.html").read_text()


def test_a_length_not_reachable_with_whole_steps_gives_a_warning() -> None:
    contest = Contest("c", "c", "nano", "as_is", "flops")
    solved = [
        Solved(label, contest, "length flops", "tokens", 9, 9, "training FLOPs", mine, 100.0)
        for label, mine in (("near", 100.4), ("far", 95.0))
    ]
    part = {"contest": contest, "verdicts": [], "arms": [], "solved": solved}
    words = "far: training FLOPs are 95.0% of the baseline's, the nearest with whole steps"
    assert warnings([], [part]) == [words]


def test_a_report_is_rebuilt_from_the_directory_alone(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    before = (copy / "verdicts.json").read_text()
    for name in ("report.html", "verdicts.json"):
        (copy / name).unlink()
    result = open_study(copy)
    result.write()
    assert (copy / "verdicts.json").read_text() == before
    assert (copy / "report.html").is_file()


def test_a_study_without_results_has_a_page_too(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for path in copy.glob("runs/*/result.json"):
        path.unlink()
    result = open_study(copy)
    result.write()
    assert {row.verdict for row in result.verdicts} == {"undecided"}


# Runs inside the page after the charts are drawn: simulates a reader's clicks and records the effects.
PRESS = """
<script type="module">
const wait = (seconds) => new Promise((done) => setTimeout(done, 1000 * seconds));
while (document.documentElement.dataset.drawn !== "all") await wait(0.1);
await wait(0.5);
const found = {errors: []};
window.addEventListener("error", (event) => found.errors.push(String(event.message)));
const box = (name) => document.querySelector(`.axes[data-for="${name}1"]`);
const press = async (name, words) => {
  [...box(name).children].find((node) => node.textContent === words).click();
  await wait(0.3);
};
const words = (name) => [...document.querySelectorAll(`#${name}1 svg text`)].map((node) => node.textContent);
const opacities = () => [...document.querySelectorAll("#curves1 svg .mark-line path")]
  .map((node) => node.getAttribute("opacity") ?? getComputedStyle(node).opacity);
found.axes = [...box("curves").children].map((node) => node.textContent);
found.costs = [...box("cost").children].map((node) => node.textContent);
found.before = words("curves");
await press("curves", "seconds");
found.seconds = words("curves");
await press("curves", "FLOPs");
found.flops = words("curves");
found.pressed = [...box("curves").children].filter((node) => node.ariaPressed === "true").map((n) => n.textContent);
await press("cost", "cache bytes/token");
found.cache = words("cost");
found.all = opacities();
found.indicators = [...box("indicators").children].map((node) => node.textContent);
await press("indicators", "entropy");
found.entropy = words("indicators");
const cells = () => document.querySelectorAll("#maps1 svg .mark-rect path").length;
found.layers = [...box("maps").children].map((node) => node.textContent);
found.cells = [cells()];
await press("maps", "layer 2");
found.cells.push(cells());
await press("cost", "decode tokens/s");
found.decode = words("cost");
const legend = [...document.querySelectorAll("#curves1 svg .role-legend-label text")];
for (const kind of ["pointerdown", "mousedown", "pointerup", "mouseup", "click"])
  legend[0].dispatchEvent(new MouseEvent(kind, {bubbles: true, view: window}));
await wait(0.3);
found.one = opacities();
const paper = () => getComputedStyle(document.body).backgroundColor;
const ink = () => getComputedStyle(document.querySelector("#forest1 svg .role-axis-label text")).fill;
found.light = [paper(), ink()];
document.getElementById("theme").click();
found.dark = [paper(), ink()];
document.getElementById("theme").click();
const table = document.querySelector("table.verdicts");
const heading = (words) => [...table.tHead.rows[0].cells].find((cell) => cell.textContent === words);
const column = (words) => [...table.tBodies[0].rows].map((row) => row.cells[heading(words).cellIndex].textContent);
const sorted = async (words) => {
  const button = heading(words).querySelector("button");
  button.focus();
  button.click();
  await wait(0.1);
  return [heading(words).ariaSort, ...column(words)];
};
found.sorts = [await sorted("difference"), await sorted("difference"), await sorted("FLOPs")];
found.others = [...table.tHead.rows[0].cells].filter((cell) => cell.ariaSort !== "none").map((cell) => cell.textContent);
found.order = column("verdict");
const copied = [];
Object.defineProperty(navigator, "clipboard", { value: { writeText: async (text) => copied.push(text) } });
const tools = table.parentElement.nextElementSibling;
for (const button of tools.children) { found.focusable = button.tabIndex; button.click(); await wait(0.1); }
found.tools = [...tools.children].map((button) => button.textContent);
found.copied = copied;
await wait(2);
found.labels = [...tools.children].map((button) => button.textContent);
found.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
found.title = document.title;
const out = document.createElement("pre");
out.id = "found";
out.textContent = JSON.stringify(found);
document.body.append(out);
</script>
"""


def test_in_a_real_browser_charts_are_drawn_and_hostile_text_is_inert(folder: Path, tmp_path: Path) -> None:
    dom, console = browse(tmp_path, f"file://{folder / 'report.html'}", "--dump-dom")
    assert len(re.findall(r'<svg[^>]*class="marks"', dom)) in (CHARTS - 1, CHARTS), console
    assert "<title>owned" not in dom
    assert console == []


def test_in_a_real_browser_axes_arms_and_theme_can_be_switched(folder: Path, tmp_path: Path) -> None:
    page = tmp_path / "pressed.html"
    page.write_text((folder / "report.html").read_text() + PRESS)
    dom, console = browse(tmp_path, f"file://{page}", "--dump-dom")
    assert console == []
    found = message(dom)
    assert found["axes"] == ["tokens", "FLOPs", "seconds"]
    assert found["costs"] == ["parameters", "FLOPs/token", "cache bytes/token", "tokens/s", "decode tokens/s"]
    assert found["indicators"][:2] == ["first token", "entropy"]
    assert "entropy of the map, nats summed over queries (higher is more spread)" in found["entropy"]
    assert found["layers"] == ["layer 1", "layer 2"]
    assert min(found["cells"]) > 1000
    assert "decode tokens per second, batch 8, full window (right is faster)" in found["decode"]
    assert "tokens trained on" in found["before"]
    assert "seconds of training, mean over seeds" in found["seconds"]
    assert "training FLOPs (three times forward)" in found["flops"]
    assert found["seconds"] != found["before"] != found["flops"]
    assert found["pressed"] == ["FLOPs"]
    assert "cache bytes per token (left is cheaper)" in found["cache"]
    assert set(found["all"]) == {"1"}
    assert sorted(found["one"]) == ["0.07", "0.07", "1"]
    assert found["light"] == ["rgb(255, 255, 255)", "rgb(36, 41, 47)"]
    assert found["dark"] == ["rgb(20, 23, 28)", "rgb(215, 218, 224)"]
    up, down, flops = found["sorts"]
    values = [float(text) for text in up[1:-1]]
    assert (up[0], up[-1], values) == ("ascending", "", sorted(values)), "the baseline has no difference"
    assert down == ["descending", *reversed(up[1:-1]), ""]
    assert flops[0] == "ascending"
    assert found["others"] == ["FLOPs"]
    markdown, latex = (text.splitlines() for text in found["copied"])
    assert markdown[0].startswith("| arm | verdict | bits per byte | difference | 95 % interval | cache |")
    assert markdown[1].startswith("|---|---|---:|")
    assert any(HOSTILE.replace("<", "\\<") in line for line in markdown)
    assert latex[1:3] == ["\\begin{tabular}{llrrrrrrrrr}", "\\toprule"]
    assert latex[-2:] == ["\\bottomrule", "\\end{tabular}"]
    assert "95 \\% interval" in latex[3]
    assert [line.split(" & ")[1] for line in latex[5:-2]] == found["order"]
    assert found["tools"] == ["copied", "copied"]
    assert found["labels"] == ["copy as Markdown", "copy as LaTeX"]
    assert found["requests"] == []
    assert found["errors"] == []
    assert "owned" not in re.sub(r"document.title='owned'", "", found["title"])


def test_in_a_real_browser_the_page_of_runs_trained_elsewhere_is_drawn(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    rows = [
        f"{arm},{seed},{1 + 0.1 * seed + shift}"
        for arm, shift in (("a", 0), ("b", 0.01))
        for seed in (1, 2, 3)
    ]
    table.write_text("arm,seed,loss\n" + "\n".join(rows) + "\n")
    judge(table, arm="arm", seed="seed", metric="loss", out=tmp_path / "judged")
    dom, console = browse(tmp_path, f"file://{tmp_path / 'judged' / 'report.html'}", "--dump-dom")
    assert len(re.findall(r'<svg[^>]*class="marks"', dom)) == 2, console
    assert console == []


def test_in_a_real_browser_nothing_is_cut_or_overlaps_at_any_width(folder: Path, tmp_path: Path) -> None:
    """In dark mode as the system asks for it, colors of charts included."""
    page = (
        (folder / "report.html")
        .read_text()
        .replace(str(markupsafe.escape(HOSTILE)), "standard, QK three times as fast")
    )
    page = page.replace(json.dumps(HOSTILE)[1:-1].replace("<", "\\u003c"), "standard, QK three times as fast")
    measured, console = framed(tmp_path, page, MEASURE, WIDTHS, DARK)
    assert console == []
    assert sorted(found["width"] for found in measured) == sorted(WIDTHS)
    for found in measured:
        assert (found["page"], found["cut"], found["overlapping"]) == (found["width"], [], [])
        assert (found["paper"], found["ink"]) == ("rgb(20, 23, 28)", "rgb(215, 218, 224)")


BROKEN = """<body style="margin:0"><p style="width:700px">wide</p><p>one line</p><p style="margin-top:-32px">another</p>
<div class="chart"><svg width="50" height="20"><text x="40" y="15">outside</text></svg></div></body>"""


def test_in_a_real_browser_the_measurement_finds_what_is_cut_or_overlaps(tmp_path: Path) -> None:
    (found,), _ = framed(tmp_path, BROKEN, MEASURE, [400])
    assert found["cut"] == [" P wide", " text outside"]
    assert found["overlapping"] == [" P one line |  P another"]


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(1200, 2400)])
def test_in_a_real_browser_a_screenshot_can_be_taken(
    folder: Path, tmp_path: Path, width: int, height: int
) -> None:
    picture = tmp_path / "page.png"
    flags = (f"--window-size={width},{height}", f"--screenshot={picture}")
    _, console = browse(tmp_path, f"file://{folder / 'report.html'}", *flags)
    assert console == []
    header = picture.read_bytes()[:24]
    assert struct.unpack(">II", header[16:24]) == (width, height)
    # An empty page of this size is a few kilobytes.
    assert picture.stat().st_size > 50_000


def test_in_a_real_browser_a_watched_study_shows_its_curves(folder: Path, tmp_path: Path) -> None:
    from headtohead.report.dashboard.server import server

    with server(folder, 0) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        dom, console = browse(tmp_path, f"http://127.0.0.1:{running.server_port}/", "--dump-dom")
        running.shutdown()
    assert console == []
    assert "100 % trained, finished" in dom
    assert '<p class="headline" id="headline">Nobody beat standard: 2 undecided.</p>' in dom
    assert '<a id="report" href="/report.html">' in dom
    assert "9 done" in dom
    assert 'src="/curves/0/tokens/light.svg?' in dom
    assert "<title>owned" not in dom
    assert "&lt;script&gt;document.title" in dom
