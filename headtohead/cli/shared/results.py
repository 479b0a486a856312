"""How commands print a study's results."""

from __future__ import annotations

from collections.abc import Callable

from headtohead.api import StudyResult
from headtohead.cli.shared.exit_codes import ExitCode
from headtohead.cli.shared.tables import print_rows, print_table, say_wrapped
from headtohead.common.numbers import interval, number
from headtohead.common.terminal import say
from headtohead.common.text import counted
from headtohead.interpret.faithfulness import ATTENTION
from headtohead.study.judge.headline import headline
from headtohead.study.judge.transfer_matrix import places, short_labels
from headtohead.study.judge.verdict import Verdict
from headtohead.study.run.execute import Summary
from headtohead.study.store.manifest import METRIC, Contest, Solved, metric_label


def show_left(summary: Summary) -> ExitCode:
    """Print what is left to do; return the exit code."""
    if summary.left and summary.stopped:
        say(f"\nstopped with {counted(summary.left, 'run')} left; repeat the same command to continue")
        return ExitCode.UNFINISHED
    if summary.left:
        for words in summary.trouble:
            say(words)
        say(f"\n{counted(summary.left, 'run')} without a result; fix the cause and repeat the same command")
        return ExitCode.PROBLEM
    return ExitCode.PROBLEM if summary.unreported else ExitCode.DONE


def show_result(result: StudyResult) -> None:
    """Print the verdicts and the paths of verdicts.json and the report."""
    show_verdicts(result)
    say(f"\nverdicts: {result.path / 'verdicts.json'}")
    if result.report is not None:
        say(f"page:     {result.report}")


def show_verdicts(result: StudyResult) -> None:
    """Print who won in one sentence, one table of verdicts per contest, trends, and the solved budgets."""
    if result.verdicts:
        say(f"\n{headline(result.verdicts)}")
    for contest in result.manifest.contests():
        _show_contest(result, contest)
    _show_trends(result)
    _show_matrix(result)
    _show_explained(result)
    _show_solved(result)
    for words in result.damage:
        say(words)


def _show_contest(result: StudyResult, contest: Contest) -> None:
    """Print the verdicts of a contest in a table that fits 80 columns, and the remarks about each arm below it."""
    found = [row for row in result.verdicts if row.of(contest)]
    metric = found[0].metric if found else METRIC
    # Metrics other than bits per byte have any magnitude.
    form = ".4f" if metric == METRIC else ".5g"
    columns: dict[str, Callable[[Verdict], object]] = {
        "arm": lambda row: row.label,
        "verdict": lambda row: row.verdict,
        metric_label(metric): lambda row: number(row.mean, form),
        "difference": lambda row: number(row.difference, f"+{form}"),
        "95 % interval": lambda row: interval(row.ci_low, row.ci_high, f"+{form}"),
        "p (Holm)": lambda row: number(row.p_holm, ".2g"),
        "n": lambda row: row.n,
    }
    rows = [[cell(row) for cell in columns.values()] for row in found]
    base = number(found[0].baseline_mean if found else None, form)
    rows.append([result.manifest.baseline, "baseline", base, *[""] * (len(columns) - 3)])
    print_table(contest.title, [*columns], rows, right=[*columns][2:])
    _show_remarks({row.label: _remarks(row, form) for row in found})


def _show_remarks(remarks: dict[str, list[str]]) -> None:
    """Print the remarks by arm; those that several arms all share come first, once."""
    first = next(iter(remarks.values()), [])
    shared = [text for text in first if len(remarks) > 1 and all(text in own for own in remarks.values())]
    own = {label: [text for text in texts if text not in shared] for label, texts in remarks.items()}
    say()
    for label, texts in {"all arms": shared, **own}.items():
        if texts:
            say_wrapped(f"{label}: {'; '.join(texts)}")


def _remarks(row: Verdict, form: str) -> list[str]:
    """Return what a reader of the verdict must know: the planned comparison, what could be detected, the notes."""
    power = (
        f"a difference of {row.detectable:{form}} or more would probably be detected"
        if row.verdict == "undecided" and row.detectable is not None
        else ""
    )
    return [*(["planned comparison"] if row.primary else []), *([power] if power else []), *row.notes]


def _show_trends(result: StudyResult) -> None:
    trends = result.trends()
    for trend in trends:
        if trend.line is not None:
            say("; ".join([f"{trend.words.removesuffix('.')} ({trend.where})", *trend.notes]))
    for words in dict.fromkeys(trend.notes[0] for trend in trends if trend.line is None):
        say(words)


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
    title = f"difference from {result.manifest.baseline} in bits per byte"
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
        *("contest", "arm", "by", "on relevant tokens", "uniform attention"),
        *("% above .33", "AOPC", "by chance", "n"),
    )
    if rows:
        print_table("attention of the read-out row on relevant tokens", columns, rows, right=columns[3:])


def _show_solved(result: StudyResult) -> None:
    columns: dict[str, Callable[[Solved], object]] = {
        "contest": lambda row: row.contest.title,
        "arm": lambda row: row.label,
        "rule": lambda row: row.rule,
        "solved": lambda row: row.what,
        "from": lambda row: f"{row.before:,.0f}",
        "to": lambda row: f"{row.after:,.0f}",
        "held equal": lambda row: row.held,
        "match": lambda row: f"{row.match:.2%}",
    }
    if len(result.manifest.contests()) == 1:
        del columns["contest"]
    if solved := result.manifest.solved:
        text = ("contest", "arm", "rule", "solved", "held equal")
        print_rows("solved budgets", solved, columns, text)
        for words in dict.fromkeys(f"{row.label}: {row.note}" for row in solved if row.note):
            say(words)
