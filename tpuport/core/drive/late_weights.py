"""A pipeline whose components get their weights when they are first called.

A run that is given back what it did before calls a part of its components alone. The
weights of others are not read, and need not be there.
"""

from __future__ import annotations

import torch

from tpuport.core.drive.rehearsal import without_weights
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.reports import Reporter
from tpuport.core.seam.ported import modules_of
from tpuport.core.weights.stored_tensors import StoredFile, StoredTensor
from tpuport.errors import WeightsError


class LateWeights:
    """Loads weights at the first call of a component.

    Until then parameters are NaN: a pipeline that reads them outside of calls makes no
    video, which is refused. Buffers are read at once, because pipelines read them.

    Attributes:
        pipeline: with its components.
    """

    def __init__(
        self, folder: PipelineFolder, dtype: torch.dtype, reporter: Reporter
    ) -> None:
        self._folder, self._dtype, self._reporter = folder, dtype, reporter
        self.pipeline = without_weights(folder, dtype, float("nan"))
        self._waiting = modules_of(self.pipeline)
        for name, component in self._waiting.items():
            _read_buffers(folder, name, component)

    def load(self, called: str) -> None:
        """Give the component that ``called`` begins with its weights, once.

        Raises:
            WeightsError: they are not there, or cannot be used.
        """
        name = called.partition(".")[0]
        component = self._waiting.pop(name, None)
        if component is None:
            return
        # Upstream's classes draw numbers when they are built, which no run must see.
        with (
            self._reporter.timed(f"loading {name}"),
            torch.random.fork_rng(devices=[]),
        ):
            _take_over(component, self._folder.load_component(name, self._dtype))


def _take_over(module: torch.nn.Module, loaded: torch.nn.Module) -> None:
    """Give ``module`` the tensors of ``loaded``, which is of the same config."""
    found = dict(loaded.named_modules())
    for path, child in module.named_modules():
        other = found[path]
        child._parameters, child._buffers = other._parameters, other._buffers
    if hasattr(loaded, "generation_config"):
        module.generation_config = loaded.generation_config


def _read_buffers(folder: PipelineFolder, name: str, module: torch.nn.Module) -> None:
    """Read the buffers that are stored; where the files are missing, they are NaN."""
    wanted = {
        f"{path}.{own}".lstrip("."): (child, own)
        for path, child in module.named_modules()
        for own, tensor in child._buffers.items()
        if tensor is not None and own not in child._non_persistent_buffers_set
    }
    if not wanted:
        return
    try:
        files = folder.checkpoint.weight_files(name)
    except WeightsError:
        for child, own in wanted.values():
            tensor = child._buffers[own]
            if tensor is not None and tensor.is_floating_point():
                child._buffers[own] = torch.full_like(tensor, float("nan"))
        return
    for key in wanted.keys() & files.keys():
        child, own = wanted[key]
        stored = StoredFile(folder.reference, files[key], framework="pt")
        found = stored.get_tensor(key)
        if isinstance(found, StoredTensor):
            found = found.on_host()
        child._buffers[own] = found.to(child._buffers[own])
