"""A process of its own for the TPU compiler, which reads its environment once."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.processes import run_python

ROOT = Path(__file__).resolve().parents[1]

#: What jax.experimental.topologies and libtpu want where there is no TPU. The last but
#: one lets two compilers run on one machine; none of the flags that make CPU programs
#: quick to compile (``conftest.py``) reaches the compiler for TPUs.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v6e-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
}

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


def run_program(
    program: str, *args: str, timeout: float = 600, **variables: str
) -> list[str]:
    """The lines that a program prints, with the tests' modules on its path.

    ``variables`` are of the environment, and win over ``ENVIRONMENT``.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = run_python(
        ["-c", program, *args],
        environment=os.environ | ENVIRONMENT | {"PYTHONPATH": path} | variables,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def run_json(
    program: str, *args: str, timeout: float = 600, **variables: str
) -> dict[str, Any]:
    """The document in the last line that a program prints."""
    lines = run_program(program, *args, timeout=timeout, **variables)
    found: dict[str, Any] = json.loads(lines[-1])
    return found
