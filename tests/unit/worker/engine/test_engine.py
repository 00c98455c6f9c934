"""The engine turns decoded tokens into emissions that end where they should."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from omlx_producer.wire import GenerationRequest
from omlx_producer.wire.structure import Constraint
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.loading import loader
from omlx_worker.engine.loading.loader import load_engine
from omlx_worker.engine.ragged.masks import Matcher
from omlx_worker.engine.rows.emission import Emission
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.engine.rows.row import Row, RowStep, Sampled
from tests.helpers import checkpoints
from tests.helpers.checkpoints import write_family, write_llama, write_qwen
from tests.helpers.decoding import enter


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("engine-qwen"))


@pytest.fixture
def engine(path: Path) -> DecodingEngine:
    return load_engine(str(path), max_rows=8)


def generate(engine: DecodingEngine, job: str = "job", **fields: Any) -> list[Emission]:
    return play(engine, GenerationRequest.parse({"model": "m", "temperature": 0, **fields}), job)


def play(engine: DecodingEngine, request: GenerationRequest, job: str = "job") -> list[Emission]:
    open_rows = {enter(engine, prepared).row_id for prepared in engine.prepare(request, job)}
    emissions: list[Emission] = []
    while open_rows:
        for emission in engine.step():
            emissions.append(emission)
            if emission.finish_reason:
                open_rows.discard(emission.row_id)
    return emissions


def text_of(emissions: list[Emission]) -> str:
    return "".join(emission.text for emission in emissions)


def test_the_model_says_how_deep_it_can_draft(path: Path, tmp_path: Path) -> None:
    assert load_engine(str(path), max_rows=1, depth=2).info.draft_depth == 2
    assert load_engine(str(path), max_rows=1).info.draft_depth == 0
    assert load_engine(str(write_llama(tmp_path)), max_rows=1, depth=2).info.draft_depth == 0


def test_the_model_says_whether_it_has_a_chat_template(path: Path, tmp_path: Path) -> None:
    assert load_engine(str(path), max_rows=1).info.chat_template
    bare = write_llama(tmp_path)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (bare / "tokenizer_config.json").write_text(json.dumps(config))
    assert not load_engine(str(bare), max_rows=1).info.chat_template


def test_the_last_token_of_a_prompt_is_not_left_to_read_but_read_by_the_first_step(
    engine: DecodingEngine,
) -> None:
    [prepared] = engine.prepare(
        GenerationRequest(model="m", prompt=list(range(30)), max_completion_tokens=2), "job"
    )

    row = Row(prepared)
    engine.add(row)
    left = [row.left]
    for tokens in (10, 18, 1):
        engine.read({row: tokens})
        left.append(row.left)

    assert left == [29, 19, 1, 0]


def test_a_row_ends_at_its_token_limit_and_leaves_the_engine(engine: DecodingEngine) -> None:
    emissions = generate(engine, prompt="def f", max_tokens=12, ignore_eos=True)

    assert sum(len(emission.tokens) for emission in emissions) == 12
    assert [emission.finish_reason for emission in emissions[:-1]] == [None] * 11
    assert emissions[-1].finish_reason == "length"
    assert engine.step() == []


def test_a_stop_string_ends_a_row_one_step_late_without_letting_the_surplus_out(
    engine: DecodingEngine,
) -> None:
    full = generate(engine, prompt="def f", max_tokens=40, ignore_eos=True)
    whole = text_of(full)
    stop = whole[10:12]
    cut = whole.find(stop)

    emissions = generate(engine, prompt="def f", max_tokens=40, ignore_eos=True, stop=stop)

    assert emissions[-1].finish_reason == "stop"
    assert text_of(emissions) == whole[:cut]
    assert engine.step() == []
    assert engine.step() == []


def test_an_echo_tells_the_log_probability_of_the_stop_token_too(engine: DecodingEngine) -> None:
    full = generate(engine, prompt="abc", max_tokens=20, ignore_eos=True)
    stop = [token for emission in full for token in emission.tokens][8]
    asked: dict[str, Any] = {"prompt": "abc", "max_tokens": 20, "logprobs": 0}

    for echo in (False, True):
        emissions = generate(engine, **asked, stop_token_ids=[stop], echo=echo)
        tokens = [token for emission in emissions for token in emission.tokens]
        told = [entry.token_id for emission in emissions for entry in emission.logprobs or ()]
        assert told == tokens + [stop] * echo


def test_a_stop_token_is_not_among_the_rows_tokens(engine: DecodingEngine) -> None:
    full = generate(engine, prompt="abc", max_tokens=20, ignore_eos=True)
    tokens = [token for emission in full for token in emission.tokens]
    stop = tokens[8]

    emissions = generate(engine, prompt="abc", max_tokens=20, stop_token_ids=[stop])

    kept = [token for emission in emissions for token in emission.tokens]
    assert kept == tokens[: tokens.index(stop)]
    assert emissions[-1].finish_reason == "stop"


def test_choices_of_a_sampled_request_differ(engine: DecodingEngine) -> None:
    emissions = generate(engine, prompt="abc", max_tokens=12, temperature=1.0, n=3, ignore_eos=True)

    texts = {
        choice: [t for e in emissions if e.row_id == f"job:{choice}" for t in e.tokens]
        for choice in range(3)
    }
    assert all(len(tokens) == 12 for tokens in texts.values())
    assert len({tuple(tokens) for tokens in texts.values()}) == 3


def test_a_removed_row_emits_nothing_more_and_the_rest_goes_on(engine: DecodingEngine) -> None:
    request = GenerationRequest(model="m", prompt="abc", max_completion_tokens=9, ignore_eos=True)
    gone, _ = (enter(engine, *engine.prepare(request, job)) for job in ("gone", "stays"))
    engine.step()
    engine.step()

    engine.remove(gone)
    engine.remove(Row(gone.request))
    rest = [emission.row_id for _ in range(12) for emission in engine.step()]

    assert set(rest) == {"stays:0"}


def test_penalised_rows_see_prompt_and_every_generated_token_once(
    engine: DecodingEngine, path: Path
) -> None:
    """The decoded tokens equal those of a plain loop that counts the history by hand."""
    request = GenerationRequest(
        model="m",
        prompt="abcabcaab",
        temperature=0,
        max_completion_tokens=24,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        ignore_eos=True,
    )
    [prepared] = engine.prepare(request, "job")
    network, _, _ = loader.load(path)
    history = list(prepared.prompt)
    for _ in range(24):
        logits = network(mx.array([history]))[0, -1].tolist()
        for token in set(history):
            value = logits[token]
            value = value * 1.3 if value < 0 else value / 1.3
            logits[token] = value - 0.4 - 0.3 * history.count(token)
        history.append(max(range(len(logits)), key=logits.__getitem__))

    enter(engine, prepared, chunk=4)
    emissions = [emission for _ in range(26) for emission in engine.step()]

    assert [t for e in emissions for t in e.tokens] == history[len(prepared.prompt) :]


def resumed(engine: DecodingEngine, generated: list[int], **fields: Any) -> list[Emission]:
    """What is emitted for a request of which these tokens were there before."""
    request = GenerationRequest.parse({"model": "m", "temperature": 0, **fields})
    [prepared] = engine.prepare(request, "resumed")
    enter(engine, prepared, generated, chunk=16)
    return [emission for _ in range(30) for emission in engine.step()]


BIASED = {"prompt": "def f", "max_tokens": 24, "ignore_eos": True, "logprobs": True}


@pytest.mark.parametrize("stop", [None, "later"])
def test_an_interrupted_row_emits_just_what_followed_what_it_had_emitted(
    engine: DecodingEngine, stop: str | None
) -> None:
    whole = generate(engine, **BIASED)
    if stop:
        # Held back from its first character on, until its last.
        stop = text_of(whole)[9:14]
        whole = generate(engine, **BIASED, stop=stop)
    held = 0

    for place in range(1, len(whole)):
        before, after = whole[:place], whole[place:]
        generated = [token for emission in before for token in emission.tokens]
        emissions = resumed(engine, generated, **BIASED, stop=stop)

        assert text_of(emissions) == text_of(after)
        for name in ("tokens", "logprobs"):
            wanted = [entry for emission in after for entry in getattr(emission, name)]
            got = [entry for emission in emissions for entry in getattr(emission, name)]
            if name == "tokens":
                assert got == wanted
            assert [getattr(entry, "token_id", entry) for entry in got] == [
                getattr(entry, "token_id", entry) for entry in wanted
            ]
        assert emissions[-1].finish_reason == whole[-1].finish_reason
        held += before[-1].text == ""
    assert held or not stop, "nothing was ever held back"


def test_log_probabilities_tell_the_bytes_of_tokens_that_are_parts_of_characters(
    engine: DecodingEngine,
) -> None:
    fields = {"prompt": "def f", "max_tokens": 60, "ignore_eos": True, "seed": 1}
    emissions = generate(engine, **fields | {"temperature": 1, "logprobs": True, "top_logprobs": 5})

    entries = [entry for emission in emissions for entry in emission.logprobs or ()]
    written = b"".join(bytes(entry.bytes or entry.token.encode()) for entry in entries)
    whole = codecs.getincrementaldecoder("utf-8")("replace").decode(written)
    assert whole == text_of(emissions)
    parts = [entry for entry in entries if entry.bytes]
    assert parts
    assert all(bytes(e.bytes or ()).decode(errors="backslashreplace") == e.token for e in parts)
    tokens = [[text for text, *_ in entry.top] for entry in entries]
    assert all(len(set(texts)) == 5 for texts in tokens)


@pytest.mark.slow
def test_an_emission_says_how_much_of_its_text_drafts_wrote() -> None:
    emissions = generate(
        load_engine("demo", max_rows=1, depth=2),
        prompt="def add(a, b):\n",
        max_tokens=24,
        logprobs=True,
    )

    assert sum(emission.accepted for emission in emissions) > 3
    for emission in emissions:
        drafted = (emission.logprobs or [])[: emission.accepted]
        assert emission.drafted_text == len("".join(entry.token for entry in drafted))


@pytest.mark.parametrize(
    ("asked", "reason", "kept"),
    [
        ({"stop_token_ids": [65]}, "stop", 1),
        ({"stop": "b"}, "stop", 2),
        ({"max_tokens": 2}, "length", 2),
        ({"repetition_detection": {"max_pattern_size": 1, "min_count": 2}}, "repetition", 3),
    ],
)
def test_a_row_ends_inside_the_accepted_drafts_of_a_step(
    engine: DecodingEngine,
    monkeypatch: pytest.MonkeyPatch,
    asked: dict[str, Any],
    reason: str,
    kept: int,
) -> None:
    tokens = [64, 65, 65, 66, 67]  # "abbcd"
    [row] = engine.prepare(
        GenerationRequest.parse({"model": "m", "prompt": "x", "max_tokens": 9, **asked}), "job"
    )
    drafted = RowStep(enter(engine, row), [*map(Sampled, tokens)], drafted=4, step_depth=4)
    monkeypatch.setattr(engine.decoder, "step", lambda _: [drafted])

    [emission] = engine.step()

    assert emission.finish_reason == reason
    assert emission.tokens == tokens[:kept]
    assert not engine.decoder.rows, "the row has left"


@pytest.mark.parametrize(("stop", "reason"), [(True, "stop"), (False, "length")])
def test_an_interrupted_row_that_had_ended_only_says_so(
    engine: DecodingEngine, stop: bool, reason: str
) -> None:
    fields = {"prompt": "def f", "max_tokens": 12, "ignore_eos": True, "logprobs": True}
    if stop:
        fields["stop"] = text_of(generate(engine, **fields))[3:5]
    whole = generate(engine, **fields)
    generated = [token for emission in whole for token in emission.tokens]

    emissions = resumed(engine, generated, **fields)

    assert emissions == [Emission("resumed:0", [], "", [], reason)]  # type: ignore[arg-type]
    assert engine.step() == []


def test_an_interrupted_row_that_had_ended_can_be_removed_before_it_says_so(
    engine: DecodingEngine,
) -> None:
    request = GenerationRequest(model="m", prompt="abc", max_completion_tokens=2)
    [prepared] = engine.prepare(request, "job")
    row = Row(prepared, generated=(1, 2))
    engine.add(row)

    engine.remove(row)

    assert engine.step() == []


def test_a_suspended_row_may_finish_by_what_was_under_way(engine: DecodingEngine) -> None:
    request = GenerationRequest(model="m", prompt="abc", max_completion_tokens=3, ignore_eos=True)
    [prepared] = engine.prepare(request, "job")
    row = enter(engine, prepared)
    for _ in range(3):
        engine.step()

    engine.suspend(row)
    [last] = engine.step()

    assert last.finish_reason == "length"
    assert not engine.decoder.rows


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("/no/such/place", "no such directory; give a directory or a repository"),
        ("./nowhere", "no such directory"),
        (__file__, "is a file; give the directory of a whole model"),
        ("not a name!", "neither 'demo', a directory, nor a repository name"),
    ],
)
def test_a_model_that_is_not_there_is_one_sentence(model: str, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        load_engine(model, max_rows=1)


def test_a_directory_that_is_no_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no checkpoint, for it has no config"):
        load_engine(str(tmp_path), max_rows=1)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", b"{}"),
        ("config.json", b"[]"),
        ("model.safetensors", b"cut off"),
        ("tokenizer.json", b"{"),
        ("generation_config.json", b"{"),
    ],
)
def test_a_broken_checkpoint_is_one_sentence(tmp_path: Path, file: str, content: bytes) -> None:
    (write_llama(tmp_path) / file).write_bytes(content)

    with pytest.raises(ModelError) as refused:
        load_engine(str(tmp_path), max_rows=1)

    assert str(refused.value).startswith(f"--model {tmp_path}: ")
    assert "\n" not in str(refused.value)


class Digits(GenerationRequest):
    """A request whose text is five digits."""

    @property
    def constraint(self) -> Constraint:
        return Constraint("regex", "[0-9]{5}")


@pytest.mark.parametrize("depth", [0, 2])
def test_a_constrained_row_ends_where_its_text_is_complete(path: Path, depth: int) -> None:
    engine = load_engine(str(path), max_rows=8, depth=depth)

    emissions = play(engine, Digits(model="m", prompt="def f", temperature=0, max_tokens=20))

    assert text_of(emissions).isdigit()
    assert len(text_of(emissions)) == 5
    assert emissions[-1].finish_reason == "stop"
    assert engine.step() == []


@pytest.mark.parametrize("depth", [0, 2])
def test_a_constrained_row_runs_where_logits_are_wider_than_the_config_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    monkeypatch.setitem(checkpoints.LLAMA, "vocab_size", 300)
    path, load = write_llama(tmp_path), loader.load

    def load_with_a_narrow_config(*args: Any, **options: Any) -> Any:
        network, tokenizer, config = load(*args, **options)
        return network, tokenizer, {**config, "vocab_size": 257}

    monkeypatch.setattr(loader, "load", load_with_a_narrow_config)
    engine = load_engine(str(path), max_rows=2, depth=depth)
    emissions = play(engine, Digits(model="m", prompt="def f", temperature=0, max_tokens=20))
    assert len(text_of(emissions)) == 5
    assert text_of(emissions).isdigit()


def test_a_family_that_names_its_context_otherwise_gets_no_more_than_that(tmp_path: Path) -> None:
    path = write_family(tmp_path, "gpt2") / "config.json"
    config = json.loads(path.read_text())
    config.pop("max_position_embeddings", None)
    path.write_text(json.dumps(config))
    engine = load_engine(str(tmp_path), max_rows=1)
    assert engine.info.context_length == config["n_positions"]


def test_a_constrained_row_that_cannot_go_on_ends_as_if_cut(
    engine: DecodingEngine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    commit = Matcher.commit

    def fails(self: Matcher, tokens: list[int]) -> None:
        commit(self, tokens)
        self.failed |= bool(tokens)

    monkeypatch.setattr(Matcher, "commit", fails)
    emissions = play(engine, Digits(model="m", prompt="def f", temperature=0, stop="12345"))

    assert emissions[-1].finish_reason == "length"
    assert 1 <= len(text_of(emissions)) < 5
    assert engine.step() == []
    assert "its constraint" in caplog.text
    assert emissions[-1].error is None


def test_a_row_whose_constraint_is_too_slow_to_follow_says_so(engine: DecodingEngine) -> None:
    [row] = engine.prepare(Digits(model="m", prompt="def f", temperature=0), "job")
    assert row.grammar is not None
    enter(engine, row)
    engine.step()

    row.grammar.too_slow = True
    emissions = [each for _ in range(3) for each in engine.step()]

    row.grammar.too_slow = False  # it is kept for other tests
    assert [str(each.error) for each in emissions] == [
        "response_format: the constraint takes too long to follow; make it less ambiguous"
    ]
    assert engine.step() == []
