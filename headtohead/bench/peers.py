"""Peer models of the same shape from other libraries, trained and decoded as their documentation recommends."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import unknown
from headtohead.model.sizes import Size

Step = Callable[[], object]
Writer = Callable[[Tensor, int, Callable[[Tensor], object]], int]
"""write(prompt, count, hand) continues a prompt (batch, time) greedily by `count` tokens, calls `hand` with each (batch,) on
the host as soon as it is generated, and returns the final cache size in bytes."""


def _register_causal() -> str:
    """Register an attention function with transformers that sets `is_causal` instead of a mask; return its name.

    Under `torch.compile` transformers builds the causal mask as a tensor, and SDPA then does not use its flash kernel.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attend(
        module: nn.Module,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling)
        return found.transpose(1, 2).contiguous(), None

    AttentionInterface.register("causal", attend)
    AttentionMaskInterface.register("causal", lambda *given, **named: None)
    return "causal"


class _Transformers(nn.Module):
    """Llama of transformers with its own loss; `attention` is `sdpa`, or `causal` for SDPA without a mask tensor."""

    def __init__(self, size: Size, attention: str = "causal") -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        configure: Any = LlamaConfig  # accepts more arguments than its annotations declare
        config = configure(
            vocab_size=size.vocabulary,
            hidden_size=size.width,
            intermediate_size=size.ffn,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            max_position_embeddings=size.context,
            tie_word_embeddings=True,
            use_cache=False,
            attn_implementation=_register_causal() if attention == "causal" else attention,
        )
        self.model = LlamaForCausalLM(config)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss; the targets are the tokens, shifted by the model."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss


class _Litgpt(nn.Module):
    """GPT of litgpt configured as a Llama: gated feed-forward, RMS norm, litgpt's vocabulary padding, tied head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        from litgpt.config import Config
        from litgpt.model import GPT

        config = Config(
            block_size=size.context,
            vocab_size=size.vocabulary,
            n_layer=size.layers,
            n_head=size.heads,
            n_embd=size.width,
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="RMSNorm",
            mlp_class_name="LLaMAMLP",
            intermediate_size=size.ffn,
        )
        self.model = GPT(config)
        self.model.apply(self.model._init_weights)
        self.model.lm_head.weight = self.model.transformer.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean loss of all tokens but the first."""
        logits = self.model(tokens)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


_PEERS: dict[str, Callable[..., nn.Module]] = {"transformers": _Transformers, "litgpt": _Litgpt}
PEERS = tuple(_PEERS)


def missing(name: str) -> str:
    """Return why a peer cannot be imported, or an empty string."""
    if name not in _PEERS:
        raise unknown("peer", name, PEERS)
    try:
        importlib.import_module("litgpt.model" if name == "litgpt" else name)
    except ImportError as error:
        return f"{name} cannot be imported: {error}"
    return ""


def peer_step(
    name: str,
    size: Size,
    batch: int,
    device: torch.device,
    bf16: bool,
    compile: bool,
    *,
    mode: str | None = None,
    **settings: str,
) -> Step:
    """Return one training step of a peer: float32 weights, autocast, fused AdamW, clipping; `batch` sequences.

    Tokens are already on the device, with a different batch every step. `mode` is passed to `torch.compile`, `settings` to
    the peer's model.
    """
    torch.manual_seed(0)
    model = _PEERS[name](size, **settings).to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True
    )
    batches = torch.randint(0, size.vocabulary, (8, batch, size.context), device=device)
    forward: Any = torch.compile(model, mode=mode) if compile else model
    turn = 0

    def step() -> None:
        nonlocal turn
        turn += 1
        with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
            loss = forward(batches[turn % len(batches)])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


WRITERS = {"transformers": None, "transformers-static": "static"}
"""Peers that generate, with their `cache_implementation` in transformers: the default cache grows token by token; the
static one makes it compile the decoding step."""


def peer_writer(name: str, size: Size, device: torch.device, dtype: torch.dtype) -> Writer:
    """Return the Writer of a peer model of this shape."""
    from transformers import GenerationConfig, logging
    from transformers.generation.streamers import BaseStreamer

    logging.set_verbosity_error()
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = _Transformers(size).model
    model = model.to(dtype).eval()
    model.config.use_cache = True
    # Random weights generate the end-of-text token as often as any other; ignore it.
    model.config.eos_token_id = model.generation_config.eos_token_id = None

    class Handed(BaseStreamer):
        """Passes new tokens to `hand`; the first call holds the prompt and is skipped."""

        def __init__(self, hand: Callable[[Tensor], object]) -> None:
            self.hand, self.prompt = hand, True

        def put(self, value: Tensor) -> None:
            if not self.prompt:
                self.hand(value)
            self.prompt = False

        def end(self) -> None:
            pass

    def write(prompt: Tensor, count: int, hand: Callable[[Tensor], object]) -> int:
        config = GenerationConfig(
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            use_cache=True,
            return_dict_in_generate=True,
            cache_implementation=WRITERS[name],
        )
        seen = torch.ones_like(prompt)
        found = model.generate(prompt, attention_mask=seen, generation_config=config, streamer=Handed(hand))
        kept = (tensor for layer in found.past_key_values.layers for tensor in (layer.keys, layer.values))
        return sum(tensor.numel() * tensor.element_size() for tensor in kept)

    return write
