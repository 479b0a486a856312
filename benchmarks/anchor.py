"""Reproduce a published number: nanoGPT's character model of Shakespeare, trained by this package's trainer.

    python benchmarks/anchor.py [--data DIR] [--device cuda] [--seeds 3] [--out FILE]

nanoGPT (config/train_shakespeare_char.py) trains 6 layers of width 384, 6 heads, context 256, batches of 64 windows, 5,000
steps, dropout 0.2, AdamW 1e-3 to 1e-4, and reports a best validation loss of 1.4697 nats per character on the last tenth of the
text. Here `standard` is trained with the same shape and settings (`gpt2`: learned positions, LayerNorm, GELU; dropout of
embeddings, block outputs and attention weights), and with this package's default shape at about the same number of
parameters (`llama`: RoPE, RMSNorm, SwiGLU). The whole last tenth is scored every 250 steps and the best loss is reported,
as in nanoGPT.
"""

from __future__ import annotations

import argparse
import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headtohead.common.files import write_json
from headtohead.data.shards import Split
from headtohead.data.windows import Windows
from headtohead.evaluation.loss import score_split
from headtohead.mechanisms.contract.base import Frame
from headtohead.mechanisms.contract.cache import Cache
from headtohead.mechanisms.standard import Standard
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Settings, Size
from headtohead.study.environment import device_name, provenance
from headtohead.training.settings import TrainSettings
from headtohead.training.trainer import Hooks, Trainer

PUBLISHED = 1.4697
DROPOUT = 0.2
_GPT2 = Settings(positions="learned", norm="layer", ffn="gelu", dropout=DROPOUT)
SHAPES = {
    "gpt2": Size("gpt2", 384, 6, 6, 1536, 256, 256, _GPT2),
    "llama": Size("llama", 384, 6, 6, 1024, 256, 256, Settings(dropout=DROPOUT)),
}


class AttentionDropout(Standard):
    """`standard` with dropout 0.2 on the attention weights during training, as in nanoGPT."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor, frame: Frame, cache: Cache | None) -> Tensor:
        """Return the mixed values (batch, heads, time, dim)."""
        if not self.training:
            return super().mix(q, k, v, frame, cache)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=DROPOUT, is_causal=True)


def text_splits(folder: Path) -> dict[str, Split]:
    """Return the first nine tenths and the last tenth of the text, as bytes."""
    text = lzma.decompress((folder / "tinyshakespeare" / "input.txt.xz").read_bytes())
    cut = int(len(text) * 0.9)
    parts = {"train": text[:cut], "valid": text[cut:]}
    return {
        name: Split(np.frombuffer(part, np.uint8), np.array([0], np.uint64), len(part))
        for name, part in parts.items()
    }


def train(
    size: Size, splits: dict[str, Split], seed: int, device: torch.device, steps: int
) -> dict[str, Any]:
    """Return the best validation loss in nats, its step, and the whole curve."""
    torch.manual_seed(seed)
    model = Decoder(size, parse_layout(AttentionDropout).layers(size.layers), seed).to(device)
    batch = 64 * size.context
    settings = TrainSettings(
        tokens=steps * batch,
        batch=batch,
        lr=1e-3,
        warmup=min(1.0, 100 / steps),
        beta2=0.99,
        precision="bf16" if device.type == "cuda" else "float32",
        evaluations=max(1, steps // 250),
    )
    curve: list[float] = []

    def evaluate() -> dict[str, Any]:
        model.eval()
        score = score_split(model, splits["valid"], np.ones(256, np.int64), precision=settings.precision)
        model.train()
        curve.append(score.nats)
        return {"valid": {"nats": score.nats}}

    windows = Windows(splits["train"], size.context, seed)
    trainer = Trainer(model, windows, settings, hooks=Hooks(evaluate=evaluate), compile=device.type == "cuda")
    trainer.run()
    evaluate()
    best = min(curve)
    return {
        "seed": seed,
        "parameters": model.parameter_count(),
        "best_nats": best,
        "at_step": (curve.index(best) + 1) * 250,
        "curve": [round(nats, 4) for nats in curve],
    }


def main() -> None:
    """Train every shape and seed; print and write the results."""
    parser = argparse.ArgumentParser(description="nanoGPT's Shakespeare number")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device, splits = torch.device(given.device), text_splits(given.data)
    document: dict[str, Any] = {
        "benchmark": "anchor",
        **provenance(),
        "device": device_name(device),
        "steps": given.steps,
        "published_nats": PUBLISHED,
        "rows": [],
    }
    for name in given.shapes:
        for seed in range(1, given.seeds + 1):
            row = {"shape": name, **train(SHAPES[name], splits, seed, device, given.steps)}
            document["rows"].append(row)
            print(f"{name}, seed {seed}: {row['best_nats']:.4f} nats at step {row['at_step']}", flush=True)
            if given.out:
                write_json(given.out, document)
    print(json.dumps(document))


if __name__ == "__main__":
    main()
