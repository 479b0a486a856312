"""headtohead: controlled comparisons of attention mechanisms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headtohead.common import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from headtohead.api import *  # noqa: F403
    from headtohead.common.errors import UserError as UserError
    from headtohead.data.shards import prepare as prepare
    from headtohead.data.tasks.registry import prepare_task as prepare_task
    from headtohead.mechanisms.contract.base import Circuit as Circuit
    from headtohead.mechanisms.contract.base import Companion as Companion
    from headtohead.mechanisms.contract.base import CompanionSpec as CompanionSpec
    from headtohead.mechanisms.contract.base import Flops as Flops
    from headtohead.mechanisms.contract.base import Frame as Frame
    from headtohead.mechanisms.contract.base import Mechanism as Mechanism
    from headtohead.mechanisms.contract.base import Shape as Shape
    from headtohead.mechanisms.contract.base import Supports as Supports
    from headtohead.mechanisms.contract.cache import Cache as Cache
    from headtohead.mechanisms.contract.cache import Entry as Entry
    from headtohead.mechanisms.contract.options import Options as Options
    from headtohead.mechanisms.contract.options import option as option
    from headtohead.mechanisms.contract.projected import Projected as Projected
    from headtohead.mechanisms.contract.projected import Stage as Stage
    from headtohead.mechanisms.contract.score import Learned as Learned
    from headtohead.mechanisms.contract.score import learned as learned
    from headtohead.mechanisms.contract.score import score as score
    from headtohead.mechanisms.contract.wrap import wrap as wrap
    from headtohead.mechanisms.families.groups import Group as Group
    from headtohead.mechanisms.kuramoto import Kuramoto as Kuramoto
    from headtohead.model.generation import Sampling as Sampling
    from headtohead.study.store.archive import export_runs as export_runs
    from headtohead.study.store.archive import import_runs as import_runs
    from headtohead.study.store.run_store import Store as Store

# Names are imported on first use: `import headtohead` takes negligible time compared with importing torch.
_HOME = {
    **dict.fromkeys(
        (
            *(
                "bench_decode",
                "bench_generate",
                "bench_growth",
                "bench_kernels",
                "bench_population",
                "bench_study",
            ),
            *("bench_train", "catalog", "check", "corpus_stats", "cost", "draw_growth", "evaluate"),
            *("evaluate_task", "examine_study", "explain", "forecast", "generate_text", "judge"),
            *(
                "load",
                "load_model",
                "LoadedRun",
                "look",
                "new_mechanism",
                "open_study",
                "reproduce",
                "Reproduction",
                "run_toy",
            ),
            *(
                "score_task",
                "score_tasks",
                "SlurmJob",
                "Study",
                "StudyResult",
                "Toy",
                "ToyPlan",
                "watch_study",
            ),
            "write_site",
        ),
        "headtohead.api",
    ),
    **dict.fromkeys(
        ("Circuit", "Companion", "CompanionSpec", "Flops", "Frame", "Mechanism", "Shape", "Supports"),
        "headtohead.mechanisms.contract.base",
    ),
    **dict.fromkeys(("Cache", "Entry"), "headtohead.mechanisms.contract.cache"),
    **dict.fromkeys(("Options", "option"), "headtohead.mechanisms.contract.options"),
    **dict.fromkeys(("Learned", "learned", "score"), "headtohead.mechanisms.contract.score"),
    **dict.fromkeys(("Projected", "Stage"), "headtohead.mechanisms.contract.projected"),
    **dict.fromkeys(("export_runs", "import_runs"), "headtohead.study.store.archive"),
    "Group": "headtohead.mechanisms.families.groups",
    "Kuramoto": "headtohead.mechanisms.kuramoto",
    "Sampling": "headtohead.model.generation",
    "Store": "headtohead.study.store.run_store",
    "UserError": "headtohead.common.errors",
    "prepare": "headtohead.data.shards",
    "prepare_task": "headtohead.data.tasks.registry",
    "wrap": "headtohead.mechanisms.contract.wrap",
}
__all__ = sorted(_HOME)


_OLD_NAMES = {"bench_stack": "bench_population"}


def __getattr__(name: str) -> Any:
    name = _OLD_NAMES.get(name, name)
    if name not in _HOME:
        raise AttributeError(f"module 'headtohead' has no attribute '{name}'")
    import importlib

    return getattr(importlib.import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
