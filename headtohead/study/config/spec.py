"""The definition of a study: from a TOML file, `Study(...)` or flags."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from headtohead.common.errors import MissingFile, UserError, unknown
from headtohead.common.files import read_text
from headtohead.common.numbers import exact_count, is_number, parse_count
from headtohead.common.text import check_values
from headtohead.common.typed import decode
from headtohead.data.tasks.registry import check_task_known
from headtohead.mechanisms.contract.score import Score
from headtohead.model.layout import Layout, parse_layout
from headtohead.model.sizes import Settings, Size, find_size
from headtohead.study.config.validation import as_text, check_known
from headtohead.study.probes import check_probes_apply, corpora, probe_names
from headtohead.training.settings import TrainSettings, defaults_of, train_settings

ShapeRule = Literal["as_is", "params", "cache"]
LengthRule = Literal["tokens", "flops", "time", "time_plain"]
_Names = str | Annotated[list[str], msgspec.Meta(min_length=1)]
_TRAINING = {field.name for field in dataclasses.fields(TrainSettings)}
_MAX_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Arm:
    """One contender: a layout with its options, a short label for display, and optional settings of its own."""

    text: str
    label: str
    layout: Layout
    training: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    start: str = ""
    """The run whose weights it starts from; if empty, the study's."""


@dataclass(frozen=True)
class Tune:
    """The grid of learning rates for every arm, and the training tokens and seeds of each trial."""

    lr: tuple[float, ...]
    """three or more learning rates that every arm is tried at; the grid is extended where the best is at its edge."""
    tokens: int | None = None
    """training tokens of each trial; by default those of the run that is judged."""
    seeds: int = 1
    """seeds per rate; the rate with the best mean over them is chosen."""

    def __post_init__(self) -> None:
        if not 1 <= self.seeds <= _MAX_SEEDS:
            raise UserError(f"tune.seeds={self.seeds} is not between 1 and {_MAX_SEEDS:,}")
        if len(self.lr) < 3:
            raise UserError("tune.lr takes three rates or more; with fewer, no optimum is inside the grid")
        if not all(0 < rate < 1e3 for rate in self.lr):
            raise UserError(f"tune.lr takes rates above 0, got {list(self.lr)}")


@dataclass(frozen=True)
class StudySpec:
    """Arms x seeds x corpora or tasks x sizes x rules, with the settings that all arms share."""

    arms: tuple[Arm, ...]
    name: str = "study"
    corpora: tuple[str, ...] = ("stdlib",)
    sizes: tuple[str, ...] = ("nano",)
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)
    shapes: tuple[str, ...] = ("as_is",)
    lengths: tuple[str, ...] = ("tokens",)
    cache_at: int = 0
    """Context at which shape = cache compares whole caches; 0: bytes of one token."""
    baseline: str = ""
    """Text or label of the arm that the others are compared with; if empty, the first."""
    primary: str = ""
    """Text or label of the arm of the primary comparison; if empty, the first arm after the baseline."""
    given_margin: float | None = None
    """Differences within it count as equivalent. None: 0.005 bits per byte, or the default of the task's metric."""
    tokenizer: str = ""
    """bytes, bpe:N or file:PATH; if empty, it follows from the size's vocabulary."""
    contexts: tuple[int, ...] = ()
    """Tokens in a window, one contest for each; if empty, the size's own."""
    branches: tuple[int, ...] = ()
    """Token counts of the decayed models that branch off one trunk, in ascending order."""
    model: dict[str, Any] = field(default_factory=dict)
    training: dict[str, Any] = field(default_factory=dict)
    tune: Tune | None = None
    """None: every arm uses the study's learning rate, or its own."""
    bytes: int = 0
    """Bytes of text each run is trained on, if the length is given in bytes; else 0."""
    probes: tuple[str, ...] = ()
    """Measurements on every trained run other than its loss."""
    tasks: tuple[str, ...] = ()
    """Tasks to train on instead of corpora, one contest for each."""
    causal: bool = True
    """Whether a task's models are causal or bidirectional."""
    answer: str = "write"
    """How a task's model answers: `write` generates the answer, `point` selects a span of the text."""
    metric: str = ""
    """The metric of all tasks; if empty, each task's own."""
    start: str = ""
    """The run whose weights a task's models start from."""
    log_circuits: bool = False
    """Whether to log every circuit's rates, gradients and product norms; not part of a run's identity."""

    @property
    def margin(self) -> float:
        """The given margin, or the default for bits per byte."""
        return _MARGIN if self.given_margin is None else self.given_margin

    @property
    def baseline_arm(self) -> Arm:
        """The arm that the others are compared with."""
        return self._arm(self.baseline, "baseline") if self.baseline else self.arms[0]

    @property
    def primary_arm(self) -> Arm | None:
        """The arm of the primary comparison."""
        if self.primary:
            return self._arm(self.primary, "primary")
        return next((arm for arm in self.arms if arm is not self.baseline_arm), None)

    def _arm(self, name: str, role: str) -> Arm:
        for arm in self.arms:
            if name in (arm.text, arm.label):
                return arm
        raise unknown(f"arm given as {role}", name, [arm.text for arm in self.arms])

    def size(self, name: str, arm: Arm, context: int = 0) -> Size:
        """Return a size with the model settings of study and arm applied; `context=0` means the first context."""
        size = find_size(name).with_settings(**(self.model | arm.model))
        size = dataclasses.replace(size, context=context or next(iter(self.contexts), size.context))
        if self.tokenizer.startswith("bpe:"):
            size = dataclasses.replace(size, vocabulary=parse_count(self.tokenizer[4:]))
        elif self.tokenizer == "bytes":
            size = dataclasses.replace(size, vocabulary=256)
        return size

    def tokenizer_for(self, size: Size) -> str:
        """Return the tokenizer for a size."""
        return self.tokenizer or ("bytes" if size.vocabulary == 256 else f"bpe:{size.vocabulary}")

    def train_settings(
        self, arm: Arm, size: Size | None = None, bytes_per_token: float = 1.0
    ) -> TrainSettings:
        """Return an arm's training settings; unset ones take the defaults of `size`.

        A length in bytes is converted with `bytes_per_token`.
        """
        defaults = {} if size is None or self.tasks else defaults_of(size)
        settings = train_settings(defaults | self.training | arm.training)
        if not self.bytes:
            return settings
        return dataclasses.replace(settings, tokens=round(self.bytes / bytes_per_token))


def with_stored_names(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings under the names that stores keep: `init_from` is stored as `from`, its name until version 0.1."""
    values = {"from" if key in ("init_from", "from_") else key: value for key, value in given.items()}
    if isinstance(arms := values.get("arms"), list | tuple):
        values["arms"] = [with_stored_names(arm) if isinstance(arm, Mapping) else arm for arm in arms]
    return values


class GivenSettings(msgspec.Struct, rename={"start": "init_from"}):
    """The settings of a study as they are given, without those of training. `h2h settings` prints each with its line."""

    arms: Any = None
    """mechanisms with options, layouts, FILE.py:Class, or tables with arm and its own settings; required."""
    name: str = "study"
    """name of the study; its default directory is races/NAME."""
    corpus: _Names = "stdlib"
    """stdlib, a path or a named corpus (h2h data list); several give one contest each."""
    size: _Names = "nano"
    """model shape (h2h list sizes); several give one contest each."""
    seeds: Any = 5
    """number of paired seeds, or a list of seeds."""
    shape: ShapeRule | Annotated[list[ShapeRule], msgspec.Meta(min_length=1)] = "as_is"
    """what is held equal in the model; several give one contest each."""
    cache_at: Any = 0
    """context in tokens at which shape = cache compares whole caches, states included; 0: bytes of one token."""
    length: LengthRule | Annotated[list[LengthRule], msgspec.Meta(min_length=1)] = "tokens"
    """what is held equal in training; several give one contest each."""
    baseline: str = ""
    """arm that the others are compared with; if empty, the first."""
    primary: str = ""
    """arm of the planned comparison; if empty, the first other arm."""
    margin: Annotated[float, msgspec.Meta(ge=0, lt=1e6)] | None = None
    """largest difference that counts as none; by default 0.005 bits per byte, or that of the task's metric."""
    tokenizer: str = ""
    """bytes, bpe:VOCABULARY or file:TOKENIZER.json; if empty, the size's own."""
    context: Any = 0
    """tokens in a window, a divisor of batch; several give one contest each; 0: the size's own."""
    branches: Any = None
    """token counts to decay at, from one trunk per arm and seed; replaces tokens."""
    model: Any = msgspec.field(default_factory=dict)
    """settings of the model that all arms share, listed as model.NAME."""
    tune: Any = None
    """grid of learning rates to tune every arm on; replaces lr; listed as tune.NAME."""
    bytes: Any = 0
    """bytes of text each run is trained on; replaces tokens."""
    probes: Any = ()
    """measurements on every trained run other than its loss (h2h list probes)."""
    log_circuits: bool = False
    """whether to log rates, gradients and product norms of every circuit."""
    tasks: _Names | None = None
    """tasks to train on instead of a corpus (h2h data list), one contest each."""
    causal: bool = True
    """whether the models of a task are causal; false: bidirectional."""
    answer: Literal["write", "point"] = "write"
    """how a task's model answers: write generates the answer, point selects a span of the text."""
    metric: str = ""
    """metric of all tasks; if empty, each task's own."""
    start: str = ""
    """run whose weights the models of a task start from: STUDY/ARM/SEED, STUDY/ID or its directory."""


_KNOWN = {
    "from" if name == "init_from" else name for name in GivenSettings.__struct_encode_fields__
} | _TRAINING


def build_study(given: Mapping[str, Any]) -> StudySpec:
    """Return the study defined by plain values: a TOML file's content, or keyword arguments of `Study`."""
    check_values(given, "")
    values = with_stored_names(given)
    check_known(values, _KNOWN, "study setting")
    training = {key: values.pop(key) for key in list(values) if key in _TRAINING}
    arms = _arms(values.pop("arms", None))
    plain = decode(
        GivenSettings, {"init_from" if key == "from" else key: value for key, value in values.items()}
    )
    decode(Settings, plain.model, "model")
    tasks = _tasks(values, _several(plain.tasks or ()), arms)
    branches = _branches(plain.branches, training, arms)
    names, sizes = _several(plain.corpus), _several(plain.size)
    spec = StudySpec(
        arms=arms,
        name=_name(plain.name),
        corpora=() if tasks else names,
        sizes=sizes,
        seeds=_seeds(plain.seeds),
        shapes=_several(plain.shape),
        cache_at=_cache_at(plain.cache_at, _several(plain.shape)),
        lengths=_several(plain.length),
        baseline=plain.baseline,
        primary=plain.primary,
        given_margin=plain.margin,
        tokenizer=plain.tokenizer,
        contexts=_contexts(plain.context),
        branches=branches,
        model=dict(plain.model),
        training=training,
        tune=_tune(plain.tune, training, "bytes" in values),
        bytes=parse_count(plain.bytes, "bytes"),
        probes=_probes(plain.probes, names, bool(tasks)),
        tasks=tasks,
        causal=plain.causal,
        answer=plain.answer,
        metric=plain.metric,
        start=plain.start,
        log_circuits=plain.log_circuits,
    )
    if "bytes" in values and not spec.bytes:
        raise UserError(
            f"bytes={values['bytes']} gives no text to train on; expected a count above 0, such as '20M'"
        )
    own = [arm.label for arm in arms if "tokens" in arm.training]
    if spec.bytes and (own or "tokens" in training):
        where = f" (tokens of arm '{own[0]}')" if own else ""
        raise UserError(f"tokens and bytes are both given{where}; give only one of them")
    for name in spec.sizes:
        for arm in spec.arms:
            arm.layout.layers(spec.size(name, arm).layers)
            for context in spec.contexts or (0,):
                size = spec.size(name, arm, context)
                settings, window = spec.train_settings(arm, size), size.context
                if tasks:  # a step of a task consists of whole examples
                    continue
                settings.steps(window)
                if spec.tune and spec.tune.tokens is not None:
                    _check_tuning_tokens(dataclasses.replace(settings, tokens=spec.tune.tokens), window)
    if spec.primary_arm is spec.baseline_arm:
        raise UserError(
            f"the primary arm '{spec.baseline_arm.text}' is the baseline; it cannot be compared with itself"
        )
    return spec


_MARGIN = 0.005
_OF_TASKS = ("causal", "answer", "metric", "from")
_OF_CORPORA = ("corpus", "bytes", "branches")


def _tasks(values: Mapping[str, Any], tasks: tuple[str, ...], arms: tuple[Arm, ...]) -> tuple[str, ...]:
    """Return the tasks; raise UserError for a setting that does not apply to tasks, or to corpora."""
    for key in values:
        if tasks and key in _OF_CORPORA:
            raise UserError(f"{key} applies to corpora only; remove it or tasks = {list(tasks)}")
        if not tasks and key in _OF_TASKS:
            name = "init_from" if key == "from" else key
            raise UserError(
                f"{name} applies to tasks only; add tasks, such as tasks = ['recall', 'induction']"
            )
    for arm in arms:
        if arm.start and not tasks:
            raise UserError(f"arm '{arm.label}': init_from applies to tasks only; add tasks")
    for name in tasks:
        check_task_known(name)
    return tasks


def read_study(path: Path) -> dict[str, Any]:
    """Return the values of a TOML study file; a syntax error names the line."""
    try:
        return tomllib.loads(read_text(path, _MAX_BYTES, links=True))
    except MissingFile:
        raise UserError(f"no such study file: {path}") from None
    except ValueError as error:  # TOMLDecodeError, or an integer of more digits than Python converts
        raise UserError(f"study file {path} is not TOML: {error}") from None
    except RecursionError:
        raise UserError(f"study file {path} is not TOML: it is nested too deep") from None


_LONGEST_NAME = 200


def _name(name: str) -> str:
    """Return the name of a study; its default directory below races/ is named after it."""
    if not name.strip() or len(name.encode()) > _LONGEST_NAME:
        raise UserError(f"name takes a text of 1 to {_LONGEST_NAME} bytes, got '{name[:80]}'")
    return name


def _arms(given: Any) -> tuple[Arm, ...]:
    if isinstance(given, str | type | Score | Mapping):
        given = [given]
    if not isinstance(given, list | tuple) or not given:
        raise UserError(
            "a study needs arms, such as arms = ['standard', 'sharing:tie=kv']; h2h race quick runs a shipped study"
        )
    arms: list[Arm] = []
    for entry in given:
        arm = _arm(entry)
        if any(arm.text == other.text and arm.layout.identity != other.layout.identity for other in arms):
            raise UserError(
                f"two arms are different mechanisms called '{arm.text}'; put them into a file under two names, and give "
                "./FILE.py:NAME"
            )
        if any(arm.text == other.text and arm.label == other.label for other in arms):
            raise UserError(
                f"arm '{arm.label}' is given twice; give one of them another name and its own settings"
            )
        if any(arm.label == other.label for other in arms):
            arm = dataclasses.replace(arm, label=arm.text)
        arms.append(arm)
    return tuple(arms)


def _arm(entry: Any) -> Arm:
    if isinstance(entry, str | type | Score):
        layout = parse_layout(entry)
        return Arm(layout.text, layout.label, layout)
    named = entry.get("arm") if isinstance(entry, Mapping) else entry
    if inspect.isfunction(named):
        parse_layout(named)  # says what it lacks
    if not isinstance(entry, Mapping) or not isinstance(named, str | type | Score):
        raise UserError(
            f"an arm is a string, a class, a score function, or a table with 'arm' and its own settings; got {entry!r:.80}"
        )
    layout = parse_layout(entry["arm"])
    own = ("arm", "name", "model", "from")
    rest = {key: value for key, value in entry.items() if key not in own}
    for key in rest:
        if key not in _TRAINING:
            raise unknown(f"setting of arm '{layout.text}'", key, {*own} | _TRAINING)
    label = as_text(entry.get("name", layout.label), "name")
    if not label.strip():
        raise UserError(f"arm '{layout.text}': its name is empty")
    model = entry.get("model", {})
    decode(Settings, model, "model")
    return Arm(layout.text, label, layout, rest, dict(model), as_text(entry.get("from", ""), "from"))


def _contexts(value: Any) -> tuple[int, ...]:
    given = value if isinstance(value, list | tuple) else [value]
    contexts = tuple(dict.fromkeys(parse_count(part, "context") for part in given))
    if isinstance(value, list | tuple) and (not contexts or 0 in contexts):
        raise UserError(f"context takes a number of tokens or a list of them, each above 0, got {value!r}")
    return tuple(context for context in contexts if context)


def _cache_at(value: Any, shapes: tuple[str, ...]) -> int:
    """Return the context at which caches are compared."""
    context = parse_count(value, "cache_at")
    if context and "cache" not in shapes:
        raise UserError(f"cache_at={value} applies to shape = cache only; add shape = 'cache'")
    return context


def _branches(value: Any, training: dict[str, Any], arms: tuple[Arm, ...]) -> tuple[int, ...]:
    """Return the token counts of the branches. Sets `tokens` to the largest and `schedule` to wsd in `training`."""
    if value is None:
        return ()
    given = value if isinstance(value, list | tuple) else [value]
    counts = tuple(sorted({parse_count(part, "branches") for part in given}))
    if len(counts) < 2 or not counts[0]:
        raise UserError(
            f"branches takes two token counts or more, such as ['1M', '4M', '16M'], got {value!r}; "
            "for a single count use tokens and schedule = 'wsd'"
        )
    if "tokens" in training and parse_count(training["tokens"], "tokens") != counts[-1]:
        raise UserError(
            f"tokens={training['tokens']} and branches up to {exact_count(counts[-1])} are both given; "
            "the longest branch sets the length, so leave tokens out"
        )
    for owner, settings in [("", training), *((f"arm '{arm.label}': ", arm.training) for arm in arms)]:
        if settings.get("schedule", "wsd") != "wsd":
            raise UserError(
                f"{owner}schedule={settings['schedule']} has no separate decay phase: branches need wsd"
            )
    for arm in arms:
        if "tokens" in arm.training:
            raise UserError(f"arm '{arm.label}' has tokens of its own; with branches leave them out")
    training |= {"tokens": counts[-1], "schedule": "wsd"}
    return counts


def _probes(given: Any, names: tuple[str, ...], of_tasks: bool) -> tuple[str, ...]:
    """Return the probes in canonical form; `corpora` without names means every corpus of the study."""
    every = corpora.argument(names)
    found = probe_names(given)
    check_probes_apply(found, "tasks" if of_tasks else "corpora")
    return tuple(f"{name}:{every}" if name == corpora.NAME else name for name in found)


def changed_settings(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` updated with `changes`. Tables are merged; a changed setting removes those that exclude it."""
    joined = dict(values)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(joined.get(key), Mapping)
        joined[key] = {**joined[key], **value} if both else value
    for group in (("lr", "tune"), ("tokens", "bytes", "branches"), ("corpus", "tasks")):
        if any(key in changes for key in group):
            for other in group:
                if other not in changes:
                    joined.pop(other, None)
    return joined


def _tune(value: Any, training: dict[str, Any], in_bytes: bool) -> Tune | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not isinstance(value.get("lr"), list | tuple):
        raise UserError(
            f"tune takes a table such as tune = {{lr = [1e-3, 2e-3, 4e-3], tokens = '10M'}}, got {value!r}"
        )
    for key in value:
        if key not in Tune.__dataclass_fields__:
            raise unknown("tune setting", str(key), Tune.__dataclass_fields__)
    if "lr" in training:
        raise UserError("lr and tune are both given; give only one of them")
    rates = value["lr"]
    if not all(map(is_number, rates)):
        raise UserError(f"tune.lr takes numbers, got {rates!r}")
    if in_bytes and "tokens" not in value:
        raise UserError(
            "tune needs tokens of its own if the study's length is given in bytes; add tune.tokens"
        )
    tokens = parse_count(value["tokens"], "tune.tokens") if "tokens" in value else None
    seeds = parse_count(value.get("seeds", 1), "tune.seeds")
    return Tune(tuple(sorted({float(rate) for rate in rates})), tokens, seeds)


def _check_tuning_tokens(training: TrainSettings, context: int) -> None:
    try:
        training.steps(context)
    except UserError as error:
        raise UserError(f"tune: {error}") from None


def _several(value: str | Sequence[str]) -> tuple[str, ...]:
    """Return one name or several as a tuple, each once."""
    return tuple(dict.fromkeys([value] if isinstance(value, str) else value))


_MAX_SEEDS = 10_000
_LARGEST_SEED = 2**48
"""The seeds of layers are 10,007 times the seed of a run, and torch takes seeds below 2**63."""


def _seeds(value: Any) -> tuple[int, ...]:
    if isinstance(value, list | tuple):
        seeds = tuple(parse_count(seed, "seeds") for seed in value)
        if too_large := [seed for seed in seeds if seed > _LARGEST_SEED]:
            raise UserError(f"seed {too_large[0]} is too large; at most {_LARGEST_SEED} (2**48)")
        if len(set(seeds)) != len(seeds):
            raise UserError(f"seeds {list(seeds)} contain a duplicate")
    else:
        count = parse_count(value, "seeds")
        if count > _MAX_SEEDS:
            raise UserError(f"seeds={count:,} is too many; at most {_MAX_SEEDS:,}")
        seeds = tuple(range(1, count + 1))
    if not seeds:
        raise UserError("seeds=0 gives no runs; give 1 or more, or 2 or more for an interval")
    return seeds
