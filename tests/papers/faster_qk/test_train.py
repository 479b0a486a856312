"""The toy's training: compared with autograd on the formula, in batches of runs, and divergence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headtohead import UserError
from headtohead.data.tasks.toy import Source, draw_tokens
from headtohead.papers.faster_qk.forms import ADAM_FORMS, ATTENTION, adam_step, moments, sgd_step, step_sizes
from headtohead.papers.faster_qk.measure import balance, imposed_mass
from headtohead.papers.faster_qk.runs import RATE, RUNS, SEEDS, ToyRun, choose_runs
from headtohead.papers.faster_qk.task import count_tokens
from headtohead.papers.faster_qk.train import Batch, ToyResult, start_state, train
from tests.references import toy as reference

QUERIES = slice(5, 9)


def whole(form: str, seed: int) -> dict[str, Tensor]:
    """Return the full 50 x 50 matrices of a form."""
    draw = torch.Generator().manual_seed(seed)
    names = (["Q", "K"] if form[0] == "F" else ["QK"]) + (["O", "V"] if form[2] == "F" else ["OV"])
    return {name: torch.randn(50, 50, generator=draw, dtype=torch.float64) * 0.4 for name in names}


def held(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return them as the toy stores them: four queries, output maps transposed, leading dimension 1."""
    views = {
        "q": lambda: weights["Q"].T[QUERIES],
        "k": lambda: weights["K"],
        "qk": lambda: weights["QK"][QUERIES],
        "v": lambda: weights["V"].T,
        "o": lambda: weights["O"].T,
        "ov": lambda: weights["OV"].T,
    }
    return {key: view().clone()[None] for key, view in views.items() if key.upper() in weights}


@pytest.mark.parametrize("form", ["FAFO", "FACO", "CAFO", "CACO"])
def test_a_step_follows_the_gradient_of_the_formula(form: str) -> None:
    source, ratio = Source(1, length=20), 3.0
    tokens, classes = draw_tokens(source, 16, torch.Generator().manual_seed(5))
    weights = whole(form, 2)
    state = held(weights)
    for value in weights.values():
        value.requires_grad_()
    expected = reference.loss(weights, tokens, 1 + classes)
    expected.backward()
    ask = torch.nn.functional.one_hot(classes, 4).double()[None]
    pull = ask.transpose(1, 2) * (ratio * RATE / 16 / math.sqrt(50))
    known = count_tokens(tokens).double().log()[None]
    error = sgd_step(form, state, source.target, RATE, known, ask, pull)
    here = -(error[:, :, 1:5] * ask).sum(2).log1p().mean()
    assert torch.allclose(here, expected, rtol=1e-12)
    moved = {
        name: value.detach() - RATE * (ratio if name in ("Q", "K", "QK") else 1.0) * value.grad
        for name, value in weights.items()
        if value.grad is not None
    }
    assert moved.keys() == weights.keys()
    for key, value in held(moved).items():
        assert torch.allclose(state[key], value, rtol=1e-10, atol=1e-14), key


@pytest.mark.parametrize("form", ADAM_FORMS)
def test_adam_steps_equal_those_of_torch_on_the_formula(form: str) -> None:
    source, ratio, rate, steps = Source(1, length=20), 3.0, 0.01, 4
    draw = torch.Generator().manual_seed(5)
    weights = whole(form, 2)
    state = held(weights)
    state |= moments(state)
    for value in weights.values():
        value.requires_grad_()
    groups = [
        {"params": [value], "lr": rate * (ratio if name in ("Q", "K", "QK") else 1.0)}
        for name, value in weights.items()
    ]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.999), eps=1e-8)
    rates, ratios = torch.tensor([rate], dtype=torch.float64), torch.full((steps, 1), ratio)
    sizes, roots = step_sizes(0, rates, ratios)
    late, _ = step_sizes(2, rates, ratios[2:])
    assert torch.equal(late, sizes[2:])
    for size, root in zip(sizes, roots):
        tokens, classes = draw_tokens(source, 16, draw)
        optimizer.zero_grad()
        expected = reference.loss(weights, tokens, 1 + classes)
        expected.backward()
        optimizer.step()
        ask = torch.nn.functional.one_hot(classes, 4).double()[None]
        known = count_tokens(tokens).double().log()[None]
        (here,) = adam_step(form, state, source.target, known, ask, size, root)
        assert torch.allclose(here, expected, rtol=1e-10)
    for key, value in held({name: value.detach() for name, value in weights.items()}).items():
        assert torch.allclose(state[key], value, rtol=1e-8, atol=1e-12), key


def test_under_adam_the_loss_of_a_model_certain_of_a_wrong_label_is_finite() -> None:
    state = {"qk": torch.zeros(1, 4, 50), "ov": torch.zeros(1, 50, 50)}
    state["ov"][..., 0] = 200.0  # no label
    state |= moments(state)
    ask = torch.nn.functional.one_hot(torch.tensor([[0, 3]]), 4).float()
    sizes, roots = step_sizes(0, torch.tensor([1e-3]), torch.ones(1, 1))
    loss = adam_step("CACO", state, 1, torch.zeros(1, 2, 50), ask, sizes[0].float(), roots[0].float())
    assert torch.allclose(loss, torch.tensor([200.0]))


def test_adam_in_one_pass_equals_the_runs_one_by_one_and_does_not_affect_sgd() -> None:
    plain = ToyRun("a", "CACO", 1, epochs=2, batches=50, length=16)
    runs = [plain, replace(plain, adam=1e-3), replace(plain, adam=3e-3, seed=2, ratio=10, epochs=4)]
    together = train(runs)
    assert [result.run for result in together] == runs
    assert together[0] == train([plain])[0]
    for run, result in zip(runs[1:], together[1:]):
        alone = train([run])[0].marks["end"]
        assert math.isclose(alone.loss, result.marks["end"].loss, rel_tol=1e-5)
        assert math.isclose(alone.alpha, result.marks["end"].alpha, rel_tol=1e-4)
    assert together[1].marks["end"].loss < together[0].marks["end"].loss


def test_runs_without_adam_keep_their_keys() -> None:
    names = {
        "FAFO": "09ab86c23e40d808",
        "CACO": "8e8be967b2dd9830",
        "fixed factorised alpha=0.8": "76dbe9a539389632",
    }
    assert {name: RUNS[name].key for name in names} == names
    adam = RUNS["Adam FAFO"]
    assert adam.key != replace(adam, adam=None).key != replace(adam, adam=2e-3).key
    assert ToyRun(**adam.as_dict()) == adam


def test_adam_and_sgd_have_the_same_initialization() -> None:
    for name in ADAM_FORMS:
        ours, theirs = start_state(RUNS[f"Adam {name}"]), start_state(RUNS[name])
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        assert all(not ours[key].any() for key in ours.keys() - theirs.keys())
        assert len(ours) == 3 * len(theirs)


def test_runs_in_one_pass_equal_the_runs_one_by_one() -> None:
    runs = [
        ToyRun("a", "FAFO", 1, qk_start="default", epochs=2, batches=50, length=16),
        ToyRun("b", "FAFO", 2, ratio=20, epochs=1, batches=100, length=24),
        ToyRun("c", "FACO", 2, ratio_end=40, epochs=2, batches=50, length=16),
    ]
    together = train(runs)
    assert [result.run for result in together] == runs
    for run, result in zip(runs, together):
        alone = train([run])[0].marks["end"]
        assert math.isclose(alone.loss, result.marks["end"].loss, rel_tol=1e-6)
        assert math.isclose(alone.alpha, result.marks["end"].alpha, rel_tol=1e-5)
    assert train(runs[:1])[0].as_dict() == train(runs[:1])[0].as_dict()


def test_a_ramp_rises_at_every_step() -> None:
    run = ToyRun("r", "CACO", ratio=1, ratio_end=40, epochs=10, batches=50, length=16)
    batch = Batch([run], torch.device("cpu"))
    batch.step = 250
    batch._fill()
    rate = batch.inputs["pull"].sum(2).max(2).values[0, 0] * math.sqrt(50) * 32
    assert math.isclose(float(rate), RATE * 20.5, rel_tol=1e-5)


def test_initial_values_depend_only_on_the_seed() -> None:
    first, again = (start_state(RUNS["CACO"]) for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["ov"].abs().max() <= 1 / math.sqrt(50)
    assert not torch.equal(first["ov"], start_state(choose_runs(["CACO"], [SEEDS[1]])[0])["ov"])
    tiny = start_state(RUNS["FAFO"])
    assert torch.equal(tiny["v"], 1e-6 * torch.eye(50, dtype=torch.float64))
    assert tiny["q"].nonzero().tolist() == [[c, 5 + c] for c in range(4)]


def test_the_emulated_rate_follows_the_largest_singular_value() -> None:
    draw = torch.Generator().manual_seed(0)
    qk = torch.randn(1, 4, 50, generator=draw)
    state = {"qk": qk, "top": torch.full((1, 4, 1), 0.5)}
    zero = torch.zeros(1, 3, 50)
    for _ in range(60):
        ATTENTION["EA"].learn(state, zero.softmax(2), zero, torch.zeros(1, 4, 3))
    found = torch.bmm(state["top"].transpose(1, 2), qk).norm()
    assert math.isclose(float(found), float(torch.linalg.matrix_norm(qk[0], 2)), rel_tol=1e-3)


def test_imposed_attention_is_uniform_over_positions() -> None:
    counts = torch.zeros(2, 50)
    counts[0, [0, 3, 12, 15]] = torch.tensor([1.0, 3.0, 1.0, 1.0])
    counts[1, 2] = 5  # no distinct tokens: all mass goes to the others
    mass = imposed_mass(counts, 0.8)
    assert torch.allclose(mass[0, [0, 3, 12, 15]], torch.tensor([0.05, 0.15, 0.4, 0.4]))
    assert torch.equal(mass[1].nonzero(), torch.tensor([[2]]))
    assert torch.allclose(mass.sum(1), torch.ones(2))


@pytest.mark.slow
def test_a_factored_output_has_a_lower_final_loss_at_equal_attention() -> None:
    names = ["fixed collapsed alpha=0.8", "fixed factorised alpha=0.8"]
    runs = choose_runs(names, SEEDS[:1], epochs=80, batches=100, batch=32)
    collapsed, factorised = (result.gain for result in train(runs))
    assert collapsed is not None
    assert factorised is not None
    assert factorised["loss"] < collapsed["loss"] < math.log(50)
    assert collapsed["gain"] > 0


def test_the_conserved_quantity_stays_constant_during_training() -> None:
    batch = Batch([ToyRun("x", "FAFO", batches=50, length=16)], torch.device("cpu"))
    for name in ("q", "k", "v", "o"):
        batch.state[name] *= 1e5
    before = batch.state["v"].norm()
    for _ in range(40):
        batch.launch()
        batch.collect()
    v, o = batch.state["v"][0], batch.state["o"][0]
    assert v.norm() > 1.3 * before
    assert balance(v, o) < 0.01
    assert balance(v, 1.1 * o) > 0.05


def test_a_diverged_run_is_a_result_and_the_others_continue() -> None:
    runs = [
        ToyRun(name, "CACO", ratio=ratio, epochs=3, batches=50) for name, ratio in (("a", 1.0), ("b", 1.0))
    ]
    batch = Batch(runs, torch.device("cpu"))
    batch.state["ov"][1] = math.inf
    for _ in range(3):
        batch.launch()
        batch.collect()
    fine, wrong = sorted(batch.done, key=lambda result: result.run.name)
    assert wrong.diverged == 50
    assert fine.diverged is None
    assert "end" in fine.marks
    assert ToyResult.from_dict(wrong.as_dict()) == wrong


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"form": "FAFA"}, "unknown toy form 'FAFA'; did you mean 'FAFO'?"),
        ({"qk_start": "small"}, "unknown start 'small'"),
        ({"batches": 70}, "batches takes 50, 100, 200, 250, got 70"),
        ({"ratio": -1.0}, "ratio takes numbers of at least 0"),
        ({"length": 2}, "length >= 3"),
        ({"share": 0.5}, "only with form IA.."),
        ({"form": "EACO", "adam": 1e-3}, "Adam trains FAFO, FACO, CAFO, CACO, got form EACO"),
        ({"adam": 0.0}, "adam takes a rate above 0, got 0.0"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message.replace("?", r"\?").replace(".", r"\.")):
        ToyRun(**({"name": "x", "form": "FAFO"} | settings))  # type: ignore[arg-type]


def test_an_unknown_run_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(UserError, match="did you mean 'FACO'"):
        choose_runs(["FACX"])
    with pytest.raises(UserError, match="unknown toy run"):
        choose_runs(["nothing*"])
