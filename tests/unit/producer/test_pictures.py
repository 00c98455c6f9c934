"""Pictures in requests: whole, counted, for models that take them, or refused in one sentence."""

from __future__ import annotations

from base64 import b64encode
from typing import Any

import pytest

from omlx_producer import InvalidRequest
from omlx_producer.bulk import plan
from omlx_producer.bulk.row import Row
from omlx_producer.client.models import check
from omlx_producer.errors import shown
from omlx_producer.wire import MAX_PICTURES, GenerationRequest, ModelInfo, PictureUrl
from omlx_producer.wire.chat import MAX_PICTURE_BYTES
from tests.helpers.image_parts import grey, image, part_of, url_of
from tests.helpers.requests import refusal

BASE64 = b64encode(bytes(range(256)) * 40).decode()
GIVE = 'give the file as "data:image/png;base64,..." (png, jpeg, webp, tiff or gif)'
OBJECT = 'give an object such as {"url": "data:image/png;base64,..."}'
FIELD = "messages[0].content[0].image_url"


def user(*parts: Any, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": role, "content": [*parts]}], **fields}


def linked(url: Any) -> dict[str, Any]:
    return user({"type": "image_url", "image_url": {"url": url}})


def test_pictures_travel_as_they_are_among_the_texts() -> None:
    parts = [part_of("Compare "), image(grey(shade=1)), image(grey(shade=2)), part_of("these.")]
    request = GenerationRequest.parse(user(*parts))

    assert GenerationRequest.parse(request.to_wire()) == request
    assert request.to_wire() == user(*parts)
    assert request.prompt_text == "Compare these."
    assert request.pictures == {
        "messages[0].content[1].image_url": grey(shade=1),
        "messages[0].content[2].image_url": grey(shade=2),
    }


@pytest.mark.parametrize("kind", ["png", "jpeg", "jpg", "webp", "tiff", "gif"])
def test_each_kind_of_file_is_taken_as_text_and_as_bytes(kind: str) -> None:
    request = GenerationRequest.parse(linked(url_of(b"file", kind)))
    assert request == GenerationRequest.parse(linked(PictureUrl(kind, b"file")))
    assert list(request.pictures.values()) == [b"file"]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            linked("https://example.com/a.png"),
            f"{FIELD}.url: got 'https://example.com/a.png', and workers fetch nothing; {GIVE}",
        ),
        (
            linked("file:///home/a.png"),
            f"{FIELD}.url: got 'file:///home/a.png', and workers fetch nothing; {GIVE}",
        ),
        (linked("a.png"), f"{FIELD}.url: got 'a.png', and workers fetch nothing; {GIVE}"),
        (linked(BASE64), f"{FIELD}.url: got {len(BASE64)} characters that are no URL; {GIVE}"),
        (
            linked(f"data:image/bmp;base64,{BASE64}"),
            f"{FIELD}.url: got 'data:image/bmp;base64,...', and workers fetch nothing; {GIVE}",
        ),
        (
            linked(f"data:image/png;base64,{BASE64}!"),
            f"{FIELD}.url: what follows the comma is not base64; encode the file without line "
            "breaks",
        ),
        (linked("data:image/png;base64,"), f"{FIELD}.url: nothing follows the comma; {GIVE}"),
        (linked(None), f"{FIELD}.url: missing; {GIVE}"),
        (user({"type": "image_url", "image_url": BASE64}), f"{FIELD}: got text; {OBJECT}"),
        (user({"type": "image_url", "image_url": 5}), f"{FIELD}: got 5; {OBJECT}"),
        (user({"type": "image_url"}), f"{FIELD}: missing; {OBJECT}"),
        (user(image(size=5)), f"{FIELD}.size: unknown field; remove it"),
        (
            user(image() | {"text": "a"}),
            "messages[0].content[0].text: unknown field; remove it",
        ),
        (
            user(image(), role="system"),
            f"{FIELD}: given in a message of the system; give pictures in those of the user",
        ),
        (
            user(*[image()] * 17),
            f"messages: got 17 pictures; give at most {MAX_PICTURES}",
        ),
        (
            user(image(), prompt_logprobs=1),
            "prompt_logprobs: given with pictures, which have no scores; leave it out",
        ),
    ],
)
def test_what_is_no_picture_is_refused_in_one_sentence_that_quotes_none(
    data: dict[str, Any], sentence: str
) -> None:
    assert refusal(data) == sentence


def test_the_pictures_of_a_request_have_a_longest_size_together() -> None:
    half = PictureUrl("png", b"x" * (MAX_PICTURE_BYTES // 2))
    part = {"type": "image_url", "image_url": {"url": half}}
    assert GenerationRequest.parse(user(part, part))
    assert refusal(user(part, part, image(b"y"))) == (
        f"messages: got pictures of {MAX_PICTURE_BYTES + 1} bytes; give at most "
        f"{MAX_PICTURE_BYTES}, all of a request together"
    )


def test_no_sentence_and_no_form_for_people_has_a_picture() -> None:
    url = f"data:image/png;base64,{BASE64}"
    request = GenerationRequest.parse(linked(url))
    for told in (shown({"content": [url]}), shown(url), repr(request)):
        assert not any(BASE64[at : at + 8] in told for at in range(len(BASE64) - 8))
        assert len(told) < 2000


def test_pictures_are_refused_for_a_model_that_takes_none() -> None:
    asked = GenerationRequest.parse(user(part_of("a"), image()))
    blind = ModelInfo(model="m", context_length=100, longest_token=1)
    with pytest.raises(InvalidRequest) as refused:
        check([asked], {"m": blind}, require_known_model=True)
    assert str(refused.value) == (
        "messages[0].content[1].image_url: m takes no pictures; "
        "leave it out, or name a model that takes them"
    )
    seeing = blind.model_copy(update={"picture_tokens": 16})
    assert check([asked], {"m": seeing}, require_known_model=True) == [asked]


def test_base64_counts_as_no_text_and_takes_room_in_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "BUFFER_SIZE", 2000)
    request = GenerationRequest.parse(user(part_of("abcd"), image(b"x" * 1000), max_tokens=5))
    rows = [Row(str(n), n, request, f"{n:024x}") for n in range(3)]

    assert (rows[0].characters, rows[0].work, rows[0].held) == (4, 1 + 5, 1004)
    read = iter(rows)
    next(plan.balanced(read))
    assert list(read) == rows[2:], "a buffer has two"
