"""Studies on a real Ray: several nodes on this host, with and without a shared store, and everything killed once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from headtohead import Study
from headtohead.study.store.run_store import Store
from tests.processes import until
from tests.results import stored

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("ray") is None, reason="Ray is not installed: pip install 'headtohead[ray]'"
    ),
]

SETTINGS: dict[str, Any] = {
    "arms": ["standard", "sharing:tie=kv"],
    "batch": 256,
    "tokens": 256 * 200,
    "seeds": 2,
    "lr": 5e-3,
}
ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module", autouse=True)
def one_at_a_time() -> Iterator[None]:
    """Let one process at a time run these tests: one of them kills all processes of Ray's tasks on this host."""
    with FileLock(Path(tempfile.gettempdir()) / "h2h-ray-tests.lock"):
        yield


class Nodes:
    """A cluster of a head without CPUs and some nodes with one each."""

    def __init__(self, folder: Path, shared: bool) -> None:
        from ray.cluster_utils import Cluster

        self.folder, self.shared = folder, shared
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self.add(), self.add()]

    def add(self, **resources: float) -> Any:
        variables = {"PYTHONPATH": str(ROOT), "H2H_SHARED": "on" if self.shared else "off"}
        if not self.shared:
            variables["H2H_CACHE"] = str(self.folder / "cache of the nodes")
        node = self.cluster.add_node(**{"num_cpus": 1, "env_vars": variables, **resources})
        self.cluster.wait_for_nodes()
        return node

    def kill(self, index: int) -> None:
        self.cluster.remove_node(self.nodes.pop(index), allow_graceful=False)


@pytest.fixture(scope="module", params=[True, False], ids=["shared", "unshared"])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    made = Nodes(tmp_path_factory.mktemp("nodes"), request.param)
    try:
        yield made
    finally:
        made.cluster.shutdown()


SCRIPT = """
import json, sys
from headtohead import Study
settings, out, limit = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
summary = Study(**settings).run(out, on="ray", save_every=0.2, time_limit=limit).summary
sys.exit(3 if summary.left else 0)
"""


def race(story: Path, out: Path, address: str, limit: str = "1h", **changed: Any) -> subprocess.Popen[str]:
    """Start a study with checkpoints every fifth of a second, in a process group of its own."""
    settings = json.dumps(SETTINGS | {"corpus": f"file:{story}"} | changed)
    variables = os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
    if not address:
        del variables["RAY_ADDRESS"]
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, settings, str(out), limit],
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for a process; return what it printed."""
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == code, printed
    assert "Traceback" not in printed
    return printed


@pytest.fixture(scope="module")
def local(story: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same study on this machine without Ray."""
    folder = tmp_path_factory.mktemp("local")
    assert not Study(**SETTINGS, corpus=f"file:{story}").run(folder, workers=1, quiet=True).summary.left
    return folder


def has_checkpoint(folder: Path) -> bool:
    return any(folder.glob("runs/*/checkpoint/step-*"))


def nothing_lost(folder: Path) -> None:
    """Assert that every run that was trained has a checkpoint or, if it ended before the stop, a result."""
    trained = [path.parent for path in folder.glob("runs/*/metrics.jsonl")]
    assert trained
    assert all((run / "result.json").is_file() or any(run.glob("checkpoint/step-*")) for run in trained)


def trained_once(folder: Path, local: Path) -> None:
    """Assert that every run has the result of a local study, and was trained once, in one start or resumed."""
    assert stored(folder) == stored(local)
    for run in Store(folder).runs():
        steps = [row.step for row in run.logged_rows() if row.valid is None]
        assert steps == sorted(set(steps))
    assert not [*folder.glob("runs/*/lock"), *folder.glob(".shared-*"), *folder.glob("runs/*/*.damaged")]


def test_a_study_starts_ray_here_and_gives_the_same_stored(story: Path, tmp_path: Path, local: Path) -> None:
    printed = finished(race(story, tmp_path, ""))
    assert "[4/4]" in printed
    trained_once(tmp_path, local)
    assert all(len(run.environments()) == 1 for run in Store(tmp_path).runs())


def test_ctrl_c_ends_a_ray_of_this_machine_with_checkpoints(story: Path, tmp_path: Path, local: Path) -> None:
    study = race(story, tmp_path, "")
    until(lambda: has_checkpoint(tmp_path) or study.poll() is not None)
    os.killpg(study.pid, signal.SIGINT)
    finished(study, 3)
    nothing_lost(tmp_path)
    finished(race(story, tmp_path, ""))
    trained_once(tmp_path, local)


def test_nodes_that_are_killed_lose_nothing(story: Path, tmp_path: Path, local: Path, nodes: Nodes) -> None:
    out = tmp_path / "out"
    study = race(story, out, nodes.cluster.address)
    until(lambda: has_checkpoint(out) or study.poll() is not None)
    nodes.kill(0)
    nodes.nodes.append(nodes.add())
    printed = finished(study)
    assert "was lost" in printed, printed
    trained_once(out, local)
    if not nodes.shared:  # the corpus travelled to the nodes, once
        assert [*(nodes.folder / "cache of the nodes/cluster").glob("inputs/*/data/prepared/*/train.bin")]


def test_a_killed_driver_continues(story: Path, tmp_path: Path, local: Path, nodes: Nodes) -> None:
    out = tmp_path / "out"
    study = race(story, out, nodes.cluster.address)
    until(lambda: has_checkpoint(out) or study.poll() is not None)
    os.killpg(study.pid, signal.SIGKILL)
    study.wait()
    finished(race(story, out, nodes.cluster.address))
    trained_once(out, local)


def test_killed_workers_continue(story: Path, tmp_path: Path, local: Path, nodes: Nodes) -> None:
    out = tmp_path / "out"
    study = race(story, out, nodes.cluster.address)
    until(lambda: has_checkpoint(out) or study.poll() is not None)
    subprocess.run(["pkill", "-KILL", "-f", "^ray::h2h "], check=False)
    printed = finished(study)
    assert "was killed" in printed
    trained_once(out, local)


def test_ctrl_c_and_a_time_limit_save_checkpoints(
    story: Path, tmp_path: Path, local: Path, nodes: Nodes
) -> None:
    out = tmp_path / "out"
    study = race(story, out, nodes.cluster.address)
    until(lambda: has_checkpoint(out) or study.poll() is not None)
    os.killpg(study.pid, signal.SIGINT)
    finished(study, 3)
    nothing_lost(out)
    finished(race(story, out, nodes.cluster.address, "1s"), 3)
    finished(race(story, out, nodes.cluster.address))
    trained_once(out, local)


def test_a_node_that_cannot_write_gets_no_further_run(story: Path, tmp_path: Path, local: Path) -> None:
    nodes = Nodes(tmp_path, True)
    try:
        nodes.add(env_vars={"PYTHONPATH": str(ROOT), "H2H_CACHE": "/dev/null/cache"})
        printed = finished(race(story, tmp_path / "out", nodes.cluster.address))
    finally:
        nodes.cluster.shutdown()
    assert "the node gets no further run" in printed
    trained_once(tmp_path / "out", local)


def test_bad_clusters_are_rejected_before_anything_is_trained(story: Path, tmp_path: Path) -> None:
    def rejected(address: str, *words: str) -> str:
        command = [sys.executable, "-m", "headtohead", "race", "--arms", "standard", "sharing:tie=kv"]
        command += ["--corpus", f"file:{story}", "--out", str(out), "--on", "ray", *words]
        # Ray hands the working directory of the driver to its nodes, which here are on the same host.
        variables = os.environ | {"RAY_ADDRESS": address, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 2, done.stdout + done.stderr
        assert not out.exists()
        lines = done.stderr.strip().splitlines()
        assert len(lines) == 1, done.stderr
        return lines[0]

    out = tmp_path / "out"
    nodes = Nodes(tmp_path, True)
    try:
        address = nodes.cluster.address
        assert "no node of the cluster has 1 CPU and 2 GPUs" in rejected(address, "--gpus-per-run", "2")
        assert "no node of the cluster has a GPU" in rejected(address, "--device", "cuda")
        assert "no Ray cluster at RAY_ADDRESS" in rejected("127.0.0.1:1")
        odd = nodes.add(env_vars={"PYTHONPATH": str(ROOT), "H2H_COMMIT": "another"})
        assert "has commit another instead of" in rejected(address)
        nodes.cluster.remove_node(odd)
        package = tmp_path / "empty" / "headtohead"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'headtohead'\")")
        nodes.add(env_vars={"PYTHONPATH": str(package.parent)})
        assert "does not have headtohead: install it there" in rejected(address)
    finally:
        nodes.cluster.shutdown()
