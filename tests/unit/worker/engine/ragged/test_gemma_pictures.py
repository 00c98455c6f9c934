"""Rows of a Gemma 4 with pictures give the text of a model that reads them whole."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from omlx_worker.engine.loading.families import as_ragged
from omlx_worker.engine.loading.towers import read_tower
from omlx_worker.engine.ragged.decoder import RaggedDecoder
from omlx_worker.engine.ragged.prefix import PrefixCache
from omlx_worker.engine.ragged.prefix_arrays import LayerSpecs
from omlx_worker.engine.rows.picture import Picture
from omlx_worker.engine.rows.picture_file import pixels_of, size_of
from omlx_worker.engine.rows.request import RowRequest
from omlx_worker.engine.rows.row import Row
from omlx_worker.engine.towers.looks import Looks
from omlx_worker.engine.towers.tower import Tower
from tests.helpers.decoding import GREEDY, Loaded, enter, run
from tests.helpers.families import SLIDING
from tests.helpers.gemma_towers import BEGIN, END, IMAGE, write_gemma
from tests.helpers.towers import png

TOKENS = 8


class Gemma:
    """A tiny Gemma 4 with its tower. Its last two layers of four read what others keep."""

    def __init__(self, path: Any, **text: Any) -> None:
        self.loaded = Loaded.at(write_gemma(path, **text))
        tower = read_tower(path, self.loaded.config, None)
        assert tower is not None
        self.tower: Tower = tower

    def decoder(self, *, keeps: bool = False) -> RaggedDecoder:
        model = as_ragged(self.loaded.network, checks=False)
        model.looks = Looks(self.tower)
        kept = partial(PrefixCache, LayerSpecs.of(model), 1 << 30) if keeps else None
        return RaggedDecoder(model, 0, 0, kept)

    def request(self, name: str, *parts: list[int] | bytes) -> RowRequest:
        prompt, pictures = list[int](), list[Picture]()
        for part in parts:
            if isinstance(part, bytes):
                prompt.append(BEGIN)
                grid = self.tower.grid(*size_of(part))
                picture = Picture(
                    len(prompt), *grid, part, spatial=False, both_ways=self.tower.both_ways
                )
                prompt += [*[IMAGE] * picture.count, END]
                pictures.append(picture)
            else:
                prompt += part
        return RowRequest(name, prompt, TOKENS, GREEDY, pictures=tuple(pictures))

    def likeliest(self, request: RowRequest, text: Sequence[int]) -> list[int]:
        """The likeliest token at each place of a text, by a forward over all of it, layer by layer.

        In layers with a sliding window the tokens of a picture also see those after them, as in
        transformers' ``create_masks_for_vision_model``.
        """
        network: Any = self.loaded.network.language_model
        net, ids = network.model, mx.array([[*request.prompt, *text[:-1]]])
        hidden = net.embed_tokens(ids) * net.embed_scale
        shows = mx.zeros((ids.size,), mx.int32)
        for number, each in enumerate(request.pictures, 1):
            hidden[0, each.start : each.end] = self.tower.see(pixels_of(each.data))
            shows[each.start : each.end] = number
        own = net._get_per_layer_inputs(mx.where(shows, 0, ids))
        own = net._project_per_layer_inputs(hidden, own)
        places = mx.arange(ids.size)
        back = near = places <= places[:, None]
        if self.tower.both_ways:
            near = back | ((shows == shows[:, None]) & (shows > 0))
        near = near & (places > places[:, None] - SLIDING)
        kept = dict[int, Any]()
        for n, layer in enumerate(net.layers):
            mask = near if layer.layer_type == "sliding_attention" else back
            shared, offset = kept.get(net.previous_kvs[n], (None, None))
            hidden, *kept[n] = layer(
                hidden, mask, per_layer_input=own[:, :, n], shared_kv=shared, offset=offset
            )
        scores = net.embed_tokens.as_linear(net.norm(hidden[0, -len(text) :]))
        likeliest: list[int] = scores.argmax(axis=-1).tolist()
        return likeliest


@pytest.fixture(scope="module", params=[None, "vision"], ids=["causal", "both ways"])
def gemma(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    path = tmp_path_factory.mktemp("gemma")
    return Gemma(path, use_bidirectional_attention=request.param)


def words(count: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(256), k=count)


@pytest.fixture(scope="module")
def rows(gemma: Gemma) -> dict[str, RowRequest]:
    """Their pictures are longer than the sliding window."""
    asked: dict[str, list[list[int] | bytes]] = {
        "without": [words(40, 0)],
        "between": [words(9, 1), png(80, 90), words(7, 2)],
        "before": [png(120, 70, seed=1), words(5, 3)],
        "two": [words(3, 4), png(80, 90), words(4, 5), png(30, 110, seed=2), words(6, 6)],
    }
    return {name: gemma.request(name, *parts) for name, parts in asked.items()}


@pytest.mark.parametrize("chunk", [7, 512])
def test_rows_with_and_without_pictures_decode_beside_one_another(
    gemma: Gemma, rows: dict[str, RowRequest], chunk: int
) -> None:
    found = run(gemma.decoder(), list(rows.values()), chunk=chunk)

    assert found == {name: gemma.likeliest(rows[name], text) for name, text in found.items()}


def test_another_question_about_a_picture_reads_it_no_more(gemma: Gemma) -> None:
    decoder = gemma.decoder(keeps=True)
    asked = [
        gemma.request(name, words(9, 1), png(80, 90), words(count, 7))
        for name, count in (("first", 3), ("second", 12))
    ]
    first, second = (Row(each) for each in asked)
    shared = asked[0].pictures[0].end
    first.stops = {shared}
    decoder.leave(enter(decoder, first, chunk=shared))

    [found] = run(decoder, [second], chunk=512).values()

    assert (second.cached, found) == (shared, gemma.likeliest(asked[1], found))
