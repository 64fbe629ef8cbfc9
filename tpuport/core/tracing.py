"""Helpers that replacements of upstream functions may use while being traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@contextlib.contextmanager
def outside_torchax() -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
    """Plain torch on the host, in the middle of a trace.

    Yields a function that lifts a host tensor into the trace as a constant. Outside of
    a trace it returns the tensor as it is.
    """
    from torch.overrides import _get_current_function_mode_stack
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    from tpuport.core import compat

    tensor_module = compat.import_torchax().tensor
    env = None
    for mode in (
        *_get_current_function_mode_stack(),
        *_get_current_dispatch_mode_stack(),
    ):
        if isinstance(
            mode, (tensor_module.XLAFunctionMode, tensor_module.XLADispatchMode)
        ):
            env = mode.env

    def lift(tensor: torch.Tensor) -> torch.Tensor:
        if env is None:
            return tensor
        lifted: torch.Tensor = env.j2t_iso(env.t2j_copy(tensor))
        return lifted

    if env is None:
        yield lift
        return
    env.disable_torch_modes()
    try:
        yield lift
    finally:
        env.enable_torch_modes()
