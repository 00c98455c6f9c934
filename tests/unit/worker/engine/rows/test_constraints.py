"""Constraints compile to grammars, or are refused in one sentence that says why."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from omlx_producer.schemas import MAX_NUMBER, MAX_TEXT, short_schema
from omlx_producer.wire import GenerationRequest, InvalidRequest, ModelInfo
from omlx_producer.wire.structure import Constraint
from omlx_worker.engine.rows import constraints
from omlx_worker.engine.rows.constraints import BadConstraint, Grammars
from omlx_worker.engine.rows.prompts import Prompter
from omlx_worker.engine.rows.request import Sampling
from tests.helpers.chats import tokenizer_of
from tests.helpers.constrained import grammars
from tests.helpers.decoding import Loaded


def matches(constraint: Constraint, text: str) -> bool:
    """Whether the grammar takes exactly this text of the demo model's tokens."""
    matcher = grammars().compile(constraint).start.deep_copy()
    tokens = Loaded.demo().tokenizer.encode(text)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def refusal(kind: Any, value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(BadConstraint) as refused:
        grammars().compile(Constraint(kind, text))
    return str(refused.value)


def test_each_kind_takes_what_it_describes_and_nothing_else() -> None:
    schema = json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}})
    for constraint, right, wrong in (
        (Constraint("json_object"), '{"a": [1, null]}', "[1]"),
        (Constraint("json_schema", schema), '{"a": 3}', '{"a": "3"}'),
        (Constraint("json_schema", '{"format": "date"}'), '"2024-02-29"', '"2023-02-29"'),
        (Constraint("regex", r"[a-z]{2}-\d+"), "ab-12", "ab-"),
        (Constraint("choice", '["yes", "no|way*"]'), "no|way*", "no"),
        (Constraint("grammar", 'start: "x" start | "y"'), "xxy", "yx"),
    ):
        assert matches(constraint, right), constraint
        assert not matches(constraint, wrong), constraint


def test_what_the_short_form_takes_has_a_longest_text() -> None:
    constraint = Constraint("json_schema", json.dumps(short_schema("name, price float, count int")))
    whole = '{"name": "NAME", "price": PRICE, "count": COUNT}'
    usual = {"NAME": "a" * MAX_TEXT, "PRICE": "-12.000000001", "COUNT": str(MAX_NUMBER)}

    def taken(**other: str) -> bool:
        text = whole
        for place, value in (usual | other).items():
            text = text.replace(place, value)
        return matches(constraint, text)

    assert taken()
    assert not taken(NAME="a" * (MAX_TEXT + 1))
    assert not taken(PRICE="1.0000000001")
    assert not taken(COUNT=str(MAX_NUMBER + 1))


def test_a_constraint_may_be_a_part_of_the_text() -> None:
    framed = Constraint("json_schema", '{"type": "object"}', 'start: "so: " @answer "."?\n')

    assert matches(framed, 'so: {"a": 1}.')
    assert matches(framed, "so: {}")
    assert not matches(framed, '{"a": 1}')
    assert not matches(framed, "so: no")


def test_grammars_may_name_tokens() -> None:
    assert matches(Constraint("grammar", 'start: "a" <|im_start|> "b"'), "a<|im_start|>b")
    assert matches(Constraint("grammar", 'start: "a" <[1]> "b"'), "a<|im_start|>b")


@pytest.mark.parametrize("frame", ["", 'start: "so: " @answer'])
def test_grammars_have_lines_whatever_tokens_a_model_adds(frame: str) -> None:
    tokenizer = copy.deepcopy(Loaded.demo().tokenizer)
    tokenizer._tokenizer.add_tokens(["\n", "  "])
    tokenizer._tokenizer.add_tokens(["<étape>"], special_tokens=True)
    grammar = Constraint("grammar", 'start: "a"\n  | b\nb: "b" <étape>\n', frame)

    assert Grammars(tokenizer, len(tokenizer)).compile(grammar)


def test_a_constraint_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = Grammars(Loaded.demo().tokenizer, 4096)
    tried: list[str] = []
    monkeypatch.setattr(constraints, "_dry_run", lambda _, text: tried.append(text))
    good, bad = Constraint("regex", "[0-9]+"), Constraint("regex", "[0-9")

    assert fresh.compile(good) is fresh.compile(Constraint("regex", "[0-9]+"))
    for _ in range(2):
        with pytest.raises(BadConstraint, match="unclosed character class"):
            fresh.compile(bad)

    assert len(tried) == 2


def test_a_keyword_that_would_be_ignored_is_refused_with_its_path() -> None:
    inner = {"type": "array", "uniqueItems": True}
    schema = {"type": "object", "properties": {"a": {"anyOf": [{"type": "null"}, inner]}}}

    assert refusal("json_schema", schema) == (
        "schema.properties.a.anyOf.1: uniqueItems: not supported; leave it out"
    )


@pytest.mark.parametrize("frame", ["", 'start: "so: " @answer'])
@pytest.mark.parametrize("value", ["{x", '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}'])
def test_a_grammar_that_is_not_larks_is_refused(value: str, frame: str) -> None:
    with pytest.raises(BadConstraint, match="expecting rule, token or statement"):
        grammars().compile(Constraint("grammar", value, frame))


def test_a_schema_cannot_ask_to_be_taken_leniently() -> None:
    lenient = {"x-guidance": {"lenient": True}, "not": {"type": "string"}}

    assert refusal("json_schema", lenient) == "schema: not: not supported; leave it out"
    assert "uniqueItems" in refusal("grammar", 'start: %json {"uniqueItems": true}')


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        ("json_schema", {"$ref": "#"}, "schema: no text can match it"),
        ("json_schema", {"const": "2023-02-29", "format": "date"}, "schema: no text can match it"),
        (
            "json_schema",
            {"items": {"format": "unknown"}},
            "schema.items: Unknown format: unknown",
        ),
        ("json_schema", {"enum": []}, "schema: Unsatisfiable schema: anyOf is empty"),
        ("json_schema", {"type": "string", "pattern": "a(?=b)"}, "look-around"),
        ("json_schema", {"type": "string", "pattern": "a\\"}, "unrecognized escape sequence"),
        ("json_schema", {"type": "string", "pattern": "[a"}, "unclosed character class"),
        ("json_schema", {"oneOf": [{"type": "number"}, {"type": "integer"}]}, "give anyOf"),
        ("json_schema", {"$ref": "http://x.org/y"}, "not present in a registry"),
        ("json_schema", True, "it is no JSON object; give one"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("grammar", 'start: "a" | b', 'unknown name: "b"'),
    ],
)
def test_what_cannot_be_compiled_is_refused_on_one_line(kind: str, value: Any, reason: str) -> None:
    refused = refusal(kind, value)

    assert reason in refused
    assert "\n" not in refused


def chain(length: int, wrap: bool = False) -> dict[str, Any]:
    """References to references, or to arrays of them."""
    refs: list[dict[str, Any]] = [{"$ref": f"#/$defs/{i + 1}"} for i in range(length)]
    defs: dict[str, Any] = {
        str(i): {"type": "array", "items": ref} if wrap else ref for i, ref in enumerate(refs)
    }
    return {"$ref": "#/$defs/0", "$defs": {**defs, str(length): {"type": "string"}}}


BOMB = {"allOf": [{"pattern": f"(.*a.{{{i}}}.*)"} for i in range(1, 60)]}
DEEP = json.dumps(chain(5000))
HOSTILE = {
    "beside a token by its id": ("grammar", f"start: <[1]> %json {DEEP}"),
    "beside a token by its name": ("grammar", f"start: <|im_start|> %json {DEEP}"),
    "levels": ("json_schema", "".join(['{"items":'] * 500) + "{}" + "}" * 500),
    "references": ("json_schema", json.dumps(chain(5000))),
    "arrays": ("json_schema", json.dumps(chain(5000, wrap=True))),
    "rules": ("grammar", "\n".join(f'a{i}: "x" a{i + 1}' for i in range(9000)) + "\nstart: a0"),
    "patterns": ("json_schema", json.dumps(BOMB)),
    "patterns beside a fault": (
        "json_schema",
        json.dumps({"uniqueItems": True, "properties": {"a": BOMB, "b": {"uniqueItems": True}}}),
    ),
    "alternatives": ("json_schema", json.dumps({"enum": [f"a{i}" for i in range(100_000)]})),
    "groups": ("regex", "(a|b|cd)" * 120_000),
    "parentheses": ("grammar", "start: " + "(" * 10_000 + '"a"' + ")" * 10_000),
}


@pytest.mark.parametrize("name", ["levels", "references"])
def test_hostile_constraints_are_refused_in_time(name: str) -> None:
    began = time.monotonic()

    assert refusal(*HOSTILE[name])

    # Two seconds and the start of a process, on a machine that may be busy.
    assert time.monotonic() - began < 60


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in ("levels", "references")])
def test_every_hostile_constraint_is_refused_in_time(name: str) -> None:
    test_hostile_constraints_are_refused_in_time(name)


@pytest.mark.parametrize(
    "value",
    [
        {"type": "string", "pattern": "(x+x+)+y"},
        {"type": "string", "pattern": "^(a{0,1000}){0,1000}$"},
        {"type": "string", "pattern": "(.*a.{20})"},
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    ],
)
def test_a_mask_of_a_costly_but_legal_constraint_takes_no_longer_than_a_step(value: Any) -> None:
    matcher = grammars().compile(Constraint("json_schema", json.dumps(value))).start.deep_copy()
    worst = 0.0
    for token in Loaded.demo().tokenizer.encode('"xxxxaaaa xaxa aax'):
        began = time.thread_time()
        matcher.compute_bitmask()
        worst = max(worst, time.thread_time() - began)
        matcher.consume_token(token)

    assert worst < 0.5


INFO = ModelInfo(model="m", context_length=512, longest_token=20, draft_depth=0)


def ask(**fields: Any) -> GenerationRequest:
    return GenerationRequest.parse({"model": "m", "prompt": "x", **fields})


def test_a_request_that_cannot_be_constrained_is_refused_by_its_field() -> None:
    tokenizer = Loaded.demo().tokenizer
    constrained = Prompter(tokenizer, INFO, 4096, Sampling(), grammars=grammars())

    with pytest.raises(InvalidRequest) as refused:
        constrained.rows(ask(structured_outputs={"regex": "[a-z"}), "job")
    assert str(refused.value) == (
        "structured_outputs.regex: the regular expression cannot be compiled (unclosed character "
        "class); change it"
    )
    [row] = constrained.rows(ask(structured_outputs={"regex": "[a-z]"}), "job")
    assert row.grammar is not None


def test_a_constraint_that_was_too_slow_to_follow_is_refused_by_its_field() -> None:
    prompter = Prompter(Loaded.demo().tokenizer, INFO, 4096, Sampling(), grammars=grammars())
    request = ask(structured_outputs={"regex": "[a-y]"})
    [row] = prompter.rows(request, "job")
    assert row.grammar is not None

    row.grammar.too_slow = True

    with pytest.raises(InvalidRequest) as refused:
        prompter.rows(request, "job")
    assert str(refused.value) == (
        "structured_outputs.regex: the constraint takes too long to follow; make it less ambiguous"
    )


UNIQUE = {"type": "array", "uniqueItems": True}
TAGGED = {"type": "object", "properties": {"n": {"type": "integer"}, "tags": UNIQUE}}
AS_TAGGED = {"type": "json_schema", "json_schema": {"name": "a", "schema": TAGGED}}


def named(name: str, parameters: Any = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


@pytest.mark.parametrize("kwargs", [{}, {"thinks": True}])
@pytest.mark.parametrize(
    ("family", "fields", "blamed"),
    [
        (
            "json_tools",
            {"tools": [named("a"), named("b"), named("c", TAGGED)], "tool_choice": "required"},
            "tools[2].function.parameters: the schema cannot be compiled (schema.properties.tags: ",
        ),
        (
            "json_tools",
            {
                "tools": [named("a"), named("b", TAGGED)],
                "tool_choice": {"type": "function", "function": {"name": "b"}},
            },
            "tools[1].function.parameters: the schema cannot be compiled (schema.properties.tags: ",
        ),
        (
            "qwen3_coder",
            {
                "tools": [
                    named("a", {"properties": {"s": {"enum": ["a\u2028b\x0b", "c\n"]}}}),
                    named("b", TAGGED),
                ],
                "tool_choice": "required",
            },
            "tools[1].function.parameters.properties.tags: the schema cannot be compiled (schema: ",
        ),
        (
            "json_tools",
            {"tools": [named("a")], "response_format": AS_TAGGED},
            "response_format: the schema cannot be compiled (schema.properties.tags: ",
        ),
    ],
)
def test_a_refusal_beside_tools_names_the_schema_that_is_to_blame(
    family: str, fields: dict[str, Any], blamed: str, kwargs: dict[str, Any]
) -> None:
    tokenizer = tokenizer_of(family, thinking=True)
    made = Grammars(tokenizer, len(tokenizer._tokenizer))
    prompter = Prompter(tokenizer, INFO, 4096, Sampling(), grammars=made)
    messages = [{"role": "user", "content": "x"}]
    request = {"model": "m", "messages": messages, "chat_template_kwargs": kwargs, **fields}
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            prompter.rows(GenerationRequest.parse(request), "job")
        assert str(refused.value) == (
            f"{blamed}uniqueItems: not supported; leave it out); change it"
        )


def test_a_schema_inside_a_grammar_is_blamed_by_its_path() -> None:
    schema = '{\n  "properties": {"b": {"uniqueItems": true}}\n}'
    reason = "uniqueItems: not supported; leave it out"

    assert refusal("grammar", f'start: "a" b\nb: %json {schema}') == (
        f"schema.properties.b: {reason}"
    )
    assert refusal("grammar", f'start: "a" | "b" %json {schema}') == reason


def test_a_few_choices_need_no_process_to_try_them_in() -> None:
    with patch.object(constraints.subprocess, "Popen", side_effect=AssertionError):
        grammars().compile(Constraint("choice", json.dumps(["yes", "no"])))
        grammars().compile(Constraint("json_object"))
        with pytest.raises(AssertionError):
            grammars().compile(Constraint("choice", json.dumps(["x" * 10_000, "no"])))


def test_a_constraint_that_a_busy_machine_had_no_time_for_is_tried_again() -> None:
    made, asked = grammars(), Constraint("regex", "[0-9]{7}")
    with (
        patch.object(constraints, "PATIENCE_SECONDS", 0.0),
        pytest.raises(TimeoutError, match="machine was too busy to compile the constraint"),
    ):
        made.compile(asked)

    assert made.compile(asked)


@pytest.mark.slow
def test_a_constraint_that_takes_too_much_time_of_the_processor_is_not_tried_again() -> None:
    made = Grammars(Loaded.demo().tokenizer, 4096)
    asked = Constraint("json_schema", json.dumps(BOMB))
    with patch.object(constraints, "MOST_SECONDS", 1):
        with pytest.raises(BadConstraint, match="takes more than 1 seconds"):
            made.compile(asked)
        with (
            patch.object(constraints.subprocess, "Popen", side_effect=AssertionError),
            pytest.raises(BadConstraint, match="takes more than 1 seconds"),
        ):
            made.compile(asked)


@pytest.mark.slow
def test_a_busy_machine_is_no_reason_to_refuse_a_constraint(tmp_path: Path) -> None:
    kept_waiting = tmp_path / "dry_run.py"
    kept_waiting.write_text(
        "import runpy, time\n"
        "while time.process_time() < 1.1: pass\n"
        f"runpy.run_path({str(constraints._DRY_RUN)!r}, run_name='__main__')\n"
    )
    with patch.multiple(constraints, MOST_SECONDS=1, _DRY_RUN=kept_waiting):
        assert grammars().compile(Constraint("regex", "[0-9]{8}"))
