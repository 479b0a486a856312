"""A process that trains toy runs and reports on standard output.

It is told its runs on the first line of standard input, in groups that go through one pass each; the end of standard
input, whether the parent closed it or died, means: stop.
"""

from __future__ import annotations

import torch

from headtohead.common.worker_protocol import emit, receive
from headtohead.papers.faster_qk.runs import ToyRun
from headtohead.papers.faster_qk.train import train


def main() -> None:
    """Do the work that standard input names."""
    torch.set_num_threads(1)
    order, stop = receive()
    groups = [[ToyRun(**run) for run in group] for group in order]
    weights = [max(run.expected_steps for run in group) for group in groups]
    for place, group in enumerate(groups):

        def show(words: str, share: float, place: int = place) -> None:
            emit({"share": (sum(weights[:place]) + share * weights[place]) / sum(weights)})

        train(group, "cpu", show, lambda result: emit({"result": result.as_dict()}), stop)


if __name__ == "__main__":
    main()
