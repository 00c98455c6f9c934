"""An engine without a model: letters that follow from prompt and seed, at a pace of one's choice.

It behaves as a real one where that matters to the service: text lags one token behind, half of
the rows end on a stop token, which brings text but no token, and a row is read in chunks.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from omlx_producer.protocol import GenerationRequest, InvalidRequest, ModelInfo
from omlx_worker.engine.interface import Emission, Row, Sampling

CONTEXT = 10_000
BREAKS_PREFILL, BREAKS_STEP, BREAKS_PREPARE = "break-prefill", "break-step", "break-prepare"


@dataclass
class _State:
    row: Row
    unread: int
    produced: int = 0
    sent: int = 0


class FakeEngine:
    def __init__(self, max_rows: int = 16, step_seconds: float = 0.0) -> None:
        self.info = ModelInfo(model="fake", context_length=CONTEXT, longest_token=1)
        self.max_rows = max_rows
        self.max_depth = 0
        self.step_seconds = step_seconds
        self.states: dict[str, _State] = {}
        self.most_rows = 0

    def prepare(self, request: GenerationRequest, job_id: str) -> list[Row]:
        text = (
            request.prompt
            if isinstance(request.prompt, str)
            else "".join(message.text for message in request.messages or ())
        )
        if text == BREAKS_PREPARE:
            raise RuntimeError("no tokenizer")
        tokens = [ord(character) for character in text] or list(request.prompt or ())
        length = request.max_completion_tokens or 16
        if len(tokens) + length > CONTEXT:
            raise InvalidRequest(f"prompt: got {len(tokens)} tokens; at most {CONTEXT} fit")
        seed = request.seed if request.seed is not None else zlib.crc32(job_id.encode())
        return [
            Row(f"{job_id}:{choice}", list(map(int, tokens)), length, Sampling(seed=seed + choice))
            for choice in range(request.n)
        ]

    def add(self, row: Row) -> None:
        assert row.row_id not in self.states
        assert len(self.states) < self.max_rows
        self.states[row.row_id] = _State(row, len(row.prompt))
        self.most_rows = max(self.most_rows, len(self.states))

    def prefill(self, row_id: str, tokens: int) -> int:
        state = self.states[row_id]
        if _says(state.row, BREAKS_PREFILL):
            raise RuntimeError("out of memory")
        assert 0 < tokens <= state.unread
        state.unread -= tokens
        return state.unread

    def step(self, depths: Mapping[str, int] | None = None) -> list[Emission]:
        time.sleep(self.step_seconds)
        running = [state for state in self.states.values() if not state.unread]
        assert running
        if any(_says(state.row, BREAKS_STEP) for state in running):
            raise RuntimeError("the device was lost")
        return [self._advance(state) for state in running]

    def remove(self, row_id: str) -> None:
        self.states.pop(row_id, None)

    def close(self) -> None:
        self.states.clear()

    def _advance(self, state: _State) -> Emission:
        row = state.row
        tokens, text = expected(row)
        new = tokens[state.produced : state.produced + 1]
        state.produced += 1
        ends_on_stop_token = len(tokens) < row.max_tokens
        over = state.produced > len(tokens) if ends_on_stop_token else state.produced == len(tokens)
        final = len(text) if over else max(0, state.produced - 1)
        said, state.sent = text[state.sent : final], final
        if over:
            del self.states[row.row_id]
        reason = ("stop" if ends_on_stop_token else "length") if over else None
        return Emission(row.row_id, new, said, None, reason)


def expected(row: Row) -> tuple[list[int], str]:
    """All that a row produces."""
    key = zlib.crc32(repr((row.prompt, row.sampling.seed)).encode())
    length = row.max_tokens if key % 2 else max(1, row.max_tokens - 1)
    tokens = [97 + zlib.crc32(f"{key}:{index}".encode()) % 26 for index in range(length)]
    return tokens, "".join(map(chr, tokens))


def _says(row: Row, text: str) -> bool:
    return row.prompt == list(map(ord, text))
