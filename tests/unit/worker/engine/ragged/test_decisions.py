"""A choice has the probability that mlx-lm's own forward gives its text among all choices."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import mlx.nn as nn
import pytest

from omlx_gateway.rerank import Reranking
from omlx_producer.wire import GenerationRequest, InvalidRequest, ModelInfo
from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.ragged import reading
from omlx_worker.engine.rows.decision import branches, probabilities
from omlx_worker.engine.rows.prompts import Prompter
from omlx_worker.engine.rows.request import RowRequest, Sampling
from tests.helpers.constrained import grammars
from tests.helpers.decoding import GREEDY, Loaded
from tests.helpers.families import tiny
from tests.helpers.scoring import Scoring, mlx_lms

CLOSE = 1e-5
ENDS = [3, 7]
TREE = {"x": [9], "xy": [9, 30], "xyz": [9, 30, 41], "xz": [9, 41, 12, 13], "z": [41, 5]}
FLAT = {"yes": [100], "no": [101], "perhaps": [102]}


def decision(
    name: str, prompt: Sequence[int], spelled: Mapping[str, Sequence[int]]
) -> list[RowRequest]:
    return [
        RowRequest(f"{name}:{at}", [*prompt, *way], 0, GREEDY, prompt_logprobs=0, targets=targets)
        for at, (way, targets) in enumerate(branches(spelled, ENDS, len(prompt)))
    ]


def told(scoring: Scoring, rows: Sequence[RowRequest], choices: Sequence[str]) -> dict[str, float]:
    logprobs = [[each.logprob for each in scoring.scores.pop(row.row_id)] for row in rows]
    targets = [row.targets for row in rows]
    return probabilities(choices, zip(targets, logprobs, strict=True))


def wanted(
    network: nn.Module,
    prompt: Sequence[int],
    spelled: Mapping[str, Sequence[int]],
    ends: Sequence[int] = ENDS,
) -> Any:
    """The same by mlx-lm: a forward over the whole text of each choice."""
    weights, ended = {}, any(a != b and a.startswith(b) for a in spelled for b in spelled)
    for text, tokens in spelled.items():
        after = mlx_lms(network, [*prompt, *tokens])[len(prompt) - 1 :]
        weights[text] = math.exp(sum(after[at][token] for at, token in enumerate(tokens)))
        if ended:
            weights[text] *= sum(math.exp(after[-1][end]) for end in ends)
    total = sum(weights.values())
    return pytest.approx({text: each / total for text, each in weights.items()}, abs=CLOSE)


def counted(rows: Sequence[RowRequest], network: nn.Module, **bounds: int) -> tuple[int, list[int]]:
    """How many tokens rows read in a loop of their own, and the width of each window."""
    scoring, widths, read = Scoring(network), list[int](), reading._read

    def watched(model: Any, caches: Any, readings: Any, lengths: Sequence[int], *rest: Any) -> None:
        widths.append(max(lengths))
        read(model, caches, readings, lengths, *rest)

    with patch.multiple(reading, _read=watched, **bounds):
        scoring.run(*rows)
    return scoring.counters.prompt_tokens, widths


def prompt_of(length: int) -> list[int]:
    return [(7 * place + length) % 251 for place in range(length)]


@pytest.mark.parametrize(
    "family", ["gemma3_text", "lfm2", pytest.param("mamba", marks=pytest.mark.slow)]
)
def test_in_every_family_whatever_is_read_beside_it(family: str) -> None:
    network = tiny(family)
    scoring, prompts = Scoring(network), [prompt_of(length) for length in (1, 40, 130)]
    asked = [(at, spelled) for at in range(len(prompts)) for spelled in (TREE, FLAT)]
    rows = [decision(str(n), prompts[at], spelled) for n, (at, spelled) in enumerate(asked)]

    scoring.run(*(row for each in rows for row in each), RowRequest("other", prompts[2], 4, GREEDY))

    for each, (at, spelled) in zip(rows, asked, strict=True):
        shares = told(scoring, each, list(spelled))
        assert shares == wanted(network, prompts[at], spelled)
        assert sum(shares.values()) == pytest.approx(1)


def test_what_choices_have_in_common_is_read_once(qwen: Loaded) -> None:
    prompt = prompt_of(200)

    assert counted(decision("flat", prompt, FLAT), qwen.network)[0] == len(prompt)
    # Of the three ways the second and the third begin after the prompt.
    tokens, _ = counted(decision("tree", prompt, TREE), qwen.network)
    assert tokens == len(prompt) + 3 + 4 + 2


def test_only_the_windows_that_score_are_narrow(qwen: Loaded) -> None:
    vocabulary = as_ragged(qwen.network).vocabulary
    rows = decision("flat", prompt_of(100), FLAT)

    assert counted(rows, qwen.network, MOST_LOGITS=24 * vocabulary)[1] == [99, 1]
    assert counted(rows, qwen.network)[1] == [100]


def test_a_kept_beginning_is_not_read_again_but_for_its_last_token() -> None:
    network, prompt = tiny("llama"), prompt_of(200)
    scoring = Scoring(network)
    scoring.run(*(RowRequest(name, [*prompt, 9], 4, GREEDY) for name in ("one", "another")))
    before, rows = scoring.counters.prompt_tokens, decision("late", prompt, FLAT)

    scoring.run(*rows)

    assert scoring.counters.prompt_tokens == before + 1
    assert told(scoring, rows, list(FLAT)) == wanted(network, prompt, FLAT)


def prompter(loaded: Loaded, context: int = 4096) -> Prompter:
    info = ModelInfo(model="tiny", context_length=context, longest_token=20)
    vocabulary = loaded.config.get("text_config", loaded.config)["vocab_size"]
    return Prompter(loaded.tokenizer, info, vocabulary, Sampling(), grammars=grammars(loaded))


def ask(choices: Sequence[str], **fields: Any) -> GenerationRequest:
    form = {"choice": list(choices)}
    asked = {"model": "m", "structured_outputs": form, "probabilities": True, **fields}
    return GenerationRequest.parse(asked)


@pytest.mark.slow
def test_texts_of_the_demo_model_have_their_probabilities() -> None:
    demo, text = Loaded.demo(), "def is_even(number):\n    return number % 2 == "
    choices = ["0", "1", "0 and number > 2", "None", "é", "0"]
    request, scoring = ask(choices, prompt=text), Scoring(demo.network)

    rows = prompter(demo).rows(request, "job")
    scoring.run(*rows)

    encode = demo.tokenizer.encode
    spelled = {choice: encode(choice, add_special_tokens=False) for choice in choices}
    ends = sorted(demo.tokenizer.eos_token_ids)
    expected = wanted(demo.network, encode(text), spelled, ends)
    assert told(scoring, rows, request.choices) == expected


def test_choices_that_do_not_fit_the_context_are_refused(qwen: Loaded) -> None:
    sentence = "^prompt: 66 tokens with the choices do not fit the context of tiny"
    with pytest.raises(InvalidRequest, match=sentence):
        prompter(qwen, 64).rows(ask(["yes", "no", "noble"], prompt="x" * 61), "job")


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
"""Of Qwen3's chat template what these chats meet."""


def test_a_document_is_read_in_the_form_of_qwens_reranker_and_scored_at_its_end(
    qwen: Loaded,
) -> None:
    tokenizer = copy.deepcopy(qwen.tokenizer)
    tokenizer._tokenizer.chat_template = CHATML
    [chat] = Reranking.of({"query": "pets", "documents": ["a cat"]}).chats(None)

    [row, *_] = prompter(replace(qwen, tokenizer=tokenizer)).rows(
        GenerationRequest.parse(chat | {"model": "m"}), "job"
    )

    place = row.targets[0].place
    assert tokenizer.decode(row.prompt[:place]) == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: Given a web search query, retrieve relevant passages that "
        "answer the query\n<Query>: pets\n<Document>: a cat<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    first = {target.token for target in row.targets if target.place == place}
    assert first == {tokenizer.encode(letter)[0] for letter in "yn"}
