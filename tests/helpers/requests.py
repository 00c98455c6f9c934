"""Requests that are refused."""

from __future__ import annotations

from typing import Any

import pytest

from omlx_producer.errors import InvalidRequest
from omlx_producer.wire import GenerationRequest


def refusal(data: Any) -> str:
    """Why this is no request."""
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest.parse(data)
    return str(caught.value)
