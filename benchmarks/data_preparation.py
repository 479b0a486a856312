"""Measure the time and memory of preparing enwik8 as byte shards and as a 16k BPE.

    H2H_DATA=DIR python benchmarks/data_preparation.py

Each is prepared with an empty cache in a separate process. The last line is one JSON document.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

from headtohead.study.environment import provenance

CHILD = """
import json, resource, sys, time
from headtohead.data.shards import prepare
began = time.perf_counter()
corpus = prepare("enwik8", sys.argv[1], cache=sys.argv[2])
print(json.dumps({
    "tokenizer": sys.argv[1],
    "seconds": round(time.perf_counter() - began, 2),
    "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "train_tokens": len(corpus.splits["train"].tokens),
}))
"""


def main() -> None:
    """Measure and print."""
    rows = []
    for tokenizer in ("bytes", "bpe:16384"):
        with tempfile.TemporaryDirectory() as cache:
            found = subprocess.run(
                [sys.executable, "-c", CHILD, tokenizer, cache], capture_output=True, text=True, check=False
            )
        if found.returncode:
            sys.exit(found.stderr.strip().splitlines()[-1])
        row = json.loads(found.stdout)
        rows.append(row)
        print(
            f"enwik8 to {tokenizer}: {row['seconds']} s, peak {row['peak_bytes'] / 2**20:.0f} MiB", flush=True
        )
    print(json.dumps({"benchmark": "data_preparation", **provenance(), "rows": rows}))


if __name__ == "__main__":
    main()
