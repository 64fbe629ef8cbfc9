"""Help is quick and complete; how the parser refuses what it does not know."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.tools import Cli
from tpuport.cli.asked.environment import DEFAULT_MODEL
from tpuport.core.spec.run_settings import COMMANDS

EVERY = tuple(COMMANDS.values())
GROUPS = {
    "": {name for name in EVERY if " " not in name},
    "bench": {"attention"},
    "runs": {"clean"},
}
HEAVY = ("torch", "jax", "diffusers", "transformers", "numpy")

_LIST_MODULES = """
import json, sys
from tpuport.cli import main
import contextlib, io
codes = []
for args in json.loads(sys.argv[1]):
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        codes.append(main(args))
print(json.dumps([codes, sorted(sys.modules)]))
"""


def test_help_and_mistakes_import_nothing_heavy() -> None:
    asked = [["--help"], [], ["--version"], *([*c.split(), "-h"] for c in EVERY)]
    asked += [["models"], ["plugins", "--json"], ["runs"]]
    fox = ["generate", "--prompt", "a fox"]
    wrong = [["generate"], [*fox, "--out", "a.avi"], [*fox, "--image", __file__]]
    wrong += [[*fox, "--latents", __file__], [*fox, "--lora", "none"], ["plan"]]
    done = subprocess.run(
        [sys.executable, "-c", _LIST_MODULES, json.dumps([*asked, *wrong])],
        capture_output=True,
        text=True,
        check=True,
    )
    codes, modules = json.loads(done.stdout)
    assert codes == [0] * len(asked) + [2] * len(wrong)
    assert not set(HEAVY) & set(modules)
    assert done.stderr == ""


@pytest.mark.parametrize("command", EVERY)
def test_help_fits_two_screens_and_begins_with_what_most_runs_name(
    cli: Cli, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = cli(*command.split(), "--help").out.splitlines()
    assert len(lines) <= 80
    assert max(map(len, lines)) <= 80
    assert any(line.startswith(f"  Example: tpuport {command}") for line in lines)
    heads = [line for line in lines if line.endswith(":") and line[0] != " "]
    assert heads[-1] == "Of every command:" or command in ("bench", "runs")
    if command == "generate":
        first, second = (lines.index(head) for head in heads[:2])
        common = [line.split()[0] for line in lines[first + 1 : second - 1]]
        assert common[:5] == ["--prompt", "--size", "--frames", "--steps", "--seed"]
        assert {"--out", "--model", "--variant", "--weights"} <= set(common)
        assert len(common) < 12
        assert f"(default: {DEFAULT_MODEL})" in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("group", ["", "bench", "runs"])
def test_a_group_says_in_full_what_its_commands_do(
    cli: Cli, group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = cli(*group.split(), "--help").out
    assert "..." not in said.partition("\n")[2]
    assert "  Example: tpuport " in said
    listed = said.partition("\nCommands:\n")[2].splitlines()
    commands = [line.split()[0] for line in listed if line[2] != " "]
    assert len(commands) == len(listed)  # each says it in a line
    for command, line in zip(commands, listed, strict=True):
        its_help = cli(*group.split(), command, "--help").out
        assert f"  {line[2:].removeprefix(command).strip()}\n" in its_help
    assert set(commands) == GROUPS[group]
    if not group:
        assert cli().out == said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--bogus",), "No such option: --bogus"),
        (("generate", "--step", "2"), "--step (did you mean --steps?)"),
        (
            ("bench", "attention", "--chip"),
            "requires an argument; see `tpuport bench attention --help`",
        ),
        (("generat",), "No such command 'generat'"),
        (("generate", "--steps", "many"), "error: --steps: 'many' is not an integer;"),
        (("generate", "--fps", "x"), "--fps: 'x' is not a number; give one such as"),
        (("serve", "--port", "-1"), "--port: '-1' is too small; give at least 0"),
        (("serve", "--port", "65536"), "65536' is too large; give at most 65535"),
        (("generate", "a fox"), '(a fox), give the prompt as --prompt "..."; see '),
        (("replay",), "Missing argument 'FILE'"),
        (("bench", "--repeat", "0"), "--repeat"),
    ],
)
def test_the_parser_answers_in_one_line(
    cli: Cli, args: tuple[str, ...], said: str
) -> None:
    ran = cli(*args)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("error: ")
    assert said in ran.err
    assert "--help`" in ran.err


LONG = "a panda plays the guitar " * 60


@pytest.mark.parametrize(
    ("args", "advice"),
    [
        (("generate", "--steps", LONG), "see `tpuport generate --help`"),
        (("generate", f"--{LONG}"), "see `tpuport generate --help`"),
        ((LONG,), "see `tpuport --help`"),
        (("generate", "--prompt", "a", "--seed", LONG), "or several as 1,2,3"),
        (("generate", "--prompt", "a", "--mesh", LONG), '"2,1,4" (dp, sp, tp)'),
        (("generate", "--prompt", "a", "--cache", LONG), "deepcache, taylorseer, none"),
        (("generate", "--config", "c.yaml"), "is not text"),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else value,
)
def test_an_error_is_short_whatever_was_given_and_keeps_its_advice(
    cli: Cli, args: tuple[str, ...], advice: str
) -> None:
    Path("c.yaml").write_text(f'prompt: {{a: "{LONG}"}}')
    ran = cli(*args)
    assert (ran.code, ran.err.count("\n")) == (2, 1)
    assert len(ran.last) <= 300
    assert ran.last.endswith(advice)
    assert "a panda plays" in ran.last
