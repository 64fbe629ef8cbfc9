"""Everything a run leaves on disk: the public door to the modules that do the work.

A file appears under its name whole or not at all (:mod:`tpuport.core.files`), and a
file is used only after it has been found to be the one that was recorded
(:mod:`tpuport.core.run_directory`).
"""

from __future__ import annotations

from tpuport.core.documents import (
    SCHEMA_VERSION,
    SIDECAR_SCHEMA,
    read_sidecar,
    sidecar_path,
    write_sidecar,
)
from tpuport.core.files import atomic_write_bytes, atomic_write_json, replacing
from tpuport.core.fingerprint import FINGERPRINT_WHOLE_BYTES, fingerprint_files
from tpuport.core.run_directory import RunDirectory
from tpuport.core.run_record import (
    RUN_FILE,
    RUN_SCHEMA,
    STAGE_FILES,
    STAGES,
    blocks_of,
    implementation_in,
)
from tpuport.core.tensors import TensorSpec, check_tensors, save_tensors

__all__ = [
    "FINGERPRINT_WHOLE_BYTES",
    "RUN_FILE",
    "RUN_SCHEMA",
    "SCHEMA_VERSION",
    "SIDECAR_SCHEMA",
    "STAGES",
    "STAGE_FILES",
    "RunDirectory",
    "TensorSpec",
    "atomic_write_bytes",
    "atomic_write_json",
    "blocks_of",
    "check_tensors",
    "fingerprint_files",
    "implementation_in",
    "read_sidecar",
    "replacing",
    "save_tensors",
    "sidecar_path",
    "write_sidecar",
]
