"""A model without a ragged form is refused, with the reason and what serves it."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step

from omlx_worker.engine.caches.attention_cache import AttentionCache
from omlx_worker.engine.loading.loader import decoder_of, load_engine
from omlx_worker.engine.rows.interface import ModelError
from tests.helpers.checkpoints import write_family
from tests.helpers.documentation import ROOT
from tests.helpers.families import REFUSED, tiny

EVERY_DAY = ("afm7", "gpt_bigcode")
PARAMETERS = [
    pytest.param(name, marks=[] if name in EVERY_DAY else pytest.mark.slow) for name in REFUSED
]


@pytest.mark.parametrize("family", PARAMETERS)
def test_a_checkpoint_without_a_ragged_form_is_refused_by_name(tmp_path: Path, family: str) -> None:
    folder = write_family(tmp_path / family, family)
    with pytest.raises(ModelError, match=rf"^--model: this {family} cannot be decoded in a batch"):
        load_engine(str(folder), max_rows=4)


def test_a_load_tells_what_it_does(tmp_path: Path) -> None:
    told: list[str] = []
    folder = write_family(tmp_path / EVERY_DAY[0], EVERY_DAY[0])
    with pytest.raises(ModelError):
        load_engine(str(folder), max_rows=4, tell=told.append)
    assert told == ["reading the weights", "comparing it with mlx-lm"]


def test_the_documentation_lists_every_family_that_is_refused() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    assert not [name for name in REFUSED if f"`{name}`" not in page]


def test_a_model_with_which_mlx_lm_itself_fails_is_refused_by_name() -> None:
    model = tiny("llama")
    model.model_type = "brand_new"

    def fail(*_: object, **__: object) -> mx.array:
        raise ValueError("no such\nmask")

    with (
        patch.object(type(model), "__call__", fail),
        pytest.raises(ModelError, match=r"brand_new .* its forward fails \(ValueError\)"),
    ):
        decoder_of(model, max_rows=4, depth=0)


def test_the_check_leaves_nothing_in_the_model() -> None:
    model, prompt = tiny("llama"), mx.array([5, 6, 7])
    wanted = [token for token, _ in generate_step(prompt, model, max_tokens=20)]

    with patch.object(AttentionCache, "put", lambda *_: None), pytest.raises(ModelError):
        decoder_of(model, max_rows=4, depth=0)

    assert [token for token, _ in generate_step(prompt, model, max_tokens=20)] == wanted
