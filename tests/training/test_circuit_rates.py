from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headtohead.common.errors import UserError
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from headtohead.study.store.archive import import_runs
from headtohead.study.store.run_store import Store
from headtohead.training.circuit_rates import Rule, assign, parse_rules, recorded_rules, with_words
from headtohead.training.optimizer import make_optimizer, set_rates
from headtohead.training.settings import TrainSettings, train_settings
from headtohead.training.trainer import Trainer

TINY = dataclasses.replace(SIZES["nano"], width=16, layers=4, ffn=24, context=16, vocabulary=64)
SLOW_TOP = {
    "tag": "qk",
    "layers": [0.5, 1.0],
    "kind": "hold_return",
    "factor": 0.25,
    "hold": 0.04,
    "back": 0.01,
}


def decoder(layout: str = "standard") -> Decoder:
    return Decoder(TINY.with_settings(init_std=0.2), parse_layout(layout).layers(4), seed=1)


def trained(layout: str = "standard", **values: Any) -> tuple[dict[str, torch.Tensor], Trainer]:
    tokens = (np.arange(3000) * 7 % 61).astype(np.uint8)
    windows = Windows(Split(tokens, np.array([0], dtype=np.uint64), len(tokens)), 16, 1)
    torch.manual_seed(1)
    trainer = Trainer(decoder(layout), windows, TrainSettings(tokens=64 * 20, batch=64, lr=1e-2, **values))
    trainer.run()
    return dict(trainer.model.state_dict()), trainer


def test_ratios_are_the_published_ones() -> None:
    assert Rule("qk", factor=30).ratio(7, 1000) == 30
    ramp = Rule("qk", kind="ramp", start=1, end=40)
    assert ramp.ratio(0, 1000) == 1
    assert ramp.ratio(500, 1000) == 20.5
    (slow,) = parse_rules([SLOW_TOP])
    found = [slow.ratio(step, 1000) for step in (0, 39, 45, 50, 999)]
    assert found == pytest.approx([0.25, 0.25, 0.625, 1, 1])
    early = Rule("qk", kind="ramp", start=0, end=4, until=0.5)
    assert [early.ratio(step, 100) for step in (0, 25, 50, 99)] == [0, 2, 4, 4]


@pytest.mark.parametrize("layout", ["standard", "(coupled sharing:tie=kv)*2", "kuramoto:ffn_start=small"])
def test_a_ratio_of_one_changes_no_bit(layout: str) -> None:
    plain, _ = trained(layout)
    tags = dict.fromkeys(circuit.tag for circuit in decoder(layout).circuits())
    ruled, trainer = trained(layout, circuit_lr=[{"tag": tag, "factor": 1} for tag in tags])
    assert {group["rule"] for group in trainer.optimizer.param_groups} == {None}
    assert all(torch.equal(plain[name], ruled[name]) for name in plain)


def test_a_rule_changes_only_the_parameters_it_names() -> None:
    frozen, trainer = trained(circuit_lr=[{"tag": "qk", "layers": [3, 4], "factor": 0}])
    start = decoder().state_dict()
    still = {name for name in start if torch.equal(start[name], frozen[name])}
    assert still == {f"blocks.{i}.mechanism.{part}.weight" for i in (2, 3) for part in "qk"}
    assert trainer.step == 20


def test_decay_times_rate_is_equal_unless_coupled() -> None:
    for decay, product in (("equal", 0.1 * 1e-2), ("coupled", 0.3 * 1e-2)):
        settings = TrainSettings(
            lr=1e-2, warmup=0, schedule="constant", circuit_lr={"qk": "3x"}, circuit_decay=decay
        )  # type: ignore[arg-type]
        optimizer = make_optimizer(decoder(), settings)
        set_rates(optimizer, 5, 10)
        groups = {group["tag"]: group for group in optimizer.param_groups if group["decays"]}
        assert groups["qk"]["lr"] == pytest.approx(3e-2)
        assert groups["qk"]["lr"] * groups["qk"]["weight_decay"] == pytest.approx(product)
        assert groups["ov"]["lr"] * groups["ov"]["weight_decay"] == pytest.approx(1e-3)
    vectors = [group for group in optimizer.param_groups if not group["decays"]]
    assert vectors
    assert all(group["weight_decay"] == 0 for group in vectors)


def test_own_obeys_the_rule_of_the_circuit_it_follows_unless_named() -> None:
    circuits = decoder("standard+coupled").circuits()
    own = next(circuit for circuit in circuits if circuit.tag == "own" and circuit.follows == "qk")
    tied = next(circuit for circuit in decoder("sharing:tie=kv").circuits() if circuit.tag == "both")
    (qk, named) = parse_rules([{"tag": "qk", "factor": 2}, {"tag": "own", "factor": 3}])
    assert assign([qk], circuits, 4)[own.parameters[0]] is qk
    assert assign([qk, named], circuits, 4)[own.parameters[0]] is named
    assert tied.parameters[0] not in assign([qk], decoder("sharing:tie=kv").circuits(), 4)
    top = dataclasses.replace(named, layers=(4, 4))
    assert assign([qk, top], circuits, 4)[own.parameters[0]] is qk, "own is named only in the last layer"


def test_layers_are_numbers_or_fractions_of_the_depth() -> None:
    assert list(Rule("qk", layers=(2, 3)).span(4)) == [1, 2]
    halves = [list(Rule("qk", layers=share).span(5)) for share in ((0.0, 0.5), (0.5, 1.0))]
    assert halves == [[0, 1], [2, 3, 4]], "every layer once; the upper half starts at depth // 2"
    assert parse_rules([{"tag": "qk", "layers": [0.5, 1], "factor": 2}])[0].layers == (0.5, 1.0)
    found = assign(
        parse_rules([{"parameters": "*.q.weight", "layers": [1, 1], "factor": 2}]), decoder().circuits(), 4
    )
    assert list(found) == ["blocks.0.mechanism.q.weight"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"qq": "2x"}, "unknown circuit in circuit_lr 'qq'; did you mean 'qk'"),
        ({"qk": "fast"}, "takes a ratio such as 30x"),
        ({"qk": "1.2.3x"}, "takes a ratio such as 30x"),
        ({"qk": 3}, "takes a ratio such as 30x"),
        ("qk=3", "takes a list of rules"),
        (["qk"], "a circuit_lr rule is a table"),
        ([{"tag": "qk"}], "factor is missing"),
        ([{"factor": 2}], "needs either a tag or a parameters pattern"),
        ([{"tag": "qk", "parameters": "*", "factor": 2}], "not both"),
        ([{"tag": "qk", "factor": -1}], "factor=-1 is not a finite number >= 0"),
        ([{"tag": "qk", "factor": float("nan")}], "factor=nan is not a finite number"),
        ([{"tag": "qk", "factor": "3"}], "factor takes a number"),
        ([{"tag": "qk", "kind": "jump", "factor": 2}], "unknown kind of rule"),
        ([{"tag": "qk", "kind": "ramp", "factor": 2}], "unknown value of a ramp rule in circuit_lr 'factor'"),
        ([{"tag": "qk", "kind": "ramp", "start": 1, "end": 4, "until": 1.2}], "ends at 1.2 of the run"),
        ([SLOW_TOP | {"hold": 0.9, "back": 0.2}], "go beyond the run's end"),
        ([{"tag": "qk", "factor": 2, "layers": [1]}], "layers takes two numbers"),
    ],
)
def test_bad_rules_are_rejected(rules: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        train_settings({"circuit_lr": rules})


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        (
            [{"tag": "qk", "factor": 2}, {"tag": "qk", "layers": [1, 2], "factor": 2}],
            "two rules .* blocks.0.mechanism",
        ),
        ([{"tag": "qk", "factor": 2}, {"parameters": "*.q.*", "factor": 1}], "two rules"),
        (
            [{"tag": "qk", "layers": [3, 5], "factor": 2}],
            "layers 3 to 5 are outside the model, whose layers are 1 to 4",
        ),
        ([{"tag": "qk", "layers": [0, 2], "factor": 2}], "outside the model"),
        ([{"tag": "qk", "layers": [0.5, 1.5], "factor": 2}], "not fractions of the depth"),
        ([{"tag": "qk", "layers": [0.1, 0.2], "factor": 2}], "contain no layer"),
        ([{"tag": "both", "factor": 2}], "matches no parameter of this model"),
        ([{"tag": "embedding", "layers": [1, 2], "factor": 2}], "matches no parameter"),
        ([{"parameters": "*.query.*", "factor": 2}], "matches no parameter"),
    ],
)
def test_rules_that_do_not_fit_a_model_are_rejected(rules: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_optimizer(decoder(), TrainSettings(circuit_lr=rules))


def test_disjoint_layers_do_not_overlap() -> None:
    rules = [{"tag": "qk", "layers": part, "factor": f} for part, f in (([0.0, 0.5], 2), ([0.5, 1.0], 3))]
    found = assign(parse_rules(rules), decoder().circuits(), 4)
    assert [found[f"blocks.{i}.mechanism.q.weight"].factor for i in range(4)] == [2, 2, 3, 3]


def test_stored_rules_round_trip() -> None:
    assert not {"rates", "circuit_lr", "circuit_decay"} & TrainSettings().as_dict().keys(), (
        "existing run ids do not change"
    )
    for settings in (
        TrainSettings(circuit_lr=parse_rules([SLOW_TOP])),
        TrainSettings(circuit_lr=parse_rules({"qk": "1x..40x"}), circuit_decay="coupled"),
        TrainSettings(circuit_lr=parse_rules({"ffn": "0.5x"}), circuit_decay="coupled"),
        TrainSettings(),
    ):
        rules, decay = recorded_rules(settings.as_dict())
        assert (rules, decay if rules else settings.circuit_decay) == (
            settings.circuit_lr,
            settings.circuit_decay,
        )
    shown = with_words(TrainSettings(circuit_lr=parse_rules([SLOW_TOP])).as_dict())["circuit_lr"]
    assert shown == (
        "qk x0.25 for 0.04 of the run, back to x1 over 0.01 in layers 0.5 to 1 of the depth "
        "(weight decay divided by the ratio: lr x decay is equal in all circuits)"
    )


def test_stored_runs_with_rates_are_read_and_keep_their_ids(tmp_path: Path) -> None:
    store = Store(tmp_path)
    import_runs(store, Path(__file__).parents[2] / "results/kuramoto-1m/runs.tar.gz")
    found = []
    for run in store.runs():
        settings = run.spec().training
        assert settings.as_dict() == json.loads((run.path / "spec.json").read_text())["training"]
        if settings.circuit_lr:
            assert settings.circuit_decay == "coupled"
            found.append(settings.circuit_lr)
    assert (Rule("ffn", factor=0.5),) in found
