"""Every error tpuport raises on purpose.

A message says what was asked, what was found and what to do next. The command line
prints it as one line and exits with ``exit_code``: 2 for a request that cannot be
right, 1 for one that failed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

#: Characters of an error's line, and of what it quotes.
LINE, QUOTED = 300, 80


def in_one_line(text: object, most: int = LINE) -> str:
    """An error as one line of at most 300 characters, or ``most``.

    What it quotes is cut in the middle first, then the line: what was asked is at its
    beginning, and what to do at its end.
    """
    line = " ".join(str(text).split())
    if len(line) > most:
        quotes = r"'[^']{80,}'|\"[^\"]{80,}\"|\S{80,}"
        line = re.sub(quotes, lambda found: _shortened(found[0], QUOTED), line)
    return _shortened(line, most)


def quoted(value: object) -> str:
    """``repr`` of what a user gave, short whatever its length."""
    return _shortened(repr(value), QUOTED)


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = (most - 3) // 2
    return f"{text[:half]}...{text[-half:]}"


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """The end of an error about a name that there is not."""
    near = difflib.get_close_matches(name, list(known), 1, 0.5)
    return f"did you mean {near[0]}?" if near else otherwise


class TpuportError(Exception):
    """Base of all errors raised on purpose by tpuport.

    Attributes:
        exit_code: of the command that ends so.
    """

    exit_code = 1


class UsageError(TpuportError, ValueError):
    """The request itself is wrong: an unknown name, a value off the rule."""

    exit_code = 2


class MeshError(UsageError):
    """A device mesh does not fit the devices, the heads, the batch or the sizes."""


class PluginError(TpuportError):
    """A model plugin is missing, broken, or collides with another."""


class UnknownModelError(UsageError):
    """No plugin, or no variant of a plugin, has the requested name."""


class WeightsError(TpuportError):
    """A checkpoint is missing, incomplete, truncated or not what its config says."""


class MissingWeightsError(WeightsError, UsageError):
    """What was named as weights is no folder, nor the name of any on the hub."""


class HubError(WeightsError):
    """A hub id could not be resolved to files."""


def damaged(found: str, whole: str = "the file") -> WeightsError:
    """The error for a checkpoint that cannot be used as it is on disk.

    Args:
        found: what is wrong, and in which file.
        whole: what a new download mends.
    """
    return WeightsError(f"{found}; download {whole} again")


class ShardingError(TpuportError):
    """Sharding rules and weights disagree."""


class OpConflictError(TpuportError):
    """Two owners claim the same torch operator."""


class PatchError(TpuportError):
    """A patch target is gone, or two patches claim the same target."""


class AttentionError(TpuportError, NotImplementedError):
    """No attention implementation honours the call exactly."""


class ArtifactError(TpuportError):
    """A file of a run directory is missing, altered, truncated or of another run."""


class AtWorkError(ArtifactError):
    """Another process works on a run directory."""


class MissingArtifactError(ArtifactError, UsageError):
    """A run directory, sidecar or folder of executables that was named is not there."""


class OutputError(UsageError):
    """The requested output cannot be written."""


class WriteError(ArtifactError, OutputError):
    """A file could not be written, such as on a full disk."""

    exit_code = 1


class StoreError(TpuportError):
    """An object store cannot be reached, read or written."""


class MissingStoreError(StoreError, UsageError):
    """There is nothing at an address of an object store."""


class VideoError(TpuportError):
    """The frames are not a video: NaN, constant or all black."""


class ReplayError(TpuportError):
    """A replayed video has other frames than the recorded ones."""


class ServerError(TpuportError):
    """A server of videos cannot be reached, or cannot do what is asked.

    Attributes:
        away: whether it may be there again soon.
        lost: whether it may have done what it was asked, and the answer was lost.
    """

    def __init__(self, said: str, *, away: bool = False, lost: bool = False) -> None:
        super().__init__(said)
        self.away, self.lost = away, lost
