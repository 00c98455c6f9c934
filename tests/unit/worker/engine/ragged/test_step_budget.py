"""What one step costs, counted and not timed: the kernels that it launches on CUDA.

A GPU's step is many small kernels of a few microseconds each, so their number is its cost.
Counted on the CPU, with stand-ins for the kernels.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlx_worker.engine.kernels import source
from omlx_worker.engine.kernels.device import for_cuda
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.rows.row import Sampling
from tests.helpers.checkpoints import write_qwen
from tests.helpers.decoding import GREEDY, Loaded, row

ROWS = 2

on_cpu = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="counted on the CPU")


def decoding(decoder: RaggedDecoder, sampling: Sampling = GREEDY) -> RaggedDecoder:
    """A batch that is well under way."""
    for index in range(ROWS):
        decoder.add(row(str(index), [1 + index, 2, 3], 400, sampling))
        decoder.prefill({str(index): 8})
    for _ in range(4):
        decoder.step()
    return decoder


@pytest.mark.slow
@on_cpu
@pytest.mark.parametrize(
    ("depth", "kernels"),
    [
        # Three for each of three recurrent layers and two for attention, two products a layer more
        # for their projections and two for the MLPs, and one for the logits.
        (
            0,
            {
                "net_inputs": 3,
                "delta_run_in_place": 3,
                "net_gated_norm": 3,
                "attention_put": 1,
                "attention": 1,
                "products": 17,
            },
        ),
        # The head's layer and its mixing product, and its logits.
        (
            1,
            {
                "net_inputs_replaying": 3,
                "delta_replay_and_run_in_place": 3,
                "net_gated_norm": 3,
                "attention_put": 2,
                "attention": 2,
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
    model = as_ragged(loaded.network, drafts=depth > 0, kernels=for_cuda(32, 32), checks=False)
    decoder = decoding(RaggedDecoder(model, depth))
    decoder._halves.forwards.cache_clear()  # compiled afresh, and counted
    decoder._halves.commits.cache_clear()
    launched.clear()

    decoder.step()

    products = sum(count for name, count in launched.items() if "skinny_product" in name)
    own = {name: count for name, count in launched.items() if "skinny_product" not in name}
    assert own | {"products": products} == kernels


def stand_in_for_cuda(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Replace CUDA's kernels by some that only say which they are and what they shape."""
    launched = Counter[str]()

    def kernel(name: str, input_names: list[str], output_names: list[str], *_: str) -> Any:
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

    monkeypatch.setattr(mx.fast, "cuda_kernel", kernel)
    # Kernels are kept between launches, those of an earlier stand-in too.
    monkeypatch.setattr(source, "_kernel", source._kernel.__wrapped__)
    return launched
