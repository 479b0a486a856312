"""Create the golden files: small finished studies in the formats of this version.

    python tests/golden/make.py tests/golden/schema-1

Run it when a format changes on purpose, with the folder of the new schema number. The files of older schemas are never
recreated: they show what older versions wrote. Pack them: tar -C tests/golden -cJf tests/golden/schema-0.tar.xz schema-0
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "data"
"""A data directory with a few kilobytes of random words under the names of two corpora."""
_TEXT: dict[str, Any] = {"corpus": "tinyshakespeare", "context": 32, "batch": 256}
_TASK: dict[str, Any] = {"tasks": "reverse:train=40,form=place", "causal": False, "tokens": 512, "batch": 256}
STUDIES: dict[str, dict[str, Any]] = {
    # Two arms and two seeds, a solved width, evaluations during training.
    "corpus": _TEXT
    | {
        "arms": ["standard", "sharing:tie=kv"],
        "seeds": 2,
        "tokens": 1024,
        "shape": "params",
        "evaluations": 2,
        "log_circuits": True,
        "probes": ["positions", "indicators:4", "skip:512", "decode"],
    },
    # A trained tokenizer, statistics of the corpora, and every arm scored on the other corpus.
    "corpora": _TEXT
    | {
        "arms": ["standard"],
        "tokens": 1024,
        "tokenizer": "bpe:300",
        "corpus": ["tinyshakespeare", "wikitext-2"],
        "seeds": 1,
        "probes": ["corpora"],
    },
    # A tuned rate, and a trunk with two branches. The best rate is in the middle of the grid.
    "tuned": _TEXT
    | {
        "arms": ["standard"],
        "seeds": 1,
        "context": 16,
        "branches": [1024, 2048],
        "tune": {"lr": [1e-5, 1e-2, 1e1], "tokens": 512},
        "probes": ["maps"],
    },
    # Seconds per step in the lock, and a trend over two contexts.
    "timed": _TEXT
    | {"arms": ["standard", "diagonal"], "seeds": 1, "tokens": 4096, "context": [16, 32], "length": "time"},
    # Two seeds trained as a population.
    "stacked": _TEXT | {"arms": ["standard"], "seeds": 2, "tokens": 512},
    "task": _TASK
    | {"arms": ["standard", "sharing:tie=kv"], "seeds": 1, "evaluations": 2, "probes": ["explain"]},
    # Models that start from the weights of another run; `from` is filled in.
    "started": _TASK | {"arms": ["standard"], "seeds": 1},
}
EXPORTED = ("corpus", "corpora", "started")


def make_studies(out: Path) -> None:
    """Run every golden study into a folder with its name, and export some of them."""
    from headtohead import Study
    from headtohead.study.store.archive import export_runs
    from headtohead.study.store.run_store import Store

    for name, settings in STUDIES.items():
        if name == "started":
            runs = Store(out / "task").runs()
            trained = next(run for run in runs if run.spec().arm == "standard")
            settings = settings | {"from": str(trained.path)}
        study = Study(name=name, **settings)
        study.run(
            out / name, device="cpu", workers=1, population=name == "stacked", data_dir=DATA, quiet=True
        )
    for name in EXPORTED:
        export_runs(Store(out / name), out / f"{name}.tar.xz")


def strip(out: Path) -> None:
    """Remove weights, pages, and the paths of this machine."""
    from headtohead.common.files import with_checksum

    for path in [
        *out.glob("*/runs/*/checkpoint"),
        *out.glob("*/runs/*/branches"),
        *out.glob("*/runs/*/lock"),
    ]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in out.glob("*/report.html"):
        path.unlink()
    for path in [*out.glob("*/study.json"), *out.glob("*/runs/*/spec.json")]:
        text = path.read_text(encoding="utf-8")
        path.write_text(with_checksum(json.loads(text.replace(f"{out}/", ""))), encoding="utf-8")


def main() -> None:
    """Create the golden files in the given folder."""
    out = Path(sys.argv[1]).resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["H2H_CACHE"] = cache
        make_studies(out)
    strip(out)
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    print(f"{out}: {size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
