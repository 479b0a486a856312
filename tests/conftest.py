"""Fixtures: a separate cache for every session, a small text, and the shared data sets if they exist."""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.story import story_file

torch.set_num_threads(1)

# Triton decides whether to interpret a kernel when the kernel is defined. Without a GPU all kernels are defined as
# interpreted here, in every process; they run only in tests that use the fixture `interpreted`.
if find_spec("triton") and not torch.cuda.is_available():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for name in (
            "attention.decode_triton",
            "attention.decode_rope_triton",
            "attention.recurrence_triton",
            "dynamics.integrator_triton",
            "matmul.loss_triton",
            "pointwise.convolution_triton",
            "pointwise.norm_triton",
            "pointwise.rope_swiglu_triton",
        ):
            import_module(f"headtohead.kernels.{name}")
        import_module("headtohead.papers.faster_qk.fused")
        import_module("headtohead.kernels.path")._INTERPRETED = False


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Return ids that show shapes (2x5x8), types and settings."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    if isinstance(val, tuple) and val and all(isinstance(item, int) for item in val):
        return "x".join(map(str, val))
    if isinstance(val, dict) and all(isinstance(item, str | int | float | bool) for item in val.values()):
        return ",".join(f"{key}={item}" for key, item in val.items()) or "defaults"
    return None


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run Triton kernels in Triton's interpreter, on the CPU."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: pip install triton")
    if torch.cuda.is_available():
        pytest.skip("kernels run on the GPU here: make test-gpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr("headtohead.kernels.path._INTERPRETED", True)


@pytest.fixture(autouse=True)
def _page_only_where_it_is_read(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a stub instead of a study's page in tests not marked `page`: a page takes as long as the training."""
    package = request.path.relative_to(Path(__file__).parent).parts[0]
    if package not in ("study", "integrations", "training") or request.node.get_closest_marker("page"):
        return
    page = pytest.importorskip("headtohead.report.page")

    def stub(path: Path, analysis: object, damage: object, stamp: str) -> Path:
        (path / "report.html").write_text(f"<!-- {stamp} -->", encoding="utf-8")
        return path / "report.html"

    monkeypatch.setattr(page, "write_report", stub)


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Use a temporary cache, and hide the user's data from the tests."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["H2H_CACHE"] = str(folder)
    os.environ.pop("H2H_DATA", None)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of the shared data sets; skips the test where there is none."""
    for folder in (os.environ.get("H2H_TEST_DATA"), Path(__file__).parents[2] / "shared" / "data"):
        if folder and (Path(folder) / "README.md").is_file():
            return Path(folder)
    pytest.skip("shared data sets not found; set H2H_TEST_DATA, or provide ../shared/data")


@pytest.fixture(scope="session")
def story() -> Path:
    """A text of about 60 kB with structure that a small model can learn."""
    return story_file()
