"""Every error tpuport raises on purpose.

A message says what was asked, what was found and what to do next. The command line
prints it as one line and exits with ``exit_code``: 2 for a request that cannot be
right, 1 for one that failed.
"""

from __future__ import annotations


class TpuportError(Exception):
    """Base of all errors raised on purpose by tpuport."""

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


class MissingArtifactError(ArtifactError, UsageError):
    """A run directory, sidecar or folder of executables that was named is not there."""


class OutputError(UsageError):
    """The requested output cannot be written."""


class WriteError(ArtifactError, OutputError):
    """A file could not be written, such as on a full disk."""

    exit_code = 1


class VideoError(TpuportError):
    """The frames are not a video: NaN, constant or all black."""


class ReplayError(TpuportError):
    """A replayed run did not give the recorded latents."""
