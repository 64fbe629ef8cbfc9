"""Calling the command line in this process."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.processes import Once
from tpuport.cli import main
from tpuport.core.run import progress

#: A small video of the default model's demo.
SMALL = ("--size", "96x64", "--frames", "9", "--steps", "2")
#: The smallest video of the small pipeline that has more than one step and frame.
ASKED = (
    *("--prompt", "a fox runs", "--size", "32x16", "--frames", "5", "--steps", "2"),
    *("--negative-prompt", "blurry", "--option", "max_sequence_length=16"),
)
#: The same by upstream's own code, which compiles nothing.
UPSTREAM = (*ASKED, "--backend", "diffusers")


@dataclass(frozen=True)
class Ran:
    """What one call of ``main`` did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document on stdout."""
        return json.loads(self.out)

    @property
    def last(self) -> str:
        """The last line for people."""
        return self.err.strip().splitlines()[-1]


@dataclass(frozen=True)
class Made:
    """A finished run of two prompts with one seed."""

    ran: Ran
    folder: Path

    @property
    def videos(self) -> list[Path]:
        return [Path(video["path"]) for video in self.ran.json["videos"]]


def example(once: Once, name: str) -> Path:
    """A small pipeline of a class, in the layout that ``save_pretrained`` writes."""
    from tests.pipelines.example import all_examples, made, saved

    def write(folder: Path) -> None:
        saved(made(all_examples()[name])[0], folder / "pipeline")

    return once(name, write) / "pipeline"


def forget_stores() -> None:
    """Have stores looked for anew, as the environment says now."""
    import s3fs

    from tpuport.core.files import stores
    from tpuport.core.weights import hub

    s3fs.S3FileSystem.clear_instance_cache()
    stores._probe.cache_clear()
    hub._commits.clear()


class Cli:
    """``tpuport ARGS`` in this process."""

    def __call__(self, *args: str | Path) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            # What is said does not depend on how fast the machine is.
            mock.patch.object(progress, "BEAT", 3600.0),
        ):
            code = main([str(arg) for arg in args])
        return Ran(code, out.getvalue(), err.getvalue())

    def good(self, *args: str | Path) -> Ran:
        """A command that goes well."""
        ran = self(*args)
        assert ran.code == 0, ran.err
        return ran

    def refused(self, said: str, *args: str | Path, code: int = 2) -> Ran:
        """A command that ends with a line that says so."""
        ran = self(*args)
        assert (ran.code, said in ran.last) == (code, True), ran.err
        return ran


call = Cli()
