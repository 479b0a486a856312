from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import headtohead
from headtohead.bench import generate as module
from headtohead.bench.generate import disagreement
from headtohead.bench.peers import missing, peer_writer
from headtohead.cli.main import main
from headtohead.common.errors import UserError
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES

QUICK = {
    "size": "nano",
    "batch": 2,
    "cached": 20,
    "new": 4,
    "rounds": 1,
    "precision": "float32",
    "device": "cpu",
}
needs_transformers = pytest.mark.skipif(bool(missing("transformers")), reason="transformers is not installed")


@pytest.mark.slow
def test_rows_hold_rates_and_caches_of_each_arm() -> None:
    document = headtohead.bench_generate(peers=(), **QUICK)  # type: ignore[arg-type]
    shared, usual = document["rows"]
    assert (shared["contender"], usual["contender"]) == ("sharing:tie=kv", "standard")
    assert usual["cache_bytes"] == 2 * shared["cache_bytes"] == 2 * 64 * 2 * 2 * 23 * 4
    assert document["ratios"]["standard"]["cache_bytes"] == 0.5
    assert document["ratios"]["standard"]["tokens_per_second"] == pytest.approx(
        usual["milliseconds"] / shared["milliseconds"]
    )
    assert shared["tokens_per_second"] == pytest.approx(2e3 / shared["milliseconds"])
    # Halfway there are 21 tokens of 64 numbers in two layers, for two sequences.
    assert shared["step_bytes"] == 4 * (shared["parameters"] + 2 * 2 * 21 * 64)
    for row in document["rows"]:
        assert row["disagreement"] < 1e-5
        assert row["disagreement_step_by_step"] < 1e-5
        assert row["recorded"] is False
        assert row["error"] is None
        assert {"commit", "torch", "date"} <= row.keys()


@needs_transformers
@pytest.mark.parametrize("peer", ["transformers", "transformers-static"])
def test_a_peer_of_the_same_shape_has_the_same_bytes(peer: str) -> None:
    document = headtohead.bench_generate(("standard",), peers=(peer,), **QUICK)  # type: ignore[arg-type]
    ours, theirs = document["rows"]
    assert theirs["error"] is None
    assert theirs["step_bytes"] == ours["step_bytes"]
    assert theirs["cache_bytes"] == ours["cache_bytes"]
    assert document["ratios"][peer]["tokens_per_second"] > 0


@needs_transformers
def test_a_peer_passes_on_the_tokens_it_generates() -> None:
    prompt = torch.randint(0, 256, (2, 9))
    usual: list[torch.Tensor] = []
    static: list[torch.Tensor] = []
    for name, handed in (("transformers", usual), ("transformers-static", static)):
        peer_writer(name, SIZES["nano"], torch.device("cpu"), torch.float64)(prompt, 5, handed.append)
    assert [token.shape for token in usual] == [(2,)] * 5
    assert torch.equal(torch.stack(usual), torch.stack(static))


def test_a_wrong_step_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = Decoder(SIZES["nano"], parse_layout("standard").layers(2), seed=0).eval()
    text = torch.randint(0, 256, (2, 16))
    assert disagreement(decoder, text) < 1e-5
    monkeypatch.setattr(module.Decoding, "__call__", lambda self, token: torch.ones(2, 256))
    assert disagreement(decoder, text) > 0.1
    assert disagreement(decoder, text, record=False) < 1e-5


def test_a_failed_contender_is_a_row_and_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("H2H_COMMIT", "abc")
    out = tmp_path / "rows.json"

    def full(*given: object, **named: object) -> object:
        raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

    with monkeypatch.context() as patch:
        patch.setattr(module, "generate", full)
        document = headtohead.bench_generate(("standard",), peers=(), out=out, **QUICK)  # type: ignore[arg-type]
    assert document["rows"][0]["error"] == "out of memory"
    assert document["ratios"]["standard"]["tokens_per_second"] is None
    again = headtohead.bench_generate(("standard",), peers=(), out=out, **QUICK)  # type: ignore[arg-type]
    assert [row["error"] for row in again["rows"]] == [None]
    kept = headtohead.bench_generate(("standard",), peers=(), out=out, **QUICK)  # type: ignore[arg-type]
    assert kept["rows"] == again["rows"] == json.loads(out.read_text())["rows"]


def test_a_missing_peer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    document = headtohead.bench_generate(("standard",), **QUICK)  # type: ignore[arg-type]
    assert "transformers cannot be imported" in document["missing"]["transformers-static"]
    assert [row["contender"] for row in document["rows"]] == ["standard"]


def test_the_last_line_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    words = "bench generate --size nano --batch 2 --cached 20 --new 4 --rounds 1 --precision float32 --peers"
    with pytest.raises(SystemExit) as end:
        main([*words.split(), "--device", "cpu"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert len(json.loads(out.splitlines()[-1])["rows"]) == 2
    assert "2 x 20 cached + 4 tokens" in out


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"size": "nanoo"}, "nano"),
        ({"arms": ("standrad",)}, "standard"),
        ({"peers": ("transformer",)}, "transformers"),
        ({"new": 1}, "new=1 at least 2"),
        ({"arms": ()}, "at least one"),
        ({"precision": "bf61"}, "bf16"),
        ({"out": "nowhere/rows.json"}, "no directory"),
    ],
)
def test_mistakes_are_named(given: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        headtohead.bench_generate(**{**QUICK, "peers": (), **given})  # type: ignore[arg-type]
