"""How a request over HTTP fails."""

from __future__ import annotations

from typing import Any

#: HTTP's codes by the type that clients are told.
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found"}

#: Characters of a message.
_LONGEST = 1000


class Refused(Exception):
    """An answer that is an error.

    Args:
        status: HTTP's code.
        message: one line for people.
        param: the field that is at fault.
    """

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = _sendable(message)[:_LONGEST]
        self.param = None if param is None else _sendable(param)[:100]

    def body(self) -> dict[str, Any]:
        """As OpenAI's clients read it."""
        kind = _TYPES.get(self.status)
        if kind is None:
            kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": None,
            }
        }


def _sendable(text: str) -> str:
    """A text that is UTF-8, whatever a client has sent."""
    return text.encode("utf-8", "replace").decode()
