"""headtohead: controlled comparisons of attention mechanisms."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headtohead.common.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from headtohead.api import Reproduction as Reproduction
    from headtohead.api import Study as Study
    from headtohead.api import StudyResult as StudyResult
    from headtohead.api import Toy as Toy
    from headtohead.api import ToyPlan as ToyPlan
    from headtohead.api import bench_decode as bench_decode
    from headtohead.api import bench_generate as bench_generate
    from headtohead.api import bench_growth as bench_growth
    from headtohead.api import bench_kernels as bench_kernels
    from headtohead.api import bench_population as bench_population
    from headtohead.api import bench_train as bench_train
    from headtohead.api import check as check
    from headtohead.api import corpus_stats as corpus_stats
    from headtohead.api import cost as cost
    from headtohead.api import draw_growth as draw_growth
    from headtohead.api import evaluate as evaluate
    from headtohead.api import evaluate_task as evaluate_task
    from headtohead.api import examine_study as examine_study
    from headtohead.api import explain as explain
    from headtohead.api import forecast as forecast
    from headtohead.api import generate_text as generate_text
    from headtohead.api import judge as judge
    from headtohead.api import load as load
    from headtohead.api import load_model as load_model
    from headtohead.api import look as look
    from headtohead.api import open_study as open_study
    from headtohead.api import reproduce as reproduce
    from headtohead.api import run_toy as run_toy
    from headtohead.api import score_task as score_task
    from headtohead.api import score_tasks as score_tasks
    from headtohead.api import watch_study as watch_study
    from headtohead.common.errors import UserError as UserError
    from headtohead.data.tasks.registry import prepare_task as prepare_task
    from headtohead.mechanisms.contract.base import Cache as Cache
    from headtohead.mechanisms.contract.base import Circuit as Circuit
    from headtohead.mechanisms.contract.base import Companion as Companion
    from headtohead.mechanisms.contract.base import CompanionSpec as CompanionSpec
    from headtohead.mechanisms.contract.base import Entry as Entry
    from headtohead.mechanisms.contract.base import Flops as Flops
    from headtohead.mechanisms.contract.base import Frame as Frame
    from headtohead.mechanisms.contract.base import Mechanism as Mechanism
    from headtohead.mechanisms.contract.base import Shape as Shape
    from headtohead.mechanisms.contract.base import Supports as Supports
    from headtohead.mechanisms.contract.options import Options as Options
    from headtohead.mechanisms.contract.options import option as option
    from headtohead.mechanisms.contract.projected import Projected as Projected
    from headtohead.mechanisms.contract.projected import Stage as Stage
    from headtohead.mechanisms.contract.wrap import wrap as wrap
    from headtohead.mechanisms.families.groups import Group as Group
    from headtohead.mechanisms.kuramoto import Kuramoto as Kuramoto

# Names are imported on first use: `import headtohead` takes negligible time compared with importing torch.
_HOME = {
    **dict.fromkeys(
        (
            "Reproduction",
            "Study",
            "StudyResult",
            "Toy",
            "ToyPlan",
            "bench_decode",
            "bench_generate",
            "bench_growth",
            "bench_kernels",
            "bench_population",
            "bench_train",
            "check",
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
            "score_task",
            "score_tasks",
            "watch_study",
            "reproduce",
            "run_toy",
        ),
        "headtohead.api",
    ),
    **dict.fromkeys(
        (
            *("Cache", "Circuit", "Companion", "CompanionSpec", "Entry"),
            *("Flops", "Frame", "Mechanism", "Shape", "Supports"),
        ),
        "headtohead.mechanisms.contract.base",
    ),
    **dict.fromkeys(("Options", "option"), "headtohead.mechanisms.contract.options"),
    **dict.fromkeys(("Projected", "Stage"), "headtohead.mechanisms.contract.projected"),
    "Group": "headtohead.mechanisms.families.groups",
    "Kuramoto": "headtohead.mechanisms.kuramoto",
    "UserError": "headtohead.common.errors",
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
