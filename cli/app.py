"""The program: its commands, and how any run of it ends."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence

import typer

import tpuport
from tpuport.cli.asked.parsing import Command, Group
from tpuport.cli.commands.batch import batch
from tpuport.cli.commands.bench import bench
from tpuport.cli.commands.check import check_, new_model, scan_
from tpuport.cli.commands.compile import compile_
from tpuport.cli.commands.doctor import doctor
from tpuport.cli.commands.generate import decode, denoise, encode, generate, resume
from tpuport.cli.commands.models import models, plugins
from tpuport.cli.commands.patches import patches
from tpuport.cli.commands.plan import plan
from tpuport.cli.commands.replay import replay
from tpuport.cli.commands.runs import clean, runs
from tpuport.cli.commands.serve import serve
from tpuport.cli.commands.submit import submit
from tpuport.cli.commands.tune import bench_attention, tune
from tpuport.cli.shown.errors import as_usage_error, explain

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="PyTorch video-diffusion pipelines on TPUs: exact, sharded, compiled.\n\n"
    'Example: tpuport generate --prompt "a panda" --out panda.mp4',
)
app.command("generate", cls=Command)(generate)
app.command("encode", cls=Command)(encode)
app.command("denoise", cls=Command)(denoise)
app.command("decode", cls=Command)(decode)
app.command("resume", cls=Command)(resume)
app.command("replay", cls=Command)(replay)
app.command("batch", cls=Command)(batch)
app.command("serve", cls=Command)(serve)
app.command("submit", cls=Command)(submit)
runs_app = typer.Typer(cls=Group, invoke_without_command=True)
runs_app.callback()(runs)
runs_app.command("clean", cls=Command)(clean)
app.add_typer(runs_app, name="runs")
app.command("plan", cls=Command)(plan)
app.command("compile", cls=Command)(compile_)
# `tpuport bench` measures; what follows it names something else to measure.
bench_app = typer.Typer(cls=Group, invoke_without_command=True)
bench_app.callback()(bench)
bench_app.command("attention", cls=Command)(bench_attention)
app.add_typer(bench_app, name="bench")
app.command("tune", cls=Command)(tune)
app.command("models", cls=Command)(models)
app.command("plugins", cls=Command)(plugins)
app.command("patches", cls=Command)(patches)
app.command("scan", cls=Command)(scan_)
app.command("check", cls=Command)(check_)
app.command("new-model", cls=Command)(new_model)
app.command("doctor", cls=Command)(doctor)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Show the version."),
) -> None:
    if version:
        print(f"tpuport {tpuport.__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(context.get_help())


def run(argv: Sequence[str] | None) -> int:
    """Parse ``argv``, run the command, and return the exit code."""
    command = typer.main.get_command(app)
    args = list(sys.argv[1:] if argv is None else argv)
    # Filters set for one command must not outlive it in a process that calls main().
    with warnings.catch_warnings():
        try:
            code = command.main(args=args, prog_name="tpuport", standalone_mode=False)
        except (typer.Abort, KeyboardInterrupt):
            return explain(KeyboardInterrupt(), debug=False)
        except Exception as error:
            usage = as_usage_error(error)
            if usage is None:
                return explain(error, debug="--debug" in args)
            print(f"error: {usage}", file=sys.stderr)
            return 2
    return code if isinstance(code, int) else 0
