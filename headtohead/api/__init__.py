"""What `import headtohead` offers: studies and everything around a run. The shell adds nothing to it."""

from __future__ import annotations

from headtohead.api.bench import bench_train
from headtohead.api.judging import Reproduction, TableResult, forecast, judge, reproduce
from headtohead.api.mechanisms import check, check_settings, cost
from headtohead.api.studies import Study, StudyResult, examine_study, open_study, watch_study
from headtohead.api.trained import evaluate, generate_text, load, score_task, score_tasks

__all__ = [
    "Reproduction",
    "Study",
    "StudyResult",
    "TableResult",
    "bench_train",
    "check",
    "check_settings",
    "cost",
    "evaluate",
    "examine_study",
    "forecast",
    "generate_text",
    "judge",
    "load",
    "open_study",
    "reproduce",
    "score_task",
    "score_tasks",
    "watch_study",
]
