"""The built-in model ports, found through the ``tpuport`` entry-point group."""
