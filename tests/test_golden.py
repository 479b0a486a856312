"""Golden losses: when one changes, bump NUMERICS so that old runs are not mixed with new ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.mechanisms.contract.registry import builtin_mechanisms
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES
from headtohead.study.numerics import NUMERICS
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Trainer

# Mean nats of the last of 20 steps, by arm, for each value of NUMERICS.
GOLDEN = {
    2: {
        "standard": 4.996166,
        "sharing:tie=kv": 4.719374,
        "sharing:tie=qkv,rope=score": 4.908906,
        "diagonal:init=signs": 4.971466,
        "standard:kv_heads=1,window=16,qk_norm=true": 4.485087,
        "coupled": 4.994866,
        "coupled:dynamics=leapfrog,force=potential,steps=2": 4.988114,
        "differential": 5.251122,
        "differential:version=2": 4.709829,
        "differential+coupled:dynamics=affine": 5.244682,
        "approximate": 5.003590,
        "approximate:features=elementwise": 5.001095,
        "non_approximate": 5.063860,
        "token_mlp": 4.659002,
        "static_emb_qk": 4.990719,
        "rnd_emb_qk": 5.071439,
        "even(fixed_seq_qk)": 5.108561,
        "prefix_mean": 5.055455,
        "odd(no_attention)": 4.845274,
        "kuramoto": 4.933536,
        "kuramoto_gated": 4.975316,
        "latent": 5.049750,
        "gated_linear": 4.524989,
        # Without the norm of its output: where that output is near 0, the norm amplifies rounding, and a change of the weights
        # by 1e-6 can move this loss by 3e-2 (2e-7 without the norm). Two CPUs then differ by more than the tolerance.
        "gated_delta:output_norm=false": 4.513979,
        "gated_delta:decay=channel,output_gate=sigmoid,output_norm=false": 4.478772,
        "selective_state": 4.250257,
        "factorised": 5.339662,
        "gated": 4.723691,
        "sink": 4.976181,
        "exclusive": 4.901509,
        "forgetting": 4.393721,
        "value_residual": 4.878810,
        "canon": 5.058078,
        "flex:alibi": 4.650087,
        "flex:relative,kv_heads=2": 5.054097,
        "flex:sigmoid": 5.029600,
    }
}


def final_loss(arm: str) -> float:
    tokens = ((np.arange(40_000) ** 2 // 7 + np.arange(40_000) * 3) % 251).astype(np.uint8)
    windows = Windows(Split(tokens, np.array([0], dtype=np.uint64), len(tokens)), 128, seed=1)
    torch.manual_seed(1)
    layers = parse_layout(arm).layers(2)
    rope = all("rope" in layer.base.kind.supports.positions for layer in layers)
    size = SIZES["nano"].with_settings(init_std=0.08, positions="rope" if rope else "learned")
    model = Decoder(size, layers, seed=1, companion=tokens)
    trainer = Trainer(model, windows, TrainSettings(tokens=20 * 512, batch=512, lr=4e-3))
    return trainer.run().train_nats


def test_every_built_in_mechanism_has_a_golden_loss() -> None:
    layers = [layer for arm in GOLDEN[NUMERICS] for layer in parse_layout(arm).layers(2)]
    assert {term.kind.name for layer in layers for term in layer.terms} >= set(builtin_mechanisms())


@pytest.mark.parametrize("arm", GOLDEN[max(GOLDEN)])
def test_a_golden_loss_has_not_changed(arm: str) -> None:
    assert NUMERICS in GOLDEN, "NUMERICS was bumped: record the new golden losses here"
    found = final_loss(arm)
    assert found == pytest.approx(GOLDEN[NUMERICS][arm], rel=2e-5), (
        "the arithmetic has changed; if that is intended, bump NUMERICS and record the new losses"
    )
