"""An engine without a model: letters that follow from prompt and seed, at a pace of one's choice.

It behaves as a real one where that matters to the service: text lags one token behind, half of
the rows end on a stop token, which brings text but no token, and a row is read in chunks. With
tools it thinks until the first m, and calls from the first x after that. Asked to go round and
round it repeats itself.
"""

from __future__ import annotations

import json
import time
import zlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omlx_producer.wire import (
    FinishReason,
    FunctionCall,
    GenerationRequest,
    InvalidRequest,
    ModelInfo,
    PromptLogprob,
    RepetitionDetection,
    require_kind,
)
from omlx_worker.engine.rows.decision import branches
from omlx_worker.engine.rows.emission import Emission, Said
from omlx_worker.engine.rows.interface import Delays
from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.rows.repetition import Repetition
from omlx_worker.engine.rows.reply import ReplyForm
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.row import Row
from tests.helpers.markups import between

CONTEXT = 10_000
BYTES_A_TOKEN = 1024
END = 96
"""The token that ends an answer, where choices are scored."""


def calls_of(request: GenerationRequest) -> ReplyForm:
    """Calls of ``f`` with the first of a parameter's choices, or else with the call's own text."""
    parameters = [tool.function.schema_of_arguments for tool in request.tools or ()]
    properties = parameters[0].get("properties", {}) if parameters else {}
    chosen = {name: of["enum"][0] for name, of in properties.items() if "enum" in of}

    def read(text: str) -> list[FunctionCall]:
        return [FunctionCall(name="f", arguments=json.dumps(chosen or {"text": text}))]

    return ReplyForm(between(("?", "m"), ("x", ""), thinks=True), read)


def vector_of(tokens: int, size: int) -> bytes:
    """The vector of a text with this many tokens."""
    return array("f", range(tokens, tokens + size)).tobytes()


GOES_ROUND = "round and round"
"""A prompt with which a text repeats itself: two tokens, or those of a long table in a picture."""
PICTURE = 0xFFFC
BREAKS_READ, BREAKS_STEP, BREAKS_PREPARE = "break-read", "break-step", "break-prepare"
TOO_BUSY = "too-busy"
BREAKS_LOOK = b"break-look"


@dataclass
class _State:
    row: Row
    whole: tuple[list[int], str]
    sent: int = 0
    suspended: bool = False

    @property
    def asked(self) -> RowRequest:
        return self.row.request


class FakeEngine:
    """
    Args:
        vector_size: numbers of its vectors; 0 generates.
    """

    def __init__(self, max_rows: int = 16, step_seconds: float = 0.0, vector_size: int = 0) -> None:
        self.info = ModelInfo(
            model="fake",
            context_length=CONTEXT,
            longest_token=1,
            system_fingerprint="fp_fake",
            vector_size=vector_size,
            picture_tokens=1,
        )
        self.max_rows = max_rows
        self.max_depth = self.own_depth = 0
        self.head_hint = None
        self.tower_hint = None
        self.drafters: str | None = None
        self.step_seconds = step_seconds
        self.states: dict[Row, _State] = {}
        self.traces = self.drains = self.contests = 0
        self.shares, self.pads = False, True
        self.memory_budget = 1 << 30
        self.kept_within: int | None = None
        self.weight_bytes = 0
        self.most_rows = 0
        self.first_parts = 1
        self.wrong_pages = 0

    def prepare(self, request: GenerationRequest, job_id: str) -> list[RowRequest]:
        require_kind(request, self.info)
        if request.input is not None:
            size = request.dimensions or self.info.vector_size
            prompts = [
                list(map(ord, text)) if isinstance(text, str) else text for text in request.texts
            ]
            return [
                RowRequest(f"{job_id}:{index}", prompt, 0, Sampling(), vector=size)
                for index, prompt in enumerate(prompts)
            ]
        text = (
            request.prompt
            if isinstance(request.prompt, str)
            else "".join(message.text for message in request.messages or ())
        )
        if text == BREAKS_PREPARE:
            raise RuntimeError(f"no tokenizer for {text}")
        if text == TOO_BUSY:
            raise TimeoutError("the worker's machine was too busy; submit the job again")
        tokens = [ord(character) for character in text] or list(request.prompt or ())
        pictures = tuple(
            Picture(place, 1, 1, data) for place, data in enumerate(request.pictures.values())
        )
        tokens = [PICTURE] * len(pictures) + tokens
        asked = request.max_completion_tokens
        length = (1100 if text == GOES_ROUND else 16) if asked is None else asked
        loops = request.repetition_detection
        if len(tokens) + length > CONTEXT:
            raise InvalidRequest("prompt", f"got {len(tokens)} tokens", f"at most {CONTEXT} fit")
        seed = request.seed if request.seed is not None else zlib.crc32(job_id.encode())
        if request.probabilities:
            spelled = {choice: list(map(ord, choice)) for choice in request.choices}
            return [
                RowRequest(
                    f"{job_id}:{number}",
                    [*tokens, *way],
                    0,
                    Sampling(),
                    prompt_logprobs=0,
                    targets=targets,
                )
                for number, (way, targets) in enumerate(branches(spelled, [END], len(tokens)))
            ]
        reply = calls_of(request) if request.calling else None
        return [
            RowRequest(
                f"{job_id}:{choice}",
                list(map(int, tokens)),
                length,
                Sampling(seed=seed + choice),
                cache=request.cache,
                repetition=loops if loops and loops.max_pattern_size else None,
                reply=reply,
                prompt_logprobs=None if choice else request.scored_alternatives,
                echo=text if request.echo else None,
                pictures=pictures,
            )
            for choice in range(request.n)
        ]

    @property
    def slots(self) -> int:
        return len(self._present)

    @property
    def delays(self) -> Delays:
        return Delays(self.traces, self.drains, self.contests)

    def warm_up(self, *, first: bool = False) -> bool:
        return False

    def text_of(self, row: Row) -> Said:
        return Said(expected(row.request)[1][: self._said(row)])

    def _said(self, row: Row) -> int:
        """Characters that are final once a row's generated tokens are fed."""
        produced = row.produced
        return produced if produced == row.request.max_tokens else max(0, produced - 1)

    def add(self, row: Row) -> int:
        assert row not in self.states
        assert len(self._present) < self.max_rows
        whole = expected(row.request)
        assert row.text_tokens() == whole[0][: row.produced]
        row.computed = 0
        self.states[row] = _State(row, whole, self._said(row))
        self.most_rows = max(self.most_rows, len(self._present))
        return 0

    def read(self, tokens: Mapping[Row, int]) -> list[Emission]:
        if any(_says(row.request, BREAKS_READ) for row in tokens):
            raise RuntimeError("out of memory")
        for row, count in tokens.items():
            assert min(1, row.left) <= count <= row.left
            row.computed += count
        return [told for row in tokens if not row.left for told in self._report(row)]

    def _report(self, row: Row) -> list[Emission]:
        """A token's log-probability is minus its id; the likeliest are always a, b and c.

        What a decision scores gets a share of it, as small as there are ``!`` in the prompt.
        A vector counts up from the number of its tokens.
        """
        asked = row.request
        if asked.vector:
            del self.states[row]
            vector = vector_of(len(asked.prompt), asked.vector)
            return [Emission(row.row_id, [], "", finish_reason="stop", vector=vector)]
        if not row.is_scored:
            return []
        row.told = True
        calm = 1 + (asked.prompt.count(ord("!")) if asked.targets else 0)
        top = [(letter, ord(letter), -0.5 - at) for at, letter in enumerate("abc")]
        scores = [
            PromptLogprob(
                token=chr(token),
                token_id=token,
                logprob=-token / calm if place else 0.0,
                top=top[: asked.prompt_logprobs],
                rank=7 if place else 0,
            )
            for place, token in (
                [target[:2] for target in asked.targets] or enumerate(asked.prompt)
            )
        ]
        reason: FinishReason | None = None if asked.max_tokens else "length"
        if reason:
            del self.states[row]
        return [Emission(row.row_id, [], "", finish_reason=reason, prompt_logprobs=scores)]

    def look(self, row: Row) -> None:
        picture = row.unseen(row.left)
        assert picture is not None
        if picture.data == BREAKS_LOOK:
            raise ValueError("the picture cannot be decoded")
        row.saw(picture)

    def limit_prefixes(self, room: int) -> None:
        """There are none."""

    def step(self, depth: int | None = None) -> list[Emission]:
        time.sleep(self.step_seconds)
        running = [state for state in self._present if not state.row.left]
        assert running
        if any(_says(state.asked, BREAKS_STEP) for state in running):
            raise RuntimeError("the device was lost")
        return [self._advance(state) for state in running]

    def suspend(self, row: Row) -> None:
        state = self.states[row]
        assert not row.left
        assert not state.suspended
        state.suspended = True
        row.kept_bytes = row.length * BYTES_A_TOKEN

    def resume(self, row: Row) -> None:
        assert len(self._present) < self.max_rows
        assert self.states[row].suspended
        self.states[row].suspended = False

    def keep_within(self, limit: int) -> None:
        self.kept_within = limit

    def bytes_for(self, rows: Sequence[tuple[int, int]], *, alone: bool = False) -> int:
        return BYTES_A_TOKEN * sum(to_read + longest for to_read, longest, *_ in rows)

    def miscounted_pages(self) -> int:
        return self.wrong_pages

    def remove(self, row: Row) -> None:
        self.states.pop(row, None)

    def close(self) -> None:
        self.states.clear()

    @property
    def _present(self) -> list[_State]:
        """The rows in the batch, or on their way into it."""
        return [state for state in self.states.values() if not state.suspended]

    def _advance(self, state: _State) -> Emission:
        row, asked = state.row, state.asked
        tokens, text = state.whole
        produced = row.produced + 1
        new = tokens[row.produced : produced]
        row.tokens += new
        row.computed += len(new)
        ends_on_stop_token = len(tokens) < asked.max_tokens
        over = produced > len(tokens) if ends_on_stop_token else produced >= len(tokens)
        final = len(text) if over else max(0, produced - 1)
        said, state.sent = text[state.sent : final], final
        if over:
            del self.states[row]
        reason: FinishReason = "stop" if ends_on_stop_token else "length"
        if ends_on_stop_token and _says(asked, GOES_ROUND):
            reason = "repetition"
        thought = text.partition("m")[0][:final] if asked.reply else ""
        return Emission(
            *(row.row_id, new, said, None, reason if over else None), reasoning_tokens=len(thought)
        )


def expected(row: RowRequest) -> tuple[list[int], str]:
    """All that a row produces."""
    if _says(row, GOES_ROUND):
        watch = Repetition(row.repetition or RepetitionDetection())
        size = 200 if row.pictures else 2
        tokens = [97 + index % size % 26 for index in range(row.max_tokens)]
        end = next((n for n, token in enumerate(tokens, 1) if watch.feed(token)), None)
        return tokens[:end], "".join(map(chr, tokens[:end]))
    seen = [picture.digest for picture in row.pictures]
    key = zlib.crc32(repr((row.prompt, row.sampling.seed, *seen)).encode())
    length = row.max_tokens if key % 2 else max(1, row.max_tokens - 1)
    tokens = [97 + zlib.crc32(f"{key}:{index}".encode()) % 26 for index in range(length)]
    return tokens, "".join(map(chr, tokens))


def _says(row: RowRequest, text: str) -> bool:
    return row.prompt[len(row.pictures) :] == list(map(ord, text))
