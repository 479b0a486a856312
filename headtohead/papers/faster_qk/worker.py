"""Worker process that trains toy runs and reports on standard output.

The first line of standard input lists its runs, in groups that are trained in one pass. It stops at the end of standard
input, whether the parent closed it or died.
"""

from __future__ import annotations

import torch

from headtohead.common.worker_protocol import emit, receive
from headtohead.papers.faster_qk.runs import ToyRun
from headtohead.papers.faster_qk.train import train


def main() -> None:
    """Train the runs given on standard input."""
    torch.set_num_threads(1)
    order, stop = receive()
    groups = [[ToyRun(**run) for run in group] for group in order]
    weights = [max(run.expected_steps for run in group) for group in groups]
    for index, group in enumerate(groups):

        def show(message: str, share: float, index: int = index) -> None:
            emit({"share": (sum(weights[:index]) + share * weights[index]) / sum(weights)})

        train(group, "cpu", show, lambda result: emit({"result": result.as_dict()}), stop)


if __name__ == "__main__":
    main()
