"""What one step costs, counted and not timed: nodes of its graph, submissions, waits, reads.

A GPU's step is many small kernels, each of a few microseconds of which its work is a fraction,
so the nodes of the graph are the price of a step. The ceilings are what is there now: lower
them when a change saves some, and think twice before raising one. Counted on the CPU, where
MLX spells out norms and rope in operations; other platforms have fewer nodes.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlx_worker.engine.interface import Sampling
from omlx_worker.engine.kernels import platform, skinny_product
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from tests.helpers.checkpoints import write_qwen
from tests.helpers.decoding import GREEDY, Loaded, row

VIEWS = {
    *("Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Split", "Squeeze"),
    *("Transpose", "Unflatten"),
}
"""Nodes that mostly compute nothing."""

ROWS = 2

on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="counted on the CPU")


def decoding(loaded: Loaded, depth: int, sampling: Sampling = GREEDY) -> RaggedDecoder:
    """A batch that is well under way."""
    decoder = loaded.decoder(depth)
    for index in range(ROWS):
        decoder.add(row(str(index), [1 + index, 2, 3], 400, sampling))
        decoder.prefill(str(index), 8)
    for _ in range(4):
        decoder.step()
    return decoder


def nodes_of_a_step(
    decoder: RaggedDecoder, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Counter[str]:
    """The primitives of what the next step submits."""
    submit, found = mx.async_eval, Counter[str]()

    def counted(*arrays: Any) -> None:
        mx.export_to_dot(str(folder / "step.dot"), *_flat(arrays))
        graph = (folder / "step.dot").read_text()
        found.update(re.findall(r'\[label ="([^"]+)", shape=rectangle\]', graph))
        submit(*arrays)

    monkeypatch.setattr(mx, "async_eval", counted)
    decoder.step()
    monkeypatch.setattr(mx, "async_eval", submit)
    return found


def _flat(tree: Any) -> list[mx.array]:
    if isinstance(tree, mx.array):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree
    return [array for part in parts for array in _flat(part)]


@on_cpu
@pytest.mark.parametrize(
    ("sampling", "depth", "nodes", "products"),
    [
        (GREEDY, 0, 192, 45),
        (GREEDY, 1, 355, 61),
        (GREEDY, 3, 515, 87),
        (Sampling(0.7, top_p=0.9), 0, 209, 45),
        (Sampling(0.7, top_p=0.9), 3, 582, 87),
    ],
)
def test_a_step_has_no_more_nodes_than_it_has_today(
    qwen: Loaded,
    sampling: Sampling,
    depth: int,
    nodes: int,
    products: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = nodes_of_a_step(decoding(qwen, depth, sampling), tmp_path, monkeypatch)

    computing = sum(count for name, count in counts.items() if name not in VIEWS)
    assert computing <= nodes, counts
    assert counts["Matmul"] <= products, counts


@on_cpu
@pytest.mark.parametrize(
    ("depth", "kernels"),
    [
        # Three for each of three recurrent layers, two products a layer more for their
        # projections and two for the MLPs, and one for the logits.
        (0, {"net_inputs": 3, "delta_run_in_place": 3, "net_gated_norm": 3, "products": 17}),
        # The head's layer and its mixing product, and its logits.
        (
            1,
            {
                "net_inputs_replaying": 3,
                "delta_replay_and_run_in_place": 3,
                "net_gated_norm": 3,
                "products": 23,
            },
        ),
    ],
)
def test_on_cuda_a_layer_is_a_few_large_kernels(
    depth: int, kernels: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = stand_in_for_cuda(monkeypatch)
    heads = {"linear_num_value_heads": 16, "linear_value_head_dim": 32}
    loaded = Loaded.at(write_qwen(tmp_path, vocab_size=320, **heads))
    loaded.network.set_dtype(mx.bfloat16)
    decoder = decoding(loaded, depth)
    decoder.batch._steps = type(decoder.batch._steps)()  # compiled afresh, by the stand-ins
    launched.clear()

    decoder.step()

    products = sum(count for name, count in launched.items() if "skinny_product" in name)
    own = {name: count for name, count in launched.items() if "skinny_product" not in name}
    assert own | {"products": products} == kernels


def stand_in_for_cuda(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Take the way of CUDA, with kernels that only say which they are and what they shape."""
    launched = Counter[str]()

    def kernel(name: str, input_names: list[str], output_names: list[str], **_: Any) -> Any:
        def launch(inputs: Any, output_shapes: Any, output_dtypes: Any, **_: Any) -> list[mx.array]:
            assert len(inputs) == len(input_names)
            assert len(output_shapes) == len(output_names)
            # Behind the name may stand a number that is part of the source.
            launched[name.partition("_0x")[0]] += 1
            used = sum(part.astype(mx.float32).sum() for part in inputs) * 0
            return [
                mx.zeros(shape, dtype) + mx.array(used).astype(dtype)
                for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
            ]

        return launch

    monkeypatch.setattr(platform, "backend", lambda: "cuda")
    monkeypatch.setattr(mx.fast, "cuda_kernel", kernel)
    for module, name in ((platform, "kernel"), (skinny_product, "_kernel")):
        # Past their caches, which outlive this test.
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    return launched
