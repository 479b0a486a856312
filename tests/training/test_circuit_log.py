from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headtohead import Study, UserError
from headtohead.data.shards import prepare
from headtohead.data.windows import Windows
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size
from headtohead.study.config.spec import build_study
from headtohead.training.circuit_log import CircuitLog, product_norm
from headtohead.training.optimizer import make_optimizer
from headtohead.training.settings import TrainSettings, train_settings
from headtohead.training.trainer import Hooks, Trainer

SIZE = Size("t", 16, 2, 4, 24, 256, 16)
RULES = [{"tag": "qk", "layers": [2, 2], "kind": "ramp", "start": 1, "end": 5}]


def settings(**more: Any) -> TrainSettings:
    return train_settings({"tokens": 16 * 4 * 6, "batch": 64, "lr": 1e-2, **more})


def trained(story: Path, layout: str = "standard", log: bool = True, stop_at: int = 0, **more: Any) -> Any:
    corpus = prepare(f"file:{story}", "bytes")
    torch.manual_seed(0)
    model = Decoder(SIZE, parse_layout(layout).layers(2), seed=1, companion=corpus.splits["train"].tokens)
    rows: list[dict[str, Any]] = []
    folder = more.pop("folder", None)
    steps = 0

    def stop() -> bool:
        nonlocal steps
        steps += 1
        return steps == stop_at

    trainer = Trainer(
        model,
        Windows(corpus.splits["train"], 16, 1),
        settings(**more),
        folder=folder,
        hooks=Hooks(log=rows.append, stop=stop),
        log_circuits=log,
    )
    trainer.run()
    return model, rows


@pytest.mark.parametrize("arm", ["standard", "standard:kv_heads=2", "standard:kv_heads=1", "coupled"])
def test_product_norms_equal_those_of_the_explicit_products(arm: str) -> None:
    mechanism = Decoder(SIZE, parse_layout(arm).layers(2), seed=3).layers[0].mechanism
    q, k, v, o = (getattr(mechanism, name).weight.detach() for name in "qkvo")
    wide = 4 // (len(k) // 4)
    total_qk = total_ov = 0.0
    for head in range(4):
        mine, theirs = slice(4 * head, 4 * head + 4), slice(4 * (head // wide), 4 * (head // wide) + 4)
        total_qk += float((q[mine].T @ k[theirs]).square().sum())
        total_ov += float((o[:, mine] @ v[theirs]).square().sum())
    assert float(product_norm(mechanism, "qk")) == pytest.approx(math.sqrt(total_qk), rel=1e-5)  # type: ignore[arg-type]
    assert float(product_norm(mechanism, "ov")) == pytest.approx(math.sqrt(total_ov), rel=1e-5)  # type: ignore[arg-type]


def test_the_four_forms_of_one_function_have_the_same_norm() -> None:
    size = SIZE.with_settings(positions="learned")
    found = []
    for form in ("FAFO", "FACO", "CAFO", "CACO"):
        model = Decoder(size, parse_layout(f"factorised:form={form}").layers(2), seed=3)
        found.append([float(product_norm(model.layers[1].mechanism, tag)) for tag in ("qk", "ov")])  # type: ignore[arg-type]
    for row in found[1:]:
        assert row == pytest.approx(found[0], rel=1e-4)


@pytest.mark.parametrize("arm", ["no_attention", "kuramoto", "differential", "latent"])
def test_a_mechanism_without_factors_has_no_product(arm: str) -> None:
    mechanism = Decoder(SIZE, parse_layout(arm).layers(2), seed=3).layers[0].mechanism
    assert product_norm(mechanism, "qk") is None


def test_logged_rates_and_gradients_match_the_run(story: Path) -> None:
    _, rows = trained(story, circuit_lr=RULES)
    given = settings(circuit_lr=RULES)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        circuits = row["circuits"]
        squares = sum(norm**2 for circuit in circuits.values() for norm in circuit["grad_norm"])
        assert math.sqrt(squares) == pytest.approx(row["grad_norm"], rel=1e-4)
        rates = [given.learning_rate(step, 6) for step in range(row["step"])]
        ramped = [rate * (1 + 4 * step / 6) for step, rate in enumerate(rates)]
        assert circuits["qk"]["layers"] == [1, 2]
        assert circuits["qk"]["lr_sum"] == pytest.approx([sum(rates), sum(ramped)], rel=1e-5)
        assert circuits["ov"]["lr_sum"] == pytest.approx([sum(rates)] * 2, rel=1e-5)
        assert len(circuits["qk"]["product"]) == len(circuits["ov"]["product"]) == 2
    assert "product" not in rows[-1]["circuits"]["ffn"]


@pytest.mark.parametrize("layout", ["sharing:tie=kv", "kuramoto"])
def test_logging_does_not_change_training(story: Path, layout: str) -> None:
    plain, rows = trained(story, layout, log=False)
    logged, more = trained(story, layout, log=True)
    assert all("circuits" not in row for row in rows)
    assert all("circuits" in row for row in more)
    for one, two in zip(plain.parameters(), logged.parameters(), strict=True):
        assert torch.equal(one, two)
    strip = lambda row: {key: row[key] for key in ("step", "nats", "lr", "grad_norm")}  # noqa: E731
    assert [strip(row) for row in rows] == [strip(row) for row in more]


def test_a_resumed_run_logs_the_same_rows(story: Path, tmp_path: Path) -> None:
    _, whole = trained(story, circuit_lr=RULES)
    _, first = trained(story, circuit_lr=RULES, folder=tmp_path, stop_at=3)
    _, second = trained(story, circuit_lr=RULES, folder=tmp_path)
    assert [row["circuits"] for row in [*first, *second]] == [row["circuits"] for row in whole]


def test_a_row_costs_little_compared_with_a_step(story: Path) -> None:
    """A step of nano takes about 50 ms of CPU; a row must take less than a tenth of that."""
    model = Decoder(Size("n", 64, 2, 4, 176, 256, 128), parse_layout("standard").layers(2), seed=1)
    log = CircuitLog(model, make_optimizer(model, settings()), settings(), 6)
    tokens = torch.zeros(32, 128, dtype=torch.long)
    began = time.process_time()
    model(tokens, tokens)[0].backward()
    step = time.process_time() - began
    log.record_gradients()
    log.row(1)
    began = time.process_time()
    for _ in range(20):
        log.record_gradients()
        log.row(2)
    assert (time.process_time() - began) / 20 < 0.1 * step


@pytest.mark.page
def test_a_study_with_log_circuits_has_the_same_runs(story: Path, tmp_path: Path) -> None:
    given = {"tokens": 1024, "batch": 256, "seeds": 2, "corpus": f"file:{story}"}
    arms = ["standard", {"arm": "standard", "name": "fast", "circuit_lr": {"qk": "3x"}}]
    plain = Study(arms, name="s", **given).run(tmp_path / "plain", workers=1, quiet=True)
    logged = Study(arms, name="s", log_circuits=True, **given).run(tmp_path / "logged", workers=1, quiet=True)
    names = [
        sorted(path.name for path in (tmp_path / name / "runs").iterdir()) for name in ("plain", "logged")
    ]
    assert names[0] == names[1]
    texts = {
        name: [path.read_text() for path in sorted((tmp_path / name / "runs").glob("*/metrics.jsonl"))]
        for name in ("plain", "logged")
    }
    assert sorted('"circuits"' in text for text in texts["plain"]) == [False, False, True, True]
    assert all('"circuits"' in text for text in texts["logged"])
    assert [row.difference for row in plain.verdicts] == [row.difference for row in logged.verdicts]
    page = (tmp_path / "logged" / "report.html").read_text()
    assert "Circuits during training." in page
    assert "norm of W_QK, root mean square over layers" in page


def test_log_circuits_must_be_a_boolean() -> None:
    with pytest.raises(UserError, match="log_circuits takes true or false, got 3"):
        build_study({"arms": ["standard"], "log_circuits": 3})
