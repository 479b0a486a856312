"""The documents agree with the package: examples match their files, links resolve, commands exist."""

from __future__ import annotations

import dataclasses
import importlib
import json
import lzma
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

import headtohead as h2h
from headtohead.cli.main import COMMANDS, GROUPS
from headtohead.common.numbers import short_bytes
from headtohead.data import corpora, shards
from headtohead.data.tasks import registry as find
from headtohead.data.tasks import synthetic, zeroshot
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import find_size
from headtohead.report.panels import base as panels_base
from headtohead.study.claims.paper import find_paper, read_paper
from headtohead.study.config.spec import build_study
from headtohead.study.probes import base as probes_base
from headtohead.study.store.manifest import Contest, Manifest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def test_the_example_in_contributing_is_the_example_file() -> None:
    block = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[0]
    file = (ROOT / "examples" / "prefix_mean.py").read_text()
    assert file.split('"""\n\n', 1)[1] == block


@pytest.fixture(scope="module")
def sink(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of the mechanism in docs/mechanisms.md."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "mechanisms.md").read_text(), re.DOTALL)
    file = tmp_path_factory.mktemp("docs") / "sink.py"
    file.write_text(next(block for block in blocks if "class Sink(" in block))
    return str(file)


def test_the_mechanism_in_the_documents_reaches_the_last_level(sink: str) -> None:
    found = h2h.check(sink)
    assert found.findings == []
    assert found.complete


def test_the_mechanism_in_the_documents_decodes_from_its_window(sink: str) -> None:
    size = dataclasses.replace(find_size("nano"), width=16, ffn=16)
    layers = parse_layout(f"({sink}:window=4 {sink})*1").layers(2)
    model = Decoder(size.with_settings(init_std=0.3), layers, seed=1).double().eval()
    text = torch.randint(0, 256, (2, 30), generator=torch.Generator().manual_seed(1))
    caches = model.new_caches(2, 30)
    with torch.no_grad():
        parts = [model.logits(part, caches=caches) for part in (text[:, :9], *text[:, 9:].split(1, 1))]
        assert torch.allclose(torch.cat(parts, 1), model.logits(text), rtol=1e-9)
    assert caches.bytes == model.cache_bytes(2, 30, torch.float64) == 2 * 2 * (4 + 30) * 16 * 8


def test_the_stated_cache_of_the_mechanism_in_the_documents_is_its_cache(sink: str) -> None:
    page = (ROOT / "docs" / "mechanisms.md").read_text()
    usual, windowed = (short_bytes(h2h.cost(arm)["cache_bytes"]) for arm in ("standard", f"{sink}:window=16"))
    assert f"# cache at context: {usual} and {windowed}" in page


def test_the_score_functions_in_the_documents_are_arms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs" / "mechanisms.md").read_text()
    block = next(
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "@h2h.score" in block
    )
    (tmp_path / "mine.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    found = h2h.check("./mine.py:softcap")
    assert found.findings == []
    assert found.complete
    (arms,) = re.findall(r"^h2h race --arms (.* \./mine\.py:bias)$", page, re.MULTILINE)
    size = dataclasses.replace(find_size("nano"), width=16, ffn=16)
    tokens = torch.zeros(1, 9, dtype=torch.long)
    for arm in (*arms.split(), "./mine.py:decay,kind=log,rate=2"):
        model = Decoder(size, parse_layout(arm).layers(2), seed=1)
        assert torch.isfinite(model.logits(tokens)).all(), arm


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for first, second in re.findall(r"(?:^|`)h2h ([a-z]+)(?: ([a-z]+))?", page.read_text(), re.MULTILINE):
        name = f"{first} {second}" if first in GROUPS and second else first
        assert name in COMMANDS or name in GROUPS, name


def test_make_targets_named_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for name in re.findall(r"`make ([a-z-]+)`|^make ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert next(filter(None, name)) in targets


def test_every_study_in_the_documents_is_valid() -> None:
    blocks = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "studies.md").read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for block in blocks:
        build_study({"arms": ["standard"], **tomllib.loads(block)})  # some blocks show only part of a study


def test_the_counts_in_the_readme_are_those_of_the_package() -> None:
    text = (ROOT / "README.md").read_text()
    stated = {
        "mechanisms": (r"\| mechanisms \| (\d+), one", len(builtin_mechanisms())),
        "named corpora": (r"your text, (\d+) named corpora", len(corpora._KINDS)),
        "tasks": (r"\[(\d+) tasks\]", len(find.KINDS) + len(find.SYNTHETIC)),
        "zero-shot sets": (r"to train on, (\d+) zero-shot tasks", len(zeroshot.KINDS)),
    }
    found = {name: re.findall(pattern, text) for name, (pattern, _) in stated.items()}
    assert found == {name: [str(number)] for name, (_, number) in stated.items()}
    sizes = re.findall(r"`30k` \(([\d,]+) parameters\), `nano` \(([\d,]+)\)", text)
    assert sizes == [tuple(f"{h2h.cost('standard', size=size)['parameters']:,}" for size in ("30k", "nano"))]


def test_the_stated_speed_of_peers_is_the_measured_one() -> None:
    text = (ROOT / "README.md").read_text()
    rows = json.loads((ROOT / "results/speed/train-gpu.json").read_text())["rows"]
    row = next(row for row in rows if (row["size"], row["tokens_per_step"]) == ("51m", 32_768))
    ours, litgpt = (row["results"][name]["milliseconds"] for name in ("standard", "litgpt"))
    settings = json.loads((ROOT / "results/speed/peer-settings.json").read_text())["rows"]
    best = min(one["milliseconds"] for one in settings if one["size"] == "51m")
    assert f"{best / ours:.1f} times as long in `transformers`" in text
    assert f"{litgpt / ours:.1f} times in `litgpt`" in text


def test_the_claims_are_counted() -> None:
    papers = ("coupled", "sharing", "deconstructed", "faster_qk", "kuramoto")
    claims = [claim for name in papers for claim in read_paper(find_paper(name)).claims]
    ours = sum(claim.ours for claim in claims)
    text = (ROOT / "README.md").read_text()
    assert f"[{len(claims) - ours} published claims](docs/claims.md) and {ours} questions of ours" in text


def test_what_the_architecture_names_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = re.findall(r"`([a-z_/]+\.py): ([\w.]+)`", text)
    assert len(named) > 20
    for file, name in named:
        module = importlib.import_module(f"headtohead.{file.removesuffix('.py').replace('/', '.')}")
        found: object = module
        for part in name.split("."):
            found = getattr(found, part)
    for file in re.findall(r"`([a-z_/]+/[a-z_]+\.py)", text):
        assert (ROOT / "headtohead" / file).is_file(), file
    packages = {path.name for path in (ROOT / "headtohead").iterdir() if (path / "__init__.py").is_file()}
    assert packages == set(
        re.findall(
            r"`([a-z]+)`", "".join(re.findall(r"^\| (`.*?) \|", text.partition("| package in")[0], re.M))
        )
    )


def test_no_folder_is_too_full() -> None:
    for folder in (ROOT / "headtohead").rglob("*/"):
        files = list(folder.glob("*.py"))
        assert len(files) <= 15 or any((one / "__init__.py").is_file() for one in folder.iterdir()), folder


def snippet(title: str) -> str:
    section = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0]


def test_the_corpus_in_contributing_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpora, "_KINDS", dict(corpora._KINDS))
    exec(snippet("A corpus"), vars(corpora))
    (tmp_path / "poems").mkdir()
    (tmp_path / "poems/poems.txt.xz").write_bytes(
        lzma.compress(b"\n\n".join(b"poem %d" % i for i in range(200)))
    )
    splits = shards.prepare("poems", "bytes", data_dir=tmp_path).splits
    assert sum(len(split.documents) for split in splits.values()) == 200


def test_the_task_in_contributing_is_drawn() -> None:
    names = dict(vars(synthetic))
    exec(snippet("A task"), names)
    found, places = names["Rotate"]().answer(np.array([3, 1, 2]))
    assert (list(found), places) == ([1, 2, 3], [[1], [2], [0]])


def test_the_probe_in_contributing_measures() -> None:
    names = dict(vars(probes_base))
    exec(snippet("A probe"), names)
    size = find_size("nano")
    model = Decoder(size, parse_layout("standard").layers(size.layers), seed=1)
    probe = names["PROBE"]
    found = probe.measure(SimpleNamespace(model=model), "")
    assert msgspec.convert(msgspec.to_builtins(found), probe.form) == found
    assert len(found.norms) == size.layers


def test_the_panel_in_contributing_is_drawn() -> None:
    names = dict(vars(panels_base))
    exec(snippet("A panel"), names)
    manifest = Manifest("s", (("a", "a"),), "a", None, 0.01, (1,), ())
    view = panels_base.View(Path(), manifest, Contest("c", "c", "nano", "as_is", "tokens"), [], [])
    assert names["figure"](view) is None
    row = SimpleNamespace(label="a", seeds=[7], values=[1.0])
    figure = names["figure"](dataclasses.replace(view, verdicts=[row]))
    assert figure.chart.to_dict()["datasets"]["seeds"] == [{"arm": "a", "seed": 7, "value": 1.0}]
