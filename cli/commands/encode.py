"""``tpuport encode``: the first stage, which creates the run directory."""

from __future__ import annotations

from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.stage_commands import encode_stage
from tpuport.core.files.run_record import STAGES
from tpuport.errors import UsageError


@command("encode")
def encode(settings: Settings) -> None:
    """Encode the prompts into a run directory; takes the settings of `generate`.

    The settings are kept in the run directory: `denoise` and `decode` read them there.
    """
    prepare(debug=settings.debug)
    if settings.run_dir is None:
        raise UsageError(f"--run-dir is missing; name a folder for {STAGES[0]}")
    encode_stage(settings)
