"""Chats: messages through the model's template, and how the answer's text is to be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from itertools import takewhile

from mlx_lm.tokenizer_utils import TokenizerWrapper

from omlx_producer.wire import Constraint, GenerationRequest, InvalidRequest, Message
from omlx_worker.engine.rows.forms import form_of, markup_of
from omlx_worker.engine.rows.reply import ReplyForm
from omlx_worker.engine.rows.template import LEADING, Template
from omlx_worker.engine.rows.text import bytes_in_any_thread
from omlx_worker.engine.rows.thinking import Thinking
from omlx_worker.engine.rows.tokens import in_common
from omlx_worker.engine.rows.tools.grammar import grammar_of_calls
from omlx_worker.engine.rows.tools.reading import CallReader
from omlx_worker.engine.rows.tools.syntax import syntax_of

_OTHER = "\u2063"
"""An invisible separator, with which no message is likely to begin."""


class Chat:
    """The chats of one model.

    Args:
        model: its name, for errors.
        encode: turns what a template has written into tokens; by default the tokenizer does.
        picture: see `Template`.
    """

    def __init__(
        self,
        tokenizer: TokenizerWrapper,
        model: str,
        encode: Callable[[str], list[int]] | None = None,
        picture: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._template = Template(tokenizer, model, picture)
        self.encode = encode or partial(tokenizer.encode, add_special_tokens=False)
        self._model = model
        self._form = form_of(tokenizer)
        self._syntax = syntax_of(tokenizer)
        # The last system message asked about, and its tokens: chats of a file often share one.
        self._asked, self._begins = "", list[int]()

    @cached_property
    def _bytes_of(self) -> Callable[[int], bytes]:
        return bytes_in_any_thread(self._tokenizer)

    def text(self, request: GenerationRequest) -> str:
        """The prompt of a request with messages; see `Template.text`."""
        return self._template.text(request)

    def shared(self, request: GenerationRequest, prompt: list[int]) -> int:
        """Length of the prompt's beginning that any chat with the same system message has too."""
        messages = request.messages or []
        leading = list(takewhile(lambda message: message.role in LEADING, messages))
        if not (request.cache and leading) or len(leading) == len(messages):
            return 0
        other = request.model_copy(
            update={"messages": [*leading, Message(role="user", content=_OTHER)]}
        )
        given = other.tools, other.tool_choice, other.reasoning_effort, other.chat_template_kwargs
        asked = repr((other.messages, given))
        if asked != self._asked:
            self._asked = asked
            try:
                self._begins = self.encode(self.text(other))
            except InvalidRequest:
                self._begins = []  # the template refuses such a chat
        return in_common(prompt, self._begins)

    def reply(self, request: GenerationRequest, text: str) -> ReplyForm | None:
        """How the answers to a request are read; None if they are plain text.

        Args:
            text: the prompt.
        """
        calling = request.calling
        if not (calling or self._form.thinks):
            return None
        tail = self._template.tail(request, text) if self._may_be_begun(text) else ""
        names = [each.name for each in calling.functions] if calling else []
        syntax = self._syntax if calling else None
        held = request.constraint is not None or (
            calling is not None and (calling.required or calling.strict)
        )
        markup, tokens = markup_of(self._form, syntax, names, tail, held=held)
        if calling is None:
            return ReplyForm(markup, tokens=tokens, tail=tail)
        reader = CallReader(self._tokenizer, calling.functions)
        # Strict calls alone have free text around them.
        whole = calling.required or request.constraint is not None
        end = self._syntax.end
        if whole and reader.is_exact and end and end not in markup.by_token:
            # An argument may spell this end. Only the reader, as the grammar's inverse, can tell.
            markup = markup.model_copy(update={"edges": {**markup.edges, "call": {}}})
            return ReplyForm(markup, reader.read_all, None, calling.parallel, tokens, tail)
        return ReplyForm(markup, reader.read, reader.read_cut, calling.parallel, tokens, tail)

    def _may_be_begun(self, text: str) -> bool:
        """Whether a prompt may end within or after thinking. Messages may hold markers, too."""
        return any(marker in text for markers in self._form.edges().values() for marker in markers)

    def thinking(
        self, request: GenerationRequest, reply: ReplyForm | None, budget: int | None
    ) -> Thinking | None:
        """How the tokens of answers tell their thinking; None if the model marks none.

        Args:
            reply: how the answers are read.
        """
        if reply is None or not self._form.thinks:
            return None
        form = self._form
        again = tuple(self.encode(form.close))
        first = tuple(self.encode(form.close_for_calls)) if request.calling else again
        return Thinking(reply.markup, reply.tokens, first, again, self._bytes_of, budget)

    def answer_begins(self, reply: ReplyForm | None) -> list[int] | None:
        """The tokens of an answer before its content; None if thinking has begun."""
        if reply is None or reply.markup.first == "content":
            return []
        return None if reply.markup.first == "reasoning" else self.encode(self._form.answer)

    def constraint(self, request: GenerationRequest, reply: ReplyForm | None) -> Constraint | None:
        """What the answers to a request must match, thinking and calls of tools included.

        Args:
            reply: how the answers are read.

        Raises:
            InvalidRequest: if the calls that it asks for cannot be held to the model's syntax.
        """
        constraint, calling, form = request.constraint, request.calling, self._form
        header = form.header
        if calling is not None and (calling.required or calling.strict or constraint):
            grammar = grammar_of_calls(
                self._model, calling, self._syntax, form.spelling, header, constraint
            )
            constraint, header = Constraint("grammar", grammar), ""
            if self._syntax.bare:
                # Only what begins or follows the thinking with a brace is read as a call.
                form = replace(form, opens=(), closes=())
        if constraint is None or reply is None:
            return constraint
        first = reply.markup.first
        talks = request.constraint is None
        frame = form.frame(first, reply.tail, header, talks=talks)
        return replace(constraint, frame=frame)
