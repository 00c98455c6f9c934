"""The file of API keys: a line of JSON for each, with the key's hash and what it may do."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omlx_producer.wire import PRIORITIES, Priority
from omlx_producer.wire.request import ModelAlias

PREFIX = "omlx-"
PRIVATE_FILE = 0o600
MOST_KEY_LETTERS = 200

KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]

log = logging.getLogger("omlx_gateway")


class KeyFileError(ValueError):
    """The file cannot be used. The message is one sentence."""


class ApiKey(BaseModel):
    """A line of the file.

    Attributes:
        sha256: of the key, in hexadecimal digits.
        level: the best priority that its requests may have, and the one that they have by default.
        rate: requests a minute at all gateways together; None for any number.
        models: that it may use; None for all.
        admin: whether it may see and press the page, which shows and changes everybody's work.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: KeyName
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    level: Priority = "high"
    rate: Annotated[int, Field(ge=1)] | None = None
    models: tuple[ModelAlias, ...] | None = None
    admin: bool = False

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def may_join(self, priority: Priority) -> bool:
        return PRIORITIES.index(priority) >= PRIORITIES.index(self.level)

    def own(self, text: str) -> str:
        """A text such as an idempotency key, made different for each key."""
        return hashlib.sha256(f"{self.sha256}:{text}".encode("utf-8", "replace")).hexdigest()


class KeyFile:
    """The keys of a file, which is read again when it changes.

    Raises:
        KeyFileError: if it cannot be read at first. Later, a broken file leaves the keys as they
            were, and the log tells of it once.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._keys = read_keys(path)
        self._seen = _version(path)

    def find(self, key: str) -> ApiKey | None:
        """The line of a key; its time tells nothing of the hashes in the file."""
        self._refresh()
        digest = hash_key(key)
        found = None
        for each in self._keys:
            if hmac.compare_digest(each.sha256, digest):
                found = each
        return found

    def _refresh(self) -> None:
        version = _version(self.path)
        if version == self._seen:
            return
        self._seen = version
        try:
            self._keys = read_keys(self.path)
        except KeyFileError as error:
            log.error("%s; the keys stay as they were", error)


def read_keys(path: Path) -> list[ApiKey]:
    """The keys of a file.

    Raises:
        KeyFileError: if it is missing, a line is no key, or two have one name.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise KeyFileError(
            f"{path}: cannot be read ({reason}); make it with: omlx-gateway keys add NAME"
        ) from None
    keys: dict[str, ApiKey] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            key = ApiKey.model_validate_json(line)
        except ValidationError as error:
            # Without the value, which may be a key that somebody pasted.
            problem = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(map(str, problem["loc"])) or "the line"
            raise KeyFileError(
                f"{path}, line {number}: {field}: {problem['msg']}; mend or remove the line"
            ) from None
        if key.name in keys:
            raise KeyFileError(
                f"{path}, line {number}: name: {key.name!r} has a line already; remove one"
            )
        keys[key.name] = key
    return list(keys.values())


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


def _version(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size
