"""Measure how long `import headtohead` takes beyond `import torch`: the minimum CPU seconds of several fresh processes.

python benchmarks/imports.py [COUNT]
"""

from __future__ import annotations

import subprocess
import sys

CODE = (
    "import time, torch; began = time.process_time(); import headtohead; print(time.process_time() - began)"
)


def main(count: int) -> None:
    """Print the minimum of `count` measurements."""
    times = [
        float(subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True).stdout)
        for _ in range(count)
    ]
    print(f"import headtohead: {min(times):.2f} s of CPU beyond torch (minimum of {count})")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
