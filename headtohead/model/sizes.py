"""Named model shapes, and the settings shared by all arms."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from headtohead.common.choices import check_choices
from headtohead.common.errors import UserError, unknown
from headtohead.mechanisms.contract.base import Bias, Positions


@dataclass(frozen=True)
class Settings:
    """Settings of the model, not of a mechanism."""

    positions: Positions = "rope"
    """rope rotates queries and keys, learned adds a table to the embeddings, none gives no positions."""
    bias: Bias = "none"
    """which linear maps have biases: none, only qkv, or all."""
    norm: Literal["rms", "layer"] = "rms"
    """pre-norm of each block: rms or layer."""
    ffn: Literal["swiglu", "gelu"] = "swiglu"
    """feed-forward block: gated swiglu (three matrices) or gelu (two)."""
    tied: bool = True
    """whether the output layer uses the embedding's table."""
    dropout: float = 0.0
    """fraction of each block's output dropped in training."""
    init_std: float = 0.02
    """standard deviation of initial values."""
    rope_theta: float = 10_000.0
    """base of the rotary frequencies."""
    norm_eps: float = 1e-6
    """added under the square root of a norm."""

    def __post_init__(self) -> None:
        check_choices(self)
        if not 0.0 <= self.dropout < 1.0:
            raise UserError(f"dropout={self.dropout} must be from 0 to 1")
        if not (0 < self.init_std < 1e6 and 1 < self.rope_theta < 1e30 and 0 < self.norm_eps < 1):
            raise UserError("init_std and norm_eps must be above 0, rope_theta above 1, and none too large")


_LARGEST = 2**24
"""The largest allowed dimension of a model; a larger value in a file is an error."""


@dataclass(frozen=True)
class Size:
    """A model shape; always displayed with its dimensions and exact parameter count."""

    name: str
    width: int
    layers: int
    heads: int
    ffn: int
    vocabulary: int
    context: int
    settings: Settings = Settings()

    def __post_init__(self) -> None:
        for name in ("width", "layers", "heads", "ffn", "vocabulary", "context"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise UserError(f"size {self.name}: {name} takes a whole number, got {value!r}")
            if value < (0 if name == "ffn" else 1):
                raise UserError(f"size {self.name}: {name}={value} is too small")
            if value > _LARGEST:
                raise UserError(f"size {self.name}: {name}={value:,} is too large; at most {_LARGEST:,}")
        if self.width % self.heads:
            raise UserError(f"size {self.name}: width {self.width} is not divisible by {self.heads} heads")

    @property
    def dims(self) -> str:
        """Width/layers/heads/feed-forward, context and vocabulary, for display."""
        return (
            f"{self.width}/{self.layers}/{self.heads}/{self.ffn}, context {self.context}, "
            f"vocabulary {self.vocabulary:,}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return every field that can change a result; the name cannot."""
        record = dataclasses.asdict(self)
        del record["name"]
        return record

    def with_settings(self, **changes: Any) -> Size:
        """Return this size with model settings changed."""
        known = {field.name for field in dataclasses.fields(Settings)}
        for name in changes:
            if name not in known:
                raise unknown("model setting", name, known)
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, **changes))


_GPT2 = Settings(positions="learned", bias="all", norm="layer", ffn="gelu", norm_eps=1e-5)
_QWEN = Settings(bias="qkv", rope_theta=1e6)

_SIZES = (
    # our own: RMSNorm, RoPE, SwiGLU, tied head, no biases; bytes
    # below width 100, an init_std of 0.02 delays the start of learning
    Size("30k", 32, 2, 2, 72, 256, 128, Settings(init_std=0.08)),
    Size("nano", 64, 2, 4, 176, 256, 128, Settings(init_std=0.08)),
    Size("nano-deep", 48, 4, 4, 128, 256, 128, Settings(init_std=0.08)),
    Size("300k", 80, 4, 4, 192, 256, 128, Settings(init_std=0.08)),
    Size("1m", 128, 5, 4, 344, 256, 256),
    Size("1m-deep", 96, 9, 4, 256, 256, 256),
    Size("1m-wide", 192, 2, 4, 588, 256, 256),
    Size("5m", 256, 6, 8, 728, 256, 256),
    # BPE of 16,384 and 50,257 tokens
    Size("10m", 256, 6, 4, 1024, 16_384, 512),
    Size("60m", 512, 8, 8, 2048, 50_257, 512),
    Size("150m", 768, 12, 12, 3072, 50_257, 512),
    Size("350m", 1024, 24, 16, 2816, 50_257, 1024),
    Size("454m", 1024, 24, 16, 4096, 50_257, 512),
    # "Do Transformers Need Three Projections?", section 4: GPT-2 style
    Size("sharing-xs", 128, 8, 4, 512, 256, 1024, _GPT2),
    Size("sharing-s", 512, 8, 8, 2048, 50_304, 2048, _GPT2),
    Size("sharing-300m", 1024, 20, 16, 4096, 50_304, 2048, _GPT2),
    Size("sharing-1.2b", 2048, 22, 32, 8192, 50_304, 2048, _GPT2),
    # "Faster Query-Key Learning": one layer for sentences and posts, six for SQuAD, once with GPU-friendly
    # widths; twelve for the paper that disputes it
    Size("faster-1l", 64, 1, 4, 256, 4096, 128, _GPT2),
    Size("faster-6l", 300, 6, 6, 1200, 8192, 256, _GPT2),
    Size("faster-6l-256", 256, 6, 4, 1024, 8192, 256, _GPT2),
    Size("faster-12l", 128, 12, 4, 512, 256, 256, _GPT2),
    # "Deconstructing Attention", section 4: Qwen2.5 style
    Size("deconstructed-xxs", 64, 4, 4, 256, 256, 512, _QWEN),
    Size("deconstructed-xs", 128, 8, 4, 512, 256, 512, _QWEN),
    Size("deconstructed-xs24", 128, 24, 4, 512, 256, 512, _QWEN),
    Size("deconstructed-s", 512, 8, 8, 2048, 50_304, 1024, _QWEN),
    Size("deconstructed-70m", 512, 6, 8, 2048, 50_304, 2048, _QWEN),
    Size("deconstructed-160m", 768, 12, 12, 3072, 50_304, 2048, _QWEN),
    Size("deconstructed-500m", 896, 24, 14, 4864, 50_304, 2048, _QWEN),
    Size("deconstructed-1.7b", 2048, 28, 16, 6144, 50_304, 2048, dataclasses.replace(_QWEN, bias="none")),
)
SIZES: dict[str, Size] = {size.name: size for size in _SIZES}


def find_size(name: str) -> Size:
    """Return the size of that name."""
    if name not in SIZES:
        raise unknown("size", name, SIZES)
    return SIZES[name]
