"""What the reading model is trained on: `python -m scripts.reading_model.train`."""

import random

from jinja2 import Template

from scripts.reading_model.files import (
    CHAT_TEMPLATE,
    IMAGE,
    INSTRUCTION,
    PROMPT,
    make_tokenizer,
)
from scripts.reading_model.lines import draw, held_out, line


def test_training_draws_no_held_out_line() -> None:
    generator = random.Random(1)
    assert any(held_out(line(generator)) for _ in range(100))
    assert not any(held_out(draw(generator, held=False).text) for _ in range(100))


def test_the_template_writes_what_training_puts_around_a_picture() -> None:
    parts = [{"type": "text", "text": INSTRUCTION}, {"type": "image"}]
    written = Template(CHAT_TEMPLATE).render(
        messages=[{"role": "user", "content": parts}], add_generation_prompt=True
    )
    assert written == IMAGE.join(PROMPT)


def test_each_byte_is_a_token() -> None:
    tokens = make_tokenizer().encode("user\n12,40 €").tokens
    assert tokens[0] == "user"
    assert len(tokens) == 1 + len("\n12,40 €".encode())
