"""Plain technical English: names, modules and phrases that are retired do not come back."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = sorted((ROOT / "headtohead").rglob("*.py"))
TEXTS = sorted(
    [
        *CODE,
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("headtohead/report/*.jinja"),
        *ROOT.glob("examples/*.py"),
        *ROOT.glob("benchmarks/*.py"),
    ]
)

NAMES = frozenset(
    [
        "Ground",
        "CorpusGround",
        "TaskGround",
        "ground_of",
        "grounds",
        "Feed",
        "WindowFeed",
        "TaskFeed",
        "told",
        "tell",
        "_tell",
        "Hold",
        "Holds",
        "bury",
        "_hire",
        "Crew",
        "_Crew",
        "crew",
        "perform",
        "perform_stack",
        "Obstacle",
        "Outline",
        "outline",
        "read_outline",
        "outline_from",
        "Recorded",
        "recordable",
        "unrecordable",
        "Recordable",
        "Traced",
        "COMPARED",
        "wrong_with_spec",
        "wrong_with_result",
        "wrong_with_score",
        "wrong_with_probe",
        "sealed",
        "unsealed",
        "mend",
        "mended",
        "forget",
        "forget_failed",
        "piece_of_work",
        "Looked",
        "Sight",
        "Standing",
        "look_at",
        "Begun",
        "begun",
        "conclude",
        "unless_lost",
        "guarded",
        "Followed",
        "followed",
        "Tracked",
        "Stacking",
        "is_stacked",
        "stacked_together",
        "most_stacked",
        "StackedTrainer",
        "StackedPart",
        "Conditions",
        "conditions_from",
        "LockedPace",
        "Speed",
        "Pace",
        "take_weights",
        "MOST_TOLD",
        "sound",
        "sound_results",
        "sound_seconds",
        "metric_words",
        "flops_words",
        "in_words",
        "allowed_words",
        "refuse_other_words",
        "_Matter",
        "lasting_name",
        "OutOfTime",
        "_shake",
        "colour",
        "colours",
        "optimiser",
        "make_optimiser",
        "turn_of",
        "Alone",
        "yes_or_no",
    ]
)
PREFIXES = ("refuse_", "_refuse_", "wrong_with_", "MOST_", "_MOST_", "FEWEST")

MODULES = [
    "study/plan.py",
    "study/planned.py",
    "study/outline.py",
    "study/lock.py",
    "study/work.py",
    "study/worker.py",
    "study/perform.py",
    "study/execute.py",
    "study/grounds.py",
    "study/holds.py",
    "study/pace.py",
    "study/matching.py",
    "study/start.py",
    "study/stacks.py",
    "study/records.py",
    "study/transfer.py",
    "study/trained.py",
    "study/published.py",
    "study/criteria.py",
    "study/values.py",
    "study/table.py",
    "study/matrix.py",
    "study/explained.py",
    "study/claims/parts.py",
    "measure",
    "toy",
    "common/told.py",
    "common/words.py",
    "training/feeds.py",
    "training/recorded.py",
    "training/traced.py",
    "training/stacked.py",
    "training/optimiser.py",
    "training/compiling.py",
    "kernels/turns.py",
    "kernels/decode_turned.py",
    "kernels/loss_rows.py",
    "kernels/norm_rows.py",
    "kernels/stacking.py",
    "report/follow.py",
    "report/watch.py",
    "report/judged.py",
    "report/look.py",
    "report/pictures.py",
    "integrations/follow.py",
    "bench/crew.py",
    "bench/warm.py",
    "bench/stack.py",
    "mechanisms/find.py",
    "data/foreign.py",
    "cli/use.py",
    "cli/attention.py",
    "cli/judge.py",
    "cli/flags.py",
    "model/residual.py",
]

PHRASES = """
    at hand
    behind a colon
    is told
    is heard
    of before
    as they stand
    when nothing is said
    when not given
    nobody said
    do not bear
    data bear
    put to the test
    way through the house
    behind one face
    plain twin
    compiled twin
    stacked seeds
    recorded steps
    steps one by one
    mends what
    sealed with
    see to the cause
    stands in no circuit
    stands in two circuits
    would move it
    does the runs
    the one trainer
    at the keyboard
    turned keys
    turned in the score
    what came of it
    what was learnt
    by the clock
    on the clock
    told apart
    fine in company
    done anew
    made anew
    joined anew
    start anew
    writes it anew
    sign of life
    stands outside
    alike in all but
    so-many-th
    its checksum is not its own
    what it says it is
    can be mended
    needs you
    which run stands where
    is of studies of
    looks both ways
    not at hand
    were asked for
    cannot stand
    as many as the model says
    what the layer says of itself
    start values
    is no trainable parameter
    added after looking
    leans wholly on
    still fell steeply
    the difference could be none
    can be told
    who is ahead
    if the line goes on
    are left as they are
    had been silent too long
    the machinery runs
    stands in row
    behind its name
    is not at hand
    of so many steps
    what counts nowhere
    goes on as it is
    and that is said
    is not coming back
    using the one before
    is not of this run
    negative or no number
    acts on no parameter
    holds no text
    half of a character
    as they stand in
    whatever stands beside it
    no state to lose
    like lengths together
    to write on from
    came to their end
    what became of
    for the way back
    beside the one it should be
    hold attention against
    where it looks
    where they look
    lies at the edge
    keeps no cache
    dearer
    whoever
    thereby
    wherein
    how sure that is
    before you believe it
    what these data bear
    what became of the paper
    trained here, tested there
    who wins which task
    looking and being right
    what tells nothing
    what the quality costs
    nothing here speaks for it
    may stand in for
    as near as whole steps come
    rows that stand there
    two sides of tokens
    is no tracker
    the study goes on
    no run is at work
""".strip().splitlines()


def test_no_retired_name_is_used() -> None:
    found = []
    for file in CODE:
        tokens = tokenize.generate_tokens(io.StringIO(file.read_text()).readline)
        names = {token.string for token in tokens if token.type == tokenize.NAME}
        bad = names & NAMES | {name for name in names if name.startswith(PREFIXES)}
        found += [f"{file.relative_to(ROOT)}: {name}" for name in sorted(bad)]
    assert not found


def test_no_retired_module_is_back() -> None:
    assert not [name for name in MODULES if (ROOT / "headtohead" / name).exists()]


def test_no_retired_phrase_is_used() -> None:
    pattern = re.compile(rf"\b(?:{'|'.join(re.escape(phrase.strip()) for phrase in PHRASES)})\b")
    found = []
    for file in TEXTS:
        text = re.sub(r"[\s#]+", " ", file.read_text()).lower()
        found += [f"{file.relative_to(ROOT)}: {phrase}" for phrase in sorted(set(pattern.findall(text)))]
    assert not found


def test_the_search_finds_what_it_should() -> None:
    assert "tell" in NAMES
    assert any(phrase.strip() == "plain twin" for phrase in PHRASES)
    assert len(TEXTS) > 300
