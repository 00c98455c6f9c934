"""Forms of answers as families of models write them, with tokenizers of a token a byte."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mlx_lm.tokenizer_utils import TokenizerWrapper

from tests.helpers.chats import tokenizer_with

THOUGHT, ANSWER = "Is 2 < 3?\n\nYes: {so}", '{"it": "is </so>"}'

HARMONY = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
)
_ANALYSIS = "<|channel|>analysis<|message|>THOUGHT<|end|><|start|>assistant"
_COMMAND = (
    *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    *("<|START_ACTION|>", "<|END_ACTION|>"),
)
_SEED = (
    *("<seed:think>", "</seed:think>"),
    *("<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"),
)
_THINK = "<think>", "</think>"
_K3 = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
_STEPS = "Here are my reasoning steps:\n"


@dataclass(frozen=True)
class Written:
    """An answer of a family.

    Attributes:
        tail: what its template writes of the answer.
        text: what the model writes; THOUGHT and ANSWER stand for the two.
        tokens: that the vocabulary adds.
        named: markers that are in the template alone.
        before, after: what the reasoning has around THOUGHT.
        family: of the parser of mlx-lm that reads its calls.
    """

    tail: str
    text: str
    tokens: tuple[str, ...] = ()
    named: str = ""
    before: str = ""
    after: str = ""
    family: str = ""

    @property
    def thinks(self) -> bool:
        return "THOUGHT" in self.text

    @property
    def reasoning(self) -> str:
        return self.before + THOUGHT + self.after if self.thinks else ""

    def written(self, answer: str = ANSWER) -> str:
        return self.text.replace("THOUGHT", THOUGHT).replace("ANSWER", answer)

    @property
    def tokenizer(self) -> TokenizerWrapper:
        return _tokenizer(self)


@functools.cache
def _tokenizer(form: Written) -> TokenizerWrapper:
    template = (
        f"{{# {form.named} #}}{{% for m in messages %}}{{{{ m.content }}}}\n{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{form.tail}{{% endif %}}"
    )
    return tokenizer_with(form.tokens, template, form.family)


FORMS = {
    "harmony": Written(
        "<|start|>assistant", f"{_ANALYSIS}<|channel|>final<|message|>ANSWER", HARMONY
    ),
    "harmony, constrained": Written(
        "<|start|>assistant",
        f"{_ANALYSIS}<|channel|>final <|constrain|>json<|message|>ANSWER",
        HARMONY,
    ),
    "harmony, without analysis": Written(
        "<|start|>assistant", "<|channel|>final<|message|>ANSWER", HARMONY
    ),
    "harmony, analysis twice": Written(
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Well.<|end|><|start|>assistant"
        f"{_ANALYSIS}<|channel|>final<|message|>ANSWER",
        HARMONY,
        before="Well.\n",
    ),
    "qwen 3": Written("assistant\n", "<think>\nTHOUGHT\n</think>\n\nANSWER", _THINK),
    "qwen 3, off": Written("assistant\n<think>\n\n</think>\n\n", "ANSWER", _THINK),
    "qwen 3 thinking": Written("assistant\n<think>\n", "THOUGHT\n</think>\n\nANSWER", _THINK),
    "glm 4.5": Written("<|assistant|>", "\n<think>THOUGHT</think>\nANSWER", _THINK),
    "glm 4.7, off": Written("<|assistant|></think>", "ANSWER", _THINK),
    "glm 4.5v": Written(
        "<|assistant|>",
        "<think>THOUGHT</think><|begin_of_box|>ANSWER<|end_of_box|>",
        (*_THINK, "<|begin_of_box|>", "<|end_of_box|>"),
    ),
    "seed": Written("assistant\n", "<seed:think>THOUGHT</seed:think>ANSWER", _SEED),
    "seed, no budget": Written(
        "assistant\n<seed:think><seed:cot_budget_reflect>",
        "THOUGHT</seed:cot_budget_reflect></seed:think>ANSWER",
        _SEED,
        after="</seed:cot_budget_reflect>",
    ),
    "magistral": Written("", "[THINK]THOUGHT[/THINK]ANSWER", ("[THINK]", "[/THINK]")),
    "command": Written(
        "<|CHATBOT_TOKEN|>",
        "<|START_THINKING|>THOUGHT<|END_THINKING|><|START_RESPONSE|>ANSWER<|END_RESPONSE|>",
        _COMMAND,
    ),
    "command, off": Written(
        "<|START_THINKING|><|END_THINKING|>",
        "<|START_RESPONSE|>ANSWER<|END_RESPONSE|>",
        _COMMAND,
    ),
    "command, begun": Written("<|START_RESPONSE|>", "ANSWER<|END_RESPONSE|>", _COMMAND),
    "hunyuan": Written(
        "assistant: ",
        "<think>\nTHOUGHT\n</think>\n<answer>\nANSWER\n</answer>",
        named="<think></think><answer></answer>",
    ),
    "granite 3.3": Written(
        "assistant: ",
        "<think>THOUGHT</think><response>ANSWER</response>",
        named="<think></think><response></response>",
    ),
    "granite 3.2": Written(
        "assistant: ",
        "Here is my thought process:\nTHOUGHT\n\nHere is my response:\nANSWER",
        named="Here is my thought process: Here is my response:",
    ),
    "apriel 1.5": Written(
        "<|assistant|>\n",
        f"{_STEPS}THOUGHT\n[BEGIN FINAL RESPONSE]\nANSWER\n[END FINAL RESPONSE]",
        named="[BEGIN FINAL RESPONSE] [END FINAL RESPONSE]",
        before=_STEPS,
    ),
    "apriel 1.6": Written(
        f"<|begin_assistant|>\n{_STEPS}",
        "THOUGHT\n[BEGIN FINAL RESPONSE]\nANSWER",
        named="[BEGIN FINAL RESPONSE]",
    ),
    "gemma 4": Written(
        "<|turn>model\n",
        "<|channel>thought\nTHOUGHT<channel|>ANSWER",
        ("<|channel>", "<channel|>"),
    ),
    "gemma 4, off": Written(
        "<|turn>model\n<|channel>thought\n<channel|>", "ANSWER", ("<|channel>", "<channel|>")
    ),
    "olmo 3": Written("assistant\n<think>", "THOUGHT</think>ANSWER", named="<think></think>"),
    "ernie 4.5": Written(
        "assistant\n<think>\n",
        "THOUGHT\n</think>\n\n<response>\nANSWER\n</response>\n",
        _THINK,
        named="<response></response>",
    ),
    "exaone deep": Written(
        "[|assistant|]<thought>\n", "THOUGHT\n</thought>\n\nANSWER", ("<thought>", "</thought>")
    ),
    "kimi k3": Written(
        "<|open|>think<|sep|>",
        "THOUGHT<|close|>think<|sep|><|open|>response<|sep|>ANSWER"
        "<|close|>response<|sep|><|close|>message<|sep|>",
        _K3,
    ),
    "kimi k3, off": Written(
        "<|open|>response<|sep|>", "ANSWER<|close|>response<|sep|><|close|>message<|sep|>", _K3
    ),
    "apertus": Written(
        "<|assistant_start|>",
        "<|inner_prefix|>THOUGHT<|inner_suffix|>ANSWER",
        ("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    "minimax m3": Written(
        "ai\n", "<mm:think>THOUGHT</mm:think>ANSWER", ("<mm:think>", "</mm:think>")
    ),
    "hy 3": Written(
        "<think:opensource></think:opensource>",
        "ANSWER",
        ("<think:opensource>", "</think:opensource>"),
    ),
    "none": Written("assistant\n", "ANSWER"),
}
