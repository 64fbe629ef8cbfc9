"""Small expressions of constants, computed by torch itself while a program is traced.

Frequencies of timesteps and positions are such: an exponential or a power of numbers
that no input changes. XLA rounds their last bit otherwise, and a position or a timestep
of thousands multiplies it. The results are literals of the program. Long ones of whole
numbers and masks, of positions say, the program computes, which is exact: they are
literals only where an operator may need their values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch.utils import _mode_utils
from torch.utils import _pytree as pytree

from tpuport.core.arrays import to_numpy
from tpuport.core.tracing.patching import Patch

#: Where a tensor keeps torch's own, and the array that was made of torch's.
_OWN = "_tpuport_constant"
#: Says of a tensor of the host that ``torch.tensor`` made it while tracing.
_MADE = "_tpuport_made_here"
#: Elements of a constant, at most; a program computes larger ones.
MOST = 1 << 14
#: Elements of a literal of whole numbers or a mask, at most.
MOST_WHOLE = 128
_MAKERS = (torch.arange, torch.linspace, torch.tensor)
#: Operators whose values decide what comes of them: no more than a constant's elements.
_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEX = (torch.Tensor.__getitem__, torch.ops.aten.index.Tensor)


def _computed(original: Callable[..., Any]) -> Callable[..., Any]:
    """Every call of a torch operator."""

    def dispatch(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kwargs = kwargs or {}
        with _mode_utils.no_dispatch(), torch._C.DisableTorchFunction():
            found = _by_torch(self, func, args, kwargs)
        if found is None:
            if _reads(func):
                # What is indexed is not read.
                whole, rest = (args[:1], args[1:]) if func in _INDEX else ((), args)
                rest, kwargs = pytree.tree_map_only(
                    torch.Tensor, lambda t: _literal(self, t), (rest, kwargs)
                )
                args = (*whole, *rest)
            return _mixed(original, self, func, types, args, kwargs)
        if _is_long(found) and not _reads(func):
            result = original(self, func, types, args, kwargs)
            setattr(result, _OWN, (found, result._elem))
            return result
        return pytree.tree_map_only(torch.Tensor, lambda t: _kept(self, t), found)

    return dispatch


def _by_torch(env: Any, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What torch makes of constants; ``None`` for other calls, and large results."""
    inputs = [x for x in pytree.tree_leaves((args, kwargs)) if _is_tensor(x)]
    if func in _MAKERS:
        if inputs or not env._should_use_torchax_tensor(kwargs.get("device")):
            return None
    elif not inputs or not _is_pure(func) or any(_own(x) is None for x in inputs):
        return None

    def call(device: str) -> Any:
        def there(x: Any) -> Any:
            own = _own(x) if _is_tensor(x) else None
            return x if own is None else own.to(device)

        given = pytree.tree_map(there, (args, kwargs))
        if func in _MAKERS or "device" in kwargs:
            given[1]["device"] = device
        return func(*given[0], **given[1])

    if not _reads(func):
        made = [x for x in pytree.tree_leaves(call("meta")) if _is_tensor(x)]
        if any(x.numel() > MOST for x in made):
            return None
    return call("cpu")


def _mixed(
    original: Callable[..., Any],
    env: Any,
    func: Any,
    types: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """The call, with small tensors of the host that forward made as constants."""
    if any(map(_is_made, (*args, *kwargs.values()))):
        args, kwargs = on_device(env, (args, kwargs))
    result = original(env, func, types, args, kwargs)
    if func is torch.tensor and _OWN not in vars(result):
        vars(result)[_MADE] = True
    return result


def _is_made(value: Any) -> bool:
    """Whether a value is a tensor of the host that forward made, or has some."""
    if isinstance(value, list | tuple):
        return any(map(_is_made, value))
    return isinstance(value, torch.Tensor) and _MADE in vars(value)


def on_device(env: Any, tree: Any) -> Any:
    """A tree in which tensors of the host that ``forward`` made are constants."""

    def moved(tensor: torch.Tensor) -> Any:
        made = _MADE in vars(tensor) and not hasattr(tensor, "jax")
        return _kept(env, tensor) if made else tensor

    return pytree.tree_map_only(torch.Tensor, moved, tree)


def _is_long(found: Any) -> bool:
    """Whether torch's result is many whole numbers, or a large mask."""
    if not _is_tensor(found) or found.is_floating_point() or found.is_complex():
        return False
    return found.numel() > MOST_WHOLE


def _reads(func: Any) -> bool:
    """Whether an operator may need values to know what it returns."""
    if isinstance(func, torch._ops.OpOverload):
        return bool(_READING & {*func.tags})
    return func in _INDEX


def _is_pure(func: Any) -> bool:
    """Whether an operator of torch draws nothing, and neither changes nor shares."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in func.tags:
        return False
    schema = func._schema
    return not any(x.alias_info for x in (*schema.arguments, *schema.returns))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _own(tensor: Any) -> torch.Tensor | None:
    """Torch's tensor of a constant, if nothing was written to it since."""
    own, array = vars(tensor).get(_OWN, (None, None))
    return own if own is not None and tensor._elem is array else None


def _literal(env: Any, tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` with its values, if torch computed them."""
    own = _own(tensor)
    return tensor if own is None else _kept(env, own)


def _kept(env: Any, own: torch.Tensor) -> Any:
    with jax.ensure_compile_time_eval():
        array = jnp.asarray(to_numpy(own))
    tensor = env.j2t_iso(array)
    setattr(tensor, _OWN, (own, array))
    return tensor


CONSTANTS = Patch(
    name="torch-constants",
    target="torchax.tensor:Environment.dispatch",
    replacement=_computed,
    wraps=True,
    reason="the last bit of an exponential depends on the compiler: a timestep of 1000 "
    "makes 2e-5 of it, and an embedded guidance of 6000 2e-4",
    upstream="torchax==0.0.13",
    link="https://github.com/google/torchax",
)
"""For any model."""
