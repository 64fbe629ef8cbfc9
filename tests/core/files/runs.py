"""What the tests of files share: refusals of one line, and a full disk."""

from __future__ import annotations

from typing import Any

import pytest

from tpuport.errors import ArtifactError


def refusal(action: Any, *args: Any, **kwargs: Any) -> str:
    """The message of the ArtifactError that ``action`` raises, which is one line."""
    with pytest.raises(ArtifactError) as caught:
        action(*args, **kwargs)
    message = str(caught.value)
    assert "\n" not in message
    return message


#: What every kind of file ends with on a full disk.
NO_ROOM = (
    "cannot be written: no room is left on the disk; make room, or name another place"
)


def failing(*args: Any, **kwargs: Any) -> None:
    """A full disk."""
    raise OSError(28, "No space left on device")
