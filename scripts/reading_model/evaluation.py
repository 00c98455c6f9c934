"""How well a checkpoint reads lines that it was never trained on, by transformers' own Qwen3-VL."""

import random
from collections import Counter
from pathlib import Path

import torch
from transformers import AutoTokenizer, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from scripts.reading_model.files import IMAGE, INSTRUCTION, TOKENS
from scripts.reading_model.lines import draw

BATCH, NEW_TOKENS = 50, 40
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": INSTRUCTION}, {"type": "image"}]}]


def evaluate(folder: Path, lines: int, seed: int) -> None:
    """Print the share of lines whose greedy text, in float32, is the drawn one."""
    model = Qwen3VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    generator = random.Random(seed)
    drawings = [draw(generator, held=True) for _ in range(lines)]
    right, drawn = Counter(), Counter()
    for start in range(0, lines, BATCH):
        some = drawings[start : start + BATCH]
        inputs = processor(
            [drawing.picture.convert("RGB") for drawing in some], return_tensors="pt"
        )
        vectors = int(inputs["image_grid_thw"][0].prod()) // processor.merge_size**2
        ids = tokenizer(prompt.replace(IMAGE, IMAGE * vectors), return_tensors="pt")["input_ids"]
        ids = ids.expand(len(some), -1)
        written = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=(ids == TOKENS[IMAGE]).int(),
            max_new_tokens=NEW_TOKENS,
            **inputs,
        )
        texts = tokenizer.batch_decode(written[:, ids.shape[1] :], skip_special_tokens=True)
        for drawing, text in zip(some, texts, strict=True):
            if text != drawing.text:
                print(f"{drawing.font} {drawing.size}: {drawing.text!r} read as {text!r}")
            for group in ("all", drawing.font, f"{drawing.size} pixels"):
                drawn[group] += 1
                right[group] += text == drawing.text
    for group in sorted(drawn):
        print(f"{group}: {right[group]} of {drawn[group]}, {right[group] / drawn[group]:.1%}")
