"""Judge the claims of faster_qk again by the runs recorded in results/faster_qk, without training anything.

    python benchmarks/judge_recorded.py [--out results/faster_qk]

Writes claims.json, and study.json and verdicts.json of each study, so that `h2h report` can rebuild its page. The archives hold runs without
the manifests of their studies. Arms, probes and seeds are those of scale `small`; a run
belongs to the arm of its label, and trials of tuning, whose labels name a rate, are left out. Every recorded arm was above
the trivial predictors (`unlearnt` is 0 in every verdict), so these are not computed again. The toy is read from toy.json.
Studies that were not recorded leave their criteria open.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from headtohead.api.study import plain
from headtohead.common.files import write_json
from headtohead.common.schema import write_document
from headtohead.evaluation.tasks import MARGINS
from headtohead.papers.faster_qk.findings import Finding
from headtohead.papers.faster_qk.measure import Mark
from headtohead.papers.faster_qk.train import ToyResult
from headtohead.papers.faster_qk.work import Toy, ToyPlan
from headtohead.study.claims import ClaimResult, judge_claims
from headtohead.study.claims.criteria import MAIN
from headtohead.study.claims.paper import Paper, find_paper, read_paper
from headtohead.study.claims.recorded import CLAIMS
from headtohead.study.config.spec import StudySpec, build_study
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.verdict import study_verdicts
from headtohead.study.store.archive import import_runs
from headtohead.study.store.history import study_marks
from headtohead.study.store.manifest import METRIC, Contest, Entry, Manifest, Measure
from headtohead.study.store.run_spec import RunSpec
from headtohead.study.store.run_store import Store

RESULTS = Path(__file__).parents[1] / "results" / "faster_qk"
SCALE = "small"


def recorded_toy(plan: ToyPlan, path: Path) -> Toy:
    """Return the toy of a scale from a toy.json: what each run measured at its events, and the findings."""
    record = json.loads(path.read_text())
    marks: dict[tuple[str, int], dict[str, Mark]] = {}
    for row in record["runs"]:
        numbers = (row["mean_loss"], row["alpha"], row["asked"], [], 0.0, row["qk_norm"], row["ov_norm"])
        mark = Mark(row["epoch"], *numbers, row["balance"])
        marks.setdefault((row["name"], row["seed"]), {})[row["event"]] = mark
    fixed = {(row["name"], row["seed"]): row for row in record["fixed"]}
    runs = [run for run in plan.chosen() if (run.name, run.seed) in marks | fixed]
    results = [ToyResult(run, marks.get((run.name, run.seed), {})) for run in runs]
    return Toy(results, record["left"], [], {}, [Finding(**row) for row in record["findings"]], path)


def recorded_study(spec: StudySpec, store: Store) -> Analysis:
    """Return the study whose runs are in a store."""
    labels = {arm.label for arm in spec.arms}
    runs = [run for run in (one.spec() for one in store.runs()) if run.label in labels]
    entries = tuple(Entry(run.id, run.label, run.seed, _contest(run)) for run in runs)
    results = store.results([run.id for run in runs])
    measures = {run.corpus.label: _measure(results[run.id].test) for run in runs}
    primary = spec.primary_arm
    manifest = Manifest(
        spec.name,
        tuple((arm.text, arm.label) for arm in spec.arms),
        spec.baseline_arm.label,
        primary.label if primary else None,
        spec.margin,
        spec.seeds,
        entries,
        probes=spec.probes,
        measures={label: measure for label, measure in measures.items() if measure is not None},
    )
    marks = study_marks(store.path, manifest, frozenset())
    return Analysis(manifest, study_verdicts(manifest, results, marks), results, store)


def _contest(run: RunSpec) -> Contest:
    return Contest(
        run.corpus.name, run.corpus.label, run.size.name, run.shape, run.length, numerics=run.numerics
    )


def _measure(score: Any) -> Measure | None:
    return None if score.metric == METRIC else Measure(score.metric, "higher", MARGINS[score.metric])


def judged(paper: Paper, out: Path) -> list[ClaimResult]:
    """Return the claims judged by the recorded studies, and write these."""
    with TemporaryDirectory() as scratch:
        studies = {}
        for name, settings in paper.studies(SCALE).items():
            folder, store = RESULTS / ("" if name == MAIN else name), Store(Path(scratch) / name)
            if (archive := folder / "runs.tar.xz").is_file():
                store.make()
                import_runs(store, archive)
                studies[name] = recorded_study(build_study(settings), store)
                write_study(out / folder.relative_to(RESULTS), studies[name], settings)
        toy = recorded_toy(paper.toy[SCALE], RESULTS / "toy.json")
        return judge_claims(paper, SCALE, studies, toy=toy)


def write_study(folder: Path, study: Analysis, settings: Mapping[str, Any]) -> None:
    """Write a study's manifest and verdicts."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "outline": study.manifest.as_dict(),
        "added_seeds": [],
        "settings": plain(settings),
        "seconds": {},
    }
    write_document(folder / "study.json", record)
    write_json(folder / "verdicts.json", [row.as_dict() for row in study.verdicts])


def main() -> None:
    """Write claims.json and print the outcomes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    out = parser.parse_args().out
    claims = judged(read_paper(find_paper("faster_qk")), out)
    write_json(out / CLAIMS, [claim.as_dict() for claim in claims])
    for claim in claims:
        print(f"{claim.id:14} {claim.direction:13} {claim.size:13} {claim.scale}")


if __name__ == "__main__":
    main()
