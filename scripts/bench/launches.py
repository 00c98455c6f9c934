"""How many kernels does one decode step launch on a Mac, beside mlx-lm's own step?

    python -m scripts.bench.launches
    python -m scripts.bench.launches --json

Counted from the graphs, so it needs no GPU: this process says that it has Metal, every custom
kernel and every operation of `mx.fast` is one launch, and so is every other operation but views.
Nothing is evaluated. One row decodes greedily, without drafts, with three, and without in mode
`auto`, which keeps up what drafts need. The models have the layers of the published ones, and small
matrices. mlx-lm's step is that of its `BatchGenerator`.
"""

from __future__ import annotations

import argparse
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

import mlx.core as mx

VIEWS = {
    *("AsStrided", "Broadcast", "BroadcastAxes", "ExpandDims", "Flatten", "Full", "Reshape"),
    *("Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten"),
}
"""Operations that launch nothing, and constants."""

_NODE = re.compile(r'\[label ="(\w+)", shape=rectangle\]')


def _launch(shapes: Sequence[tuple[Any, mx.Dtype]], inputs: Sequence[Any]) -> list[mx.array]:
    """Arrays of these shapes that one node of the graph makes of its inputs."""
    made = [mx.broadcast_to(mx.array(0, dtype), shape) for shape, dtype in shapes]
    return mx.depends(made, [array for array in inputs if isinstance(array, mx.array)])


def _as_input(operation: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """An operation with one launch, whose result is shaped like its first argument."""

    @wraps(operation)
    def launch(x: mx.array, *args: Any, **options: Any) -> mx.array:
        return _launch([(x.shape, x.dtype)], [x, *args, *options.values()])[0]

    return launch


def _attention(q: mx.array, k: mx.array, v: mx.array, **options: Any) -> mx.array:
    shape = (*q.shape[:-1], v.shape[-1])
    return _launch([(shape, q.dtype)], [q, k, v, *options.values()])[0]


def _log_sum(x: mx.array, *, keepdims: bool = False, **_: Any) -> mx.array:
    shape = (*x.shape[:-1], 1) if keepdims else x.shape[:-1]
    return _launch([(shape, x.dtype)], [x])[0]


def _gathered(x: mx.array, weights: mx.array, *, rhs_indices: mx.array, **_: Any) -> mx.array:
    batch = mx.broadcast_shapes(x.shape[:-2], rhs_indices.shape)
    shape = (*batch, x.shape[-2], weights.shape[-1])
    return _launch([(shape, x.dtype)], [x, weights, rhs_indices])[0]


def _kernel(*_: Any, **__: Any) -> Callable[..., list[mx.array]]:
    def run(
        inputs: Sequence[Any], output_shapes: Any, output_dtypes: Any, **_: Any
    ) -> list[mx.array]:
        return _launch(list(zip(output_shapes, output_dtypes, strict=True)), inputs)

    return run


# Before mlx-lm is imported, which makes its kernels then.
mx.metal.is_available = lambda: True
mx.default_device = lambda: mx.Device(mx.gpu)
mx.fast.metal_kernel = _kernel
mx.fast.scaled_dot_product_attention = _attention
mx.logsumexp = _log_sum
for module, name in ((mx.fast, "rms_norm"), (mx.fast, "layer_norm"), (mx.fast, "rope")):
    setattr(module, name, _as_input(getattr(module, name)))
mx.softmax = _as_input(mx.softmax)

import mlx.nn as nn  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402
from mlx_lm.models.cache import make_prompt_cache  # noqa: E402
from mlx_lm.utils import _get_classes  # noqa: E402

from omlx_producer.wire.request import MAX_DRAFT_DEPTH  # noqa: E402
from omlx_worker.engine.kernels.compiling import unfused  # noqa: E402
from omlx_worker.engine.kernels.contest import Contest  # noqa: E402
from omlx_worker.engine.kernels.device import for_device  # noqa: E402
from omlx_worker.engine.kernels.trial import Form  # noqa: E402
from omlx_worker.engine.loading.families import as_ragged  # noqa: E402
from omlx_worker.engine.models.mtp import with_head  # noqa: E402
from omlx_worker.engine.ragged.decoder import RaggedDecoder  # noqa: E402
from omlx_worker.engine.rows.request import RowRequest, Sampling  # noqa: E402
from omlx_worker.engine.rows.row import Row  # noqa: E402
from scripts.bench.shapes import shape_of  # noqa: E402

MODELS = {"llama-8b": (0,), "qwen3-0.6b": (0,), "4b": (0, 3), "35b-a3b": (0, 3)}
"""Drafts to count with, of each of `scripts.bench.shapes`."""

AUTO = "0 of auto"
"""A step without drafts of a worker whose other steps may draft, by the head and by lookups."""

FULL = {"35b-a3b": 40}
"""Layers, where the shape has fewer than the published model."""


class Kernel(Contest):
    """Lets the first kernel win, if it takes its arguments."""

    def run(
        self,
        part: str,  # noqa: ARG002
        size: str,  # noqa: ARG002
        forms: Mapping[str, Form],
        arguments: Sequence[Any],
        options: Mapping[str, Any] | None = None,
        *,
        like: Callable[[], Sequence[Any]] | None = None,  # noqa: ARG002
        exact: bool = False,  # noqa: ARG002
    ) -> Any:
        plain, kernel, *_ = forms.values()
        try:
            return kernel(*arguments, **options or {})
        except ValueError:
            return plain(*arguments, **options or {})


def small(name: str) -> nn.Module:
    """A network with a model's layers and heads, and narrow matrices."""
    config = shape_of(name, FULL.get(name))
    text = config.get("text_config", config)
    text.setdefault("head_dim", text["hidden_size"] // text["num_attention_heads"])
    text |= {"vocab_size": 512, "hidden_size": 256}
    for size in ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"):
        if size in text:
            text[size] = 64
    family, args = _get_classes(config)
    network = with_head(family)(args.from_dict(config))
    network.set_dtype(mx.bfloat16)
    return _emptied(network)


def _emptied(tree: Any) -> Any:
    """The same with zeros in place of arrays, which depend on nothing."""
    if isinstance(tree, nn.Module):
        tree.update(_emptied(tree.parameters()))
        return tree
    return tree_map(lambda leaf: _zeros(leaf) if isinstance(leaf, mx.array) else leaf, tree)


def _zeros(array: mx.array) -> mx.array:
    zeros = mx.zeros(array.shape, array.dtype)
    mx.eval(zeros)
    return zeros


def counted(*outputs: Any) -> Counter[str]:
    """Launches of the graph that makes these arrays."""
    text = io.StringIO()
    mx.export_to_dot(
        text, [leaf for _, leaf in tree_flatten(outputs) if isinstance(leaf, mx.array)]
    )
    return Counter(name for name in _NODE.findall(text.getvalue()) if name not in VIEWS)


def of_mlx_lm(network: nn.Module) -> Counter[str]:
    caches = [cache.merge([cache]) for cache in make_prompt_cache(network)]
    for _ in range(2):  # the first one makes the caches
        for cache in caches:
            vars(cache).update(_emptied(vars(cache)))
        logits = network(mx.zeros((1, 1), mx.int32), cache=caches)[:, -1]
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        outputs = [mx.argmax(scores, axis=-1), scores, [vars(cache) for cache in caches]]
    return counted(outputs)


def of_ragged(network: nn.Module, depth: int, deepest: int = 0, lookup: int = 0) -> Counter[str]:
    """A step with ``depth`` drafts.

    Args:
        deepest: drafts that the head may make in other steps, for which its cache is kept up.
        lookup: likewise drafts that are looked up.
    """
    most = max(depth, deepest)
    model = as_ragged(network, drafts=most > 0, kernels=for_device(Kernel()), checks=False)
    decoder = RaggedDecoder(model, most, lookup)
    submit, gather, submitted = mx.async_eval, mx.gather_mm, list[Any]()
    mx.gather_mm = _gathered  # a CPU has it in float32 alone
    with unfused():
        decoder.enter(Row(RowRequest("", [1, 2, 3], 100, Sampling(temperature=0))))
        for _ in range(3):  # the first steps have no drafts and no kept inputs yet
            decoder.step(depth)
    mx.gather_mm = gather
    mx.async_eval = lambda *arrays: submitted.extend(arrays)
    decoder.step(depth)
    mx.async_eval = submit
    return counted(submitted)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--json", action="store_true", help="print one line")
    parser.add_argument("--operations", action="store_true", help="say which, by their names")
    return parser.parse_args()


def sides(name: str) -> Iterator[tuple[str, Counter[str]]]:
    """Each side's name in the results, and its launches by operation."""
    yield "mlx-lm", of_mlx_lm(small(name))
    for depth in MODELS[name]:
        yield str(depth), of_ragged(small(name), depth)
    yield AUTO, of_ragged(small(name), 0, max(MODELS[name]), MAX_DRAFT_DEPTH)


def main() -> None:
    args = parse()
    results: dict[str, dict[str, int]] = {}
    for name in args.models:
        results[name] = {}
        for side, launches in sides(name):
            total = results[name][side] = launches.total()
            if args.json:
                continue
            ratio = total / results[name]["mlx-lm"]
            what = f"{side} drafts" if side.isdigit() else side
            print(f"{name:12} {what:9} {total:6}   {ratio:.2f} of mlx-lm's")
            if args.operations:
                for operation, count in launches.most_common():
                    print(f"{count:12} {operation}")
    if args.json:
        print(json.dumps(results))


if __name__ == "__main__":
    main()
