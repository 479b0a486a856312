"""Scale labels, criteria that are only shown, and criteria about training curves, judged from synthetic runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headtohead.common.errors import UserError
from headtohead.evaluation.logged_row import LoggedRow
from headtohead.study.claims import ClaimResult, judge_claims
from headtohead.study.claims.paper import read_paper
from headtohead.study.config.spec import build_study
from headtohead.study.judge.analysis import Analysis
from headtohead.study.judge.verdict import study_verdicts
from headtohead.study.store.manifest import Contest, Entry, Manifest
from tests.results import run_result

FILE = """
[study]
arms = ["standard", {{arm = "sharing:tie=kv", name = "a"}}]
corpus = "enwik8"
tokens = 2048
batch = 256
[scale.smoke]
[scale.small]
[scale.paper]
[[claim]]
id = "p.1"
statement = "said"
published = "some"
at = {{{at}}}
criteria = [{criteria}]
"""
BETTER = '{kind = "difference", arm = "a", expect = "better"}'
WORSE = '{kind = "difference", arm = "a", expect = "worse"'
SAME = 'corpus = "enwik8", size = "nano", tokens = 2048'
OWN = (0.004, -0.004, 0.002, -0.003, 0.001)
Curves = dict[str, list[list[float]]]
"""By arm: the logged losses of each seed, 256 tokens apart."""


def judged(
    folder: Path, criteria: str = BETTER, *, at: str = SAME, epochs: float = 1.0, curves: Curves | None = None
) -> ClaimResult:
    """Return the claim judged from five synthetic seeds in which arm a is better by 0.1."""
    path = folder / "p.toml"
    path.write_text(FILE.format(at=at, criteria=criteria))
    paper = read_paper(path)
    contest = Contest("enwik8", "enwik8", "nano", "as_is", "tokens")
    entries, results = [], {}
    for label in ("standard", "a"):
        for seed in range(1, 6):
            run = f"{label}/{seed}"
            entries.append(Entry(run, label, seed, contest))
            value = 2.0 - (0.1 + OWN[seed - 1]) * (label == "a")
            results[run] = run_result(
                test={"bits_per_byte": value, "blocks": [[value, 1.0]]}, epochs=epochs, step=8
            )
    arms = tuple((arm.text, arm.label) for arm in build_study(paper.settings("small")).arms)
    manifest = Manifest("p", arms, "standard", "a", 0.005, (1, 2, 3, 4, 5), tuple(entries))

    class Curved(Analysis):
        def curve(self, run: str) -> list[LoggedRow]:
            label, seed = run.split("/")
            losses = (curves or {}).get(label, [[]] * 5)[int(seed) - 1]
            return [LoggedRow(i, tokens=256 * i, nats=loss) for i, loss in enumerate(losses, 1)]

    finished = Curved(manifest, study_verdicts(manifest, results), results)
    (found,) = judge_claims(paper, "small", {"study": finished})
    return found


@pytest.mark.parametrize(
    ("at", "epochs", "note"),
    [
        (SAME, 1.0, ""),
        (SAME + ', tokenizer = "bytes", optimizer = "adamw:0.9/0.95", epochs = 4', 4.0, ""),
        ('corpus = "enwik8", size = "nano"', 1.0, "the published length is unknown"),
        (SAME, 3.5, "the text is seen 3.5 times here, how often in the published runs is unknown"),
        (SAME + ", epochs = 2", 3.5, "the text is seen 3.5 times here, 2 times published"),
        (SAME + ', tokenizer = "gpt2"', 1.0, "tokenizer bytes here, gpt2 published"),
        (SAME + ', tokenizer = "unknown"', 1.0, "the published tokenizer is unknown"),
        (SAME + ', optimizer = "sgd"', 1.0, "optimizer adamw here, sgd published"),
        (SAME + ', optimizer = "adamw"', 1.0, ""),
        (SAME + ', optimizer = "adamw:0.9/0.9999"', 1.0, "optimizer adamw:0.9/0.95 here, adamw:0.9/0.9999"),
        (SAME + ', optimizer = "unknown"', 1.0, "the published optimizer is unknown"),
    ],
)
def test_every_difference_from_the_published_setting_makes_the_scale_reduced(
    tmp_path: Path, at: str, epochs: float, note: str
) -> None:
    found = judged(tmp_path, at=at, epochs=epochs)
    assert found.scale == ("reduced scale" if note else "published scale"), found.reason
    assert note in found.reason
    assert found.direction == "supported"


def test_a_criterion_that_is_only_shown_has_no_effect_on_the_outcome(tmp_path: Path) -> None:
    found = judged(tmp_path, f"{BETTER}, {WORSE}, decides = false}}")
    assert found.direction == "supported"
    assert "shown, not judged: a - standard" in found.reason
    assert [row.get("decides", True) for row in found.measured] == [True, False]
    assert judged(tmp_path, f"{BETTER}, {WORSE}}}").direction == "contradicted"
    with pytest.raises(UserError, match=r"claim p\.1: decides = false in every criterion"):
        judged(tmp_path, f"{WORSE}, decides = false}}")


def falling(to: float, rows: int = 40) -> list[list[float]]:
    """Return losses of five seeds that fall linearly from 3 to about `to`, slightly different per seed and end."""
    ends = [to + to * own for own in OWN]
    return [[3 + (end - 3) * (row + 1) / rows for row in range(rows)] for end in ends]


@pytest.mark.parametrize(
    ("rest", "direction", "size"),
    [
        ('quantity = "train_loss", expect = "lower"', "supported", "open"),
        ('quantity = "train_loss", expect = "higher"', "contradicted", "open"),
        (
            'quantity = "train_loss", compare = "ratio", expect = "lower", at_most = 0.6',
            "supported",
            "supported",
        ),
        (
            'quantity = "tokens_to_loss", compare = "ratio", expect = "lower", effect = 0.525',
            "supported",
            "supported",
        ),
        (
            'quantity = "tokens_to_loss", compare = "ratio", expect = "lower", effect = 0.2',
            "supported",
            "contradicted",
        ),
        ('quantity = "spikes", expect = "no higher", margin = 0.5', "supported", "open"),
    ],
)
def test_a_number_of_the_training_curve_is_judged(
    tmp_path: Path, rest: str, direction: str, size: str
) -> None:
    curves = {"standard": falling(2.0), "a": falling(1.0)}
    found = judged(tmp_path, f'{{kind = "curve", arm = "a", {rest}}}', curves=curves)
    assert (found.direction, found.size) == (direction, size), found.reason
    assert found.measured[0]["n"] == 5


def test_a_run_that_never_reaches_the_loss_and_missing_curves_leave_the_claim_open(tmp_path: Path) -> None:
    part = '{kind = "curve", arm = "a", quantity = "tokens_to_loss", compare = "ratio", expect = "lower"}'
    found = judged(tmp_path, part, curves={"standard": falling(1.0), "a": falling(2.0)})
    assert found.direction == "open"
    assert "5 of 5 runs do not reach the final loss of the other arm" in found.reason
    assert found.scale == "published scale", "no run is missing"
    assert judged(tmp_path, part).scale == "not run"


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ('quantity = "tokens_to_loss", expect = "lower"', "tokens_to_loss takes compare = 'ratio'"),
        ('quantity = "loss", expect = "lower"', "unknown value for quantity 'loss'"),
        ('quantity = "spikes"', "a curve criterion takes either expect or the margin"),
    ],
)
def test_an_invalid_curve_criterion_is_rejected(tmp_path: Path, part: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        judged(tmp_path, f'{{kind = "curve", arm = "a", {part}}}')


def test_the_curve_of_a_run_without_files_is_empty() -> None:
    facts: dict[str, Any] = {"manifest": Manifest("p", (), "", None, 0.0, (), ()), "verdicts": []}
    assert Analysis(**facts).curve("r") == []
