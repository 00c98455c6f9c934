"""A text's vector is that of its tokens alone, in any company and in any windows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from omlx_producer.wire import GenerationRequest, InvalidRequest
from omlx_worker.engine.kernels.window import Window, own_pages
from omlx_worker.engine.loading.loader import load_engine
from omlx_worker.engine.rows.interface import ModelError
from tests.helpers.checkpoints import EMBEDDING, VECTOR, write_embedding, write_llama, write_modules
from tests.helpers.embedding import LENGTHS, Embedding, texts

CLOSE = 1e-6


@pytest.fixture(scope="module", params=EMBEDDING)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_embedding(tmp_path_factory.mktemp("embedding"), family)


@pytest.fixture(scope="module")
def embedding(path: Path) -> Embedding:
    return Embedding(load_engine(str(path), max_rows=8))


def test_texts_of_many_lengths_have_the_vectors_that_each_has_alone(embedding: Embedding) -> None:
    alone = np.concatenate([embedding.of([text]) for text in texts()])

    np.testing.assert_allclose(embedding.of(texts()), alone, rtol=0, atol=CLOSE)


def test_texts_are_read_in_chunks_unless_their_tokens_see_all_others(
    embedding: Embedding, family: str
) -> None:
    whole, before = embedding.of(texts()), embedding.counters.prompt_windows
    chunked, after = embedding.of(texts(), chunk=16), embedding.counters.prompt_windows

    np.testing.assert_allclose(chunked, whole, rtol=0, atol=CLOSE)
    assert (after - before > len(LENGTHS)) == (family == "qwen3")


def test_vectors_have_length_1_and_differ(embedding: Embedding, family: str) -> None:
    vectors = embedding.of(texts())

    assert vectors.shape == (len(LENGTHS), VECTOR[family])
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=CLOSE)
    assert np.max(vectors @ vectors.T - 2 * np.eye(len(LENGTHS))) < 0.999


def test_fewer_dimensions_are_the_first_ones_with_length_1(embedding: Embedding) -> None:
    first = embedding.of(texts())[:, :8]

    wanted = first / np.linalg.norm(first, axis=1, keepdims=True)
    np.testing.assert_allclose(embedding.of(texts(), dimensions=8), wanted, rtol=0, atol=CLOSE)


def test_tokens_stand_for_a_text_with_its_special_tokens(embedding: Embedding) -> None:
    tokens = [[*embedding.engine.prepare(_asked("hello"), "j")[0].prompt]]

    assert len(tokens[0]) == len("hello") + 1
    np.testing.assert_array_equal(embedding.of(tokens), embedding.of(["hello"]))


def test_names_as_mlx_lm_saves_them_are_read_alike(
    embedding: Embedding, family: str, tmp_path: Path
) -> None:
    other = Embedding(load_engine(str(write_embedding(tmp_path, family, nested=True)), max_rows=8))

    np.testing.assert_array_equal(other.of(texts()), embedding.of(texts()))


def test_every_token_of_a_text_counts_where_all_see_all(tmp_path: Path) -> None:
    path = write_embedding(tmp_path, "gemma3_text")
    embedding = Embedding(load_engine(str(path), max_rows=8))
    text = texts((60,))[0]
    whole = embedding.of([text])[0]

    for place in (0, 30, 59):
        changed = text[:place] + "X" + text[place + 1 :]
        assert np.abs(embedding.of([changed])[0] - whole).max() > 1e-3


def test_a_sliding_layer_sees_half_its_window_to_each_side_where_all_see_all() -> None:
    lengths = [40, 23]
    window = Window.of_prompts([0, 0], lengths, 40, own_pages(2, 4))

    before, seen = replace(window, both_ways=True).masks(sliding=16)

    at = np.arange(40)
    near = abs(at[:, None] - at) <= 8
    wanted = [near & (at < length) for length in lengths]
    assert before.shape[-1] == 0
    np.testing.assert_array_equal(np.broadcast_to(np.array(seen)[:, 0], (2, 40, 40)), wanted)


def _asked(text: str, **fields: int) -> GenerationRequest:
    return GenerationRequest(model="m", input=text, **fields)


def test_what_cannot_be_read_is_refused_in_a_sentence(embedding: Embedding, family: str) -> None:
    longest, size = EMBEDDING[family]["max_position_embeddings"], VECTOR[family]
    prepare, model = embedding.engine.prepare, embedding.engine.info.model

    def refusal(request: GenerationRequest) -> str:
        with pytest.raises(InvalidRequest) as refused:
            prepare(request, "j")
        return str(refused.value)

    prepare(_asked("x" * (longest - 1)), "j")
    long = refusal(_asked("x" * longest))
    assert long.startswith(f"input: {longest + 1} tokens do not fit the context of {model}, ")
    assert "generated" not in long
    assert refusal(_asked("x", dimensions=size + 1)) == (
        f"dimensions: got {size + 1}, and the vectors of {model} have {size} numbers; "
        f"give at most {size}"
    )
    chat = {"role": "user", "content": "x"}
    for field, asked in (("messages", {"messages": [chat]}), ("prompt", {"prompt": "x"})):
        assert refusal(GenerationRequest(model="m", **asked)) == (
            f"{field}: m makes vectors and generates no text; "
            "name another model, or give input to /v1/embeddings"
        )
    several = GenerationRequest(model="m", input=[[1], [257]])
    assert refusal(several).startswith("input[1]: token id 257 is outside the vocabulary")


def test_a_model_that_generates_makes_no_vectors(tmp_path: Path) -> None:
    engine = load_engine(str(write_llama(tmp_path)), max_rows=1)

    with pytest.raises(InvalidRequest) as refused:
        engine.prepare(_asked("x"), "j")
    assert str(refused.value) == (
        "input: m generates text and makes no vectors; name a model of embeddings"
    )


POOLING = ("Pooling", "1_Pooling")


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        ([("Transformer", ""), POOLING, ("LayerNorm", "2")], "it has the module LayerNorm"),
        ([("Transformer", "0"), POOLING], "its modules begin with Transformer, Pooling"),
        ([("WordEmbeddings", ""), POOLING], "its modules begin with WordEmbeddings, Pooling"),
        ([("Transformer", ""), ("Pooling", "gone")], "cannot be read (FileNotFoundError)"),
    ],
)
def test_other_modules_are_refused_in_a_sentence(
    tmp_path: Path, modules: list[tuple[str, str]], sentence: str
) -> None:
    path = write_embedding(tmp_path)
    write_modules(path, modules)

    with pytest.raises(ModelError) as refused:
        load_engine(str(path), max_rows=1)
    assert sentence in str(refused.value)
    assert str(refused.value).endswith("Dense and Normalize alone")


@pytest.mark.parametrize("mode", ["cls_token", "max_tokens", "weightedmean_tokens"])
def test_another_pooling_is_refused_in_a_sentence(tmp_path: Path, mode: str) -> None:
    path = write_embedding(tmp_path)
    (path / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))

    with pytest.raises(ModelError, match=f"its pooling is {mode}; give one with"):
        load_engine(str(path), max_rows=1)


def test_another_family_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = write_llama(tmp_path)
    write_modules(path, [("Transformer", ""), POOLING])

    with pytest.raises(ModelError, match="its family is llama; give one of qwen3 or gemma3_text"):
        load_engine(str(path), max_rows=1)


def test_fixed_shapes_are_refused_in_a_sentence(path: Path) -> None:
    with pytest.raises(ModelError, match=r"^--fixed-shapes: leave it out, .* vectors$"):
        load_engine(str(path), max_rows=1, fixed=True)
