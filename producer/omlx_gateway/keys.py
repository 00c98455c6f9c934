"""The file of API keys: a line of JSON for each, with the key's hash and what it may do."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import shlex
import stat
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omlx_producer.wire import PRIORITIES, Priority
from omlx_producer.wire.request import ModelAlias

PREFIX = "omlx-"
PRIVATE_FILE = 0o600
WRITABLE_BY_OTHERS = 0o022
MOST_KEY_LETTERS = 200

_GONE = {
    "rate": "gateways limit no rates; remove it, and limit them in a proxy before the gateway",
}

KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]

log = logging.getLogger("omlx_gateway")


class KeyFileError(ValueError):
    """The file cannot be used. The message is one sentence."""


class ApiKey(BaseModel):
    """A line of the file.

    Attributes:
        sha256: of the key, in hexadecimal digits.
        level: the best priority that its requests may have, and the one that they have by default.
        models: that it may use; None for all.
        admin: whether it may see and press the page, which shows and changes everybody's work.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: KeyName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    level: Priority = "high"
    models: tuple[ModelAlias, ...] | None = None
    admin: bool = False

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def may_join(self, priority: Priority) -> bool:
        return PRIORITIES.index(priority) >= PRIORITIES.index(self.level)


class KeyFile:
    """The keys of a file, which is read again when it changes.

    When it is read again, broken lines are left out, and no key is in force while it cannot be
    used. The log says so once.

    Raises:
        KeyFileError: if it cannot be used at first, or a line is broken.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen = _version(path)
        self._keys = read_keys(path)

    def find(self, key: str) -> ApiKey | None:
        """The line of a key; its time tells nothing of the hashes in the file."""
        self._refresh()
        digest = hash_key(key)
        found = None
        for each in self._keys:
            if hmac.compare_digest(each.sha256, digest):
                found = each
        return found

    def holds(self, key: ApiKey) -> bool:
        """Whether a key that was found earlier still has its line."""
        self._refresh()
        return any(each.sha256 == key.sha256 for each in self._keys)

    def _refresh(self) -> None:
        version = _version(self.path)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._keys, problems = _read_lines(self.path)
        except KeyFileError as error:
            self._keys, problems = [], []
            log.error("%s; no key is in force until then", error)
        for problem in problems:
            log.error("%s; the other lines are in force", problem)


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file.

    Raises:
        KeyFileError: if it is missing, others may write it, a line is no key, or two have one name.
    """
    keys, problems = _read_lines(path)
    if problems:
        raise KeyFileError(problems[0])
    return keys


def _read_lines(path: Path) -> tuple[list[ApiKey], list[str]]:
    """The keys of a file, and a sentence for each line that is none.

    Raises:
        KeyFileError: if it is missing, or others than its owner may write it.
    """
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            # What is no UTF-8 breaks its own line alone.
            lines = file.read().decode("utf-8", "replace").splitlines()
    except OSError as error:
        raise KeyFileError(
            f"{path}: cannot be read ({error.strerror}); make it with: omlx-gateway keys add NAME"
        ) from None
    if mode & WRITABLE_BY_OTHERS:
        raise KeyFileError(
            f"{path}: others than its owner may write it (mode {mode:04o}); "
            f"run: chmod 600 {shlex.quote(str(path))}"
        )
    keys, problems = dict[str, ApiKey](), list[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            key = ApiKey.model_validate_json(line)
        except ValidationError as error:
            # Without the value, which may be a key that somebody pasted.
            problem = error.errors(include_url=False)[0]
            field = ".".join(map(str, problem["loc"])) or "the line"
            told = f"{problem['msg']}; mend or remove the line"
            if field in _GONE:
                told = f"got {problem['input']!r:.20}; {_GONE[field]}"
            problems.append(f"{path}, line {number}: {field}: {told}")
            continue
        if keys.setdefault(key.name, key) is not key:
            problems.append(
                f"{path}, line {number}: name: {key.name!r} has a line already; remove one"
            )
    return list(keys.values()), problems


def add_key(path: Path, name: str, **allowed: Any) -> str:
    """Make a key and add its line to the file, which others see whole or not at all.

    Args:
        allowed: what it may do, by the attributes of `ApiKey`.

    Returns:
        The key, which is kept nowhere.

    Raises:
        KeyFileError: if the file cannot be read or written, or the name has a key.
        ValidationError: if a value is wrong.
    """
    key = PREFIX + secrets.token_urlsafe(32)
    line = ApiKey(name=name, sha256=hash_key(key), **allowed)
    fresh = path.with_name(path.name + ".new")
    try:
        # Exclusive, so that of two commands at the same time none loses its line.
        handle = os.open(fresh, os.O_CREAT | os.O_EXCL | os.O_WRONLY, PRIVATE_FILE)
    except FileExistsError:
        raise KeyFileError(
            f"{fresh}: exists, so another command writes it or was killed; try again, or remove it"
        ) from None
    except OSError as error:
        raise KeyFileError(f"{fresh}: cannot be written ({error.strerror})") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            known = read_keys(path) if path.exists() else []
            if any(each.name == name for each in known):
                raise KeyFileError(
                    f"{path}: {name!r} has a key; choose another name, or remove its line"
                )
            for each in (*known, line):
                file.write(each.model_dump_json(exclude_none=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException as error:
        fresh.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise KeyFileError(f"{path}: cannot be written ({error.strerror})") from None
        raise
    return key


def hash_key(key: str) -> str:
    """SHA-256 suffices: a key has 256 random bits, so nobody can try them all."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def _version(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size, found.st_mode
