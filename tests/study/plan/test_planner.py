from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from headtohead.common.errors import UserError
from headtohead.model.decoder import Decoder
from headtohead.study.config.spec import build_study
from headtohead.study.plan.budgets import match_cache, match_flops, match_params
from headtohead.study.plan.execution import layers_of
from headtohead.study.plan.planner import plan_study
from headtohead.study.store.manifest import manifest_from
from headtohead.study.store.run_spec import run_spec_from
from headtohead.training.settings import TrainSettings


def plan(story: Path, **values: object):  # type: ignore[no-untyped-def]
    given = {
        "arms": ["standard", "sharing:tie=kv"],
        "corpus": f"file:{story}",
        "tokens": 2560,
        "batch": 256,
        "seeds": 2,
    }
    return plan_study(build_study(given | values))


def test_a_plan_has_every_arm_seed_and_rule(story: Path) -> None:
    found = plan(story, shape=["as_is", "params"], length=["tokens", "flops"], tokens=256 * 4000)
    assert len(found.compared()) == 2 * 2 * 4
    assert len(found.manifest.contests()) == 4
    # The baseline's runs are the same under every rule and run once.
    assert len(found.runs) == 2 + 2 * 4
    assert [run.seed for run in found.runs.values()] == sorted(run.seed for run in found.runs.values())


def test_the_hash_covers_what_can_change_the_result_and_nothing_else(story: Path, tmp_path: Path) -> None:
    base = plan(story).compared()[0]
    for values in (
        {"lr": 0.003},
        {"tokens": 5120},
        {"model": {"dropout": 0.1}},
        {"clip": 0.5},
        {"context": 64},
    ):
        assert plan(story, **values).compared()[0].id != base.id, values
    other = tmp_path / "other.txt"
    other.write_text(story.read_text() + "one more line\n")
    assert plan(other).compared()[0].id != base.id
    for values in (
        {"seeds": 5},
        {"arms": ["standard", "diagonal"]},
        {"margin": 0.1},
        {"name": "x"},
        {"baseline": "sharing:tie=kv"},
    ):
        assert plan(story, **values).compared()[0].id == base.id, values
    renamed = plan(story, arms=[{"arm": "standard", "name": "renamed"}, "sharing:tie=kv"]).compared()[0]
    assert renamed.id == base.id
    assert len({run.id for run in plan(story).compared()}) == 4


def test_equal_params_solve_the_feed_forward_width(story: Path) -> None:
    found = plan(
        story, arms=["standard", "sharing:tie=kv", "sharing:tie=qkv", "standard:kv_heads=1"], shape="params"
    )
    target = found.compared()[0].parameters
    for run in found.compared():
        assert abs(run.parameters - target) <= 0.005 * target
        assert run.parameters == Decoder.on_meta(run.size, layers_of(run)).parameter_count()
    widths = {run.label: run.size.ffn for run in found.compared()}
    # Freed weights over 3 d, with d = 64: 64 * 64 / (3 * 64).
    assert widths["standard"] == 176
    assert widths["(Q, K=V)"] == 176 + round(64 * 64 / (3 * 64))
    assert widths["(Q=K=V)"] == 176 + round(2 * 64 * 64 / (3 * 64))


def test_an_impossible_match_is_rejected_with_the_reason(story: Path) -> None:
    run = plan(story).compared()[0]
    with pytest.raises(UserError, match="cannot be met"):
        match_params(run.size, tuple(layers_of(run)), 1000)


def test_equal_flops_solve_the_tokens() -> None:
    settings = TrainSettings(tokens=100_000, batch=1000)
    assert match_flops(settings, arm=2.0, baseline=1.0).tokens == 50_000
    assert match_flops(settings, arm=1.0, baseline=1.5).tokens == 150_000
    with pytest.raises(UserError, match="less than one step"):
        match_flops(settings, arm=1e9, baseline=1.0)


def test_a_corpus_shorter_than_the_context_is_rejected(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("too little text to fill a window of 128 tokens\n" * 20)
    with pytest.raises(UserError, match="fewer than the context 128"):
        plan(short)


def test_an_arm_that_cannot_be_built_is_rejected_before_anything_runs(story: Path) -> None:
    with pytest.raises(UserError, match="cannot share kv_heads=3 evenly"):
        plan(story, arms=["standard", "sharing:tie=kv,kv_heads=3"])


def test_the_record_rebuilds_the_run(story: Path) -> None:
    found = plan(story, arms=["standard", "sharing:value_mix=(1,-1),kv_heads=2"])
    run = found.compared()[-1]
    again = run_spec_from(json.loads(json.dumps(run.as_dict())), run.id)
    assert (again.size, again.training, again.steps) == (run.size, run.training, run.steps)
    assert again.as_dict() == run.as_dict()
    assert tuple(layers_of(again)) == found.composed(run)


def test_equal_cache_solves_unset_kv_heads_and_else_the_width(story: Path) -> None:
    found = plan(story, arms=["sharing:tie=kv", "standard", "coupled"], shape="cache")
    assert {run.cache_bytes_per_token for run in found.compared()} == {256}
    texts = {run.arm: set(run.layers) for run in found.compared()}
    assert texts["standard"] == {"standard:kv_heads=2"}
    assert texts["coupled"] == {"coupled"}  # one query per key: its kv heads cannot be fewer
    solved = {row.label: (row.what, row.before, row.after, row.match) for row in found.solved}
    assert solved["standard"] == ("kv heads", 4, 2, 1.0)
    assert solved["coupled (euler, 1 step)"] == ("width", 64, 32, 1.0)
    assert "(Q, K=V)" not in solved
    # Half the bytes at the same width; given kv heads are not changed.
    arms = ["standard", "sharing:tie=kv", "standard:kv_heads=1"]
    wide = plan(story, arms=arms, shape="cache")
    assert [run.size.width for run in wide.compared()] == [64, 64, 128, 128, 256, 256]
    assert {run.cache_bytes_per_token for run in wide.compared()} == {512}
    assert wide.compared()[-1].layers[0] == "standard:kv_heads=1"
    for run in wide.compared():
        assert Decoder.on_meta(run.size, layers_of(run)).parameter_count() == run.parameters


@pytest.mark.parametrize(
    ("arms", "message"),
    [
        (["standard", "gated_linear"], "arm 'gated_linear': .* cache of the arm does not grow"),
        (["gated_linear", "standard"], "cache of the baseline does not grow"),
        (["standard", "MINE"], "the arm has no cache"),
    ],
)
def test_an_impossible_cache_match_is_rejected(
    story: Path, tmp_path: Path, arms: list[str], message: str
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        "import torch\nclass Mine(torch.nn.Module):\n    def __init__(self, shape, options):\n"
        "        super().__init__()\n        self.o = torch.nn.Linear(shape.width, shape.width)\n"
        "    def forward(self, x, frame):\n        return self.o(x)\n"
    )
    given = [f"{mine}:Mine" if arm == "MINE" else arm for arm in arms]
    with pytest.raises(UserError, match=message):
        plan(story, arms=given, shape="cache")


def test_caches_of_fixed_size_are_matched_at_a_context(story: Path) -> None:
    arms = ["standard", "gated_linear", "gated_delta", "selective_state", "(gated_linear standard)*1"]
    found = plan(story, arms=[*arms, "gated_linear:key_dim=8"], shape="cache", cache_at=2048)
    runs = found.compared()[::2]
    held = [Decoder.on_meta(run.size, layers_of(run)).cache_bytes(1, 2048, torch.bfloat16) for run in runs]
    assert held == pytest.approx([2 * 2048 * 256] * 6, rel=0.005)
    # The rows of states are solved where they are unset, else the width.
    assert [run.size.width for run in runs[:5]] == [64] * 5
    assert runs[1].layers == ("gated_linear:key_dim=2048",) * 2
    assert runs[4].layers[0] == "gated_linear:key_dim=2048"
    assert runs[5].layers == ("gated_linear:key_dim=8",) * 2
    assert runs[5].size.width > 64
    solved = {row.label: (row.what, row.before, row.after, row.held) for row in found.solved}
    assert solved["gated_linear"] == ("rows of a state", 8, 2048, "cache bytes at 2,048 tokens")


def test_without_a_context_caches_are_compared_per_token(story: Path) -> None:
    arms = ["standard", "sharing:tie=kv", "standard:kv_heads=1"]
    per_token = plan(story, arms=arms, shape="cache").compared()
    whole = plan(story, arms=arms, shape="cache", cache_at="2k").compared()
    assert [run.id for run in per_token] == [run.id for run in whole], (
        "caches without states differ by a factor"
    )


def test_a_context_for_caches_needs_the_rule(story: Path) -> None:
    with pytest.raises(UserError, match="cache_at=2048 applies to shape = cache only"):
        plan(story, cache_at=2048)
    with pytest.raises(UserError, match="does not grow with the text; cache_at = 128 compares whole caches"):
        plan(story, arms=["standard", "gated_linear"], shape="cache")
    with pytest.raises(UserError, match="the cache of the arm is empty"):
        plan(story, arms=["standard", "no_attention"], shape="cache", cache_at=2048)


def test_a_cache_that_no_width_gives_is_rejected(story: Path) -> None:
    run = plan(story).compared()[0]
    with pytest.raises(UserError, match=r"within 0.5 %: nearest is .* bytes per token at width"):
        match_cache(run.size, tuple(layers_of(run)), 3)


def test_solved_numbers_are_explained(story: Path) -> None:
    found = plan(story, shape=["as_is", "params"], length=["tokens", "flops"], tokens=256 * 4000)
    rows = [(row.contest.shape, row.contest.length, row.rule, row.what) for row in found.solved]
    assert rows == [
        ("as_is", "flops", "length flops", "tokens"),
        ("params", "tokens", "shape params", "feed-forward width"),
        ("params", "flops", "shape params", "feed-forward width"),
        ("params", "flops", "length flops", "tokens"),
    ]
    assert all(row.match == pytest.approx(1, abs=0.005) for row in found.solved)
    contest = found.solved[0].contest
    run = next(
        found.runs[row.run] for row in found.entries if row.contest == contest and row.label != "standard"
    )
    assert found.solved[0].after == run.training.tokens
    assert found.solved[0].mine == 3 * run.flops_per_token * run.training.tokens
    manifest = found.manifest
    assert manifest_from(json.loads(json.dumps(manifest.as_dict()))) == manifest
    old = {key: value for key, value in manifest.as_dict().items() if key != "solved"}
    assert manifest_from(old).solved == ()


def test_two_corpora_with_one_label_are_rejected(story: Path, tmp_path: Path) -> None:
    other = tmp_path / story.name
    other.write_text(story.read_text()[::-1])
    with pytest.raises(UserError, match=f"would both be called '{story.name}'"):
        plan_study(build_study({"arms": ["standard"], "corpus": [f"file:{story}", f"file:{other}"]}))
    assert plan_study(build_study({"arms": ["standard"], "corpus": f"file:{other}"})).compared()


USER_ARMS = Path(__file__).parents[2] / "mechanisms" / "user_arms.py"


@pytest.mark.parametrize("context", [128, 1024])
def test_a_copy_of_standard_gets_the_same_tokens_at_equal_flops(tmp_path: Path, context: int) -> None:
    text = tmp_path / "long.txt"
    text.write_text("\n".join(f"{line} times {line} is {line * line}" for line in range(3000)))
    copies = [f"{USER_ARMS}:{name}" for name in ("Copy", "Masked")]
    found = plan(
        text,
        arms=["standard", *copies],
        length="flops",
        context=context,
        tokens=100 * 1024,
        batch=1024,
        seeds=1,
    )
    tokens = [run.training.tokens for run in found.compared()]
    assert tokens == [pytest.approx(tokens[0], rel=0.01)] * 3
    assert found.manifest.flops == {"standard": "declared", "Copy": "counted", "Masked": "counted"}
    assert all("counted for" in row.note and "declared for standard" in row.note for row in found.solved)
    assert all("upper bound" in row.note for row in found.solved)
    manifest = found.manifest
    assert manifest_from(json.loads(json.dumps(manifest.as_dict()))) == manifest


def test_arms_that_declare_their_flops_keep_their_runs(story: Path) -> None:
    found = plan(story, arms=["standard", "sharing:tie=kv"], length="flops", tokens=256 * 400, seeds=1)
    assert [run.training.tokens for run in found.compared()] == [102_400, 109_056]
    assert not any(row.note for row in found.solved)
