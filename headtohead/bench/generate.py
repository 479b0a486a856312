"""Benchmark of text generation from a long prompt: tokens/s and cache bytes, compared with transformers.

Every contender gets the same prompt of random tokens and continues it greedily. Each new token is copied to the host
before its timestamp is taken. Prefill is timed separately. Contenders run one after the other in one process, since two
caches of this length do not fit on one device.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headtohead.bench.clock import copy_bandwidth, release, wait
from headtohead.bench.harness import Case, Progress, Row, Rows, attempt, silent
from headtohead.bench.peers import WRITERS, Writer, missing, peer_writer
from headtohead.bench.train import check_arms, find_shape
from headtohead.common.errors import UserError, unknown
from headtohead.model.decoder import Decoder
from headtohead.model.decoding import Decoding, graph_blocker, one_step
from headtohead.model.generation import Sampling, generate
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import Size
from headtohead.study.environment import choose_device, device_name

ARMS = ("sharing:tie=kv", "standard")
DTYPES = {"bf16": torch.bfloat16, "float32": torch.float32}
_COMPARED = 4


def bench_generate(
    arms: Sequence[str] = ARMS,
    *,
    peers: Sequence[str] = tuple(WRITERS),
    size: str = "350m",
    batch: int = 64,
    cached: int = 8064,
    new: int = 129,
    rounds: int = 2,
    precision: str = "bf16",
    device: str = "auto",
    out: str | Path | None = None,
    progress: Progress = silent,
) -> Row:
    """Return the benchmark document: one row per contender, and the ratio of the first arm's rate to each one's.

    `cached` is the prompt length. The first of the `new` tokens comes from prefill, each other from one decoding step, so
    that caches end with `cached` + `new` - 1 tokens. A failed contender is a row with its error. `out` stores each row as
    soon as it is measured; rows stored for this commit, device and settings are reused.
    """
    if min(batch, cached, rounds) < 1 or new < 2:
        raise UserError(
            f"batch={batch}, cached={cached} and rounds={rounds} must be at least 1, new={new} at least 2"
        )
    if precision not in DTYPES:
        raise unknown("precision", precision, DTYPES)
    for name in peers:
        if name not in WRITERS:
            raise unknown("peer", name, WRITERS)
    shape, where = find_shape(size), choose_device(device)
    shape = dataclasses.replace(shape, context=max(shape.context, cached + new))
    check_arms(arms, shape)
    lacking = missing("transformers") if peers else ""
    present = [] if lacking else list(peers)
    known = {"transformers": metadata.version("transformers")} if present else {}
    shared = {"peers": known, "missing": dict.fromkeys(peers, lacking) if lacking else {}}
    rows = Rows("generate", out, shared)
    setting = _Setting(shape, where, DTYPES[precision], batch, cached, new, rounds)
    facts = {
        "size": shape.name,
        "dims": shape.dims,
        "device": device_name(where),
        "precision": precision,
        "batch": batch,
        "cached": cached,
        "new": new,
        "rounds": rounds,
    }
    cases = {
        name: Case({"contender": name} | facts, name, partial(setting.measured, name, name in arms))
        for name in (*arms, *present)
    }
    document = rows.run(cases.values(), progress)
    found = {name: rows.find(case.facts) or {} for name, case in cases.items()}
    return document | {"ratios": _ratios(arms[0], found)}


def _ratios(first: str, rows: Mapping[str, Mapping[str, Any]]) -> Row:
    """Return the ratios of the first arm to each contender: tokens/s (median step and overall) and cache bytes.

    A ratio is None if a contender failed or has no cache.
    """
    ours = rows[first]
    return {
        name: {
            key: None if ours["error"] or row["error"] or not row[key] else ours[key] / row[key]
            for key in ("tokens_per_second", "whole_tokens_per_second", "cache_bytes")
        }
        for name, row in rows.items()
    }


@dataclasses.dataclass(frozen=True)
class _Setting:
    """The settings shared by all contenders."""

    size: Size
    device: torch.device
    dtype: torch.dtype
    batch: int
    cached: int
    new: int
    rounds: int

    def measured(self, name: str, ours: bool, progress: Progress) -> Row:
        """Return the measurements of one contender, or its error; its device memory is released."""
        found = attempt(self._measure, name, ours, progress, name="error")
        if self.device.type == "cuda":
            torch.compiler.reset()
            release()
        return {"error": None} | found

    def _measure(self, name: str, ours: bool, progress: Progress) -> Row:
        progress("building", 0.0)
        bandwidth = copy_bandwidth(self.device)
        cuda = self.device.type == "cuda"
        if cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        receive: list[str] = []
        model = self._model(name) if ours else None
        write = _writer(model, receive) if model else peer_writer(name, self.size, self.device, self.dtype)
        chance = torch.Generator().manual_seed(0)
        prompt = torch.randint(0, self.size.vocabulary, (self.batch, self.cached), generator=chance)
        prompt = prompt.to(self.device)
        reading, turns, kept = [], [], 0
        for turn in range(self.rounds):
            note = "" if turn or ours else ", compiling if needed"
            progress(f"round {turn + 1} of {self.rounds}{note}", turn / self.rounds)
            stamps: list[float] = []
            wait(self.device)
            began = time.perf_counter()
            kept = write(prompt, self.new, lambda token, stamps=stamps: stamps.append(time.perf_counter()))  # type: ignore[misc]
            if len(stamps) != self.new:
                raise UserError(f"{len(stamps)} tokens were generated, {self.new} were requested")
            reading.append(stamps[0] - began)
            turns.append([later - earlier for earlier, later in itertools.pairwise(stamps)])
            gc.collect()
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else None
        medians = [statistics.median(steps) for steps in turns]
        seconds = statistics.median(medians)
        read = self._bytes(name if ours else "standard")
        found = {
            "tokens_per_second": self.batch / seconds,
            "whole_tokens_per_second": self.batch * (self.new - 1) / sum(turns[-1]),
            "milliseconds": 1e3 * seconds,
            "milliseconds_all": [round(1e3 * value, 3) for value in medians],
            "first_steps_milliseconds": [[round(1e3 * step, 1) for step in steps[:5]] for steps in turns],
            "prompt_seconds": [round(value, 3) for value in reading],
            "cache_bytes": kept,
            "peak_bytes": peak,
            "step_bytes": read,
            "copy_bytes_per_second": bandwidth,
            "share_of_copy": read / seconds / bandwidth,
        }
        if model is None:
            return found
        progress("comparing with the full forward pass", 1.0)
        return found | {
            "parameters": model.parameter_count(),
            "recorded": cuda and not receive,
            "told": receive,
            "disagreement": disagreement(model, prompt[:2]),
            "disagreement_step_by_step": disagreement(model, prompt[:2], record=False),
        }

    def _model(self, arm: str) -> Decoder:
        torch.manual_seed(0)
        text = torch.randint(0, self.size.vocabulary, (self.size.context,))
        model = Decoder(self.size, parse_layout(arm).layers(self.size.layers), 0, companion=text)
        return model.to(self.device, self.dtype).eval()

    def _bytes(self, arm: str) -> float:
        """Return the minimum bytes read by a step halfway through: every weight once, and the caches at that point."""
        model = Decoder.on_meta(self.size, parse_layout(arm).layers(self.size.layers))
        filled = self.cached + (self.new - 1) // 2
        cache = model.cache_bytes(self.batch, filled, self.dtype) or 0
        return float(model.parameter_count() * self.dtype.itemsize + cache)


def _writer(model: Decoder, receive: list[str]) -> Writer:
    """Return our greedy `generate` as a Writer; `receive` gets the reason if steps do not run as a CUDA graph."""

    def write(prompt: Tensor, count: int, hand: Callable[[Tensor], object]) -> int:
        for token in generate(model, prompt, count, Sampling(temperature=0), warn=receive.append):
            hand(token.cpu())
        return model.cache_bytes(len(prompt), prompt.shape[1] + count - 1, model.readout.dtype) or 0

    return write


@torch.inference_mode()
def disagreement(model: Decoder, text: Tensor, record: bool = True) -> float:
    """Return the relative norm of the difference between the last logits of decoding steps and of the full forward pass.

    With `record` steps run at fixed shapes, as timed, if the model allows it; else eagerly.
    """
    batch, length = text.shape
    last = torch.full((batch,), length - 1, device=text.device)
    whole = model.logits(text, rows=last)[:, -1].float()
    if not model.decodable:
        return 0.0
    start = max(1, length - _COMPARED)
    caches = model.new_caches(batch, length)
    scores = model.logits(text[:, :start], caches=caches, rows=last - (length - start))[:, -1]
    recorded = Decoding(model, caches) if record and not graph_blocker(model, caches) else None
    for index in range(start, length):
        token = text[:, index : index + 1]
        scores = recorded(token) if recorded is not None else one_step(model, caches, token)
    return float((scores.float() - whole).norm() / whole.norm())
