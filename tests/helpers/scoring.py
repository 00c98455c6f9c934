"""A decode loop over rows that are scored, and mlx-lm's own scores beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from omlx_producer.wire import ModelInfo, PromptLogprob
from omlx_worker.decode.budget import MemoryBudget
from omlx_worker.decode.chunk_size import ChunkSize
from omlx_worker.decode.counters import Counters
from omlx_worker.decode.depth.fixed import FixedPolicy
from omlx_worker.decode.depth_driver import DepthDriver
from omlx_worker.decode.loop import DecodeLoop
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.row import BULK, Row
from tests.helpers.decoding import Loaded

PLENTY = 1 << 30


class Scoring:
    """A decode loop over a network that keeps prefixes, and the scores that it tells."""

    def __init__(self, network: nn.Module, *, depth: int = 0, max_rows: int = 8) -> None:
        model = as_ragged(network, drafts=depth > 0)
        self.decoder = RaggedDecoder(
            model, depth, 0, partial(PrefixCache, LayerSpecs.of(model), PLENTY)
        )
        info = ModelInfo(model="tiny", context_length=4096, longest_token=1)
        prepare = cast(Any, None)  # rows come with tokens
        engine = DecodingEngine(
            "tiny", self.decoder, Loaded.demo().tokenizer, prepare, info, max_rows
        )
        self.counters = Counters()
        self.scores: dict[str, list[PromptLogprob]] = {}
        self.reasons: dict[str, str] = {}
        self.thought: dict[str, int] = {}
        self._loop = DecodeLoop(
            engine,
            MemoryBudget(PLENTY, 0, self.decoder.bytes_for),
            self.counters,
            driver=DepthDriver(FixedPolicy(depth)),
            chunks=ChunkSize(256),
        )

    def run(self, *rows: RowRequest | Row) -> dict[str, list[int]]:
        """Run rows to their ends; the tokens of each."""
        running = [Row(row, BULK) if isinstance(row, RowRequest) else row for row in rows]
        self._loop.add(running)
        while (emissions := self._loop.act()) is not None:
            for emission in emissions:
                if emission.prompt_logprobs is not None:
                    assert emission.row_id not in self.scores
                    self.scores[emission.row_id] = emission.prompt_logprobs
                if emission.finish_reason:
                    self.reasons[emission.row_id] = emission.finish_reason
                    self.thought[emission.row_id] = emission.reasoning_tokens
        return {row.row_id: row.text_tokens() for row in running}


def mlx_lms(network: nn.Module, prompt: Sequence[int]) -> Any:
    """Log-probabilities after each token of a prompt, ``[T, V]``."""
    logits = network(mx.array([list(prompt)]))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))
