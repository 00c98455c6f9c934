"""The demo model with a vision tower of random weights: it sees pictures, and cannot say what."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from tests.helpers.towers import add_qwen_tower

TOKENS = {4093: "<|vision_start|>", 4094: "<|vision_end|>", 4095: "<|image_pad|>"}
"""In place of the tokens of the longest texts."""

TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def write_pictured_demo(path: Path) -> Path:
    """Write its checkpoint to a folder, which is made."""
    with_text = ("*.json", "*.jinja", "model.safetensors")
    path.mkdir(parents=True)
    for pattern in with_text:
        for file in resolve(DEMO).glob(pattern):
            shutil.copy(file, path)
    return add_sight(path)


def add_sight(path: Path, **tower: Any) -> Path:
    """Give a checkpoint of the demo model a tower, and the tokens and the template of pictures.

    Args:
        path: it may be grown.
        tower: see `add_qwen_tower`.
    """
    file = path / "tokenizer.json"
    tokenizer: dict[str, Any] = json.loads(file.read_text())
    model = tokenizer["model"]
    gone = {token for token, number in model["vocab"].items() if number in TOKENS}
    model["vocab"] = {token: n for token, n in model["vocab"].items() if token not in gone}
    model["merges"] = [pair for pair in model["merges"] if not gone & {"".join(pair), *pair}]
    special = tokenizer["added_tokens"][0] | {"special": True}
    for number, text in TOKENS.items():
        tokenizer["added_tokens"].append(special | {"id": number, "content": text})
    file.write_text(json.dumps(tokenizer))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    add_qwen_tower(path, token=4095, **tower)
    file = path / "config.json"
    config = json.loads(file.read_text())
    text = config["text_config"]
    rope = text["rope_parameters"]
    pairs = int(text["head_dim"] * rope["partial_rotary_factor"]) // 2
    rope["mrope_section"] = [(pairs + 2) // 3, (pairs + 1) // 3, pairs // 3]
    file.write_text(json.dumps(config))
    return path
