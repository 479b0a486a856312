"""Loading and evaluating trained runs with a companion, and skip evaluation of trained hybrids with its controls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import headtohead as h2h
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.data.shards import prepare
from headtohead.model.layout import parse_layout, skipped_layers
from headtohead.study.config.spec import build_study
from headtohead.study.plan.planner import plan_study
from headtohead.study.store.run_store import RunDirectory, Store

HYBRID, FIXED = "even(rnd_emb_qk)", "(fixed_seq_qk standard)"
SMALL = {"tokens": 5120, "batch": 256, "seeds": 1, "lr": 5e-3}


@pytest.fixture(scope="module")
def raced(story: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, RunDirectory]]:
    """A standard run and two hybrids of two layers, trained briefly."""
    folder = tmp_path_factory.mktemp("hybrids")
    corpus = f"file:{story}"
    h2h.Study(arms=["standard", HYBRID, FIXED], corpus=corpus, **SMALL).run(folder, workers=1, quiet=True)
    return corpus, {run.spec().arm: run for run in Store(folder).runs()}


def score(raced: tuple[str, dict[str, RunDirectory]], arm: str, **settings: object) -> float:
    corpus, runs = raced
    return h2h.evaluate(runs[arm].path, corpus, quiet=True, device="cpu", **settings).nats  # type: ignore[arg-type]


def test_a_loaded_run_has_its_companion_and_its_score(raced: tuple[str, dict[str, RunDirectory]]) -> None:
    corpus, runs = raced
    for arm in (HYBRID, FIXED):
        result = runs[arm].result()
        assert result is not None
        assert result.status == "done"
        assert score(raced, arm) == pytest.approx(result.test.values["nats"], rel=1e-6)
    model, _ = h2h.load(runs[FIXED].path)
    train = prepare(corpus).splits["train"].tokens
    assert model.companion is not None
    assert model.companion.tolist() == train[:128].tolist(), "the first tokens of the train split"
    noise = h2h.load(runs[HYBRID].path)[0].companion
    assert noise is not None
    assert float(noise.std()) == pytest.approx(0.02, rel=0.1)


def test_a_loaded_run_generates_text(raced: tuple[str, dict[str, RunDirectory]]) -> None:
    for arm in (HYBRID, FIXED):
        assert "".join(h2h.generate_text(raced[1][arm].path, "the cat", tokens=20, device="cpu"))
    with pytest.raises(UserError, match="companion has 128 tokens"):
        "".join(h2h.generate_text(raced[1][FIXED].path, "the cat", tokens=200, device="cpu"))


def test_skipping_the_variant_is_the_model_without_its_blocks(
    raced: tuple[str, dict[str, RunDirectory]],
) -> None:
    whole = score(raced, HYBRID)
    variant, standard = (score(raced, HYBRID, skip=kind) for kind in ("variant", "standard"))
    assert len({whole, variant, standard}) == 3
    assert whole < min(variant, standard), "both kinds of layers have learned something"
    assert variant == score(raced, HYBRID, skip="1")
    assert standard == score(raced, HYBRID, skip="2")
    kept = score(raced, HYBRID, skip="variant", keep_ffn=True)
    assert kept not in (whole, variant)


def test_the_control_skips_the_same_layers_of_the_standard_run(
    raced: tuple[str, dict[str, RunDirectory]],
) -> None:
    assert score(raced, "standard", skip="1") > score(raced, "standard")
    model, _ = h2h.load(raced[1]["standard"].path)
    text = torch.arange(20).view(1, -1)
    shorter = model.logits(text)
    model.skip([2])
    x = model.embedding(text, h2h.Frame(time=20))
    frame = h2h.Frame(time=20, rotary=model.rotary, embeddings=x)
    by_hand = model.norm(model.layers[0](x, frame)) @ model.readout.T
    assert torch.allclose(model.logits(text), by_hand, atol=1e-5)
    assert not torch.allclose(by_hand, shorter)


def test_the_companion_does_not_run_when_no_remaining_layer_uses_it(
    raced: tuple[str, dict[str, RunDirectory]],
) -> None:
    model, _ = h2h.load(raced[1][FIXED].path)
    calls: list[int] = []
    model.layers[1].mechanism.register_forward_pre_hook(lambda _, given: calls.append(len(given[0])))
    model.skip([1])
    model.logits(torch.zeros(3, 5, dtype=torch.long))
    assert calls == [3], "only the data"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"skip": "varient"}, "did you mean 'variant'"),
        ({"skip": "3"}, "not a layer from 1 to 2"),
        ({"skip": "0"}, "not a layer from 1 to 2"),
        ({"skip": "2-1"}, "not a layer from"),
        ({"skip": "1,,2"}, "variant, standard or layers"),
        ({"skip": "1-2"}, "at least one must remain"),
        ({"keep_ffn": True}, "give skip too"),
    ],
)
def test_an_invalid_skip_is_rejected(
    raced: tuple[str, dict[str, RunDirectory]], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        score(raced, HYBRID, **settings)


def test_a_standard_run_has_no_variant_and_a_uniform_one_no_standard() -> None:
    with pytest.raises(UserError, match="every layer of this model is standard"):
        skipped_layers(parse_layout("standard:window=4").layers(4), "variant")
    with pytest.raises(UserError, match="no layer of this model is standard"):
        skipped_layers(parse_layout("prefix_mean").layers(4), "standard")
    hybrid = parse_layout("quarter(token_mlp)").layers(8)
    assert skipped_layers(hybrid, "standard") == [4, 8]
    assert skipped_layers(hybrid, "variant") == [1, 2, 3, 5, 6, 7]
    assert skipped_layers(hybrid, "2,4-6, 8") == [2, 4, 5, 6, 8]


def test_the_command_line_skips_layers(
    raced: tuple[str, dict[str, RunDirectory]], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, runs = raced
    command = ["evaluate", str(runs[HYBRID].path), "--corpus", corpus, "--device", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main([*command, "--skip", "variant", "--keep-ffn", "--json"])
    assert ended.value.code == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["skip"], record["keep_ffn"]) == ("variant", True)
    assert record["nats"] == pytest.approx(score(raced, HYBRID, skip="variant", keep_ffn=True))
    for given, message in ((["--skip", "7"], "layer from 1 to 2"), (["--keep-ffn"], "give skip too")):
        with pytest.raises(SystemExit) as ended:
            main([*command, *given])
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


def test_plans_divide_the_companion_by_the_batch_and_reject_short_texts(story: Path) -> None:
    def planned(arm: str, batch: int, size: str = "nano"):  # type: ignore[no-untyped-def]
        spec = build_study({"arms": [arm], "corpus": f"file:{story}", "size": size, **SMALL, "batch": batch})
        return plan_study(spec).compared()[0]

    standard, few, many = planned("standard", 256), planned(FIXED, 128), planned(FIXED, 2560)
    assert few.flops_per_token > many.flops_per_token
    assert many.flops_per_token < standard.flops_per_token, (
        "half of the layers have no queries and keys of their own"
    )
    assert planned("standard", 128).flops_per_token == standard.flops_per_token
    assert many.cache_bytes_per_token == standard.cache_bytes_per_token * 3 // 4, (
        "only values in one of two layers; tables are not per token"
    )
    assert few.id != planned("(fixed_seq_qk:offset=1 standard)", 128).id
    with pytest.raises(UserError, match="the companion takes 99,999 from token 0 on"):
        planned("fixed_seq_qk:length=99999", 256)


def test_old_names_are_accepted(tmp_path: Path) -> None:
    assert h2h.bench_stack is h2h.bench_population
    study = h2h.Study(arms=["standard", "diagonal"], tokens=512, batch=256, seeds=1)
    result = study.run(tmp_path, workers=1, seconds=0.0, stack=False, quiet=True)
    assert result.summary.stopped
    with pytest.raises(TypeError, match="population, or stack, its old name"):
        study.run(tmp_path, stack=False, population=False)


def test_init_from_is_stored_under_its_old_name() -> None:
    arms = ["standard", {"arm": "standard", "name": "mine", "init_from": "b/c"}]
    for key in ("init_from", "from_"):
        study = h2h.Study(arms=arms, tasks=["recall"], **{key: "a/b"})
        assert study.spec.start == "a/b"
        assert study.spec.arms[1].start == "b/c"
        assert study.values["from"] == "a/b"
