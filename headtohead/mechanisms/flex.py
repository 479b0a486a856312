"""Attention with a score function: the score of each query and key passes through an elementwise function of the score,
the head and both positions before it is normalized. `flex:alibi` names a built-in function, `./mine.py:softcap` your own
([score functions](../mechanisms.md#score-functions)).

    s_ij = q_i . k_j / sqrt(d)        o_i = W_o [ sum_(j <= i) softmax_j(f(s_ij, head, i, j)) v_j ]_heads

    plain       s                                                        standard attention, as a control
    alibi       s - m (i - j)                                            m = 2^(-8 h / H) for head h = 1 ... H
    softcap     cap tanh(s / cap)
    relative    s + b[h, min(i - j, reach - 1)]                          b learned, zero at first
    sandwich    s + H / (8 h) sum_(k < dim / 2) cos((i - j) / 10000^(2 k / dim))
    sigmoid     sigmoid(s - log n) is the weight                         no softmax; n = i + 1, or given
    sliding     s if i - j < window, else hidden
    dilated     s if (i - j) mod dilation = 0, else hidden               and i - j < window dilation, with a window
    prefix      s if j < prefix or i - j < window, else hidden           causal inside the prefix too

Linear biases: Press et al., arXiv 2108.12409, with their slopes for a power of two at every number of heads. Soft capping:
Gemma 2, arXiv 2408.00118. Relative biases: Shaw et al., arXiv 1803.02155, and T5, arXiv 1910.10683, here one bias for
each distance instead of buckets. Sandwich: Chi et al., arXiv 2212.10356. Sigmoid attention: Ramapuram et al., arXiv
2409.04431, with the number of keys so far instead of the sequence length, which a causal model does not know. Sliding and
dilated windows: Beltagy et al., arXiv 2004.05150. A prefix that all see with a window: Xiao et al., arXiv 2309.17453.

Arms: flex:alibi flex:relative flex:sandwich flex:sigmoid flex:sliding flex:dilated flex:prefix

Claims: Linear biases, trained on 1024 tokens and read at 2048, have the perplexity of sinusoidal positions trained on 2048
(arXiv 2108.12409). Sandwich uses information from beyond the length it was trained on (arXiv 2212.10356). Sigmoid attention
matches softmax over a wide range of domains and scales, when properly normalized (arXiv 2409.04431).

Watch: The model's rotary positions stay on; set `positions = "none"` for a bias that replaces them. The function is applied
to whole maps, except on a GPU, where FlexAttention runs a causal batch without padding: not `flex:sigmoid`, nor functions
with learned tensors. FLOPs count the visible pairs of training and every cached key in decoding; the function itself is
elementwise and not counted. The cache holds every token: `standard:window=64` computes `flex:sliding` with a cache of 64
tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

from headtohead.mechanisms.contract.options import Options, option
from headtohead.mechanisms.contract.score import Score
from headtohead.mechanisms.contract.scored import Scored, ScoredOptions
from headtohead.mechanisms.families.scores import SCORES, plain


@dataclass(frozen=True)
class FlexOptions(ScoredOptions):
    """Options of attention with a built-in score function; each function adds its own."""

    cases: ClassVar[str] = (
        "kv_heads=1 score=alibi softcap=2 relative=5,kv_heads=2 sandwich=8 score=sigmoid sigmoid=7 sliding=3 "
        "dilated=2 dilated=2,window=2 score=dilated prefix=2,window=3"
    )
    selector: ClassVar[str] = "score"
    function: ClassVar[Score] = plain

    score: str = option("plain", "the score function", choices=tuple(SCORES))

    @classmethod
    def variants(cls) -> Mapping[str, type[Options]]:
        """Return the options of each built-in function."""
        return _variants()


@cache
def _variants() -> dict[str, type[Options]]:
    found = {name: one.options_class(FlexOptions) for name, one in SCORES.items() if one is not plain}
    return {"plain": FlexOptions, **found}


class Flex(Scored):
    """Attention whose scores pass through a function of score, head and positions."""

    name: ClassVar[str] = "flex"
    Options: ClassVar[Any] = FlexOptions
