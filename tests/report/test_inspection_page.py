from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import headtohead as h2h
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.data.tasks.base import Task
from headtohead.data.tasks.registry import prepare_task
from headtohead.data.tokenizers import Bytes
from headtohead.interpret.inspection import inspect_text
from headtohead.model.classifier import Classifier, Pointer, Reader
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size
from headtohead.report.inspection_page import InspectionView, sentence
from tests.browser import DARK, MEASURE, WIDTHS, browse, framed, message

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=document.title='owned'>"
GRAMMAR = "grammar:train=30"


def decoder(layout: str, vocabulary: int = 256, context: int = 128) -> Decoder:
    size = Size("t", 16, 2, 2, 24, vocabulary, context).with_settings(init_std=0.3)
    return Decoder(size, parse_layout(layout).layers(2), seed=1).eval()


def grammarian(layout: str) -> Classifier:
    task = prepare_task(GRAMMAR, context=32)
    size = Size("t", 16, 2, 2, 24, task.vocabulary, 32).with_settings(init_std=0.3)
    return Classifier(size, parse_layout(layout).layers(2), 2, seed=1).eval()


def data(page: Path) -> list[dict[str, Any]]:
    text = page.read_text()
    return json.loads(re.search(r'id="data">(.*?)</script>', text, flags=re.DOTALL)[1])  # type: ignore[index]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models side by side on a hostile text, one of them with phases."""
    page = tmp_path_factory.mktemp("look") / "look.html"
    return h2h.look(
        [decoder("standard"), decoder("kuramoto")], HOSTILE, tokenizer=Bytes(), out=page, quiet=True
    )


def test_the_page_is_one_file_without_network_requests(hostile: Path) -> None:
    page = hostile.read_text()
    assert "default-src 'none'" in page
    assert not re.search(r"<(link|img|iframe|base)\b", page)
    assert not re.search(r'(src|href)="', page)
    assert page.count("</script>") == 2
    assert "document.title='owned'" not in page.replace("\\u003c", "<").partition('id="data"')[0]
    one, two = data(hostile)
    assert "".join(one["tokens"]) == HOSTILE == "".join(two["tokens"])
    assert not one["phases"]
    assert [stage["stage"] for stage in two["phases"]] == [
        "before layer 1",
        "layer 1, after coupling",
        "before layer 2",
        "layer 2, after coupling",
        "at the end",
    ]


def test_weights_on_the_page_equal_the_mechanism_s(hostile: Path, tmp_path: Path) -> None:
    import base64

    import numpy as np

    model = decoder("standard")
    page = h2h.look(model, "the cat sat", tokenizer=Bytes(), out=tmp_path / "a.html", quiet=True)
    (found,) = data(page)
    looked = inspect_text(model, list(b"the cat sat"), chr)
    for layer, shown in zip(looked.layers, found["layers"], strict=True):
        steps = np.frombuffer(base64.b64decode(shown["weights"]), "<i2").reshape(shown["heads"], -1)
        assert layer.weights is not None
        wanted = layer.weights[0][:, torch.ones(11, 11).tril().bool()].numpy()
        assert np.allclose(steps / 32767 * shown["largest"], wanted, atol=2e-5)
    with torch.no_grad():
        chances = model.logits(torch.tensor([list(b"the cat sat")]))[0, -1].softmax(-1)
    best = int(chances.argmax())
    assert found["guesses"][-1][0] == [
        Bytes().decode([best]),
        pytest.approx(float(chances[best]), abs=1e-5),
    ]
    view = InspectionView("a", "b", list("the cat sat"), looked)
    assert re.fullmatch(
        r"Prediction: “.*” \(.*%\)\. Half of its attention is on \d+ of 11 tokens\.", sentence(view)
    )


@pytest.mark.parametrize("layout", ["standard", "differential", "gated_linear", "latent", "sharing:tie=kv"])
def test_a_task_s_example_is_shown_with_its_relevant_tokens(layout: str, tmp_path: Path) -> None:
    page = h2h.look(grammarian(layout), task=GRAMMAR, example=1, out=tmp_path / "a.html", quiet=True)
    (found,) = data(page)
    row = prepare_task(GRAMMAR, context=32).splits["test"][1]
    assert found["relevant"] == row.relevant.any(0).tolist()
    assert all(re.fullmatch("[a-z]+", token) for token in found["tokens"])
    assert {words for words, _ in found["guesses"][0]} == {"singular", "plural"}
    assert all(layer["heads"] for layer in found["layers"])
    assert [layer["signed"] for layer in found["layers"]] == [layout in ("differential", "gated_linear")] * 2
    assert "on the underlined ones (uniform attention:" in page.read_text()


@pytest.mark.parametrize("kind", [Reader, Pointer])
def test_readers_and_pointers_are_shown_where_they_are_read(kind: type[Reader], tmp_path: Path) -> None:
    name = "recall:train=30,pairs=3,queries=2"
    task: Task = prepare_task(name, context=32)
    size = Size("t", 16, 2, 2, 24, task.vocabulary, 32).with_settings(init_std=0.3)
    model = kind(size, parse_layout("standard").layers(2), seed=1).eval()
    (found,) = data(h2h.look(model, task=name, out=tmp_path / "a.html", quiet=True))
    targets = task.splits["test"][0].targets
    assert targets is not None
    assert found["kind"] == ("token" if kind is Reader else "span")
    assert kind is Pointer or targets[found["place"]] >= 0


def test_a_pointer_is_correct_only_if_its_span_is_the_whole_answer(tmp_path: Path) -> None:
    name = "subtraction:train=30,length=4"
    task: Task = prepare_task(name, context=32)
    first, stop = task.splits["test"][0].span or (0, 0)
    size = Size("t", 16, 2, 2, 24, task.vocabulary, 32)
    model = Pointer(size, parse_layout("standard").layers(2), seed=1, causal=False).eval()
    for last, words in ((stop - 1, ", correct"), (stop, "; correct is")):
        model.spans = lambda tokens, last=last: torch.tensor([[first, last]])  # type: ignore[assignment]
        page = h2h.look(model, task=name, out=tmp_path / "a.html", quiet=True).read_text()
        assert re.search(rf"Span: “[^”]*” \([^)]*\){words}", page)


def test_a_mechanism_without_a_map_shows_only_its_prediction(tmp_path: Path) -> None:
    page = h2h.look(decoder("no_attention"), "a cat", tokenizer=Bytes(), out=tmp_path / "a.html", quiet=True)
    assert "no_attention has no attention map; only the prediction is shown." in page.read_text()
    (found,) = data(page)
    assert [layer["heads"] for layer in found["layers"]] == [0, 0]
    assert len(found["guesses"]) == 5


def test_a_text_longer_than_the_context_is_truncated_on_the_left_with_a_note(tmp_path: Path) -> None:
    page = h2h.look(
        decoder("standard", context=8),
        "0123456789abc",
        tokenizer=Bytes(),
        out=tmp_path / "a.html",
        quiet=True,
    )
    assert "13 tokens, but the context is 8: the first 5 were cut off." in page.read_text()
    assert "".join(data(page)[0]["tokens"]) == "56789abc"


@pytest.mark.slow
def test_a_run_is_inspected_and_invalid_input_is_rejected_in_one_line(
    story: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = {"tokens": 512, "batch": 256, "seeds": 1, "corpus": f"file:{story}"}
    h2h.Study(["standard"], name="kept", **settings).run(tmp_path / "kept", workers=1, quiet=True)
    h2h.Study(["standard"], name="bare", **settings).run(
        tmp_path / "bare", workers=1, quiet=True, keep_weights=False
    )
    (run,) = (tmp_path / "kept" / "runs").iterdir()
    (bare,) = (tmp_path / "bare" / "runs").iterdir()
    page = h2h.look(run, "the cat", out=tmp_path / "a.html", quiet=True)
    assert f"run {run.name}, seed" in page.read_text()
    with pytest.raises(SystemExit) as ended:
        main(["look", str(run), str(run), "--text", "the cat", "--out", str(tmp_path / "b.html")])
    assert ended.value.code in (0, None)
    assert capsys.readouterr().out.strip() == str(tmp_path / "b.html")
    assert len(data(tmp_path / "b.html")) == 2
    out = tmp_path / "no.html"
    for arguments, words in (
        ({"runs": bare, "text": "a"}, "has no trained weights"),
        ({"runs": run, "text": ""}, "trained on a corpus; give a text"),
        ({"runs": run, "text": "a", "task": "toy"}, "a text or a task"),
        ({"runs": [run] * 3, "text": "a"}, "3 were given"),
        ({"runs": run, "task": "toy"}, "give a task with the model's vocabulary"),
        ({"runs": run, "task": "toyy"}, "did you mean 'toy'"),
        ({"runs": grammarian("standard"), "task": GRAMMAR, "example": 99}, "no example 99 in test"),
        ({"runs": grammarian("standard"), "text": "a"}, "needs tokenizer="),
    ):
        with pytest.raises(UserError, match=words):
            h2h.look(**arguments, out=out, quiet=True)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cannot write the page"):
        h2h.look(run, "a", out=tmp_path / "none" / "a.html", quiet=True)
    assert not out.exists()


def test_a_run_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["look", "nowhere/0f", "--text", "a"])
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("h2h: no run at 'nowhere/0f'")


# Runs inside the page: simulates a reader's actions and records the effects.
PRESS = """
<script type="module">
const found = {errors: []};
window.addEventListener("error", (event) => found.errors.push(String(event.message)));
const [one, two] = document.querySelectorAll(".sight");
const text = one.querySelector(".text"), frames = (box) => [...box.querySelectorAll(".text .query")].map((node) => Number(node.dataset.index));
const last = text.children.length - 1, shades = () => [...text.children].map((node) => node.style.getPropertyValue("--share")).join();
found.start = [frames(one), frames(two), last];
const before = shades();
text.children[5].dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
found.hover = [frames(one), frames(two), before !== shades(), one.querySelector(".status").textContent];
found.unseen = [...text.children].filter((node) => node.classList.contains("unseen")).length;
text.dispatchEvent(new PointerEvent("pointerleave"));
found.left = frames(one);
text.children[7].click();
text.dispatchEvent(new PointerEvent("pointerleave"));
found.kept = frames(two);
text.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight", bubbles: true}));
found.key = frames(one);
const card = one.querySelectorAll(".head")[1], mean = shades();
card.click();
found.head = [card.ariaPressed, mean !== shades(), one.querySelector(".status").textContent.endsWith("layer 1, head 2.")];
text.dispatchEvent(new KeyboardEvent("keydown", {key: "Escape", bubbles: true}));
found.back = [frames(one), shades() === before];
found.cards = [one.querySelectorAll(".head").length, two.querySelectorAll(".head").length];
found.circles = [one.querySelectorAll("svg").length, two.querySelectorAll("svg").length];
const paper = () => getComputedStyle(document.body).backgroundColor;
found.paper = [paper()];
document.getElementById("theme").click();
found.paper.push(paper());
found.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
found.width = [document.documentElement.scrollWidth, innerWidth];
found.title = document.title;
const out = document.createElement("pre");
out.id = "found";
out.textContent = JSON.stringify(found);
document.body.append(out);
</script>
"""


def test_in_a_real_browser_a_reader_can_choose_token_head_and_theme(hostile: Path, tmp_path: Path) -> None:
    page = tmp_path / "pressed.html"
    page.write_text(hostile.read_text() + PRESS)
    dom, console = browse(tmp_path, f"file://{page}", "--dump-dom")
    assert console == []
    found = message(dom)
    last = len(HOSTILE) - 1
    assert found["start"] == [[last], [last], last]
    assert found["hover"][:3] == [[5], [5], True]
    assert found["hover"][3] == f"Attention of token 6 of {last + 1}, “i”: mean over all heads and layers."
    assert found["unseen"] == last - 5
    assert found["left"] == [last]
    assert (found["kept"], found["key"]) == ([7], [8])
    assert found["head"] == ["true", True, True]
    assert found["back"] == [[last], True]
    assert found["cards"] == [4, 4]
    assert found["circles"] == [0, 15]
    assert found["paper"] == ["rgb(255, 255, 255)", "rgb(20, 23, 28)"]
    assert found["width"][0] == found["width"][1]
    assert found["requests"] == found["errors"] == []
    assert "owned" not in found["title"]


def test_in_a_real_browser_nothing_is_cut_at_any_width(hostile: Path, tmp_path: Path) -> None:
    measured, console = framed(tmp_path, hostile.read_text(), MEASURE, WIDTHS, DARK)
    assert console == []
    assert sorted(found["width"] for found in measured) == sorted(WIDTHS)
    for found in measured:
        assert found["page"] == found["width"]
        assert found["paper"] == "rgb(20, 23, 28)"
