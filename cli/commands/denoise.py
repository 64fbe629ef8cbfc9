"""``tpuport denoise``: the second stage, on a run directory."""

from __future__ import annotations

from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.stage_commands import denoise_stage


@command("denoise")
def denoise(settings: Settings) -> None:
    """Denoise in a run directory that `encode` made.

    It runs no autoencoder: --vae is for --executables, which are of one.
    """
    prepare(debug=settings.debug)
    denoise_stage(settings)
