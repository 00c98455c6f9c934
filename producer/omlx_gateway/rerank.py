"""Rerankings: documents by how well each answers a query, in the form of Jina and Cohere.

Every document is a chat whose answer is yes or no, in the words of Qwen3-Reranker. Its score is the
probability of yes, from the two logits after the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field, model_validator

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire import MAX_PROMPT_CHARACTERS, Completion, Remedy, RequestPart
from omlx_producer.wire.answer import common_fields
from omlx_producer.wire.request import ModelAlias

MAX_DOCUMENTS = 1000
JUDGE = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"

_Text = Annotated[str, Field(min_length=1)]


def _text_of(document: Any) -> Any:
    """The text of a document that is an object; anything else as it is."""
    return document.get("text") if isinstance(document, dict) else document


class Reranking(RequestPart):
    """The body of a request for a reranking.

    Attributes:
        top_n: results at most.
        instruction: what a document must do to be a good one.
    """

    shape: ClassVar[str] = (
        'a JSON object such as {"query": "cats", "documents": ["a cat", "a dog"]}'
    )

    model: ModelAlias | None = None
    query: Annotated[_Text, Remedy("text")]
    documents: Annotated[
        Annotated[
            list[Annotated[_Text, BeforeValidator(_text_of)]],
            Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True),
        ],
        Remedy(f'a list of 1 to {MAX_DOCUMENTS} texts, or of objects such as {{"text": "..."}}'),
    ]
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = False
    instruction: Annotated[_Text | None, Remedy("text")] = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> Self:
        """The reranking that a body asks for. What is null counts as not given.

        Raises:
            InvalidRequest: with the field, the value and the remedy.
        """
        return cls.parse({name: value for name, value in body.items() if value is not None})

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        characters = sum(len(self._before) + len(text) for text in self.documents)
        if characters > MAX_PROMPT_CHARACTERS:
            raise InvalidRequest(
                "documents",
                f"got {characters} characters, with the query before each",
                f"give at most {MAX_PROMPT_CHARACTERS} at once",
            )
        return self

    @property
    def _before(self) -> str:
        return f"<Instruct>: {self.instruction or INSTRUCTION}\n<Query>: {self.query}\n<Document>: "

    def chats(self, salt: str | None) -> list[dict[str, Any]]:
        """A request for each document, with the cache salt of its client."""
        decision = {
            "reasoning_effort": "none",
            "structured_outputs": {"choice": ["yes", "no"]},
            "probabilities": True,
            "cache_salt": salt,
        } | ({} if self.model is None else {"model": self.model})
        return [
            decision
            | {
                "messages": [
                    {"role": "system", "content": JUDGE},
                    {"role": "user", "content": self._before + text},
                ]
            }
            for text in self.documents
        ]

    def answer(self, decided: Sequence[Completion]) -> dict[str, Any]:
        """The answer, from the decisions about the documents: the best document first."""
        scores = [(each.choices[0].probabilities or {})["yes"] for each in decided]
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: self.top_n]
        tokens = sum(each.usage.prompt_tokens for each in decided)
        return {
            "id": decided[0]["id"],
            **common_fields(decided[0].head),
            "results": [
                {"index": index, "relevance_score": scores[index]}
                | ({"document": {"text": self.documents[index]}} if self.return_documents else {})
                for index in best
            ],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        }
