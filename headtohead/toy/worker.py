"""A process that trains toy runs and reports on standard output.

It is told its runs on the first line of standard input, in groups that go through one pass each; the end of standard
input, whether the parent closed it or died, means: stop.
"""

from __future__ import annotations

import json
import signal
import sys
import threading
from typing import Any

import torch

from headtohead.toy.runs import ToyRun
from headtohead.toy.train import train


def main() -> None:
    """Do the work that standard input names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    groups = [[ToyRun(**run) for run in group] for group in json.loads(sys.stdin.readline())]
    stopped = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        stopped.set()

    threading.Thread(target=listen, daemon=True).start()
    weights = [max(run.expected_steps for run in group) for group in groups]
    for place, group in enumerate(groups):

        def show(words: str, share: float, place: int = place) -> None:
            tell({"share": (sum(weights[:place]) + share * weights[place]) / sum(weights)})

        train(group, "cpu", show, lambda result: tell({"result": result.as_dict()}), stopped.is_set)


def tell(event: dict[str, Any]) -> None:
    """Write one event as a line."""
    try:
        print(json.dumps(event), flush=True)
    except BrokenPipeError:
        sys.exit(1)


if __name__ == "__main__":
    main()
