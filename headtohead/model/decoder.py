"""The decoder: embedding, blocks of (mechanism, feed-forward), norm, output layer."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headtohead.common.errors import UserError
from headtohead.kernels import linear_cross_entropy, token_nats
from headtohead.mechanisms.contract.base import (
    TAGS,
    Circuit,
    Companion,
    CompanionSpec,
    Flops,
    ForwardState,
    Frame,
    Mechanism,
    Mode,
    Rotary,
    Shape,
    circuit_fault,
    default_initialise,
    seeded_draw,
)
from headtohead.mechanisms.contract.cache import ENTRY_KINDS, Cache
from headtohead.mechanisms.contract.counting import audited_flops
from headtohead.mechanisms.contract.terms import Composed
from headtohead.model.sizes import Size
from headtohead.model.spaces import Adapter, Space, find_space

_MAX_GRAPHS = 512
MODEL_TAGS = ("embedding", "position", "norm", "ffn", "head")


class Text(Protocol):
    """A sequence of tokens: a list, a tensor, an array of a corpus."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Iterable[Any]: ...


class Block(nn.Module):
    """x + mechanism(norm(x)), then x + feed_forward(norm(x)), with sums in the block's residual space."""

    def __init__(self, space: Space, mechanism: Mechanism, dropout: float, adapter: Adapter | None) -> None:
        super().__init__()
        self.space = space
        self.adapter = adapter
        self.mixer_norm = space.norm() if mechanism.writes else None
        self.mechanism = mechanism
        self.ffn_norm = space.norm()
        self.ffn = space.feed_forward()
        self.dropout = dropout
        self.mixes, self.feeds = mechanism.writes, True
        """Whether its two parts are active; a skip evaluation disables them."""

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the state in this block's space, and the normalized state that is its mechanism's input."""
        if self.adapter is not None:
            x = self.adapter(x)
        return x, self.mixer_norm(x) if self.mixer_norm is not None and self.mixes else x

    def forward(
        self,
        x: Tensor,
        frame: Frame,
        cache: Cache | None = None,
        rows: Tensor | None = None,
        normed: Tensor | None = None,
    ) -> Tensor:
        """Return the state (batch, time, width) after this block, or (batch, 1, width) at one row of each.

        With `normed`, x and normed are the result of `enter`.
        """
        if normed is None:
            x, normed = self.enter(x)
        if self.mixes:
            frame.norm = self.mixer_norm
            if rows is not None and frame.state.narrow and self.mechanism.narrows:
                x, frame.state.rows, rows = _at(x, rows), rows, None
            update = self.mechanism(normed, frame) if cache is None else self.mechanism(normed, frame, cache)
            x = self.space.add(x, F.dropout(update, self.dropout, self.training) if self.dropout else update)
        if rows is not None:  # everything after the mixing works row by row
            x = _at(x, rows)
        if self.feeds and self.ffn is not None:
            update = self.ffn(self.ffn_norm(x))
            x = self.space.add(x, F.dropout(update, self.dropout, self.training) if self.dropout else update)
        return x


def _at(x: Tensor, rows: Tensor) -> Tensor:
    """Return (batch, 1, width): one row of each sequence."""
    return x[torch.arange(len(x), device=x.device), rows].unsqueeze(1)


class Caches:
    """The caches of all layers, how far they are filled, and which tokens are padding."""

    def __init__(self, layers: list[Cache], padding: Tensor | None) -> None:
        self.layers, self.padding, self.length = layers, padding, 0
        self.place: Tensor | None = None

    @contextmanager
    def at(self, place: Tensor) -> Iterator[None]:
        """Inside, a step reads and writes at a position (1,) on the device; `length` does not change."""
        try:
            self._put(place)
            yield
        finally:
            self._put(None)

    def _put(self, place: Tensor | None) -> None:
        self.place = place
        for layer in self.layers:
            layer.place = place

    def advance(self, time: int) -> None:
        """Count `time` tokens as written."""
        self.length += time
        for layer in self.layers:
            layer.length = self.length

    @property
    def bytes(self) -> int:
        """Bytes allocated in all layers."""
        return sum(layer.bytes for layer in self.layers)


class Decoder(nn.Module):
    """A language model whose layers contain the mechanisms of its layout.

    If a layer needs a companion, `companion` is the text its tokens are cut from; they are a buffer of the model. Without a
    seed no value is initialized: weights and companion are loaded later.
    """

    companion: Tensor | None
    causal = True
    """Whether a token attends to earlier tokens only; a `Reader` may be bidirectional."""

    def __init__(
        self, size: Size, layers: Sequence[Composed], seed: int | None = 0, companion: Text | None = None
    ) -> None:
        super().__init__()
        if len(layers) != size.layers:
            raise UserError(f"{len(layers)} mechanisms were given for {size.layers} layers")
        self.size, self.arms = size, tuple(layers)
        settings = size.settings
        shape = Shape(
            size.width, size.heads, 0, size.layers, size.context, 0, settings.positions, settings.bias
        )
        shape = dataclasses.replace(shape, norm_eps=settings.norm_eps)
        self.rotary = Rotary(settings.rope_theta, size.context) if settings.positions == "rope" else None
        mechanisms = []
        for index, composed in enumerate(layers):
            # A constructor may draw values itself: seeded by run and layer, without changing the global generator.
            with torch.random.fork_rng(devices=[]):
                if seed is None:
                    # torch.manual_seed would format three stack traces for devices that are not in use.
                    torch.default_generator.manual_seed(index)
                else:
                    torch.manual_seed(seed * 10_007 + index)
                mechanisms.append(composed.build(dataclasses.replace(shape, layer=index)))
        spaces = [find_space(one.residual, size, one.residual_options) for one in mechanisms]
        self.embedding = spaces[0].embedding()
        self.blocks = nn.ModuleList()
        for index, (mechanism, space) in enumerate(zip(mechanisms, spaces, strict=True)):
            before = spaces[max(0, index - 1)]
            joint = None if before.geometry == space.geometry else Adapter(before, space)
            self.blocks.append(Block(space, mechanism, settings.dropout, joint))
        self.spaces = spaces
        self.norm = spaces[-1].norm()
        self.head = self._head()
        self.companion_spec = self._one_companion()
        self.register_buffer("companion", self._companion_buffer(companion, seed is not None))
        if seed is not None:
            self.initialise(seed)

    @classmethod
    def on_meta(cls, size: Size, layers: Sequence[Composed]) -> Decoder:
        """Return the model on the `meta` device: shapes and counts without memory or values."""
        with torch.device("meta"):
            return cls(size, layers, seed=None)

    def initialise(self, seed: int) -> None:
        """Set every initial value from (seed, layer, name), so that arms share values of common parameters."""
        std = self.size.settings.init_std
        self.embedding.initialise(seeded_draw(seed, "model", std))
        for index, block in enumerate(self.layers):
            block.mechanism.initialise(seeded_draw(seed, f"layer{index}", std))
            if block.ffn is not None:
                block.ffn.initialise(seeded_draw(seed, f"layer{index}.ffn", std))
            if block.adapter is not None:
                block.adapter.initialise(seeded_draw(seed, f"layer{index}.adapter", std))
        if self.head is not None:
            default_initialise(self.head, seeded_draw(seed, "head", std))
        if (needed := self.companion_spec) and self.companion is not None and needed.start == "noise":
            self.companion.copy_(seeded_draw(seed, "companion", needed.sigma)("noise", self.companion.shape))

    def hidden(
        self,
        tokens: Tensor,
        *,
        caches: Caches | None = None,
        padding: Tensor | None = None,
        causal: bool | None = None,
        frame: Frame | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return the input of the output layer (batch, time, features) for tokens (batch, time): normalized states.

        `padding` (batch, time) is true at real tokens; with caches, theirs is used. `causal` overrides the model's. `rows` (batch,) selects one row of each
        sequence, (batch, 1, features): the last feed-forward block is then computed only there, and so is the last mixing
        in a narrow frame if the mechanism supports it.
        """
        causal = self.causal if causal is None else causal
        if caches is not None and not causal:
            raise UserError("a bidirectional model cannot decode from a cache")
        start, time = (caches.length if caches else 0), tokens.shape[1]
        if caches is not None and caches.padding is not None:
            padding = caches.padding[:, : start + time]
        self._check_supported(padding is not None, causal)
        frame = frame or Frame()
        frame.start, frame.time, frame.causal, frame.padding = start, time, causal, padding
        frame.rotary, frame.training = self.rotary, self.training
        frame.state = ForwardState(None if caches is None else caches.place, frame.state.narrow)
        x = self._entered(self.embedding(tokens, frame), frame)
        last, beside, own = self._company(frame, caches)
        for index, block in enumerate(self.layers):
            frame.companion = None
            if index <= last:
                beside, normed = block.enter(beside)
                frame.companion = own.companion = Companion(normed)
                if index < last:
                    beside = block(beside, own, normed=normed)
                if own.time != time:  # its own longer pass has other queries, keys and map than the data
                    frame.companion = Companion(normed)
            cache = None if caches is None else caches.layers[index]
            x = block(x, frame, cache, rows if index == len(self.layers) - 1 else None)
        if caches is not None and caches.place is None:
            caches.advance(time)
        x = self.spaces[-1].features(self.norm(x))
        # The output layer would round to the narrow dtype first; rounding here fuses with the norm.
        narrow = x.is_cuda and torch.is_autocast_enabled("cuda")
        return x.to(torch.get_autocast_dtype("cuda")) if narrow else x

    def skip(self, layers: Sequence[int], keep_ffn: bool = False) -> None:
        """Disable blocks of a trained model, counted from 1, or only their attention part with `keep_ffn`."""
        if not keep_ffn and set(layers) >= set(range(1, self.size.layers + 1)):
            raise UserError(f"skip names all {self.size.layers} layers; at least one must remain")
        for layer in layers:
            block = self.layers[layer - 1]
            block.mixes, block.feeds = False, keep_ffn

    def _company(self, frame: Frame, caches: Caches | None) -> tuple[int, Tensor, Frame]:
        """Return the last layer that needs the companion (-1: none), its input (1, length, width), and its frame.

        It runs on as many tokens as the data has. With caches it runs once, at full length, before decoding. A
        bidirectional model also runs it at full length: its states depend on its length, which must not depend on the
        padding of a batch.
        """
        needed, data = self.companion_spec, frame.embeddings
        assert data is not None
        if needed is None or self.companion is None or frame.start > 0:
            return -1, data, frame
        needing = [
            i for i, block in enumerate(self.layers) if block.mixes and block.mechanism.companion_spec()
        ]
        if not needing:
            return -1, data, frame
        length = needed.length
        if caches is None:
            length = frame.time if frame.causal else self._companion_length(needed)
        rows = self.companion[:length].unsqueeze(0)
        own = Frame(time=rows.shape[1], causal=frame.causal, rotary=self.rotary, training=self.training)
        x = rows.to(data.dtype) if needed.start == "noise" else self.embedding(rows, own)
        return needing[-1], self._entered(x, own), own

    def _entered(self, x: Tensor, frame: Frame) -> Tensor:
        """Return the embeddings that enter layer 0, after dropout; the frame keeps them."""
        if self.size.settings.dropout and self.spaces[0].linear:
            x = F.dropout(x, self.size.settings.dropout, self.training)
        frame.embeddings = x
        return x

    def _companion_length(self, needed: CompanionSpec) -> int:
        """Return how many companion tokens a bidirectional pass uses: all that have a position."""
        learned = self.size.settings.positions == "learned"
        return min(needed.length, self.size.context) if learned else needed.length

    def _one_companion(self) -> CompanionSpec | None:
        """Return what the layers need of a companion; raise if they need different ones."""
        needs = {block.mechanism.companion_spec(): block.mechanism.name for block in self.layers}
        needs.pop(None, None)
        if len(needs) > 1:
            raise UserError(
                f"a model has one companion, but its layers need {len(needs)} different ones ({', '.join(needs.values())})"
            )
        needed = next(iter(needs), None)
        if needed and needed.start == "noise" and self.spaces[0].name != "euclidean":
            raise UserError(
                f"{needs[needed]} needs a companion of random vectors, but layer 1 has residual space {self.spaces[0].name}"
            )
        return needed

    def _companion_buffer(self, text: Text | None, given: bool) -> Tensor | None:
        """Return the tokens (length,) cut from the text, the noise (length, width) still to be drawn, or None."""
        needed = self.companion_spec
        if needed is None:
            return None
        if needed.start == "noise":
            return torch.zeros(needed.length, self.size.width)
        if not given:
            return torch.zeros(needed.length, dtype=torch.long)
        stop = needed.offset + needed.length
        if text is None or len(text) < stop:
            have = "got none" if text is None else f"got {len(text):,}"
            raise UserError(f"the companion needs a text of at least {stop:,} tokens; {have}")
        return torch.tensor([int(token) for token in text[needed.offset : stop]])

    def compile_hidden(self) -> None:
        """Compile everything up to the output layer as one graph; the chunked loss stays eager."""
        # Graphs are cached by shape, so another seed of an arm reuses one. Beyond the limit a model would run eagerly.
        torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = _MAX_GRAPHS
        with torch.no_grad():  # the rotary tables are computed outside the graph
            self.hidden(torch.zeros(1, self.size.context, dtype=torch.long, device=self.readout.device))
        self.hidden = torch.compile(self.hidden, dynamic=False)  # type: ignore[method-assign]

    @property
    def layers(self) -> list[Block]:
        """The blocks in order."""
        return [block for block in self.blocks if isinstance(block, Block)]

    @property
    def readout(self) -> Tensor:
        """The weight of the output layer (vocabulary, features)."""
        return self._readout()[0]

    def logits(
        self,
        tokens: Tensor,
        *,
        caches: Caches | None = None,
        padding: Tensor | None = None,
        where: Tensor | None = None,
        rows: Tensor | None = None,
        frame: Frame | None = None,
    ) -> Tensor:
        """Return logits of the next token (batch, time, vocabulary), or (positions, vocabulary) at those in `where`.

        `rows` (batch,) selects one row of each sequence: (batch, 1, vocabulary).
        """
        x = self.hidden(tokens, caches=caches, padding=padding, rows=rows, frame=frame)
        return self._scores(x if where is None else x[where])

    def _scores(self, x: Tensor) -> Tensor:
        weight, bias = self._readout()
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    def forward(
        self, tokens: Tensor, targets: Tensor, smoothing: float = 0.0, padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return (training objective, mean nats per target, the mechanisms' own loss terms).

        targets (batch, time) are -1 at positions without a target; padding (batch, time) is true at real tokens.
        """
        frame = Frame()
        x = self.hidden(tokens, padding=padding, frame=frame)
        weight, bias = self._readout()
        objective, nats = linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), smoothing, bias)
        return self._with_own_terms(objective, nats, frame)

    def _with_own_terms(
        self, objective: Tensor, nats: Tensor, frame: Frame
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        for value in frame.losses.values():
            objective = objective + value
        return objective, nats, {name: value.detach() for name, value in frame.losses.items()}

    def nats(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return (batch, time): the nats of each target, without gradient."""
        x = self.hidden(tokens)
        weight, bias = self._readout()
        return token_nats(x.flatten(0, 1), weight, targets.flatten(), bias).view(targets.shape)

    # Decoding.

    @property
    def decodable(self) -> bool:
        """Whether every layer has a cache."""
        return all(block.mechanism.decodable for block in self.layers)

    @property
    def graph_safe(self) -> bool:
        """Whether every layer's decoding step can be captured as a CUDA graph and replayed at other positions."""
        return self.companion_spec is None and all(block.mechanism.graph_safe for block in self.layers)

    def new_caches(
        self, batch: int, capacity: int, dtype: torch.dtype | None = None, padding: Tensor | None = None
    ) -> Caches:
        """Return empty caches for `capacity` tokens; `padding` (batch, capacity) is true at real tokens."""
        weight = self.readout
        given = batch, capacity, dtype or weight.dtype, weight.device
        return Caches([block.mechanism.new_cache(*given) for block in self.layers], padding)

    def cache_bytes(
        self, batch: int, capacity: int, dtype: torch.dtype, kinds: Container[str] = ENTRY_KINDS
    ) -> int | None:
        """Return the bytes of the declared cache entries of some kinds, or None if a layer has no cache."""
        specs = [block.mechanism.cache_spec() for block in self.layers]
        if None in specs:
            return None
        entries = [entry for spec in specs for entry in spec or () if entry.kind in kinds]
        return sum(entry.bytes(batch, capacity, dtype) for entry in entries)

    def cache_bytes_per_token(self, dtype: torch.dtype) -> int | None:
        """Return the cache bytes of one token, or None if a layer has no cache; a window keeps only its last tokens."""
        return self.cache_bytes(1, 1, dtype, ("token",))

    # Parameters, FLOPs and circuits.

    def parameter_count(self) -> int:
        """Return the exact number of parameters, a tied head counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def flops(self, context: int, batch: int = 1, mode: Mode = "train") -> Flops:
        """Return forward FLOPs per token of the whole model; the batch shares those of a companion."""
        rest = 2.0 * self.readout.numel()
        rest += sum(block.ffn.flops() for block in self.layers if block.ffn is not None)
        rest += sum(2.0 * block.adapter.weight.numel() for block in self.layers if block.adapter is not None)
        total = Flops(rest, rest)
        for flops, _ in self._layer_flops(context, batch, mode):
            total = total + flops
        return total + self._companion_flops(context, batch, mode)

    def flops_source(self, context: int, batch: int = 1) -> str:
        """Return how the FLOPs of training were obtained: `declared` by formula, or `counted` in at least one layer."""
        counted = any(counted for _, counted in self._layer_flops(context, batch, "train"))
        return "counted" if counted else "declared"

    def _layer_flops(self, context: int, batch: int, mode: Mode) -> Iterator[tuple[Flops, bool]]:
        """Yield the FLOPs per token of each layer's mechanism, and whether they were counted."""
        for block, composed in zip(self.layers, self.arms, strict=True):
            if composed.user_code:
                yield audited_flops(block.mechanism, context, batch, mode)
            else:
                yield block.mechanism.flops(context, batch, mode), False

    def _companion_flops(self, context: int, batch: int, mode: Mode) -> Flops:
        """Return what the companion's own pass adds per token of the batch.

        In causal training it is one more sequence: what a layer computes from it once serves both it and the data. Before
        decoding, and in a bidirectional model, it runs at full length and separately; decoding reads its tables.
        """
        total, needed = Flops(0.0, 0.0), self.companion_spec
        if needed is None or mode == "decode":
            return total
        length = max(context, needed.length)
        if mode == "train":
            length = context if self.causal else max(context, self._companion_length(needed))
        share = length / (batch * context)
        needing = [i for i, block in enumerate(self.layers) if block.mechanism.companion_spec() is not None]
        for index, block in enumerate(self.layers[: needing[-1] + 1]):
            linear = 0.0 if block.adapter is None else 2.0 * block.adapter.weight.numel()
            if index < needing[-1]:
                linear += block.ffn.flops() if block.ffn is not None else 0.0
                alone = block.mechanism.flops(length, 1)
                if mode == "train" and length == context:
                    more, same = (block.mechanism.flops(length, count) for count in (batch + 1, batch))
                    alone = more * (batch + 1) + same * -batch
                total = total + alone * share
            total = total + Flops(linear * share, linear * share)
        return total

    def circuits(self) -> list[Circuit]:
        """Return every parameter of the model in exactly one group; raise with the parameter's name otherwise."""
        groups = [circuit.prefixed("embedding") for circuit in self.spaces[0].circuits(self.embedding)]
        for index, block in enumerate(self.layers):
            place = f"blocks.{index}"
            groups += [circuit.prefixed(f"{place}.mechanism") for circuit in block.mechanism.circuits()]
            for part, tag in {
                "mixer_norm": "norm",
                "ffn_norm": "norm",
                "ffn": "ffn",
                "adapter": "ffn",
            }.items():
                groups += _by_rank(f"{place}.{part}", getattr(block, part), tag)
        groups += _by_rank("norm", self.norm, "norm") + _by_rank("head", self.head, "head")
        if fault := circuit_fault(groups, self, (*TAGS, *MODEL_TAGS)):
            raise UserError(fault)
        return groups

    def _head(self) -> nn.Module | None:
        """Return the parameters of the output layer, or None if it uses the embedding's."""
        return self.spaces[-1].head(self.spaces[0])

    def _readout(self) -> tuple[Tensor, Tensor | None]:
        return self.spaces[-1].readout(self.embedding, self.head)

    def _check_supported(self, padded: bool, causal: bool) -> None:
        for block in self.layers:
            able = block.mechanism.supports
            if padded and not able.padding:
                raise UserError(f"{block.mechanism.name} does not support padded batches")
            if not causal and not able.bidirectional:
                raise UserError(f"{block.mechanism.name} does not support bidirectional models")


def _by_rank(place: str, module: nn.Module | None, tag: str) -> list[Circuit]:
    """Return one circuit of matrices with weight decay and one of vectors without."""
    ranks: dict[bool, list[str]] = {}
    for name, parameter in module.named_parameters() if module is not None else ():
        ranks.setdefault(parameter.ndim >= 2, []).append(f"{place}.{name}")
    return [Circuit(tag, tuple(names), decay) for decay, names in ranks.items()]
