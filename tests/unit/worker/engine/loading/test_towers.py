"""An engine has the tower of its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from omlx_producer.wire import GenerationRequest
from omlx_worker.engine.loading.loader import describe, load_engine
from omlx_worker.engine.rows.interface import ModelError
from omlx_worker.engine.rows.picture import Picture
from tests.helpers.checkpoints import write_qwen
from tests.helpers.image_parts import grey, image, part_of
from tests.helpers.towers import add_qwen_tower


def test_an_engine_weighs_the_tower_of_its_checkpoint_and_looks_with_it(tmp_path: Path) -> None:
    bare = load_engine(str(write_qwen(tmp_path / "qwen")), max_rows=1)

    seeing = load_engine(str(add_qwen_tower(tmp_path / "qwen")), max_rows=1, max_pixels=16 * 1024)

    looks = seeing.decoder._model.looks
    assert looks is not None
    assert looks.tower.grid(900, 900) == (4, 4)
    assert seeing.weight_bytes - bare.weight_bytes == looks.tower.weight_bytes > 0


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
