from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Task
from headtohead.data.tasks.batches import Batches, collated
from headtohead.data.tasks.registry import prepare_task
from headtohead.kernels import plain
from headtohead.mechanisms.contract.base import ForwardState, Frame
from headtohead.model.classifier import Classifier, Pointer, Reader
from headtohead.model.decoder import Decoder
from headtohead.model.generation import Sampling, generate
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size
from headtohead.training.optimizer import make_optimizer
from headtohead.training.settings import TrainSettings

LAYOUTS = ("standard", "sharing:tie=kv", "(coupled standard)*1", "kuramoto:ffn_start=small")


def size(vocabulary: int, **settings: object) -> Size:
    return Size("t", 32, 2, 2, 64, vocabulary, 64).with_settings(init_std=0.1, **settings)


def trained(model: Reader, task: Task, steps: int, lr: float = 3e-3) -> Reader:
    batches = Batches(task.splits["train"], 32, seed=1)
    optimizer = make_optimizer(model, TrainSettings(lr=lr))
    model.train()
    for number in range(steps):
        batch = batches.batch(number)
        objective, _, _ = model(batch.tokens, batch.targets, padding=batch.padding)
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batch_neighbors_and_padding_change_no_score(layout: str, causal: bool) -> None:
    task = prepare_task("grammar:train=60", context=32)
    layers = parse_layout(layout).layers(2)
    try:
        model = Classifier(size(task.vocabulary), layers, 2, seed=1, causal=causal).double().eval()
    except UserError as error:
        assert "does not support bidirectional" in str(error)  # rejected, not ignored
        return
    rows = task.splits["train"][:12]
    batch = collated(rows, range(12))
    assert batch.padding is not None
    with torch.no_grad():
        together = model.scores(batch.tokens, batch.ends, batch.padding)
        for row, place in enumerate(batch.places.tolist()):
            alone = collated(rows, [place])
            assert alone.padding is None
            assert torch.allclose(
                together[row], model.scores(alone.tokens, alone.ends)[0], rtol=1e-9, atol=1e-12
            )
        _, nats, _ = model(batch.tokens, batch.targets, padding=batch.padding)
        wanted = torch.nn.functional.cross_entropy(together, batch.labels)
    assert nats == pytest.approx(wanted.item(), rel=1e-6), (
        "one class per sequence, and no padding in the mean"
    )


def test_a_bidirectional_model_uses_later_tokens() -> None:
    layers = parse_layout("standard").layers(2)
    tokens = torch.tensor([[1, 2, 3, 4]])
    other = torch.tensor([[1, 2, 3, 5]])
    for causal in (True, False):
        model = Reader(size(8), layers, seed=1, causal=causal).eval()
        same = torch.equal(model.logits(tokens)[:, :3], model.logits(other)[:, :3])
        assert same == causal
    with pytest.raises(UserError, match="a bidirectional model cannot decode"):
        model.hidden(tokens, caches=model.new_caches(1, 8))


def test_a_classifier_learns_agreement_past_attractors() -> None:
    task = prepare_task("grammar:train=3000", context=32)
    model = Classifier(size(task.vocabulary), parse_layout("standard").layers(2), 2, seed=1, causal=False)
    assert isinstance(trained(model, task, 250), Classifier)
    batch = collated(task.splits["test"], range(len(task.splits["test"])))
    with torch.no_grad():
        guesses = model.scores(batch.tokens, batch.ends, batch.padding).argmax(-1)
    assert (guesses == batch.labels).double().mean() > 0.95


@pytest.mark.slow
def test_a_reader_learns_to_copy_and_generates_the_copy() -> None:
    task = prepare_task("copy:train=4000,length=5,symbols=6", context=32)
    assert task.written
    model = trained(Reader(size(task.vocabulary), parse_layout("standard").layers(2), seed=1), task, 400)
    question = collated(task.splits["test"][:50], range(50), written=False)
    found = torch.cat(list(generate(model, question.tokens, 5, Sampling(temperature=0))), 1)
    assert (found == question.tokens[:, :5]).float().mean() > 0.95


def test_a_pointer_learns_the_position_of_the_subject() -> None:
    task = prepare_task("grammar:train=2000", context=32)
    model = Pointer(size(task.vocabulary), parse_layout("standard").layers(2), seed=1, causal=False)
    batches = Batches(task.splits["train"], 32, seed=1)
    optimizer = make_optimizer(model, TrainSettings(lr=3e-3))
    for number in range(120):
        batch = batches.batch(number)
        objective, _, _ = model(batch.tokens, batch.spans, padding=batch.padding)
        optimizer.zero_grad()
        objective.backward()
        optimizer.step()
    model.eval()
    test = collated(task.splits["test"], range(len(task.splits["test"])))
    with torch.no_grad():
        found = model.spans(test.tokens, test.padding)
    assert (found == test.spans).all(-1).float().mean() > 0.95


def test_the_most_likely_span_is_the_best_within_the_length_limit() -> None:
    model = Pointer(size(9), parse_layout("standard").layers(2), seed=2).eval()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        first, last = model._ends(model.hidden(tokens), None).log_softmax(-1)[0]
        for most in (1, 3, 30):
            spans = [(a, b) for a in range(8) for b in range(a, min(8, a + most))]
            best = max(spans, key=lambda span: float(first[span[0]] + last[span[1]]))
            assert model.spans(tokens, most=most).tolist() == [list(best)]


def test_a_pointer_never_points_at_padding() -> None:
    task = prepare_task("grammar:train=60", context=32)
    model = Pointer(size(task.vocabulary), parse_layout("standard").layers(2), seed=1)
    batch = collated(task.splits["train"], range(60))
    assert batch.padding is not None
    found = model.spans(batch.tokens, batch.padding)
    assert (found <= batch.ends[:, None]).all()
    assert (found[:, 0] <= found[:, 1]).all()
    for smoothing in (0.0, 0.1):
        objective, nats, _ = model(batch.tokens, batch.spans, smoothing, batch.padding)
        objective.backward()
        assert torch.isfinite(objective)
        assert nats > 0
    assert all(
        torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None
    )


@pytest.mark.parametrize("tied", [True, False])
def test_it_starts_from_a_trained_decoder(tied: bool) -> None:
    layers = parse_layout("standard").layers(2)
    source = Decoder(size(20, tied=tied), layers, seed=5)
    model = Classifier(size(20, tied=tied), layers, 3, seed=1)
    head = model.readout.clone()
    model.start_from(source.state_dict())
    tokens = torch.arange(10)[None]
    assert torch.equal(model.hidden(tokens), source.hidden(tokens))
    assert torch.equal(model.readout, head), "a head of another kind keeps its initial values"
    reader = Reader(size(20, tied=tied), layers, seed=1)
    reader.start_from(source.state_dict())
    assert torch.equal(reader.logits(tokens), source.logits(tokens))
    with pytest.raises(UserError, match=r"embedding.weight is \(20, 32\), but \(21, 32\) here"):
        Classifier(size(21), layers, 3).start_from(Decoder(size(20), layers).state_dict())
    with pytest.raises(UserError, match="does not fit this model: blocks"):
        Classifier(size(20), parse_layout("sharing:tie=kv").layers(2), 3).start_from(source.state_dict())


def test_it_is_a_decoder_in_names_circuits_and_initial_values() -> None:
    layers = parse_layout("standard").layers(2)
    decoder, model = Decoder(size(20), layers, seed=3), Classifier(size(20), layers, 3, seed=3)
    theirs, mine = decoder.state_dict(), model.state_dict()
    assert mine.keys() - theirs.keys() == {"head.weight", "head.bias"}
    assert all(torch.equal(theirs[name], mine[name]) for name in theirs)
    assert model.parameter_count() == decoder.parameter_count() + 3 * 32 + 3
    assert {circuit.tag for circuit in model.circuits()} == {
        circuit.tag for circuit in decoder.circuits()
    } | {"head"}
    with pytest.raises(UserError, match="at least 2 classes; got 1"):
        Classifier(size(20), layers, 1)


@pytest.mark.parametrize("layout", ["standard", "(prefix_mean coupled)*1", "kuramoto", "no_attention"])
def test_one_row_of_each_sequence_is_that_row_of_all(layout: str) -> None:
    model = Decoder(size(20), parse_layout(layout).layers(2), seed=1).double().eval()
    tokens, rows = torch.randint(20, (3, 7)), torch.tensor([6, 0, 3])
    with torch.no_grad():
        whole, some = model.logits(tokens), model.logits(tokens, rows=rows)
    assert some.shape == (3, 1, 20)
    assert torch.allclose(some[:, 0], whole[torch.arange(3), rows], rtol=1e-10, atol=1e-12)


NARROWING = {
    "standard": True,
    "standard:window=3": True,
    "standard:kv_heads=1,qk_norm=true": True,
    "standard+coupled": True,
    "factorised:form=FAFO": True,
    "factorised:form=CACO": True,
    "factorised:form=CAFO": True,
    "sharing:tie=kv": False,
    "differential": False,
    "latent": False,
    "no_attention": False,
}


@pytest.mark.parametrize("kernels", ["fast", "plain"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("layout", NARROWING)
def test_a_narrow_frame_mixes_one_row_and_changes_nothing_else(
    layout: str, causal: bool, kernels: str
) -> None:
    positions = "learned" if layout.startswith("factorised") else "rope"
    layers = parse_layout(layout).layers(2)
    try:
        model = Reader(size(20, positions=positions), layers, seed=1, causal=causal).double().eval()
    except UserError as error:
        assert "does not support bidirectional" in str(error)
        return
    assert model.layers[-1].mechanism.narrows == NARROWING[layout]
    tokens, rows = torch.randint(20, (3, 7)), torch.tensor([4, 0, 3])
    padding = torch.arange(7) < torch.tensor([[5], [2], [7]])
    with plain() if kernels == "plain" else nullcontext():
        for real in (None, padding):
            found = []
            for frame in (None, Frame(state=ForwardState(narrow=True))):
                model.zero_grad()
                some = model.logits(tokens, padding=real, rows=rows, frame=frame)
                assert frame is None or (frame.state.rows is rows) == NARROWING[layout]
                some.logsumexp(-1).sum().backward()
                found.append((some.detach(), model.embedding.weight.grad.clone()))
            for whole, narrow in zip(*found, strict=True):
                assert torch.allclose(whole, narrow, rtol=1e-9, atol=1e-11)
