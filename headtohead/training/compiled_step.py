"""Compile the forward and backward pass of a training step as one graph.

`make_fx` traces the function with `torch.vmap` and autograd resolved, so that the compiler sees forward and backward of
the whole model and fuses norms, casts, sums and the loss into kernels that read and write each activation once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from headtohead.common.errors import first_line
from headtohead.kernels.path import traced
from headtohead.training.compile_cache import empty_cache, set_damaged_aside, use_compile_cache

Function = Callable[..., tuple[Tensor, ...]]
"""Takes only tensors; everything that may change between calls is an argument."""
Backend = Callable[[GraphModule, list[Tensor]], Function]
# Tile size of a matrix product on a GPU, and the fewest terms per part when a sum is split.
_TILE, _TERMS = 128, 512
_ATEN = torch.ops.aten
# Relative error in bf16 between a compiled step and the same step not compiled: they round at different places.
_TOLERANCE = 0.05


class CompiledStep:
    """Runs a function as a compiled graph, built on the first call; on failure warns and runs it uncompiled."""

    def __init__(
        self, function: Function, warn: Callable[[str], None], backend: Backend | None = None
    ) -> None:
        self.function, self.warn, self.backend = function, warn, backend or inductor
        self.able = True
        self._graph: Function | None = None

    def __call__(self, *given: Tensor) -> tuple[Tensor, ...]:
        """Return function(*given), without gradients."""
        with torch.no_grad():
            if self._graph is not None:
                return self._graph(*given)
            if self.able:
                try:
                    return self._first(given)
                except torch.OutOfMemoryError:
                    raise
                except Exception as error:
                    self.able = False
                    self.warn(f"the step is not compiled: {first_line(error)}")
        return self.function(*given)

    def _first(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Build the graph and return its outputs; if an entry of the cache fails, build it with an empty cache."""
        cache = use_compile_cache(self.warn)
        filled = any(cache.iterdir()) if cache.is_dir() else False
        # This also fills cached tables, such as positions, so that the graph does not contain them.
        wanted = self.function(*given)
        try:
            graph = self._built(given)
            found = graph(*given)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            if not filled:
                raise
            with empty_cache():
                graph = self._built(given)
                found = graph(*given)
            set_damaged_aside(self.warn)
        if (error := _largest_error(found, wanted)) > _TOLERANCE:
            raise RuntimeError(f"compiled, its results differ by {error:.1%}")
        self._graph = graph
        return found

    def reset(self) -> None:
        """Rebuild the graph on the next call, because the function has changed."""
        self._graph = None

    def _built(self, given: tuple[Tensor, ...]) -> Function:
        from torch.fx.experimental.proxy_tensor import make_fx  # takes a second to import

        with traced(), torch.enable_grad():
            graph = make_fx(self.function)(*given)
        if given[0].is_cuda:
            divide(graph, torch.cuda.get_device_properties(given[0].device).multi_processor_count)
        return self.backend(graph, list(given))


def _largest_error(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Return the largest relative error among the finite outputs of a compiled step."""
    pairs = [(one.float(), other.float()) for one, other in zip(found, wanted, strict=True)]
    errors = [
        (one - other).norm() / other.norm()
        for one, other in pairs
        if bool(other.isfinite().all()) and other.any()
    ]
    return max((float(error.nan_to_num(nan=torch.inf)) for error in errors), default=0.0)


def inductor(graph: GraphModule, given: list[Tensor]) -> Function:
    """Return a graph of ATen operations compiled for tensors of these shapes; uses the Inductor cache."""
    import torch._inductor
    from torch._guards import TracingContext, tracing
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    # torch.compile would retrace the graph as Python and fail at attention kernels that return numbers.
    # Inductor consults its cache only in a tracing context with a ShapeEnv; it would then treat real inputs as dynamic.
    mode = FakeTensorMode(shape_env=ShapeEnv())
    shapes = [mode.from_tensor(tensor, static_shapes=True) for tensor in given]
    with tracing(TracingContext(mode)):
        compiled: Function = torch._inductor.compile(graph, list[Any](shapes))
    return compiled


def divide(graph: GraphModule, processors: int) -> int:
    """Split products with few outputs and long sums (split-K), such as gradients of small weights; return their number.

    The gradients of 128 x 128 weights for five seeds are five tiles on 132 processors, each a sum over all tokens. Each
    part of the sum becomes a product of its own; the parts are added in float32.
    """
    found = 0
    for node in list(graph.graph.nodes):
        if node.target is not _ATEN.bmm.default:
            continue
        left, right = node.args
        (stack, rows, terms), columns = _shape(left), _shape(right)[2]
        parts = parts_of(stack * -(-rows // _TILE) * -(-columns // _TILE), terms, processors)
        if parts == 1:
            continue
        found += 1
        with graph.graph.inserting_before(node):

            def call(target: Any, *given: Any, **named: Any) -> Node:
                return graph.graph.call_function(target, given, named)

            wide = [stack, rows, parts, terms // parts]
            first = call(_ATEN.permute.default, call(_ATEN.reshape.default, left, wide), [0, 2, 1, 3])
            first = call(_ATEN.reshape.default, first, [stack * parts, rows, terms // parts])
            second = call(_ATEN.reshape.default, right, [stack * parts, terms // parts, columns])
            product = call(_ATEN.bmm.default, first, second)
            product = call(_ATEN.reshape.default, product, [stack, parts, rows, columns])
            dtype = node.meta["tensor_meta"].dtype
            total = call(_ATEN.sum.dim_IntList, product, [1], dtype=torch.promote_types(dtype, torch.float32))
            total = call(_ATEN._to_copy.default, total, dtype=dtype)
        total.meta["tensor_meta"] = node.meta["tensor_meta"]
        node.replace_all_uses_with(total)
        graph.graph.erase_node(node)
    graph.recompile()
    return found


def parts_of(tiles: int, terms: int, processors: int) -> int:
    """Return the number of parts into which sums of `terms` terms are split so that all processors are busy."""
    parts = 1
    while tiles * parts < processors and terms % (2 * parts) == 0 and terms // (2 * parts) >= _TERMS:
        parts *= 2
    return parts


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["tensor_meta"].shape)
