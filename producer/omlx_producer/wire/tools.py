"""The functions that a model may call, in OpenAI's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import model_validator

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire.json_schema import require_schema
from omlx_producer.wire.remedy import Remedy
from omlx_producer.wire.request_part import Name, RequestPart, Text, json_text

MAX_TOOLS = 128
MAX_TOOLS_CHARACTERS = 400_000


class FunctionDefinition(RequestPart):
    """A function: its name, what it does, and a JSON schema of its arguments.

    If one function of a request is ``strict``, the arguments of all are held to their schemas, also
    where the model is free to call.
    """

    name: Name
    description: Text | None = None
    parameters: Annotated[
        dict[str, Any] | None,
        Remedy('a JSON schema such as {"type": "object", "properties": {}}'),
    ] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        if self.parameters is not None:
            require_schema("parameters", self.parameters)
            if self.parameters.get("type", "object") != "object":
                raise InvalidRequest(
                    "parameters.type", f"got {self.parameters['type']!r:.60}", "give 'object'"
                )
        return self

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        """A schema of an object; without ``parameters``, of an empty one."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


class Tool(RequestPart):
    """A tool that the model may call.

    >>> Tool(type="function", function={"name": "get_time"}).function.name
    'get_time'
    """

    type: Literal["function"]
    function: Annotated[
        FunctionDefinition,
        Remedy('a function such as {"name": "f", "parameters": {"type": "object"}}'),
    ]


class ChosenFunction(RequestPart):
    name: Annotated[Text, Remedy("the name of one of the tools")]


class ToolChoice(RequestPart):
    """The one function that the model must call."""

    type: Literal["function"]
    function: Annotated[ChosenFunction, Remedy('a function such as {"name": "f"}')]


ToolChoiceOption = Literal["auto", "none", "required"] | ToolChoice


def require_callable(tools: Sequence[Tool], choice: ToolChoiceOption | None) -> None:
    """Check tools and their choice together.

    Raises:
        ValueError: if two tools have one name, the chosen one is missing, or all are too long.
    """
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = tool.function.name
        if name in names:
            raise InvalidRequest(
                f"tools[{index}].function.name",
                f"got {name!r} a second time",
                "rename one of the two",
            )
        names.add(name)
    if isinstance(choice, ToolChoice) and choice.function.name not in names:
        raise InvalidRequest(
            "tool_choice.function.name",
            f"got {choice.function.name!r:.60}, which is none of the tools",
            f"give one of {', '.join(sorted(names)):.200}",
        )
    length = len(json_text("tools", [tool.model_dump() for tool in tools]))
    if length > MAX_TOOLS_CHARACTERS:
        raise InvalidRequest(
            "tools", f"got {length} characters", f"give at most {MAX_TOOLS_CHARACTERS} in all"
        )


@dataclass(frozen=True, slots=True)
class Calling:
    """What the model may call in one answer.

    Attributes:
        functions: at least one.
        required: whether it must call, and not answer with text.
        parallel: whether it may call more than once.
    """

    functions: tuple[FunctionDefinition, ...]
    required: bool
    parallel: bool

    @property
    def strict(self) -> bool:
        """Whether all arguments are held to their schemas also where no call is required."""
        return any(function.strict for function in self.functions)


def calling_of(
    tools: Sequence[Tool], choice: ToolChoiceOption | None, *, parallel: bool
) -> Calling | None:
    """What tools and their choice permit; None for no call. A chosen function is called once."""
    if choice == "none":
        return None
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        chosen = tuple(tool.function for tool in tools if tool.function.name == name)
        return Calling(chosen, required=True, parallel=False)
    functions = tuple(tool.function for tool in tools)
    return Calling(functions, required=choice == "required", parallel=parallel)
