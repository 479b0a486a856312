"""How commands print a study's results."""

from __future__ import annotations

from collections.abc import Callable

from headtohead.api import StudyResult
from headtohead.cli.shared.tables import print_rows, print_table
from headtohead.common.numbers import interval, number
from headtohead.common.terminal import say
from headtohead.interpret.faithfulness import ATTENTION
from headtohead.study.judge.transfer_matrix import places, short_labels
from headtohead.study.judge.verdict import Verdict
from headtohead.study.run.execute import Summary
from headtohead.study.store.manifest import METRIC, Contest, Solved, metric_label


def show_left(summary: Summary) -> int:
    """Print what is left to do; return the exit code: 1 when runs have no result although nothing stopped them."""
    if summary.left and summary.stopped:
        say(f"\nstopped with {summary.left} runs left; repeat the same command to continue")
    elif summary.left:
        for words in summary.trouble:
            say(words)
        say(f"\n{summary.left} runs have no result; fix the cause and repeat the same command")
        return 1
    return 0


def show_result(result: StudyResult) -> None:
    """Print the verdicts and the paths of verdicts.json and the report."""
    show_verdicts(result)
    say(f"\nverdicts: {result.path / 'verdicts.json'}")
    if result.report is not None:
        say(f"page:     {result.report}")


def show_verdicts(result: StudyResult) -> None:
    """Print headlines, one table of verdicts per contest, trends, and the solved budgets."""
    for words in result.headlines():
        say(words)
    for contest in result.manifest.contests():
        _show_contest(result, contest)
    _show_trends(result)
    _show_matrix(result)
    _show_explained(result)
    _show_solved(result)
    for words in result.damage:
        say(words)


def _show_contest(result: StudyResult, contest: Contest) -> None:
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
        "p (Holm)": lambda row: number(row.p_holm, ".3g"),
        "detectable": lambda row: number(row.detectable, form),
        "n": lambda row: row.n,
        "remarks": lambda row: "; ".join((["primary"] if row.primary else []) + row.notes),
    }
    rows = [[cell(row) for cell in columns.values()] for row in found]
    base = number(found[0].baseline_mean if found else None, form)
    rows.append([result.manifest.baseline, "baseline", base, *[""] * (len(columns) - 3)])
    print_table(contest.title, [*columns], rows, right=[*columns][2:-1])


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
