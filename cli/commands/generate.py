"""``tpuport generate``: from prompts to videos."""

from __future__ import annotations

import time

from tpuport.cli.asked.environment import prepare
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.staged import begin_run
from tpuport.cli.runs.variants import with_model


@command("generate")
def generate(settings: Settings) -> None:
    """Make videos from prompts.

    Upstream's pipeline drives, and its modules run on the mesh. Every prompt is made
    with every seed. What you leave out is the variant's or upstream's default.

    Example: tpuport generate --prompt "a panda" --variant 5b --out panda.mp4
    """
    prepare(debug=settings.debug)
    started = time.perf_counter()
    begin_run(with_model(settings), started, "generate")
