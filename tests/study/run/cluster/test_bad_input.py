"""Mistakes with clusters: one line with the remedy, before anything is trained."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headtohead import Study
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.study.run.cluster.engine import Node, Resources
from headtohead.study.run.cluster.ray_engine import _check_reachable, _problem


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--on", "ray", "--workers", "3"], "workers=3 is an option of one machine"),
        (["--gpus-per-run", "0.5"], "cpus_per_run and gpus_per_run apply to --on ray and --on slurm"),
        (["--on", "ray", "--gpus-per-run", "1.5"], "gpus_per_run=1.5: give a share of one such as 0.5"),
        (["--on", "ray", "--device", "cuda:1"], "device cuda:1: Ray assigns the devices of its nodes"),
        (["--on", "moon"], "moon"),
        (["--on", "ray"], "--on ray needs Ray, which is not installed: pip install 'headtohead[ray]'"),
    ],
)
def test_options_are_checked_in_one_line(
    words: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # as if it were not installed
    arguments = ["race", "--arms", "standard", "sharing:tie=kv", "--out", str(tmp_path / "out"), *words]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()


def test_the_same_in_python(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"unknown value for on 'rya'.*ray"):
        Study(arms=["standard", "sharing:tie=kv"]).run(tmp_path, on="rya")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", "no Ray cluster at RAY_ADDRESS=127.0.0.1:1: .*start one with: ray start --head"),
        ("nonsense", "RAY_ADDRESS=nonsense is not an address HOST:PORT"),
        ("host:port", "RAY_ADDRESS=host:port is not an address HOST:PORT"),
    ],
)
def test_an_address_without_a_cluster_is_named(address: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        _check_reachable(address)


def test_a_node_without_the_package_is_named() -> None:
    node = Node("name", "far", 1.0, 0.0)
    missing = RuntimeError(
        "The remote function failed to import\nModuleNotFoundError: No module named 'headtohead'"
    )
    assert "node far does not have headtohead: install it there" in _problem(node, missing)
    assert _problem(node, ValueError("first\nlast")) == "node far cannot run headtohead: last"


def test_slots_are_counted_by_the_scarcest_resource() -> None:
    node = Node("name", "far", 8.0, 2.0)
    needed = {
        (1.0, 0.0): 8,
        (4.0, 0.0): 2,
        (1.0, 1.0): 2,
        (1.0, 0.5): 4,
        (1.0, 0.3): 6,
        (0.5, 0.4): 4,
        (1.0, 2.0): 1,
        (9.0, 0.0): 0,
    }
    assert {key: node.slots(Resources(*key)) for key in needed} == needed
