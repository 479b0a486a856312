from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Example, Task
from headtohead.data.tasks.registry import prepare_task
from headtohead.interpret.deletion import deletions
from headtohead.interpret.faithfulness import Explained, attention_rows, explain_model, rolled_out
from headtohead.interpret.readout import batched, cut, reads_of
from headtohead.interpret.saliency import gradient_x_input
from headtohead.mechanisms.contract.base import Frame
from headtohead.model.classifier import Classifier, Pointer, Reader
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size


def size(vocabulary: int, layers: int = 2, **settings: Any) -> Size:
    return Size("t", 16, layers, 2, 24, vocabulary, 48).with_settings(init_std=0.3, **settings)


def model(kind: str, vocabulary: int, layout: str = "standard", layers: int = 2, **more: Any) -> Decoder:
    parts = parse_layout(layout).layers(layers)
    shape = size(vocabulary, layers)
    made = {
        "classes": lambda: Classifier(shape, parts, 2, seed=3, **more),
        "reader": lambda: Reader(shape, parts, seed=3, **more),
        "decoder": lambda: Decoder(shape, parts, seed=3),
        "pointer": lambda: Pointer(shape, parts, seed=3, **more),
    }[kind]()
    return made.double().eval()


def row(tokens: list[int], relevant: list[list[int]], label: int = 0) -> Example:
    marks = np.zeros((len(relevant), len(tokens)), dtype=bool)
    for index, positions in enumerate(relevant):
        marks[index, positions] = True
    return Example(np.array(tokens), marks, label)


def task_of(examples: list[Example], vocabulary: int = 10) -> Task:
    return Task(
        "tiny",
        "",
        ("no", "yes"),
        vocabulary,
        {"train": examples, "valid": examples, "test": examples},
        {},
        "",
    )


# --- known answers ---------------------------------------------------------------------------------------------------


def test_rollout_of_two_layers_is_the_product_by_hand() -> None:
    low = torch.tensor([[[1.0, 0.0], [0.4, 0.6]]])
    high = torch.tensor([[[1.0, 0.0], [0.8, 0.2]]])
    # .5 A + .5 I: low [[1, 0], [.2, .8]], high [[1, 0], [.4, .6]]; last row of high x low: [.4 + .6 x .2, .6 x .8].
    assert torch.allclose(rolled_out([low, high], torch.tensor([1]), 0.5), torch.tensor([[0.52, 0.48]]))
    assert torch.allclose(rolled_out([low, high], torch.tensor([1]), 1.0), torch.tensor([[0.8 + 0.08, 0.12]]))
    # A row that attends to nothing keeps only the identity.
    empty = torch.tensor([[[0.0, 0.0], [0.4, 0.6]]])
    assert torch.allclose(rolled_out([empty], torch.tensor([0]), 0.5), torch.tensor([[1.0, 0.0]]))


def test_confidence_heat_map_and_published_rules_by_hand() -> None:
    mass = np.array([0.05, 0.2, 0.4, 0.9, np.nan])
    found = Explained(
        task="toy",
        mass={"rollout": mass, "layer_mean": mass, "first_head": mass / 2},
        uniform=np.where(np.isnan(mass), np.nan, 0.25),
        right=np.array([0.05, 0.95, 0.2, 0.6, 0.9]),
        correct=np.array([False, True, False, True, True]),
        deleted=dict.fromkeys(("rollout", "layer_mean"), np.zeros((5, 5, 2)))
        | {"chance": np.full((5, 5, 2), np.nan)},
        entropy=np.zeros((5, 1)),
        sink=np.zeros((5, 1)),
        indicators=[None],
    )
    assert [found.confidence("rollout", at) for at in (0.1, 0.33, 0.5)] == [75.0, 50.0, 25.0]
    assert [found.confidence("rollout", at, correct=True) for at in (0.1, 0.33, 0.5)] == [50.0, 25.0, 25.0]
    assert found.confidence("rollout", 0.1, everyone=True) == 60.0
    assert found.heat_map("rollout").tolist() == [[1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 0], [0, 0, 0, 1]]
    summary = found.summary()
    assert (summary["examples"], summary["marked"], summary["too_short"]) == (5, 4, 5)
    assert summary["explanations"]["rollout"]["mass"] == pytest.approx(0.3875)
    assert summary["explanations"]["rollout"]["over_uniform"] == pytest.approx(1.55)
    assert summary["chance"]["comprehensiveness"] is None
    # squad: 3 of 5 above .1; agreement: half of the mass, so .2 and .45, both with p above .1; hatexplain: 2 above .33.
    assert summary["published"] == {"squad": 60.0, "agreement": 40.0, "hatexplain": 40.0, "own": None}
    assert replace(found, task="squad-whole").summary()["published"]["own"] == 60.0
    assert set(summary["explanations"]["rollout"]["heat_maps"]) == {"common", "toy"}


class Bag(Classifier):
    """The score of class 1 is the sum of the tokens' values; tokens must be in reading order."""

    def scores(
        self, tokens: Tensor, ends: Tensor, padding: Tensor | None = None, frame: Frame | None = None
    ) -> Tensor:
        values = torch.tensor([0.0, 1.0, -2.0, 3.0], dtype=torch.float64)[tokens]
        real = torch.ones_like(tokens, dtype=torch.bool) if padding is None else padding
        assert torch.equal(real.sum(-1) - 1, ends)
        order = tokens.masked_fill(~real, 99)
        assert (order.diff(dim=-1) >= 0).all()  # examples are ascending, so kept tokens must be too
        one = (values * real).sum(-1)
        return torch.stack([torch.zeros_like(one), one], -1)


def test_comprehensiveness_and_sufficiency_by_hand() -> None:
    bag = Bag(size(4), parse_layout("standard").layers(2), 2).double().eval()
    examples = [row([0, 1, 2, 3], [[0]]), row([1, 3], [[0]]), row([2], [[0]])]
    (batch,) = batched(bag, reads_of(bag, examples, 8, 100), 100)
    assert [len(read.tokens) for read in batch.reads] == [1, 2, 4]
    sigmoid = lambda value: 1 / (1 + math.exp(-value))  # noqa: E731
    given = torch.tensor([0, 1, 1])
    before = torch.tensor([sigmoid(2), sigmoid(4), sigmoid(2)], dtype=torch.float64)
    scores = torch.tensor([[9.0, 0, 0, 0], [0.1, 0.9, 0, 0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    found = deletions(bag, batch, scores, given, before, (0.05, 0.5))
    assert found[0].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert found[1, 0].tolist() == pytest.approx([sigmoid(4) - sigmoid(1), sigmoid(4) - sigmoid(3)])
    # k = 1: 1 - 2 = -1 without the 3, 3 with only it; k = 2: 1 without 2 and 3, 1 with only them.
    assert found[2, 0].tolist() == pytest.approx([sigmoid(2) - sigmoid(-1), sigmoid(2) - sigmoid(3)])
    assert found[2, 1].tolist() == pytest.approx([sigmoid(2) - sigmoid(1), sigmoid(2) - sigmoid(1)])


def test_k_is_the_ceiling_of_the_share_and_leaves_one_token() -> None:
    lengths = torch.tensor([1, 2, 20, 21, 128])
    assert cut(0.05, lengths).tolist() == [0, 1, 1, 2, 7]
    assert cut(0.5, lengths).tolist() == [0, 1, 10, 11, 64]


# --- an independent reference ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
@torch.no_grad()
def test_one_layer_matches_a_direct_implementation_of_the_definitions(causal: bool) -> None:
    torch.manual_seed(0)
    examples = [
        row(torch.randint(10, (length,)).tolist(), [[0, 1], [1]], label) for length, label in ((5, 0), (9, 1))
    ]
    classifier = model("classes", 10, layers=1, causal=causal)
    found = explain_model(classifier, task_of(examples))
    mechanism = classifier.layers[0].mechanism

    def probability(tokens: Tensor) -> Tensor:
        return classifier.scores(tokens[None], torch.tensor([len(tokens) - 1]))[0].softmax(-1)

    for index, example in enumerate(examples):
        tokens = torch.from_numpy(example.tokens)
        frame = Frame(time=len(tokens), causal=causal, rotary=classifier.rotary)
        x = classifier.embedding(tokens[None], frame)
        weights = mechanism.attention_map(classifier.layers[0].mixer_norm(x), frame)[0, :, -1].mean(0)
        assert float(found.mass["rollout"][index]) == pytest.approx(
            float((weights[0] + weights[1] + weights[1]) / 2)
        )
        assert float(found.uniform[index]) == pytest.approx(1.5 / len(tokens))
        first = probability(tokens)
        given = int(first.argmax())
        assert float(found.right[index]) == pytest.approx(float(first[example.label]))
        losses = []
        for share in (0.01, 0.05, 0.1, 0.2, 0.5):
            top = weights.argsort(descending=True)[: math.ceil(share * len(tokens))].tolist()
            without = [token for at, token in enumerate(tokens.tolist()) if at not in top]
            alone = [token for at, token in enumerate(tokens.tolist()) if at in top]
            losses.append(
                [float(first[given] - probability(torch.tensor(kept))[given]) for kept in (without, alone)]
            )
        assert np.allclose(found.deleted["rollout"][index], losses, atol=1e-9)


def test_gradient_x_input_is_the_derivative_along_each_embedding() -> None:
    classifier = model("classes", 10, layers=2)
    (batch,) = batched(classifier, reads_of(classifier, [row([1, 4, 2, 7], [[0]])], 8, 100), 100)
    given = torch.tensor([1])
    found = gradient_x_input(classifier, batch, given)[0]
    step = 1e-6
    for index in range(4):

        def scaled(_: Any, __: Any, output: Tensor, index: int = index) -> Tensor:
            changed = output.clone()
            changed[:, index] *= 1 + step
            return changed

        with torch.no_grad():
            plain = classifier.scores(batch.tokens, batch.places).log_softmax(-1)[0, 1]
            handle = classifier.embedding.register_forward_hook(scaled)
            more = classifier.scores(batch.tokens, batch.places).log_softmax(-1)[0, 1]
            handle.remove()
        assert float(found[index]) == pytest.approx(float((more - plain) / step), rel=1e-3, abs=1e-7)


# --- every model, every mechanism ------------------------------------------------------------------------------------

CASES = [
    ("classes", "grammar:train=30", "standard"),
    ("reader", "recall:train=30,pairs=3,queries=2", "standard"),
    ("decoder", "toy:train=30,length=9", "(coupled standard)*1"),
    ("pointer", "recall:train=30,pairs=3,queries=2", "sharing:tie=kv"),
    ("reader", "toy:train=30,length=9", "differential"),
    ("classes", "grammar:train=30", "gated_linear"),
    ("classes", "grammar:train=30", "kuramoto"),
    ("classes", "grammar:train=30", "(no_attention standard)*1"),
]


@pytest.mark.parametrize(("kind", "name", "layout"), CASES)
def test_a_batch_equals_its_examples_one_by_one(kind: str, name: str, layout: str) -> None:
    """Padding and the rest of the batch do not affect any number of an example."""
    task = prepare_task(name, context=48)
    examples = task.splits["test"]
    subject = model(kind, task.vocabulary, layout)
    together = explain_model(subject, task)
    for index in (0, len(examples) - 1):
        splits = {split: [examples[index], *task.splits[split]] for split in task.splits}
        alone = explain_model(subject, Task(**{**vars(task), "splits": splits}), limit=1)
        for key in together.mass:
            assert np.allclose(together.mass[key][index], alone.mass[key][0], atol=1e-9), key
        for key in together.deleted.keys() - {"chance"}:  # seeded by the example's index
            assert np.allclose(together.deleted[key][index], alone.deleted[key][0], atol=1e-9), key
        for key in ("uniform", "right", "correct", "entropy", "sink"):
            assert np.allclose(
                getattr(together, key)[index], getattr(alone, key)[0], atol=1e-9, equal_nan=True
            ), key
    everything = together.summary()
    assert everything["examples"] == len(examples)
    assert bool(together.signed) == (layout in ("differential", "gated_linear"))
    assert together.without_map == (["layer 1 (no_attention)"] if "no_attention" in layout else [])
    assert ("rollout" in together.mass) == ("no_attention" not in layout)
    for found in together.mass.values():
        assert ((found >= 0) & (found <= 1 + 1e-9)).all()


def test_a_pointer_does_not_see_the_answer_after_its_text() -> None:
    task = prepare_task("copy:train=30,length=6", context=48)
    pointer = model("pointer", task.vocabulary, causal=False)
    reads = reads_of(pointer, task.splits["test"], 8, 100)
    assert {len(read.tokens) for read in reads} == {7}
    other = [
        replace(example, tokens=np.where(np.arange(12) < 7, example.tokens, 0))
        for example in task.splits["test"]
    ]
    splits = {**task.splits, "test": other}
    found, same = (explain_model(pointer, given) for given in (task, replace(task, splits=splits)))
    assert np.array_equal(found.right, same.right)


@pytest.mark.parametrize("causal", [True, False])
def test_uniform_attention_of_a_pointer_covers_only_visible_tokens(causal: bool) -> None:
    task = prepare_task("copy:train=30,length=6", context=48)
    pointer = model("pointer", task.vocabulary, causal=causal)
    found = explain_model(pointer, task)
    reads = reads_of(pointer, task.splits["test"], 8, 100)
    for number, even in enumerate(found.uniform):
        rows = [read for read in reads if read.example == number]
        seen = [read.relevant[0, : read.place + 1] if causal else read.relevant[0] for read in rows]
        assert even == pytest.approx(np.mean([marks.mean() for marks in seen]))


@pytest.mark.parametrize(("kind", "name", "layout"), CASES[:4])
def test_progress_is_reported_at_least_every_few_passes(kind: str, name: str, layout: str) -> None:
    task = prepare_task(name, context=48)
    subject = model(kind, task.vocabulary, layout)
    shares: list[float] = [0.0]
    passes = [0]

    def progress(share: float) -> None:
        assert passes[-1] <= 3
        passes.append(0)
        shares.append(share)

    def count(*_: Any) -> None:
        passes[-1] += 1

    subject.embedding.register_forward_hook(count)
    explain_model(subject, task, progress=progress)
    assert passes[-1] == 0
    assert sum(passes) > 20
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_a_model_without_maps_is_explained_only_by_its_gradient() -> None:
    task = prepare_task("grammar:train=30", context=48)
    found = explain_model(model("classes", task.vocabulary, "no_attention"), task).summary()
    assert set(found["explanations"]) == {"gradient"}
    assert [layer["indicators"] for layer in found["layers"].values()] == [None, None]
    assert set(found["published"].values()) == {None}


def test_examples_without_relevant_tokens_are_excluded_and_counted() -> None:
    marked, bare = row([1, 2, 3, 4], [[1]], 0), row([4, 3, 2, 1, 5], [[]], 1)
    subject = model("classes", 10)
    both = explain_model(subject, task_of([marked, bare])).summary()
    one = explain_model(subject, task_of([marked, row([4, 3, 2, 1, 5], [[0]], 1)]), limit=1).summary()
    assert (both["examples"], both["marked"], both["marked_share"]) == (2, 1, 0.5)
    for name, values in both["explanations"].items():
        assert values["mass"] == pytest.approx(one["explanations"][name]["mass"])
    none = explain_model(subject, task_of([bare, row([1, 2], [[]], 0)])).summary()
    assert none["explanations"]["rollout"]["mass"] is None
    assert none["explanations"]["rollout"]["confidence"] == {"10": None, "33": None, "50": None}
    assert none["explanations"]["rollout"]["comprehensiveness"] is not None


def test_read_out_rows_sum_to_one_over_real_tokens() -> None:
    task = prepare_task("grammar:train=30", context=48)
    subject = model("classes", task.vocabulary)
    for batch in batched(subject, reads_of(subject, task.splits["test"], 8, 200), 200):
        for scores in attention_rows(subject, batch).explanations.values():
            assert torch.allclose(scores.sum(-1), torch.ones(len(scores), dtype=torch.float64))
            assert (scores[~batch.real] == 0).all()


def test_a_task_that_does_not_fit_the_model_is_rejected() -> None:
    task = prepare_task("grammar:train=30", context=48)
    for subject, message in (
        (model("reader", task.vocabulary), "needs a classifier, got a Reader"),
        (model("classes", 5), "the model of 5"),
    ):
        with pytest.raises(UserError, match=message):
            explain_model(subject, task)
    with pytest.raises(UserError, match="no split 'tset'"):
        explain_model(model("classes", task.vocabulary), task, "tset")


def test_seeds_of_one_arm_give_intervals() -> None:
    import headtohead as h2h

    task = prepare_task("grammar:train=30", context=48)
    seeds = [
        Classifier(size(task.vocabulary, 1), parse_layout("standard").layers(1), 2, seed=seed)
        for seed in (1, 2, 3)
    ]
    alone = [h2h.explain(one, task, quiet=True)["explanations"]["rollout"]["mass"] for one in seeds]
    found = h2h.explain(seeds, task, quiet=True)
    mass = found["explanations"]["rollout"]["mass"]
    assert mass["n"] == 3
    assert mass["mean"] == pytest.approx(np.mean(alone))
    assert mass["low"] < min(alone) < max(alone) < mass["high"]
    assert found["task"] == "grammar:train=30"
