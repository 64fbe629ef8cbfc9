"""What is set before the TPU compiler is loaded for chips that are not there."""

from __future__ import annotations

import os

from tpuport.core.mesh.slices import Topology, check_libtpu, compile_environment


def prepare_topology(topology: Topology) -> None:
    """Set this process up to compile for ``topology``; before jax is imported.

    What the user set stays. libtpu reads the variables when it is loaded, once in a
    process.

    Raises:
        TopologyError: the TPU compiler is not installed.
    """
    check_libtpu(topology)
    for name, value in compile_environment(topology).items():
        os.environ.setdefault(name, value)
