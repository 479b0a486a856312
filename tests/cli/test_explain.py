from __future__ import annotations

from typing import Any

import pytest

from headtohead import api
from headtohead.cli.main import main
from headtohead.data.tasks.registry import prepare_task
from headtohead.model.classifier import Classifier
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size


@pytest.mark.parametrize("seeds", [1, 2])
def test_explain_prints_every_explanation_beside_chance(
    seeds: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = prepare_task("grammar:train=30", context=32)
    size = Size("t", 16, 1, 2, 24, task.vocabulary, 32)
    layers = parse_layout("differential").layers(1)
    models = [Classifier(size, layers, 2, seed=seed) for seed in range(seeds)]
    plain = api.explain

    def explained(runs: Any, name: str, **given: Any) -> dict[str, Any]:
        assert (runs, name) == (("RUN",), task.name)
        return plain(models, task, **{**given, "quiet": True})

    monkeypatch.setattr(api, "explain", explained)
    with pytest.raises(SystemExit) as ended:
        main(["explain", "RUN", "--task", task.name])
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    for words in ("3 examples, 3", "rollout", "layer_mean", "gradient", "chance", "signed maps"):
        assert words in shown
    assert ("[" in shown) == (seeds > 1)
