"""Metal as C++: pointers get the type of their address space, what Metal forbids is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator

_TOKEN = re.compile(r"\s+|\#[^\n]*|\"[^\"\n]*\"|\w+(?:\.\w*)?|::|.", re.DOTALL)

_SPACES = {"device": "Device", "constant": "Constant", "threadgroup": "Threadgroup", "thread": ""}

_SCALARS = {"bool", "char", "uchar", "short", "ushort", "int", "uint", "long", "ulong", "size_t"}
_SCALARS |= {"float", "half", "bfloat", "bfloat16_t", "float16_t", "void", "unsigned"}
_SCALARS |= {f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)}
_SCALARS |= {f"{of}{n}" for of in ("float", "half", "bfloat", "int", "uint") for n in (2, 3, 4)}

_FORBIDDEN = re.compile(
    r"double|goto|new|delete|try|catch|throw|virtual|typeid|asm|dynamic_cast|const_cast|std|extern"
    r"|thread_local|register|noexcept|kernel|vertex|fragment"
)


class Refused(Exception):
    """A source that Metal does not compile."""


class _Tokens:
    """A source's tokens without its spaces, each with the text before it."""

    def __init__(self, source: str) -> None:
        self.texts: list[str] = []
        self.before: list[str] = []
        spaces = ""
        for text in _TOKEN.findall(source):
            if text.isspace() or text.startswith("#"):
                spaces += text
            else:
                self.texts.append(text)
                self.before.append(spaces)
                spaces = ""

    def __getitem__(self, at: int) -> str:
        return self.texts[at] if 0 <= at < len(self.texts) else ""

    def __len__(self) -> int:
        return len(self.texts)

    def past(self, at: int, opening: str, closing: str) -> int:
        """The place after a bracket that opens at ``at`` and all that is in it."""
        depth = 0
        while at < len(self):
            depth += (self[at] == opening) - (self[at] == closing)
            at += 1
            if not depth:
                return at
        raise Refused(f"a {opening!r} is not closed")

    def past_type(self, at: int) -> int:
        """The place after the name of a type, with its template arguments."""
        at += self[at] == "unsigned"
        while self[at + 1] == "::":
            at += 2
        at += 1
        return self.past(at, "<", ">") if self[at] == "<" else at

    def text(self, begin: int, end: int) -> str:
        return "".join(self.before[i] + self.texts[i] for i in range(begin, end))


def translated(source: str) -> str:
    """A preprocessed Metal source as C++ over ``metal.h``.

    Raises:
        Refused: Metal forbids something in it that C++ allows.
    """
    tokens = _Tokens(source)
    _refuse_names(tokens)
    _refuse_globals(tokens)
    _refuse_recursion(tokens)
    return "".join(_written(tokens))


def _refuse_names(tokens: _Tokens) -> None:
    types = _SCALARS | {
        tokens[at + 1]
        for at in range(len(tokens))
        if tokens[at] in ("typename", "class", "struct", "using", "enum")
    }
    depth = within = 0
    for at, token in enumerate(tokens.texts):
        depth += (token == "{") - (token == "}")
        within += (token == "(") - (token == ")")
        if _FORBIDDEN.fullmatch(token) and tokens[at - 1] != "[":
            raise Refused(f"{token!r} is not a name that a Metal kernel may use")
        if token == "long" and tokens[at + 1] in ("long", "double"):
            raise Refused(f"Metal has no 'long {tokens[at + 1]}'")
        if token.startswith("__"):
            raise Refused(f"{token!r} is a compiler's own name")
        if token == "static" and depth:
            raise Refused("Metal has no static locals")
        if token in types and tokens[at - 1] not in ("typename", "class", "struct"):
            end = tokens.past_type(at)
            if tokens[end] == "const":
                end += 1
            is_array = within and tokens[end].isidentifier() and tokens[end + 1] == "["
            is_pointer = tokens[end] in ("*", "&") or (is_array and tokens[end + 2] != "[")
            if is_pointer and tokens[at - 1 - (tokens[at - 1] == "const")] not in _SPACES:
                raise Refused(f"{tokens.text(at, end + 1).strip()!r} has no address space")


def _refuse_globals(tokens: _Tokens) -> None:
    at = 0
    while at < len(tokens):
        if tokens[at] == "template":
            at = tokens.past(at + 1, "<", ">")
        begin = at
        while tokens[at] not in ("", "(", "{", ";", "="):
            at += 1
        words = tokens.texts[begin:at]
        if tokens[at] == "=" and "using" not in words and "constant" not in words:
            raise Refused(f"{tokens.text(begin, at).strip()!r} has no address space")
        while tokens[at] not in ("", ";", "}"):
            at = tokens.past(at, "{", "}") - 1 if tokens[at] == "{" else at + 1
        at += 1


def _refuse_recursion(tokens: _Tokens) -> None:
    calls: dict[str, set[str]] = {}
    for at in range(len(tokens)):
        if not (tokens[at].isidentifier() and tokens[at + 1] == "("):
            continue
        end = tokens.past(at + 1, "(", ")")
        if tokens[end] == "{" and tokens[at] not in ("if", "for", "while", "switch", "constexpr"):
            inside = range(end, tokens.past(end, "{", "}"))
            called = {tokens[i] for i in inside if tokens[i + 1] == "("}
            calls[tokens[at]] = calls.get(tokens[at], set()) | called
    for name in calls:
        seen, reached = set(), calls[name]
        while reached - seen:
            seen |= reached
            reached = set().union(*(calls.get(other, set()) for other in reached))
        if name in seen:
            raise Refused(f"{name!r} calls itself, which Metal forbids")


def _written(tokens: _Tokens) -> Iterator[str]:
    at = depth = 0
    while at < len(tokens):
        token = tokens[at]
        depth += (token == "{") - (token == "}")
        begin = at
        at += token == "const" and tokens[at + 1] in _SPACES
        if tokens[at] not in _SPACES:
            yield tokens.text(begin, begin + 1)
            at = begin + 1
            continue
        space = tokens[at]
        is_const = begin != at or tokens[at + 1] == "const"
        at += 1 + (tokens[at + 1] == "const")
        end = tokens.past_type(at)
        kind = ("const " if is_const else "") + tokens.text(at, end).strip()
        at = end
        if tokens[at] == "const":
            kind, at = f"const {kind}", at + 1
        yield tokens.before[begin]
        if space == "thread":
            yield kind
        elif tokens[at] == "*":
            at += 1
            yield f"Pointer<{_SPACES[space]}, {kind}>"
        elif tokens[at] == "&" and kind.startswith("const "):
            at += 1
            yield kind
        elif tokens[at] == "&":
            at += 1
            yield f"Reference<{_SPACES[space]}, {kind}>"
        elif space == "threadgroup" and depth == 1:
            names = []
            while not names or tokens[at] == ",":
                at += bool(names)
                name, at = tokens[at], at + 1
                sizes = at
                while tokens[at] == "[":
                    at = tokens.past(at, "[", "]")
                names.append(f'Shared<{kind}{tokens.text(sizes, at)}> {name}{{"{name}"}}')
            yield "; ".join(names)
        elif space == "constant" and depth == 0:
            yield f"const {kind}".replace("const const", "const")
        else:
            raise Refused(f"cannot have {space!r} {tokens.text(end, end + 2).strip()!r} here")
