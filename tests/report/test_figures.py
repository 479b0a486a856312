from __future__ import annotations

import re
import struct
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from headtohead import Study, UserError, open_study

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

HOSTILE = "<script>alert(1)</script>/../../x"


@pytest.fixture(scope="module")
def folder(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished study of two contests with a hostile arm."""
    out = tmp_path_factory.mktemp("pictures") / "out"
    arms = ["standard", {"arm": "sharing:tie=kv", "name": HOSTILE}]
    Study(arms, corpus=f"file:{story}", tokens=2560, batch=256, seeds=2, shape=["as_is", "params"]).run(
        out, workers=1, quiet=True
    )
    return out


@pytest.mark.slow
def test_every_chart_is_written_as_svg_pdf_and_png(folder: Path) -> None:
    files = open_study(folder).write_charts(quiet=True)
    assert sorted((folder / "charts").iterdir()) == sorted(files)
    names = [path.name for path in files]
    assert all(re.fullmatch(r"[12]-[a-z0-9-]+\.(svg|pdf|png)", name) for name in names)
    for chart in ("forest", "seeds", "curves-tokens", "curves-flops", "curves-seconds", "cost-cache"):
        for ending in ("svg", "pdf", "png"):
            assert sum(name.endswith(f"-{chart}.{ending}") for name in names) == 2
    for path in files:
        if path.suffix == ".png":
            width, height = struct.unpack(">II", path.read_bytes()[16:24])
            assert width > 1200
            assert height > 100
        elif path.suffix == ".pdf":
            content = path.read_bytes()
            assert content.startswith(b"%PDF-")
            assert b"/Font" in content, "text stays text"
        else:
            root = ElementTree.fromstring(path.read_text())
            assert root.tag.endswith("svg")
            assert not [node for node in root.iter() if "script" in node.tag]


@pytest.mark.slow
def test_each_axis_is_a_chart_with_its_own_title(folder: Path) -> None:
    open_study(folder).write_charts(quiet=True)
    titles = {"tokens": "tokens trained on", "flops": "training FLOPs", "seconds": "seconds of training"}
    for axis, words in titles.items():
        (path,) = (folder / "charts").glob(f"1-*-curves-{axis}.svg")
        assert [name for name in titles.values() if name in path.read_text()] == [words]


def test_a_folder_that_cannot_be_created_is_named(folder: Path, tmp_path: Path) -> None:
    result = open_study(folder)
    result.path = tmp_path
    (tmp_path / "charts").write_text("a file is in the way")
    with pytest.raises(UserError, match=r"cannot write to .*charts"):
        result.write_charts(quiet=True)
