"""An engine has the tower of its checkpoint, or of the original that it was converted from."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from tokenizers import Tokenizer

from omlx_producer.wire import GenerationRequest
from omlx_worker import build
from omlx_worker.build import load_or_end
from omlx_worker.engine.engine import DecodingEngine
from omlx_worker.engine.loading.loader import describe, load_engine
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.towers.tower import Tower
from omlx_worker.settings import WorkerSettings
from tests.helpers.checkpoints import convert_without_head, shard, write_llama, write_qwen
from tests.helpers.hub import Hub
from tests.helpers.image_parts import grey, image, part_of
from tests.helpers.towers import add_qwen_tower, drawn


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3.5 in shards, its tower in one of them."""
    return add_qwen_tower(shard(write_qwen(tmp_path_factory.mktemp("original"))))


@pytest.fixture(scope="module")
def copy(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What mlx-lm makes of it at 4 bits."""
    return convert_without_head(original, tmp_path_factory.mktemp("copies") / "copy", 4)


def tower_of(engine: DecodingEngine) -> Tower:
    looks = engine.decoder._model.looks
    assert looks is not None
    return looks.tower


def refusal(model: Path, vision_from: Path, **options: Any) -> str:
    with pytest.raises(ModelError) as refused:
        load_engine(str(model), max_rows=1, vision_from=str(vision_from), **options)
    assert str(refused.value).startswith(f"--vision-from {vision_from}: ")
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_an_engine_weighs_the_tower_of_its_checkpoint_and_looks_with_it(tmp_path: Path) -> None:
    bare = load_engine(str(write_qwen(tmp_path / "qwen")), max_rows=1)

    seeing = load_engine(str(add_qwen_tower(tmp_path / "qwen")), max_rows=1, max_pixels=16 * 1024)

    assert tower_of(seeing).grid(900, 900) == (4, 4)
    assert seeing.weight_bytes - bare.weight_bytes == tower_of(seeing).weight_bytes > 0


def test_an_engine_takes_chats_about_pictures_and_tells_so_before_it_is_loaded(
    tmp_path: Path,
) -> None:
    path = write_qwen(tmp_path)
    file = path / "tokenizer_config.json"
    template = "{% for p in messages[0].content %}{{ p.text or '~' }}{% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    assert describe(str(path)).picture_tokens == 0
    stands = Tokenizer.from_file(str(path / "tokenizer.json")).token_to_id("~")
    add_qwen_tower(path, token=stands)

    engine = load_engine(str(path), max_rows=1)

    assert describe(str(path)).picture_tokens == engine.info.picture_tokens >= 64
    content = [part_of("ab"), image(grey(96, 64)), part_of("c")]
    chat = {"model": "m", "messages": [{"role": "user", "content": content}]}
    [row] = engine.prepare(GenerationRequest.parse(chat), "j")
    assert row.prompt[2:-1] == [stands] * 6
    assert row.pictures == (Picture(2, 2, 3, grey(96, 64), spatial=True),)


def test_pixels_are_not_limited_without_a_tower(tmp_path: Path) -> None:
    path = write_qwen(tmp_path)

    with pytest.raises(ModelError) as refused:
        load_engine(str(path), max_rows=1, max_pixels=65_536)

    assert str(refused.value) == f"--max-pixels: leave it out, because {path} has no vision tower"


def test_a_conversion_looks_with_the_tower_of_its_original(original: Path, copy: Path) -> None:
    own = tower_of(load_engine(str(original), max_rows=1))

    taken = load_engine(str(copy), max_rows=1, vision_from=str(original), max_pixels=16 * 1024)

    picture = drawn(100, 60)
    assert mx.array_equal(tower_of(taken).see(picture), own.see(picture))
    assert tower_of(taken).grid(900, 900) == (4, 4)
    assert taken.tower_hint is None


def test_a_text_about_larger_pictures_is_not_gone_on_with(original: Path) -> None:
    larger, smaller = (describe(str(original), max_pixels=n * 1024) for n in (64, 32))

    assert larger.system_fingerprint != smaller.system_fingerprint


def test_a_conversion_is_announced_with_the_sight_of_its_original(
    original: Path, copy: Path
) -> None:
    settings = WorkerSettings(model=str(copy), vision_from=str(original), max_pixels=32 * 1024)

    most = describe(str(original), max_pixels=32 * 1024).picture_tokens
    assert build.describe(settings).picture_tokens == most < describe(str(original)).picture_tokens


def test_of_a_repository_only_the_files_with_the_tower_are_downloaded(
    original: Path, copy: Path, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    hub.repositories["makers/original"] = original

    engine = load_engine(str(copy), max_rows=1, vision_from="makers/original")

    assert tower_of(engine).weight_bytes
    assert hub.weights_served == ["model-tower.safetensors"]
    assert "--vision-from makers/original: downloads 697 KiB for its vision tower" in caplog.text


def test_originals_that_have_no_tower_for_a_model_are_refused(
    tmp_path: Path, original: Path, copy: Path
) -> None:
    bare, other = shard(write_qwen(tmp_path / "bare")), tmp_path / "other"
    add_qwen_tower(write_qwen(other, hidden_size=32))
    dropped = add_qwen_tower(shard(write_qwen(tmp_path / "dropped")))
    (dropped / "model-tower.safetensors").unlink()
    llama = write_llama(tmp_path / "llama")

    assert refusal(copy, bare).endswith(
        "no vision tower; give the repository that the model is made of"
    )
    assert "its hidden_size is 32, and the model's is 64; give the" in refusal(copy, other)
    assert "model-tower.safetensors is missing from it" in refusal(copy, dropped)
    assert refusal(copy, llama).endswith("are not read by its family, llama; leave it out")
    assert "its family is qwen3_5, and the model's is llama; give the" in refusal(llama, original)


def test_a_worker_tells_how_to_get_a_tower_that_a_conversion_dropped(
    copy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    settings = WorkerSettings(model=str(copy), state_dir=tmp_path, mode="batched")

    engine = load_or_end(settings, print)

    said = f"get it with: omlx-worker run -m {copy} --vision-from ORIGINAL (ORIGINAL is the"
    assert said in caplog.text
    assert engine.tower_hint
    config = json.loads((copy / "config.json").read_text())
    assert "vision_config" not in config, "mlx-lm keeps what it cannot use"
