"""A chat goes through what its model's template takes, or is refused in one sentence."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from omlx_producer.wire import GenerationRequest, InvalidRequest
from omlx_worker.engine.rows.template import Template
from tests.helpers.chats import tokenizer_with
from tests.helpers.forms import HARMONY

EACH = "{% for m in messages %}"
PLAIN = f"{EACH}[{{{{ m.role }}}}]{{{{ m.content }}}}{{% endfor %}}"
ANSWER = "{% if add_generation_prompt %}[assistant]{% endif %}"
SYSTEM, USER = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}
ASSISTANT = {"role": "assistant", "content": "I begin."}
ALTERNATING = (
    f"{EACH}{{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}}"
    "{{ raise_exception('Roles must\nalternate.') }}{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}"
)


def template_of(source: str, tokens: tuple[str, ...] = ()) -> Template:
    return Template(tokenizer_with(tokens, source), "m")


def request(*messages: dict[str, Any], **fields: Any) -> GenerationRequest:
    return GenerationRequest.parse({"model": "m", "messages": list(messages or [USER]), **fields})


def text(source: str, *messages: dict[str, Any], **fields: Any) -> str:
    return template_of(source).text(request(*messages, **fields))


@pytest.mark.parametrize(
    ("variable", "on", "off"),
    [
        ("enable_thinking", "True", "False"),
        ("thinking", "True", "False"),
        ("reasoning", "True", "False"),
        ("thinking_budget", "own", "0"),
        ("thinking_mode", "enabled", "disabled"),
    ],
)
def test_a_templates_own_default_holds_unless_the_request_says_otherwise(
    variable: str, on: str, off: str
) -> None:
    source = f"{PLAIN}{{{{ {variable} if {variable} is defined else 'own' }}}}"
    # mlx-lm passes that the model thinks wherever the vocabulary has the markers.
    template = template_of(source, ("<think>", "</think>"))
    assert template.text(request()).endswith("own")
    assert template.text(request(reasoning_effort="none")).endswith(off)
    assert template.text(request(reasoning_effort="high")).endswith(on)
    given = {"chat_template_kwargs": {variable: "mine"}}
    assert template.text(request(reasoning_effort="none", **given)).endswith("mine")


def test_channels_take_the_least_effort_that_they_know_for_none() -> None:
    source = f"{PLAIN}<|channel|>{{{{ reasoning_effort }}}}"
    assert text(source, reasoning_effort="none").endswith("low")
    assert text(source, reasoning_effort="high").endswith("high")


@pytest.mark.parametrize(
    "source",
    [
        # It has no system turn, and says so.
        "{% if messages[0].role == 'system' %}{{ raise_exception('No!') }}{% endif %}" + PLAIN,
        # It drops it.
        f"{EACH}{{% if m.role != 'system' %}}[{{{{ m.role }}}}]{{{{ m.content }}}}{{% endif %}}"
        "{% endfor %}",
    ],
)
def test_a_system_message_without_a_turn_of_its_own_begins_the_users(source: str) -> None:
    assert text(source, SYSTEM, USER) == "[user]Be brief.\n\nHi?"
    with pytest.raises(InvalidRequest, match="the chat template of m does not take them: "):
        text(source, SYSTEM, ASSISTANT)


def test_a_developer_is_the_system_where_a_template_knows_none() -> None:
    source = (
        f"{EACH}{{% if m.role in ['system', 'user'] %}}[{{{{ m.role }}}}]{{{{ m.content }}}}"
        "{% endif %}{% endfor %}"
    )
    told = SYSTEM | {"role": "developer"}
    assert text(source, told, USER) == "[system]Be brief.[user]Hi?"
    assert text(PLAIN, told, USER) == "[developer]Be brief.[user]Hi?"


def test_content_comes_in_parts_where_a_template_wants_them() -> None:
    source = f"{EACH}[{{{{ m.role }}}}]{{% for p in m.content %}}{{{{ p.text }}}}{{% endfor %}}"
    source += "{% endfor %}"
    assert text(source, SYSTEM, USER) == "[system]Be brief.[user]Hi?"


def test_a_template_that_refuses_is_quoted_in_one_sentence() -> None:
    with pytest.raises(InvalidRequest) as refused:
        text(ALTERNATING, ASSISTANT)
    assert str(refused.value) == (
        "messages: the chat template of m does not take them: Roles must alternate."
    )
    with pytest.raises(InvalidRequest) as failed:
        text("{{ messages[0].tools | length }}")
    assert str(failed.value).startswith("messages: the chat template of m does not take them: ")


def test_turns_of_the_user_are_joined_where_a_template_wants_roles_to_alternate() -> None:
    assert text(ALTERNATING, USER, USER, ASSISTANT, USER) == (
        "[user]Hi?\n\nHi?[assistant]I begin.[user]Hi?"
    )
    assert text(ALTERNATING, SYSTEM, USER, USER) == "[user]Be brief.\n\nHi?\n\nHi?"


def test_system_messages_are_joined_where_a_template_takes_one_at_the_beginning() -> None:
    source = (
        f"{EACH}{{% if m.role == 'user' or (m.role == 'system' and loop.first) %}}"
        "[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
    )
    told = SYSTEM | {"role": "developer", "content": "Be kind."}
    assert text(source, SYSTEM, told, USER) == "[system]Be brief.\n\nBe kind.[user]Hi?"


def test_words_that_a_template_takes_out_of_a_text_do_not_move_it() -> None:
    source = f"{EACH}[{{{{ m.role }}}}]{{{{ m.content | replace('/no_think', '') }}}}{{% endfor %}}"
    assert text(source, SYSTEM | {"content": "Be brief./no_think"}, USER) == (
        "[system]Be brief.[user]Hi?"
    )


def test_the_switch_alone_serves_no_effort_where_the_template_refuses_such_a_word() -> None:
    source = (
        f"{PLAIN}{{% if reasoning_effort and reasoning_effort not in ['low', 'high'] %}}"
        "{{ raise_exception('Unknown effort.') }}{% endif %}{{ enable_thinking }}"
    )
    assert text(source, reasoning_effort="none").endswith("False")


def test_a_renderer_of_mlx_lm_gets_what_the_request_says_and_nothing_else() -> None:
    given = list[dict[str, Any]]()

    def render(messages: list[dict[str, Any]], **arguments: Any) -> str:
        given.append(arguments)
        return "".join(message["content"] for message in messages)

    tokenizer = tokenizer_with((), PLAIN)
    with patch.object(tokenizer, "_chat_template", render):
        template = Template(tokenizer, "m")
        for effort in (None, "none", "low"):
            assert template.text(request(reasoning_effort=effort)) == "Hi?"
    prompt = {"add_generation_prompt": True}
    assert given == [
        prompt,
        prompt | {"enable_thinking": False},
        prompt | {"enable_thinking": True},
    ]


def test_a_template_may_write_the_date() -> None:
    assert text(f"{{{{ strftime_now('%Y') }}}}{PLAIN}")[:2] == "20"


@pytest.mark.parametrize("opens", ["", "<think>\n"])
def test_the_tail_is_what_the_template_has_written_of_the_answer(opens: str) -> None:
    answer = "{% if add_generation_prompt %}[assistant]" + opens + "{% endif %}"
    asked = request(SYSTEM, USER | {"content": "What is <think>?"})
    template = template_of(PLAIN + answer)
    assert template.tail(asked, template.text(asked)) == f"[assistant]{opens}"
    unasked = template_of(f"{PLAIN}[/user]{opens}".rstrip())
    assert unasked.tail(asked, unasked.text(asked)) == f"[/user]{opens}".rstrip()


def call(number: int) -> dict[str, Any]:
    return {
        "id": f"c{number}",
        "type": "function",
        "function": {"name": "f", "arguments": f'{{"n": {number}}}'},
    }


def test_channels_get_a_call_each_before_its_result_and_no_content_beside_it() -> None:
    source = (
        f"{EACH}[{{{{ m.role }}}}{{% if m.thinking %}} thinks {{{{ m.thinking }}}}{{% endif %}}"
        "{% if m.tool_calls %} calls {{ m.tool_calls[0].function.arguments | tojson }}{% endif %}]"
        "{{ m.content }}{% endfor %}<|channel|>"
    )
    chat = [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [call(1), call(2)]}
        | {"reasoning_content": "Hm."},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
    ]
    template = template_of(source, HARMONY)
    assert template.text(request(*chat)) == (
        '[user]Hi?[assistant thinks Hm.\nI look. calls {"n": 1}][tool]one'
        '[assistant calls {"n": 2}][tool]two<|channel|>'
    )


def test_a_template_that_takes_one_call_a_message_gets_several_one_by_one() -> None:
    source = (
        f"{EACH}{{% if m.tool_calls and m.tool_calls | length > 1 %}}"
        "{{ raise_exception('One call.') }}{% endif %}[{{ m.role }}]{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %}{% endfor %}"
    )
    chat = [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [call(1), call(2)]},
        {"role": "tool", "content": "one", "tool_call_id": "c1"},
        {"role": "tool", "content": "two", "tool_call_id": "c2"},
    ]
    assert text(source, *chat) == "[user]Hi?[assistant]I look.c1[tool]one[assistant]c2[tool]two"


def test_a_result_that_a_template_leaves_out_is_said() -> None:
    source = f"{EACH}{{% if m.role != 'tool' %}}{{{{ m.content }}}}{{% endif %}}{{% endfor %}}"
    asked = {"role": "assistant", "content": "", "tool_calls": [call(1)]}
    with pytest.raises(InvalidRequest, match="it leaves out what the tool says"):
        text(source, USER, asked, {"role": "tool", "content": "one", "tool_call_id": "c1"})


def test_the_tail_holds_nothing_of_a_message_that_is_written_otherwise_at_the_end() -> None:
    source = (
        f"{EACH}[{{{{ m.role }}}}]{{% if loop.last and not add_generation_prompt %}}<think>"
        f"{{% endif %}}{{{{ m.content }}}}{{% endfor %}}{ANSWER}"
    )
    template, asked = template_of(source), request(USER, ASSISTANT)
    assert template.tail(asked, template.text(asked)) == "[assistant]"
    unasked = template_of(f"{PLAIN}<think>")
    for said in ("think", "<think>"):
        asked = request(USER | {"content": said})
        assert unasked.tail(asked, unasked.text(asked)) == "<think>"


def test_the_tail_holds_nothing_of_what_is_said_beside_a_call() -> None:
    source = (
        f"{EACH}{{% if m.role == 'user' %}}{{{{ m.content }}}}{{% elif m.tool_calls %}}"
        "[result]{{ messages[loop.index].content }}[/result]{{ m.content }}[/turn]{% endif %}"
        "{% endfor %}"
    )
    calls = ASSISTANT | {"content": "<think>", "tool_calls": [call(1)]}
    asked = request(USER, calls, {"role": "tool", "content": "one", "tool_call_id": "c1"})
    template = template_of(source)
    assert template.tail(asked, template.text(asked)) == "[/turn]"
