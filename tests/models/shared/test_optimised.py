"""Programs compiled as they are for users: with all of XLA's optimisations for CPUs.

``tests/conftest.py`` turns the optimisations off for every other test.
"""

from __future__ import annotations

import json
import os

import pytest

from tests.processes import run_python
from tests.tolerances import TOLERANCES

PROGRAM = """
import json, sys
import tpuport
from tests.pipelines.example import all_examples, difference, made, run
pipeline, call = made(all_examples()[sys.argv[1]])
expected = run(pipeline, call)
with tpuport.ported(pipeline, mesh=sys.argv[2], progress=False):
    found = run(pipeline, call)
print(json.dumps(difference(found, expected)))
"""


@pytest.mark.parametrize(
    ("name", "mesh"),
    [("CogVideoXPipeline", "dp=1"), ("HunyuanVideo15Pipeline", "dp=2,sp=2,tp=2")],
)
def test_optimised_programs_make_upstreams_video(name: str, mesh: str) -> None:
    """Over 10 s: all programs of a pipeline are compiled with every optimisation."""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = run_python(["-c", PROGRAM, name, mesh], environment=os.environ | flags)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found <= TOLERANCES["video float32"]
