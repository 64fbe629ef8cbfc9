"""What must hold after a command that met a fault; each function tells what does not.

A verdict is a list of sentences. An empty list says that all held.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tests.cli.tools import Ran
from tpuport.core.files.fingerprint import hash_output
from tpuport.core.files.sealed_json import read_sidecar, sidecar_path
from tpuport.errors import LINE, TpuportError

#: No command says any of these words, whatever it met.
NEVER = ("Traceback", "Exception ignored", "unexpected ", "Fatal Python error")


def of_words(err: str) -> list[str]:
    """A command that says what only a program's author understands."""
    return [
        f"says {line.strip()[:200]!r}"
        for line in err.splitlines()
        if any(word in line for word in NEVER)
    ]


def of_end(ran: Ran, codes: Collection[int] = (0, 1, 2)) -> list[str]:
    """An exit code that is none of ``codes``, or an error that is not one line."""
    wrong = of_words(ran.err)
    errors = [line for line in ran.err.splitlines() if line.startswith("error: ")]
    if ran.code not in codes:
        wrong.append(f"exit code {ran.code}, saying {ran.err.strip()[-300:]!r}")
    elif len(errors) != int(ran.code in (1, 2)):
        wrong.append(f"exit code {ran.code} with {len(errors)} lines of error")
    wrong += [f"a line of {len(line)}" for line in errors if len(line) > LINE]
    return wrong


def of_named(ran: Ran, *names: object) -> list[str]:
    """An error that names none of the things at fault."""
    if ran.code == 0 or any(str(name) in ran.err for name in names):
        return []
    return [f"names none of {', '.join(map(str, names))}: {ran.err.strip()[-300:]!r}"]


def of_leftovers(*folders: Path) -> list[str]:
    """Temporary files of any process."""
    return [
        f"{path} is left"
        for folder in folders
        for path in folder.rglob("*")
        if path.name.startswith(".tpuport-") or path.suffix == ".tmp"
    ]


def of_pair(video: Path, *, alone: bool = False) -> list[str]:
    """A video and a sidecar that do not belong together.

    Args:
        alone: whether the video may be there without its sidecar, as a kill leaves it.
    """
    sidecar = sidecar_path(video)
    if not sidecar.exists():
        return [] if alone or not video.exists() else [f"{video} has no sidecar"]
    if not video.exists():
        return [f"{sidecar} has no video"]
    try:
        said = read_sidecar(sidecar)["output"]["sha256"]
    except TpuportError as error:
        return [f"the sidecar is damaged: {error}"]
    return [] if said == hash_output(video)[0] else [f"{sidecar} is of another video"]
