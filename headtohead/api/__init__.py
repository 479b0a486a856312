"""The public Python API, exported by `import headtohead`; the command line is a thin layer over it."""

from __future__ import annotations

from headtohead.api.bench import (
    bench_decode,
    bench_generate,
    bench_growth,
    bench_kernels,
    bench_population,
    bench_train,
    check_growth_picture,
    draw_growth,
)
from headtohead.api.corpora import corpus_stats
from headtohead.api.interpret import explain, look
from headtohead.api.judge import TableResult, forecast, judge
from headtohead.api.mechanisms import check, check_settings, cost
from headtohead.api.reproduce import Reproduction, Toy, ToyPlan, reproduce, run_toy
from headtohead.api.runs import (
    evaluate,
    evaluate_task,
    generate_text,
    load,
    load_model,
    score_task,
    score_tasks,
)
from headtohead.api.study import Study, StudyResult, examine_study, open_study, watch_study

__all__ = [
    "Reproduction",
    "Study",
    "StudyResult",
    "TableResult",
    "Toy",
    "ToyPlan",
    "bench_decode",
    "bench_generate",
    "bench_growth",
    "bench_kernels",
    "bench_population",
    "bench_train",
    "check",
    "check_growth_picture",
    "check_settings",
    "corpus_stats",
    "cost",
    "draw_growth",
    "evaluate",
    "evaluate_task",
    "examine_study",
    "explain",
    "forecast",
    "generate_text",
    "judge",
    "load",
    "load_model",
    "look",
    "open_study",
    "reproduce",
    "run_toy",
    "score_task",
    "score_tasks",
    "watch_study",
]
