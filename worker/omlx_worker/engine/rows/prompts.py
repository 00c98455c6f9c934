"""Turns requests into rows: chat templates, tokens, limits and defaults, all checked here."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any

from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import (
    DEFAULT_CHAT_TOKENS,
    DEFAULT_MAX_TOKENS,
    FILTERS,
    Constraint,
    GenerationRequest,
    InvalidRequest,
    ModelInfo,
    require_kind,
)
from omlx_worker.engine.rows.chat import Chat
from omlx_worker.engine.rows.constraints import TOO_SLOW, BadConstraint, Grammar, Grammars, TooSlow
from omlx_worker.engine.rows.decision import branches
from omlx_worker.engine.rows.encoding import Encoder
from omlx_worker.engine.rows.picture import Sight
from omlx_worker.engine.rows.request import RowRequest, Sampling
from omlx_worker.engine.rows.result import require_short, require_short_vectors
from omlx_worker.engine.rows.thinking import Thinking
from omlx_worker.engine.rows.tools.grammar import field_of

_KINDS = {
    "json_object": "object",
    "json_schema": "schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
}


def sampling_defaults(config: dict[str, Any]) -> Sampling:
    """Defaults for fields that a request leaves out: the model's values, else OpenAI's.

    Args:
        config: the model's ``generation_config.json``; ``do_sample: false`` means greedy.
    """
    names = ("temperature", "repetition_penalty")
    given = {name: config[name] for name in names if config.get(name) is not None}
    filters = {name: config[name] for name in FILTERS if config.get(name) is not None}
    if config.get("do_sample") is False:
        given["temperature"] = 0.0
    return Sampling(**given, filters=filters)


class Prompter:
    """Turns requests into rows for one model. Safe to call from any one thread at a time.

    The tokenizer is copied, because a tokenizer must not encode in one thread while another
    decodes with it.

    Args:
        chat_tokens: of a chat that sets no limit, at most.
        thinking_budget: of a chat that sets none; None for no limit.
        whole: see `RowRequest`.
        sight: how the model takes pictures; None if it takes none.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        info: ModelInfo,
        vocabulary: int,
        defaults: Sampling,
        *,
        grammars: Grammars | None = None,
        chat_tokens: int = DEFAULT_CHAT_TOKENS,
        thinking_budget: int | None = None,
        whole: bool = False,
        sight: Sight | None = None,
    ) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._encoder = encoder = Encoder(self._tokenizer, info, sight)
        encode = partial(encoder.encode, "messages")
        self._chat = Chat(self._tokenizer, info.model, encode, encoder.picture)
        self._info = info
        self._vocabulary = vocabulary
        self._defaults = defaults
        self._grammars = grammars
        self._chat_tokens = chat_tokens
        self._thinking_budget = thinking_budget
        self._whole = whole
        self._eos = frozenset(tokenizer.eos_token_ids)

    def rows(self, request: GenerationRequest, job_id: str) -> list[RowRequest]:
        """The rows of a request, one a choice or text, named ``<job id>:<number>``.

        Raises:
            InvalidRequest: if this model can never serve it.
            TimeoutError: see `Grammars.compile`.
        """
        require_kind(request, self._info)
        if request.input is not None:
            return self._read_rows(request, job_id)
        text = None if request.messages is None else self._rendered(request)
        prompt, pictures = self._encoder.with_pictures(
            self._encode(request, text), request.pictures
        )
        room = self._info.context_length - len(prompt)
        if room < (request.max_completion_tokens != 0):
            vectors = sum(picture.count for picture in pictures)
            of_pictures = f", {vectors} of them of pictures," if pictures else ""
            raise self._encoder.too_long(request.reads, f"{len(prompt)} tokens{of_pictures}")
        self._check_token_ids("logit_bias", request.logit_bias or {})
        self._check_token_ids("stop_token_ids", request.stop_token_ids or [])
        stop_tokens = frozenset(request.stop_token_ids or ())
        reply, constraint, thinking = None, request.constraint, None
        base = RowRequest(
            job_id,
            prompt,
            0,
            Sampling(),
            cache=request.cache,
            salt=request.cache_salt,
            pictures=pictures,
        )
        if text is not None:
            base = replace(base, marks=(self._chat.shared(request, prompt),))
            reply = self._chat.reply(request, text)
            constraint = self._chat.constraint(request, reply)
            thinking = self._chat.thinking(request, reply, self._budget(request))
        if thinking is None and request.thinking_token_budget is not None:
            raise InvalidRequest(
                "thinking_token_budget",
                f"{self._info.model} does not mark its thinking",
                "leave it out",
            )
        default = DEFAULT_MAX_TOKENS if request.messages is None else self._chat_tokens
        field = _field_of(request, constraint)
        grammar = self._grammar(request, constraint, field)
        if constraint and request.probabilities:
            begins = self._chat.answer_begins(reply)
            return self._deciding(request, base, begins)
        loops = request.repetition_detection
        most = request.max_completion_tokens
        scored = request.scored_alternatives
        echo = self._text_of(request, prompt) if request.echo else None
        rows = [
            replace(
                base,
                row_id=f"{job_id}:{choice}",
                max_tokens=min(default if most is None else most, room),
                sampling=self._sampling(request, _seed(request.seed, job_id, choice), thinking),
                stop_strings=tuple(request.stop_strings),
                stop_tokens=stop_tokens if request.ignore_eos else stop_tokens | self._eos,
                repetition=loops if loops and loops.max_pattern_size else None,
                reply=reply,
                trims=request.messages is not None and grammar is None,
                depth=request.draft_depth if request.draft else 0,
                grammar=grammar,
                grammar_field=field,
                prompt_logprobs=None if choice else scored,
                echo=echo,
            )
            for choice in range(request.n)
        ]
        require_short(request, rows)
        return rows

    def _read_rows(self, request: GenerationRequest, job_id: str) -> list[RowRequest]:
        """Rows that are read for their vectors."""
        size, longest = self._info.vector_size, self._info.context_length
        wanted, rows = request.dimensions or size, list[RowRequest]()
        if wanted > size:
            raise InvalidRequest(
                "dimensions",
                f"got {wanted}, and the vectors of {self._info.model} have {size} numbers",
                f"give at most {size}",
            )
        require_short_vectors(len(request.texts), wanted)
        for index, text in enumerate(request.texts):
            field = f"input[{index}]" if len(request.texts) > 1 else "input"
            if isinstance(text, str):
                prompt = self._encoder.encode(field, text, add_special_tokens=True)
            else:
                prompt = list(text)
                self._check_token_ids(field, prompt)
            if len(prompt) > longest:
                raise self._encoder.too_long(field, f"{len(prompt)} tokens")
            rows.append(
                RowRequest(
                    row_id=f"{job_id}:{index}",
                    prompt=prompt,
                    max_tokens=0,
                    sampling=self._defaults,
                    cache=False,
                    vector=wanted,
                    whole=self._whole,
                )
            )
        return rows

    def _deciding(
        self, request: GenerationRequest, base: RowRequest, begins: list[int] | None
    ) -> list[RowRequest]:
        """The rows that read the choices of a decision after its prompt.

        Args:
            base: what they have in common.
            begins: see `Chat.answer_begins`.
        """
        if begins is None:
            raise InvalidRequest(
                "probabilities",
                f"the prompt opens the thinking of {self._info.model}, which comes before a choice",
                'give reasoning_effort: "none" too',
            )
        prompt = [*base.prompt, *begins]
        assert self._grammars  # the choices have compiled
        spelled = {text: self._grammars.spelled(text) for text in request.choices}
        rows = [
            replace(
                base,
                row_id=f"{base.row_id}:{number}",
                prompt=[*prompt, *tokens],
                prompt_logprobs=0,
                targets=targets,
            )
            for number, (tokens, targets) in enumerate(
                branches(spelled, sorted(self._eos), len(prompt))
            )
        ]
        longest = max(len(row.prompt) for row in rows)
        if longest > self._info.context_length:
            raise self._encoder.too_long(request.reads, f"{longest} tokens with the choices")
        return rows

    def _grammar(
        self, request: GenerationRequest, constraint: Constraint | None, field: str
    ) -> Grammar | None:
        if constraint is None:
            return None
        assert self._grammars  # a model of vectors takes no constraints
        try:
            return self._grammars.compile(constraint)
        except TooSlow:
            raise InvalidRequest(field, *TOO_SLOW) from None
        except BadConstraint as error:
            kind = _KINDS[constraint.kind]
            if request.calling and (blamed := field_of(error.rule, request)):
                field, kind = blamed, "schema"
            raise InvalidRequest(
                field, f"the {kind} cannot be compiled ({error})", "change it"
            ) from None

    def _text_of(self, request: GenerationRequest, prompt: list[int]) -> str:
        if isinstance(request.prompt, str):
            return request.prompt
        return str(self._tokenizer.decode(prompt))

    def _rendered(self, request: GenerationRequest) -> str:
        characters = sum(len(message.text) for message in request.messages or ())
        self._encoder.require_characters("messages", characters)
        if request.pictures:
            self._encoder.require_no_picture(request)
        return self._chat.text(request)

    def _encode(self, request: GenerationRequest, text: str | None) -> list[int]:
        """The prompt.

        Args:
            text: of a request with messages, rendered.
        """
        tokens: list[int]
        if text is not None:
            tokens = self._chat.encode(text)
        elif isinstance(request.prompt, str):
            bos = self._tokenizer.bos_token
            special = bos is None or not request.prompt.startswith(bos)
            tokens = self._encoder.encode("prompt", request.prompt, add_special_tokens=special)
        else:
            tokens = list(request.prompt or ())
            self._check_token_ids("prompt", tokens)
        if not tokens:
            raise InvalidRequest("prompt", "it has no tokens", "give at least one character")
        return tokens

    def _check_token_ids(self, field: str, ids: Any) -> None:
        for token in ids:
            if int(token) >= self._vocabulary:
                raise InvalidRequest(
                    field,
                    f"token id {token} is outside the vocabulary of {self._info.model}, "
                    f"{self._vocabulary} tokens",
                    "remove it",
                )

    def _budget(self, request: GenerationRequest) -> int | None:
        budget = request.thinking_token_budget
        if budget is None:
            # Not every template can leave the thinking out.
            return 0 if request.reasoning_effort == "none" else self._thinking_budget
        return None if budget < 0 else budget

    def _sampling(
        self, request: GenerationRequest, seed: int, thinking: Thinking | None
    ) -> Sampling:
        def given(name: str) -> Any:
            value = getattr(request, name)
            return getattr(self._defaults, name) if value is None else value

        own = {name: getattr(request, name) for name in FILTERS}
        filters = self._defaults.filters | {k: v for k, v in own.items() if v is not None}
        return Sampling(
            temperature=given("temperature"),
            filters={name: value for name, value in filters.items() if value != FILTERS[name]},
            repetition_penalty=given("repetition_penalty"),
            presence_penalty=request.presence_penalty or 0.0,
            frequency_penalty=request.frequency_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
            seed=seed,
            top_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            thinking=thinking,
        )


class Prompters:
    """Prompters for as many threads: each request gets one that no other has."""

    def __init__(self, prompters: Iterable[Prompter]) -> None:
        self._free: SimpleQueue[Prompter] = SimpleQueue()
        for prompter in prompters:
            self._free.put(prompter)

    def rows(self, request: GenerationRequest, job_id: str) -> list[RowRequest]:
        """See `Prompter.rows`. From any thread; waits until a prompter is free."""
        prompter = self._free.get()
        try:
            return prompter.rows(request, job_id)
        finally:
            self._free.put(prompter)


def _field_of(request: GenerationRequest, constraint: Constraint | None) -> str:
    """The field that a constraint comes from."""
    if constraint and request.calling and constraint.kind == "grammar":
        return "tools"
    return request.constraint_field


def _seed(seed: int | None, job_id: str, choice: int) -> int:
    """The seed of one choice: the request's own, else one made from the job id."""
    if seed is not None and choice == 0:
        return seed
    text = f"{job_id if seed is None else seed}:{choice}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
