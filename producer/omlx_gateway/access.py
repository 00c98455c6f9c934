"""Who may ask: the key of a request, and the models and priorities that it may use."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Collection, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from omlx_gateway.errors import ApiError
from omlx_gateway.gateway import is_json
from omlx_gateway.keys import MOST_KEY_LETTERS, ApiKey, KeyFile
from omlx_producer.wire import GenerationRequest, Priority

OPEN_PATHS = ("/", "/health")
"""The page asks for a key itself, and shows nothing without one."""
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]")
PAGE_HEADER = "X-Omlx-Page"
"""A browser lets no page of another site send it. So none can press a button of the page."""
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
ASKED_HEADERS = ("authorization", PAGE_HEADER)
_PORT = re.compile(r":\d*\Z")


class SiteCheck:
    """Middleware that keeps out pages of other sites, for a gateway without API keys.

    It answers at known names alone. Else any page could lead a name of its own to this machine
    ("DNS rebinding"), and a browser would take the gateway for a part of its site. And it refuses
    what a browser sends for a page of another site without asking first, unless that only reads.

    Args:
        hosts: names beside those of this machine.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = {*LOCAL_HOSTS, *map(str.lower, hosts)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            given = headers.get("host", "")
            if _PORT.sub("", given).lower() not in self._hosts:
                raise ApiError(
                    403,
                    f"Host: got {given!r:.80}; use {', '.join(LOCAL_HOSTS)}, or start the gateway "
                    "with --allow-host or --api-keys",
                    code="host_not_allowed",
                    headers={"Connection": "close"},
                )
            if scope["method"] not in SAFE_METHODS:
                _require_own_site(headers)
        await self._app(scope, receive, send)


def _require_own_site(headers: Headers) -> None:
    """Refuse what a browser says is from another site.

    A page of another site cannot send JSON or one of `ASKED_HEADERS`: the browser asks the gateway
    first, which never allows it. So a request that has them is let in, whatever its origin.

    Raises:
        ApiError: 403.
    """
    if is_json(headers) or any(name in headers for name in ASKED_HEADERS):
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    # Browsers send the first to names of this machine and over TLS alone.
    if site is not None:
        told = None if site in ("same-origin", "none") else f"Sec-Fetch-Site: got {site!r:.80}"
    else:
        own = origin is None or origin.partition("://")[2] == headers.get("host", "").lower()
        told = None if own else f"Origin: got {origin!r:.80}"
    if told:
        raise ApiError(
            403,
            f"{told}; pages of other sites may only read",
            code="site_not_allowed",
            headers={"Connection": "close"},
        )


class KeyCheck:
    """Middleware that lets no request in without a key of the file.

    The key is in ``request.state.api_key`` from then on, and the file in ``api_keys``.
    """

    def __init__(self, app: ASGIApp, keys: KeyFile) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            key = self._require_key(Headers(scope=scope))
            scope.setdefault("state", {}).update(api_key=key, api_keys=self._keys)
        await self._app(scope, receive, send)

    def _require_key(self, headers: Headers) -> ApiKey:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        given = given.strip()
        found = None
        if scheme.lower() == "bearer" and 0 < len(given) <= MOST_KEY_LETTERS:
            found = self._keys.find(given)
        if found is None:
            raise ApiError(
                401,
                "the API key is missing or unknown; send the header Authorization: Bearer KEY",
                code="invalid_api_key",
                # The body is not read.
                headers={"WWW-Authenticate": "Bearer", "Connection": "close"},
            )
        return found


def key_of(request: Request) -> ApiKey | None:
    """The key of a request; None where no keys are set."""
    found: ApiKey | None = getattr(request.state, "api_key", None)
    return found


def require_still(request: Request) -> None:
    """Refuse to go on with a request whose key was removed since it began.

    Raises:
        ApiError: 401.
    """
    key = key_of(request)
    if key is not None and not request.state.api_keys.holds(key):
        told = "the API key was removed while the request ran; ask again with another key"
        raise ApiError(401, told, code="invalid_api_key")


def owner_of(request: Request) -> str | None:
    """To whom a request's jobs, files and batches belong: the hash of its key; None without keys.

    The key's name may be given to another key.
    """
    key = key_of(request)
    return None if key is None else key.sha256


def owner_field(owner: str | None) -> dict[str, str]:
    """The field of a record in Redis that `is_own` reads."""
    return {} if owner is None else {"owner": owner}


def is_own(record: Mapping[str, str], owner: str | None) -> bool:
    """Whether a record is this owner's. Without keys every record is."""
    return owner is None or record.get("owner") == owner


def secret_of(owner: str, text: str) -> str:
    """A text such as an idempotency key, made different for each owner. Others cannot guess it."""
    return hmac.new(owner.encode(), text.encode("utf-8", "replace"), hashlib.sha256).hexdigest()


def own_salt(owner: str | None, given: Any) -> Any:
    """The cache salt of an owner's request, which no other owner's request has.

    Args:
        given: that of the request; None without one.

    Raises:
        InvalidRequest: if that is no salt.
    """
    if owner is None:
        return given
    asked = GenerationRequest.parse({"model": "x", "prompt": "x", "cache_salt": given})
    return secret_of(owner, f"cache_salt:{asked.cache_salt or ''}")


def require_model(request: Request, model: str | None) -> None:
    """Refuse a model that the request's key may not use.

    Args:
        model: None for one that the request leaves to the gateway.

    Raises:
        ApiError: 403.
    """
    key = key_of(request)
    if key is None or key.models is None or (model is not None and key.may_use(model)):
        return
    allowed = ", ".join(key.models) or "none"
    given = "no model" if model is None else f"{model!r:.200}"
    raise ApiError(
        403,
        f"model: got {given}; this API key may use {allowed}",
        code="model_not_allowed",
        param="model",
    )


def require_admin(request: Request) -> None:
    """Refuse all but admin keys what shows or changes the work of others.

    Raises:
        ApiError: 403.
    """
    key = key_of(request)
    if key is not None and not key.admin:
        raise ApiError(
            403,
            f"{request.scope['path'][:200]}: needs an admin key; make one with: "
            "omlx-gateway keys add NAME --admin",
            code="key_not_allowed",
        )


def allowed_priority(request: Request, given: Priority | None) -> Priority:
    """The priority of a request: what it asks for, else the best that its key may have.

    Raises:
        ApiError: 403 if the key may not have it.
    """
    key = key_of(request)
    if given is None:
        return "high" if key is None else key.level
    if key is not None and not key.may_join(given):
        raise ApiError(
            403,
            f"X-Omlx-Priority: got {given!r}; this API key may use {key.level} and below",
            code="priority_not_allowed",
        )
    return given
