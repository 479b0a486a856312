"""h2h race, report, watch, runs, doctor."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from headtohead.api import Study, StudyResult, examine_study, open_study, watch_study
from headtohead.cli.flags import OneWay, flag, yes_or_no
from headtohead.cli.tables import number, print_table
from headtohead.common.errors import UnreadableFile, UserError
from headtohead.common.numbers import exact_count, parse_count, parse_duration
from headtohead.interpret.faithfulness import ATTENTION
from headtohead.study.judge.transfer_matrix import places, short_labels
from headtohead.study.judge.verdict import METRIC
from headtohead.study.numerics import NUMERICS, numerics_of
from headtohead.study.run.executor import Summary
from headtohead.study.store.archive import export_runs, import_runs
from headtohead.study.store.manifest import metric_label
from headtohead.study.store.run_store import Store


def race(
    study: Annotated[str | None, tyro.conf.Positional, flag("STUDY.toml")] = None,
    /,
    *,
    arms: Annotated[tuple[str, ...], flag("ARM [ARM ...]")] = (),
    corpus: Annotated[tuple[str, ...], flag("NAME")] = (),
    tasks: Annotated[tuple[str, ...], flag("TASK")] = (),
    from_: Annotated[str | None, flag(name="from", metavar="RUN")] = None,
    size: Annotated[tuple[str, ...], flag("NAME")] = (),
    tokens: Annotated[str | None, flag("COUNT")] = None,
    seeds: Annotated[str | None, flag("COUNT|A,B,...")] = None,
    out: Annotated[str | None, flag("DIR")] = None,
    baseline: Annotated[str | None, flag("ARM")] = None,
    primary: Annotated[str | None, flag("ARM")] = None,
    shape: Annotated[tuple[str, ...], flag("RULE")] = (),
    length: Annotated[tuple[str, ...], flag("RULE")] = (),
    margin: Annotated[float | None, flag("BITS")] = None,
    batch: Annotated[str | None, flag("COUNT")] = None,
    lr: Annotated[float | None, flag("RATE")] = None,
    context: Annotated[tuple[str, ...], flag("COUNT")] = (),
    branches: Annotated[tuple[str, ...], flag("COUNT")] = (),
    tokenizer: Annotated[str | None, flag("NAME")] = None,
    precision: Annotated[str | None, flag("float32|bf16")] = None,
    probes: Annotated[tuple[str, ...], flag("PROBE")] = (),
    set: Annotated[tuple[str, ...], flag("KEY=VALUE")] = (),
    device: Annotated[str, flag("auto|cpu|cuda")] = "auto",
    workers: Annotated[int, flag("COUNT")] = 0,
    threads: Annotated[int, flag("COUNT")] = 1,
    data_dir: Annotated[str | None, flag("DIR")] = None,
    for_: Annotated[str | None, flag(name="for", metavar="TIME")] = None,
    retry: Annotated[Literal["none", "failed"], flag()] = "none",
    compile: OneWay = False,
    no_compile: OneWay = False,
    stack: OneWay = False,
    no_stack: OneWay = False,
    keep_weights: Annotated[bool, flag()] = True,
    allow_failed_check: OneWay = False,
    quiet: Annotated[bool, flag()] = False,
    track: Annotated[tuple[str, ...], flag("tensorboard|wandb")] = (),
    extend: Annotated[bool, flag()] = False,
) -> int:
    """Run a study: train every arm on every seed, judge, report. Run it again and it does only what is missing.

    Example: h2h race --arms standard sharing:tie=kv ./mine.py:Mine --tokens 500k --out races/mine

    Args:
        study: a TOML file; the flags below override what it says.
        arms: contenders: mechanisms with options, layouts, or FILE.py:Class.
        corpus: stdlib, file:PATH, or a named set (h2h data list).
        tasks: train for tasks in place of a corpus, a contest each (h2h data list): recall:pairs=16, hatexplain.
        from_: the run whose weights a task's models start from: a run's directory, or STUDY/ID.
        size: a model shape (h2h list).
        tokens: tokens each run is trained on: 120000, 120k, 65M.
        seeds: how many paired seeds, or which.
        out: where runs, verdicts and the page go; default: races/NAME, or races/ARMS-on-DATASET.
        baseline: the arm the others are measured against; the first one when not given.
        primary: the one comparison that was planned; the first other arm when not given.
        shape: what is held equal in the model: as_is, params, cache.
        length: what is held equal in training: tokens, flops, time, time_plain.
        margin: differences within it count as none, in bits per byte or a task's metric.
        batch: tokens per step.
        lr: peak learning rate; --lr.qk 30x: that of a circuit as a ratio to it, --lr.qk 1x..40x: a ramp. lr x decay stays equal.
        context: tokens in a window; several make a contest each.
        branches: token counts at which a decayed model is wanted, from one trunk per arm and seed, in place of --tokens.
        tokenizer: bytes, bpe:VOCABULARY or file:TOKENIZER.json.
        precision: arithmetic of training.
        probes: what to measure on every trained run besides its loss (h2h list --probes).
        set: any other setting, such as warmup=0.05, schedule=wsd, model.positions=learned.
        device: where to train.
        workers: runs at once; 0: one per core on CPU, one on a GPU.
        threads: threads of each run on CPU; another number gives other last digits.
        data_dir: where the named sets stand; H2H_DATA when not given.
        for_: stop cleanly after that time: 90s, 8m, 1.5h.
        retry: failed: do runs again that failed before.
        compile: compile the model with torch.compile; when nothing is said, on a GPU at 5m and above.
        no_compile: do not.
        stack: train the seeds of an arm in one pass; when nothing is said, on a GPU below 5m where memory allows.
        no_stack: do not.
        keep_weights: keep the trained weights of each run.
        allow_failed_check: train arms that fail the causality check; their verdicts say so and are never better or equivalent.
        quiet: show no progress.
        track: trackers to send every run's rows to; no run fails because of one.
        extend: continue the study in --out with other datasets, sizes or rules; rejected otherwise.
    """
    given: dict[str, Any] = {
        "arms": list(arms) or None,
        "corpus": list(corpus) or None,
        "tasks": list(tasks) or None,
        "from": from_,
        "size": list(size) or None,
        "tokens": None if tokens is None else parse_count(tokens, "--tokens"),
        "seeds": None if seeds is None else parse_seeds(seeds),
        "baseline": baseline,
        "primary": primary,
        "shape": list(shape) or None,
        "length": list(length) or None,
        "margin": margin,
        "batch": None if batch is None else parse_count(batch, "--batch"),
        "lr": lr,
        "context": [parse_count(count, "--context") for count in context] or None,
        "branches": [parse_count(count, "--branches") for count in branches] or None,
        "tokenizer": tokenizer,
        "precision": precision,
        "probes": list(probes) or None,
    }
    planned = chosen_study(study, given, set)
    seconds = math.inf if for_ is None else parse_duration(for_)
    result = planned.run(
        out,
        device=device,
        workers=workers,
        threads=threads,
        data_dir=data_dir,
        seconds=seconds,
        retry_failed=retry == "failed",
        keep_weights=keep_weights,
        allow_failed_check=allow_failed_check,
        compile=yes_or_no("compile", compile, no_compile),
        stack=yes_or_no("stack", stack, no_stack),
        quiet=quiet,
        track=track,
        extend=extend,
    )
    if result.verdicts:
        show_result(result)
    return show_left(result.summary)


def show_left(summary: Summary) -> int:
    """Say what is left to do, if anything; return the exit code, 1 where runs have no result and none was stopped."""
    if summary.left and summary.stopped:
        print(f"\nstopped with {summary.left} runs left; the same command continues where this one stopped")
    elif summary.left:
        for words in summary.trouble:
            print(words)
        print(
            f"\n{summary.left} runs have no result; see to the cause, and the same command goes on with them"
        )
        return 1
    return 0


def report(
    folder: Annotated[str, tyro.conf.Positional, flag("DIR")],
    /,
    *,
    stability: Annotated[bool, flag()] = False,
    charts: Annotated[bool, flag()] = False,
) -> int:
    """Judge a study again and rebuild its page, from its directory alone.

    Args:
        folder: the study's directory.
        stability: also show how often each arm diverged and leapt, and how soon it learned.
        charts: write every chart as SVG and PNG too, into DIR/charts.
    """
    result = open_study(folder)
    result.write()
    files = result.write_charts() if charts else []
    show_result(result)
    if stability:
        _show_stability(result)
    if charts:
        print(f"charts:   {len(files)} files in {result.path / 'charts'}")
    return 0


def watch(
    folder: Annotated[str, tyro.conf.Positional, flag("DIR")],
    /,
    *,
    port: Annotated[int, flag("NUMBER")] = 8642,
) -> int:
    """Follow a running study in a browser on this machine: curves so far, progress, time left. Ctrl-C stops it.

    The page can be reached from this machine alone, and only shows; nothing can be changed through it.

    Args:
        folder: the study's directory.
        port: where to listen on 127.0.0.1; 0: any free port.
    """
    watch_study(folder, port=port)
    return 0


def runs(
    folder: Annotated[str, tyro.conf.Positional, flag("DIR")],
    /,
    *,
    export: Annotated[str | None, flag("FILE")] = None,
    import_: Annotated[str | None, flag(name="import", metavar="FILE")] = None,
) -> int:
    """List the runs of a study and their states; move finished ones between machines.

    Args:
        folder: the study's directory.
        export: write the finished runs, without weights, into this .tar.gz or .tar.xz file.
        import_: add the finished runs of such a file.
    """
    store = Store(Path(folder))
    if import_ is not None:
        new, known = import_runs(store, Path(import_))
        print(f"{new} runs added, {known} were here already")
    if not store.path.is_dir():
        raise UserError(f"no study in {folder}: there is no such directory")
    if export is not None:
        print(f"{export_runs(store, Path(export))} finished runs written to {export}")
        return 0
    rows = []
    damage = []
    units = dict[str, None]()
    for run in store.runs():
        try:
            spec, result = run.spec(), run.result()
        except UnreadableFile as error:
            damage.append(str(error))
            rows.append((run.id, "?", 0, "?", "?", "?", "damaged", "–"))
            continue
        tokens = exact_count(spec["training"]["tokens"])
        place = (spec["label"], spec["seed"], spec["corpus"]["label"], spec["size"]["name"], tokens)
        test = (result or {}).get("test", {})
        metric = test.get("metric", METRIC)
        units[metric_label(metric)] = None
        numerics = numerics_of(spec)
        mark = "" if numerics == str(NUMERICS) else f", computed with numerics {numerics}"
        rows.append((run.id, *place, f"{run.state(result)}{mark}", number(test.get(metric), ".4f")))
    rows.sort(key=lambda row: (row[3], row[4], row[1], row[2]))
    score = next(iter(units)) if len(units) == 1 else "score"
    columns = ("run", "arm", "seed", "corpus", "size", "tokens", "state", score)
    print_table(f"{len(rows)} runs in {folder}", columns, rows, right=("seed", "tokens", score))
    for words in damage:
        print(words)
    if damage:
        print(f"h2h doctor {folder} says what can be mended")
    return 0


def doctor(
    folder: Annotated[str, tyro.conf.Positional, flag("DIR")],
    /,
    *,
    dry_run: Annotated[bool, flag()] = False,
) -> int:
    """Look through a study's directory: checksums, whole files, locks without an owner, disk left; mend what is safe.

    Damaged files are renamed, never deleted; every mending is listed. Exit code 1 when something is left to do.

    Args:
        folder: the study's directory.
        dry_run: say what would be mended, and change nothing.
    """
    findings = examine_study(folder, repair=not dry_run)
    for finding in findings:
        print(finding)
    left = sum(not finding.repaired for finding in findings)
    count = len(Store(Path(folder)).runs())
    print(f"{count} runs examined: {len(findings)} findings, {len(findings) - left} mended, {left} left")
    if any(finding.repair and not finding.repaired for finding in findings):
        print(f"h2h doctor {folder} mends what can be mended")
    return 1 if left else 0


def show_result(result: StudyResult) -> None:
    """Print the verdicts, and where the rest is."""
    show_verdicts(result)
    print(f"\nverdicts: {result.path / 'verdicts.json'}")
    if result.report is not None:
        print(f"page:     {result.report}")


def show_verdicts(result: StudyResult) -> None:
    """Print a sentence per arm, the verdicts as tables, trends, and how budgets were solved."""
    for words in result.headlines():
        print(words)
    for contest in result.manifest.contests():
        rows: list[tuple[object, ...]] = []
        found = [row for row in result.verdicts if row.of(contest)]
        metric = found[0].metric if found else METRIC
        columns = (
            *("arm", "verdict", metric_label(metric), "difference", "95 % interval"),
            *("p (Holm)", "detectable", "n", "remarks"),
        )
        # Another metric than bits per byte may be of any magnitude.
        form = ".4f" if metric == METRIC else ".5g"
        for row in found:
            interval = "–" if row.ci_low is None else f"{row.ci_low:+{form}} to {row.ci_high:+{form}}"
            remarks = "; ".join((["primary"] if row.primary else []) + row.notes)
            numbers = (number(row.mean, form), number(row.difference, f"+{form}"), interval)
            rows.append(
                (
                    row.label,
                    row.verdict,
                    *numbers,
                    number(row.p_holm, ".3g"),
                    number(row.detectable, form),
                    row.n,
                    remarks,
                )
            )
        base = number(found[0].baseline_mean if found else None, form)
        rows.append((result.manifest.baseline, "baseline", base, "", "", "", "", "", ""))
        print_table(contest.title, columns, rows, right=columns[2:8])
    _show_trends(result)
    _show_matrix(result)
    _show_explained(result)
    _show_solved(result)
    for words in result.damage:
        print(words)


def _show_trends(result: StudyResult) -> None:
    trends = result.trends()
    for trend in trends:
        if trend.line is not None:
            print("; ".join([f"{trend.words.removesuffix('.')} ({trend.where})", *trend.notes]))
    for words in dict.fromkeys(trend.notes[0] for trend in trends if trend.line is None):
        print(words)


def _show_matrix(result: StudyResult) -> None:
    cells = result.matrix()
    if not cells:
        return
    short = short_labels(cells)
    tested = list(dict.fromkeys(short[cell.evaluated] for cell in cells))
    apart = places(cells)
    several = any(apart.values())
    rows: dict[tuple[str, ...], dict[str, str]] = {}
    for cell in cells:
        row = cell.verdict
        place = (row.label, short[cell.trained], *([apart[cell.contest]] if several else []))
        words = "–" if row.difference is None else f"{row.difference:+.4f} {row.verdict}"
        rows.setdefault(place, {})[short[cell.evaluated]] = words
    labels = [label for _, label in result.manifest.arms]
    columns = ("arm", "trained on", *(["contest"] if several else []), *tested)
    lines = [(*place, *(found.get(name, "–") for name in tested)) for place, found in rows.items()]
    lines.sort(key=lambda line: labels.index(str(line[0])))
    title = f"trained here, tested there: difference to {result.manifest.baseline} in bits per byte"
    print_table(title, columns, lines, right=tested)


def _show_explained(result: StudyResult) -> None:
    contests = result.manifest.contests()
    rows = []
    for row in result.explained():
        name = next((name for name in ATTENTION if name in row.found["explanations"]), "")
        numbers = [
            number(row.mean(path.format(name)), form)
            for path, form in (
                ("explanations.{}.mass", ".3f"),
                ("uniform", ".3f"),
                ("explanations.{}.confidence.33", ".1f"),
                ("explanations.{}.aopc_comprehensiveness", ".3f"),
                ("chance.aopc_comprehensiveness", ".3f"),
            )
        ]
        by = name.replace("_", " ") or "–"
        rows.append((row.contest.title_among(contests), row.label, by, *numbers, len(row.seeds)))
    columns = (
        *("contest", "arm", "by", "on relevant tokens", "even attention"),
        *("% above .33", "AOPC", "by chance", "n"),
    )
    if rows:
        print_table("where they look: attention of the read-out row", columns, rows, right=columns[3:])


def _show_solved(result: StudyResult) -> None:
    columns = ("contest", "arm", "rule", "solved", "from", "to", "held equal", "match")
    rows = [
        (
            row.contest.title,
            row.label,
            row.rule,
            row.what,
            f"{row.before:,.0f}",
            f"{row.after:,.0f}",
            row.held,
            f"{row.match:.2%}",
        )
        for row in result.manifest.solved
    ]
    if rows:
        several = len(result.manifest.contests()) > 1
        shown = rows if several else [row[1:] for row in rows]
        print_table(
            "how budgets were solved",
            columns if several else columns[1:],
            shown,
            right=("from", "to", "match"),
        )
        for words in dict.fromkeys(f"{row.label}: {row.note}" for row in result.manifest.solved if row.note):
            print(words)


def _show_stability(result: StudyResult) -> None:
    columns = (
        *("arm", "contest", "diverged", "95 % interval", "spikes per run", "gradient tail"),
        *("reached", "tokens to target", "interval of it", "one rate off"),
    )
    rows = []
    for row in result.stability():
        share = "–" if row.diverged_low is None else f"{row.diverged_low:.0%} to {row.diverged_high:.0%}"
        low, high = row.tokens_ratio_low, row.tokens_ratio_high
        rows.append(
            (
                row.label,
                row.contest,
                f"{row.diverged}/{row.runs}",
                share,
                number(row.spikes, ".2f"),
                number(row.gradient_tail, ".2f"),
                f"{row.reached}/{row.pairs}",
                "–" if row.tokens_ratio is None else f"{row.tokens_ratio:.3f} x",
                "–" if low is None else f"{low:.3f} to {high:.3f}",
                number(row.rate_rise, "+.4f"),
            )
        )
    print_table("stability and sample efficiency", columns, rows, right=columns[2:])


def chosen_study(study: str | None, given: dict[str, Any], settings: tuple[str, ...]) -> Study:
    """Return the study of a file, of flags, or of a file that flags override; a flag that is None was not given."""
    changes = {key: value for key, value in given.items() if value is not None}
    for text in settings:
        _set(changes, text)
    return Study.from_file(study, **changes) if study else Study(**changes)


def parse_seeds(text: str) -> Any:
    """Return how many seeds, or which."""
    return (
        [parse_count(part, "--seeds") for part in text.split(",")]
        if "," in text
        else parse_count(text, "--seeds")
    )


def _set(changes: dict[str, Any], text: str) -> None:
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise UserError(f"--set takes KEY=VALUE, got '{text}'")
    table, _, inner = key.rpartition(".")
    if table == "lr":
        changes.setdefault("circuit_lr", {})[inner] = value
        return
    if table not in ("", "model", "tune"):
        raise UserError(f"--set: unknown table '{table}' (allowed: lr, model, tune)")
    place = changes.setdefault(table, {}) if table else changes
    place[inner] = [_value(part) for part in value.split(",")] if key == "tune.lr" else _value(value)


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
