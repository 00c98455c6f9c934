"""Chats with pictures become prompts with a token for each vector, or one clear sentence."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from omlx_producer.wire import GenerationRequest, InvalidRequest, ModelInfo
from omlx_worker.engine.rows.chat import Chat
from omlx_worker.engine.rows.constraints import Grammars
from omlx_worker.engine.rows.prompts import Prompter
from omlx_worker.engine.rows.request import RowRequest, Sampling
from tests.helpers.chats import tokenizer_with
from tests.helpers.image_parts import grey, image, part_of

VOCABULARY = 300
ANSWER = "{% if add_generation_prompt %}[assistant]{% endif %}"


def written(picture: str, text: str = "p.text", *, ends: str = "") -> str:
    """A template that takes contents as texts and as parts."""
    return (
        "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}"
        f"{{% else %}}{{% for p in m.content %}}{{% if p.type == 'image' %}}{picture}"
        f"{{% else %}}{{{{ {text} }}}}{{% endif %}}{{% endfor %}}{{% endif %}}{ends}{{% endfor %}}"
    )


# As the two families write a picture: with what is around its vectors, and without.
QWEN = ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"]
QWENS = written("<|vision_start|><|image_pad|><|vision_end|>") + ANSWER
PLAIN = written("<|image_pad|>") + ANSWER
GEMMA = ["<|image|>", "<|image>", "<image|>"]
GEMMAS = written("<|image|>", "p.text | trim") + ANSWER


class Eight:
    """A vector for every eight pixels each way."""

    most, spatial, both_ways = 64, True, True

    def __init__(self, token: int, around: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
        self.token, self.around = token, around

    def grid(self, width: int, height: int) -> tuple[int, int]:
        return height // 8, width // 8


class Model:
    """Chats of a model that takes pictures."""

    def __init__(self, template: str = QWENS, tokens: list[str] = QWEN, context: int = 512) -> None:
        self.tokenizer = tokenizer_with(tokens, template)
        image, *around = map(self.tokenizer.convert_tokens_to_ids, tokens)
        self.sight = Eight(image, ((), ()) if tokens is QWEN else ((around[0],), (around[1],)))
        info = ModelInfo(model="m", context_length=context, longest_token=16, picture_tokens=64)
        self.prompter = Prompter(
            self.tokenizer,
            info,
            VOCABULARY,
            Sampling(),
            grammars=Grammars(self.tokenizer, VOCABULARY),
            sight=self.sight,
        )

    def rows(self, *messages: Any, **fields: Any) -> list[RowRequest]:
        chat = [
            each if isinstance(each, dict) else {"role": "user", "content": each}
            for each in messages
        ]
        request = GenerationRequest.parse({"model": "m", "messages": chat, **fields})
        return self.prompter.rows(request, "j")

    def text(self, *messages: Any, **fields: Any) -> str:
        """The prompt, with the vectors of a picture as ``<rows x columns>``."""
        [row] = self.rows(*messages, **fields)
        text, read = "", 0
        for picture in row.pictures:
            assert row.prompt[picture.start : picture.end] == [self.sight.token] * picture.count
            text += self.tokenizer.decode(row.prompt[read : picture.start])
            text += f"<{picture.rows} x {picture.columns}>"
            read = picture.end
        return text + str(self.tokenizer.decode(row.prompt[read:]))

    def refusal(self, *messages: Any, **fields: Any) -> str:
        with pytest.raises(InvalidRequest) as refused:
            self.rows(*messages, **fields)
        return str(refused.value)


WIDE, TALL = grey(24, 8), grey(16, 32)


@pytest.mark.parametrize(
    ("template", "tokens", "before", "after"),
    [(QWENS, QWEN, "<|vision_start|>", "<|vision_end|>"), (GEMMAS, GEMMA, "<|image>", "<image|>")],
    ids=["qwen", "gemma"],
)
def test_a_prompt_has_a_token_for_each_vector_of_its_pictures_in_their_order(
    template: str, tokens: list[str], before: str, after: str
) -> None:
    model = Model(template, tokens)
    content = [part_of("one "), part_of("and"), image(WIDE), image(TALL), part_of("two")]
    assert model.text([image(TALL)], {"role": "assistant", "content": "Fine."}, content) == (
        f"[user]{before}<4 x 2>{after}[assistant]Fine."
        f"[user]one and{before}<1 x 3>{after}{before}<4 x 2>{after}two[assistant]"
    )
    [row] = model.rows(content)
    assert [picture.data for picture in row.pictures] == [WIDE, TALL]
    assert all(picture.spatial and picture.both_ways for picture in row.pictures)


def test_a_prompt_may_not_end_with_a_picture() -> None:
    model = Model(written("<|image_pad|>"))
    assert model.refusal([part_of("a"), image(WIDE)]) == (
        "messages: the chat template of m writes nothing after the last picture; "
        "give a text after it"
    )
    assert model.text([image(WIDE), part_of("a")]) == "[user]<1 x 3>a"


def test_choices_of_a_request_share_its_pictures() -> None:
    first, second = Model().rows([image(WIDE)], n=2)
    assert first.pictures[0] is second.pictures[0]
    assert first.row_id != second.row_id


def test_a_decision_about_a_picture_scores_what_follows_its_vectors() -> None:
    model = Model(GEMMAS, GEMMA)
    asked = {"structured_outputs": {"choice": ["a", "bc"]}, "probabilities": True}
    rows = model.rows([part_of("a or bc?"), image(TALL)], **asked)
    [plain] = model.rows([part_of("a or bc?"), image(TALL)])
    for row in rows:
        assert row.pictures == plain.pictures
        assert row.prompt[: len(plain.prompt)] == plain.prompt
    places = {target.place for row in rows for target in row.targets}
    assert min(places) == len(plain.prompt)


def test_chats_about_other_pictures_share_their_system_message() -> None:
    model, system = Model(), {"role": "system", "content": "Read it."}
    rows = [*model.rows(system, [image(WIDE)]), *model.rows(system, [image(TALL), part_of("a")])]
    [mark] = rows[0].marks
    assert rows[1].marks == (mark,)
    assert model.tokenizer.decode(rows[0].prompt[:mark]) == "[system]Read it.[user]"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        # The system's content is a text: a list would be written as such.
        (
            PLAIN.replace("m.content is string", "m.role == 'system'"),
            "[system]Be brief.[user]<1 x 3>a[user]b<4 x 2>[assistant]",
        ),
        # Everything comes in parts.
        (
            PLAIN.replace("m.content is string", "false"),
            "[system]Be brief.[user]<1 x 3>a[user]b<4 x 2>[assistant]",
        ),
        # There is no system.
        (
            "{% if messages[0].role == 'system' %}{{ raise_exception('No!') }}{% endif %}" + PLAIN,
            "[user]Be brief.\n\n<1 x 3>a[user]b<4 x 2>[assistant]",
        ),
        # Nobody speaks twice.
        (
            "{% if messages | length > 2 %}{{ raise_exception('No!') }}{% endif %}" + PLAIN,
            "[system]Be brief.[user]<1 x 3>a\n\nb<4 x 2>[assistant]",
        ),
    ],
    ids=["texts", "parts", "no system", "turns"],
)
def test_pictures_keep_their_places_in_the_form_that_a_template_takes(
    template: str, prompt: str
) -> None:
    system = {"role": "system", "content": "Be brief."}
    content = [image(WIDE), part_of("a")], [part_of("b"), image(TALL)]
    assert Model(template).text(system, *content) == prompt


def test_a_template_that_leaves_out_a_picture_or_a_text_beside_it_is_refused() -> None:
    told = "messages: the chat template of m does not take them: it leaves out "
    blind = Model(written(""))
    assert blind.refusal([part_of("Look!"), image()]) == f"{told}a picture"
    hasty = Model(written("<|image_pad|>", "p.text if loop.first else ''") + ANSWER)
    assert hasty.text([part_of("Look!"), image(WIDE)]) == "[user]Look!<1 x 3>[assistant]"
    assert hasty.refusal([image(), part_of("Look!")]) == f"{told}what the user says"


@pytest.mark.parametrize("opens", ["", "<think>"])
def test_the_tail_of_a_prompt_that_ends_with_a_picture_has_nothing_of_it(opens: str) -> None:
    template = written("<|vision_start|><|image_pad|><|vision_end|>", ends="[end]") + opens
    chat = Chat(tokenizer_with([*QWEN, "<think>", "</think>"], template), "m", picture=QWEN[0])
    asked = {"model": "m", "messages": [{"role": "user", "content": [part_of("a"), image()]}]}
    request = GenerationRequest.parse(asked)
    reply = chat.reply(request, chat.text(request))
    assert reply
    assert reply.tail == (f"[end]{opens}" if opens else "")


def test_a_word_that_stands_for_a_picture_is_text_or_is_refused() -> None:
    model, word = Model(), "Say <|image_pad|>!"
    assert model.text(word) == f"[user]{word}[assistant]"
    told = "a text has <|image_pad|>, which stands for a picture of m; leave it out"
    assert model.refusal([part_of(word), image()]) == f"messages[0]: {told}"
    assert model.refusal("Hi.", [image()], {"role": "assistant", "content": word}) == (
        f"messages[2]: {told}"
    )
    kwargs = {"chat_template_kwargs": {"more": word}}
    assert model.refusal([image()], **kwargs) == f"chat_template_kwargs: {told}"
    # A template may make such a word of two.
    halves = [{"role": "user", "content": [image(), part_of("<|image")]}, "_pad|>"]
    assert Model(QWENS.replace("[{{ m.role }}]", "")).refusal(*halves) == f"messages: {told}"


def test_vectors_count_for_the_context() -> None:
    text = len("[user]a[assistant]") + 2
    assert Model(context=text + 8 + 1).rows([part_of("a"), image(TALL)])
    assert Model(context=text + 8).refusal([part_of("a"), image(TALL)]) == (
        f"messages: {text + 8} tokens, 8 of them of pictures, do not fit the context of m, "
        f"{text + 8} tokens with at least one generated; shorten it"
    )


def test_a_file_that_is_no_picture_is_named_by_its_field() -> None:
    content = [image(WIDE), part_of("a"), image(TALL[:-30])]
    refusal = Model().refusal("Hi.", content)
    assert refusal.startswith("messages[1].content[2].image_url: the picture cannot be decoded (")


def test_a_model_without_a_sight_refuses_pictures() -> None:
    tokenizer = tokenizer_with(QWEN, QWENS)
    info = ModelInfo(model="m", context_length=512, longest_token=1)
    chat = [{"role": "user", "content": [image()]}]
    request = GenerationRequest.parse({"model": "m", "messages": chat})
    with (
        patch("omlx_worker.engine.rows.encoding.size_of") as looked,
        pytest.raises(
            InvalidRequest,
            match=r"^messages\[0\].content\[0\].image_url: m takes no pictures; leave",
        ),
    ):
        Prompter(tokenizer, info, VOCABULARY, Sampling()).rows(request, "j")
    assert not looked.called
