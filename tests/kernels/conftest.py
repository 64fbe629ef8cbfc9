"""Shapes and dtypes that kernels are annotated with are checked in these tests."""

from __future__ import annotations

from jaxtyping import install_import_hook

install_import_hook("tpuport.kernels", "beartype.beartype")
