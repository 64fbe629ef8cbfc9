"""A setting is declared once, read once, and documented."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tpuport.cli.asked.settings import TABLE
from tpuport.core.spec.run_settings import COMMANDS

ROOT = Path(__file__).parents[2]
READER = "tpuport/core/spec/kinds.py"

#: One more field, which everything else follows.
FIELD = '    colour: str = how(kinds.text, "--colour", "Of nothing.", default="grey")\n'
BEFORE = "    compile_cache: bool"

USE = """
import contextlib, io, json, sys
from tpuport.cli import main
from tpuport.cli.commands import generate
from tpuport.core.spec.run_settings import RunSettings
from tpuport.errors import UsageError

seen = []

def keep(settings):
    seen.append(settings.colour)
    raise UsageError("enough")

generate.check_run = keep
shown = io.StringIO()
with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(io.StringIO()):
    main(["generate", "--help"])
    main(["generate"])
    main(["generate", "--colour", "red"])
    main(["generate", "--config", sys.argv[1]])
print(json.dumps({
    "seen": seen,
    "help": "--colour" in shown.getvalue(),
    "keyword": RunSettings.read({"colour": "green"}).colour,
}))
"""


def test_text_is_parsed_in_one_module() -> None:
    parsers = ("MeshSpec.parse", "AttentionChoice.parse", "StepCache.parse")
    callers: dict[str, set[str]] = {name: set() for name in parsers}
    for path in (p for d in ("tpuport", "cli") for p in (ROOT / d).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if name in callers:
                callers[name].add(str(path.relative_to(ROOT)))
    assert callers == {name: {READER} for name in parsers}


def test_a_field_is_a_flag_a_key_and_a_keyword(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "tpuport", copy / "tpuport")
    shutil.copytree(ROOT / "cli", copy / "tpuport/cli")
    table = copy / "tpuport/core/spec/run_settings.py"
    text = table.read_text()
    assert text.count(BEFORE) == 1
    table.write_text(text.replace(BEFORE, FIELD + BEFORE))
    config = tmp_path / "c.yaml"
    config.write_text("colour: blue\n")
    done = subprocess.run(
        [sys.executable, "-c", USE, str(config)],
        cwd=copy,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {
        "seen": ["grey", "red", "blue"],
        "help": True,
        "keyword": "green",
    }


def test_the_documented_flags_are_those_of_the_commands() -> None:
    documented: dict[str, set[str]] = {}
    for line in (ROOT / "docs/cli.md").read_text().splitlines():
        flags, _, commands = line.partition("|")[2].partition("|")
        letters = set(re.findall(r"\b[A-Z]\b", commands.rpartition(" | ")[2]))
        if "FOLDER" in flags and "--out" in flags:
            letters.discard("C")  # compile's own
        for flag in re.findall(r"`(--[a-z-]+)", flags):
            documented.setdefault(flag, set()).update(letters)
    by_flag: dict[str, set[str]] = {}
    for setting in TABLE.values():
        letters = set(setting.commands) & set("GENDRPCB")
        by_flag.setdefault(setting.flags[0], set()).update(letters)
    for everywhere in ("--json", "--debug"):
        assert by_flag.pop(everywhere) == set("GENDRPCB")
    assert {flag: documented.get(flag) for flag in by_flag} == by_flag
    assert set("GENDRPCB") <= COMMANDS.keys()
