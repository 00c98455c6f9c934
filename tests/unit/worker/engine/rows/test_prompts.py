"""Requests become rows, or one clear sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omlx_producer.wire import DEFAULT_MAX_TOKENS, GenerationRequest, InvalidRequest, ModelInfo
from omlx_worker.engine.rows.constraints import Grammars
from omlx_worker.engine.rows.prompts import Prompter, sampling_defaults
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.decoding import Loaded

INFO = ModelInfo(model="tiny", context_length=64, longest_token=2)


@pytest.fixture
def prompter(qwen: Loaded) -> Prompter:
    return Prompter(qwen.tokenizer, INFO, 257, Sampling())


def ask(**fields: Any) -> GenerationRequest:
    return GenerationRequest.parse({"model": "tiny", **fields})


def test_a_prompt_becomes_its_tokens_and_the_eos_tokens_stop_it(prompter: Prompter) -> None:
    [row] = prompter.rows(ask(prompt="hi", max_tokens=5), "job")

    assert (row.row_id, len(row.prompt), row.max_tokens) == ("job:0", 2, 5)
    assert row.stop_tokens == {256}


def test_messages_go_through_the_chat_template(prompter: Prompter, qwen: Loaded) -> None:
    [row] = prompter.rows(ask(messages=[{"role": "user", "content": "hi"}]), "job")

    assert qwen.tokenizer.decode(row.prompt) == "user: hi\nassistant: "


def test_eos_is_ignored_on_request_but_own_stop_tokens_are_not(prompter: Prompter) -> None:
    [row] = prompter.rows(ask(prompt="hi", ignore_eos=True, stop_token_ids=[7]), "job")

    assert row.stop_tokens == {7}


def test_the_token_limit_is_cut_to_the_room_the_prompt_leaves(
    prompter: Prompter, qwen: Loaded
) -> None:
    roomy_info = ModelInfo(model="tiny", context_length=10_000, longest_token=1)
    roomy = Prompter(qwen.tokenizer, roomy_info, 257, Sampling())

    assert prompter.rows(ask(prompt="x" * 60), "job")[0].max_tokens == 4
    assert prompter.rows(ask(prompt="x" * 60, max_tokens=99), "job")[0].max_tokens == 4
    assert roomy.rows(ask(prompt="x"), "job")[0].max_tokens == DEFAULT_MAX_TOKENS


def test_a_chat_without_a_limit_gets_the_rest_of_the_context_up_to_the_workers_limit(
    qwen: Loaded,
) -> None:
    def most(context: int, **limits: Any) -> int:
        info = ModelInfo(model="tiny", context_length=context, longest_token=1)
        prompter = Prompter(qwen.tokenizer, info, 257, Sampling(), **limits)
        fields = {"messages": [{"role": "user", "content": "hi"}]}
        [row] = prompter.rows(ask(**fields), "job")
        [own] = prompter.rows(ask(**fields, max_tokens=3), "job")
        assert own.max_tokens == 3
        return row.max_tokens

    length = len("user: hi\nassistant: ")
    assert most(1000) == 1000 - length
    assert most(100_000) == 4096
    assert most(100_000, chat_tokens=50) == 50
    assert most(1000, chat_tokens=5000) == 1000 - length


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": "x" * 17_000, "prompt_logprobs": 20}, "prompt_logprobs"),
        ({"prompt": [7] * 17_000, "echo": True, "logprobs": 20}, "logprobs"),
        ({"n": 128, "logprobs": True, "top_logprobs": 20, "max_tokens": 130}, "logprobs"),
        ({"prompt": "x" * 300_000, "n": 128, "echo": True, "max_tokens": 1}, "echo"),
    ],
)
def test_a_result_that_would_be_too_long_is_refused_before_it_is_made(
    qwen: Loaded, fields: dict[str, Any], field: str
) -> None:
    info = ModelInfo(model="tiny", context_length=400_000, longest_token=1)
    prompter = Prompter(
        qwen.tokenizer, info, 257, Sampling(), grammars=Grammars(qwen.tokenizer, 257)
    )
    fields = {"prompt": "x", **fields}
    with pytest.raises(InvalidRequest, match=rf"^{field}: .* MiB; a result has at most 32 MiB; "):
        prompter.rows(ask(**fields), "job")
    shorter = {"prompt": fields["prompt"][:14_000], "max_tokens": 100}
    assert prompter.rows(ask(**fields | shorter), "job")


def test_choices_differ_in_seed_and_repeat_with_the_request_or_the_job(prompter: Prompter) -> None:
    def seeds(job: str, **fields: Any) -> list[int]:
        return [row.sampling.seed for row in prompter.rows(ask(prompt="a", n=3, **fields), job)]

    assert len(set(seeds("one"))) == 3
    assert seeds("one") == seeds("one")
    assert seeds("one") != seeds("two")
    assert seeds("one", seed=5) == seeds("two", seed=5)
    assert seeds("one", seed=5)[0] == 5


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": "x" * 64}, "prompt: 64 tokens do not fit the context of tiny"),
        ({"prompt": [1, 257]}, "prompt: token id 257 is outside the vocabulary of tiny"),
        ({"prompt": "a", "logit_bias": {"999": 1}}, "logit_bias: token id 999 is outside"),
        ({"prompt": "a", "stop_token_ids": [300]}, "stop_token_ids: token id 300 is outside"),
        (
            {"messages": [{"role": "user", "content": "x" * 99}]},
            "messages: 117 tokens do not fit",
        ),
    ],
)
def test_a_request_the_model_cannot_serve_gets_one_sentence(
    prompter: Prompter, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        prompter.rows(ask(**fields), "job")


def test_template_arguments_that_clash_with_the_templates_own_are_refused(
    prompter: Prompter,
) -> None:
    request = ask(
        messages=[{"role": "user", "content": "x"}],
        chat_template_kwargs={"messages": []},
    )
    with pytest.raises(InvalidRequest, match="chat template of tiny does not take them"):
        prompter.rows(request, "job")


def test_every_choice_reads_its_prompt_cold_on_request(prompter: Prompter) -> None:
    assert [row.cache for row in prompter.rows(ask(prompt="a", n=2, cache=False), "job")] == [
        False,
        False,
    ]
    assert [row.cache for row in prompter.rows(ask(prompt="a"), "job")] == [True]


def test_every_choice_has_the_salt_of_its_request(prompter: Prompter) -> None:
    rows = prompter.rows(ask(prompt="a", n=2, cache_salt="mine"), "job")
    assert [row.salt for row in rows] == ["mine", "mine"]
    assert prompter.rows(ask(prompt="a"), "job")[0].salt is None


def test_fields_left_out_take_the_models_wishes_then_openais_defaults(qwen: Loaded) -> None:
    wishes = sampling_defaults({"temperature": 0.6, "top_k": 20, "do_sample": True})
    prompter = Prompter(qwen.tokenizer, INFO, 257, wishes)

    [row] = prompter.rows(ask(prompt="a", top_k=0), "job")

    assert (row.sampling.temperature, row.sampling.filters) == (0.6, {})


def test_a_model_that_says_do_not_sample_is_greedy_by_default() -> None:
    assert sampling_defaults({"do_sample": False}).temperature == 0.0
    assert sampling_defaults({}).temperature == 1.0


def test_a_model_without_a_chat_template_asks_for_a_prompt(tmp_path: Path, qwen: Loaded) -> None:
    from mlx_lm.utils import load_tokenizer

    from tests.helpers.checkpoints import QWEN_TEXT, write_tokenizer

    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_5", **QWEN_TEXT}))
    prompter = Prompter(load_tokenizer(tmp_path), INFO, 257, Sampling())

    with pytest.raises(InvalidRequest, match="has no chat template; send a prompt"):
        prompter.rows(ask(messages=[{"role": "user", "content": "x"}]), "job")
