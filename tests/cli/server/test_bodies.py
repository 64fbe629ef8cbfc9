"""Bodies of requests: what is cut is no request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fastapi import Request

from tpuport.cli.server.bodies import asked_of
from tpuport.cli.server.messages import Refused

FORM = (
    b'--edge\r\nContent-Disposition: form-data; name="prompt"\r\n\r\na fox\r\n'
    b'--edge\r\nContent-Disposition: form-data; name="seed"\r\n\r\n7\r\n--edge--\r\n'
)


def asked(body: bytes, kind: str = "multipart/form-data; boundary=edge") -> Any:
    """The fields of a body."""

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", kind.encode())]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": headers}
    return asyncio.run(asked_of(Request(scope, receive)))[0]


def test_a_form_that_is_cut_anywhere_is_refused() -> None:
    """Also between two fields, where what came is a form but for its end."""
    assert asked(FORM) == {"prompt": "a fox", "seed": 7}
    for size in range(len(FORM) - 4):
        with pytest.raises(Refused) as caught:
            asked(FORM[:size])
        assert caught.value.status == 400


@pytest.mark.parametrize("kind", ["multipart/form-data", "multipart/form-data; a=b"])
def test_a_form_needs_a_boundary(kind: str) -> None:
    with pytest.raises(Refused, match="boundary"):
        asked(FORM, kind)
