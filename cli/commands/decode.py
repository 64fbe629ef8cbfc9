"""``tpuport decode``: the last stage, from a run directory to videos."""

from __future__ import annotations

from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.stage_commands import decode_stage


@command("decode")
def decode(settings: Settings) -> None:
    """Decode the latents of a run directory into videos.

    Without --out the video is written into the run directory, as video.mp4.
    """
    prepare(debug=settings.debug)
    decode_stage(settings)
