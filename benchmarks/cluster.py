"""Measure what `--on ray` costs: overhead of a whole study, the driver's load with many tasks, and the loss of a node.

    python benchmarks/cluster.py study quick            # wall-clock time here and on Ray, in turn
    python benchmarks/cluster.py driver --tasks 200     # memory and CPU of the driver with tasks that only post
    python benchmarks/cluster.py node                   # seconds from the death of a node to the run's next step

Prints one JSON document with provenance.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from headtohead.study.environment import provenance
from headtohead.study.run.cluster.messages import Order, Post, TaskEnd
from headtohead.study.run.events import Event


def study(name: str, repeats: int) -> dict[str, Any]:
    """Return the wall-clock seconds of a study here and on Ray, alternating."""
    found: dict[str, list[float]] = {"local": [], "ray": []}
    for _ in range(repeats):
        for place in found:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "headtohead", "race", name, "--quiet", "--on", place]
                began = time.monotonic()
                subprocess.run([*command, "--out", f"{folder}/out"], check=True, stdout=subprocess.DEVNULL)
                found[place].append(round(time.monotonic() - began, 2))
    local, ray = (min(found[place]) for place in ("local", "ray"))
    return {
        "study": name,
        "seconds": found,
        "overhead": round(ray / local - 1, 4),
        "added": round(ray - local, 2),
    }


class FakeTasks:
    """Tasks that train nothing: each posts an event as often as a real one would. One actor runs many at once."""

    def run(self, task: str, run: str, mailbox: Any) -> TaskEnd:
        """Post until the driver asks to stop."""
        import ray

        ray.get(mailbox.post.remote(Post(task, host="host", node="node")))
        step = 0
        while True:
            step += 1
            post = Post(task, [Event("step", run, step=step, nats=1.0, rate=1.0)])
            reply = ray.get(mailbox.post.remote(post))
            if reply.stop:
                return TaskEnd(task, "returned")
            time.sleep(reply.every)


def driver(tasks: int, seconds: float) -> dict[str, Any]:
    """Return the memory and the share of a core of the driver while that many tasks post."""
    from headtohead import Study
    from headtohead.common.progress import choose_display
    from headtohead.common.stop import Stop
    from headtohead.study.plan.execution import ExecutionSettings
    from headtohead.study.plan.planner import plan_study
    from headtohead.study.run.cluster.engine import Resources
    from headtohead.study.run.cluster.executor import ClusterExecutor
    from headtohead.study.run.cluster.ray_engine import RayEngine
    from headtohead.study.run.cluster.shipping import Inputs
    from headtohead.study.run.execute import Monitor, work_of
    from headtohead.study.store.run_store import Store

    plan = plan_study(Study(arms=["standard"], seeds=tasks, tokens="2M").spec)
    import ray

    class FakeTaskEngine(RayEngine):
        """Starts tasks in a few actors: 200 processes do not fit on a small machine, and the driver sees no difference."""

        def start(self, order: Order) -> None:
            host = hosts[len(self._refs) % len(hosts)]
            self._refs[host.run.remote(order.task, order.runs[0]["id"], self.mailbox)] = order.task

    engine = FakeTaskEngine()
    engine.needed = Resources(0.001)
    kind = ray.remote(FakeTasks).options(num_cpus=0, max_concurrency=tasks)
    hosts = [kind.remote() for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        store.make()
        os.environ["H2H_SHARED"] = "off"
        display = choose_display(False)
        runs = list(plan.runs.values())
        display.begin(len(runs), [work_of(plan, run) for run in runs])
        monitor = Monitor(store, plan, display)
        ended = threading.Event()
        executor = ClusterExecutor(
            store, ExecutionSettings(), engine, Inputs((), {}), stop=Stop(ended.is_set)
        )
        executor.submit(runs)
        found: dict[str, Any] = {}

        def watch() -> None:
            while sum(bool(task.host) for task in list(executor.tasks.values())) < tasks:
                time.sleep(1)
            time.sleep(5)
            before, began = time.process_time(), time.monotonic()
            time.sleep(seconds)
            share = (time.process_time() - before) / (time.monotonic() - began)
            found.update(tasks=tasks, core_share=round(share, 4), seconds=seconds)
            found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            ended.set()

        threading.Thread(target=watch, daemon=True).start()
        executor.events(monitor.handle, monitor.say)
        display.end()
    engine.close()
    return found


def node(repeats: int) -> dict[str, Any]:
    """Return the seconds from the death of a node until the driver started its run again, and until its next step."""
    from ray.cluster_utils import Cluster

    noticed, resumed = [], []
    for _ in range(repeats):
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        variables = {"H2H_SHARED": "off", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        nodes = [cluster.add_node(num_cpus=1, env_vars=variables) for _ in range(2)]
        cluster.wait_for_nodes()
        with tempfile.TemporaryDirectory() as folder:
            script = (
                "import sys; from headtohead import Study; Study(arms=['standard'], seeds=1, tokens='20M', batch=256)"
                ".run(sys.argv[1], on='ray', save_every=0.5)"
            )
            process = subprocess.Popen(
                [sys.executable, "-c", script, f"{folder}/out"],
                env=os.environ | {"RAY_ADDRESS": cluster.address},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            newest = lambda: max(Path(folder).glob("out/runs/*/checkpoint/step-*"), default=None)  # noqa: E731
            while newest() is None:
                time.sleep(0.05)
            busy = _busy(cluster, nodes)
            step, killed = newest(), time.monotonic()
            cluster.remove_node(busy, allow_graceful=False)
            assert process.stdout is not None
            for line in process.stdout:
                if "was lost" in line:
                    noticed.append(round(time.monotonic() - killed, 2))
                    break
            step = newest()
            while newest() == step:
                time.sleep(0.05)
            resumed.append(round(time.monotonic() - killed, 2))
            process.kill()
            process.wait()
        cluster.shutdown()
    return {"noticed_seconds": noticed, "resumed_seconds": resumed}


def _busy(cluster: Any, nodes: list[Any]) -> Any:
    """Return the node whose CPU is taken."""
    import ray

    ray.init(address=cluster.address, log_to_driver=False, logging_level="critical")
    try:
        while True:
            for one in nodes:
                left = ray._private.state.available_resources_per_node().get(one.node_id, {})
                if not left.get("CPU"):
                    return one
            time.sleep(0.2)
    finally:
        ray.shutdown()


def main() -> None:
    """Run one measurement."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["study", "driver", "node"])
    parser.add_argument("name", nargs="?", default="quick")
    parser.add_argument("--tasks", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    chosen = {
        "study": lambda: study(given.name, given.repeats),
        "driver": lambda: driver(given.tasks, given.seconds),
        "node": lambda: node(given.repeats),
    }
    import ray

    found = {
        "benchmark": f"cluster {given.what}",
        **provenance(),
        "ray": ray.__version__,
        "cores": os.cpu_count(),
    }
    print(json.dumps(found | chosen[given.what](), indent=1))


if __name__ == "__main__":
    main()
