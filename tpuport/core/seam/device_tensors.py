"""Tensors of a program's results, which stay on the devices until host code reads them.

A cache of frames goes from one call of a decoder to the next: upstream's loop hands
the cache on and reads nothing. Such a tensor is never copied to the host. A call may
also wait until its result is read; see ``program_runs.py``. Arithmetic on a tensor may
be left to the devices; see ``arithmetic.py``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tpuport.core.mesh.mesh_arrays import readable

#: What upstream may ask of a tensor without reading the numbers.
_ABOUT = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_meta")
) | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.stride,
    torch.Tensor.is_contiguous,
    torch.Tensor.element_size,
    torch.Tensor.__len__,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.ndim.__get__,
}
#: Functions of torch, by name, that are made of operators alone. Others may look into a
#: tensor's memory.
_OF_OPERATORS = """
abs add addcdiv addcmul all amax amin any bfloat16 bmm broadcast_to cat ceil
chunk clamp clamp_max clamp_min clip clone concat concatenate contiguous copy
cos cpu detach div divide einsum eq exp expand expand_as expm1 fill flatten flip
float floor ge greater gt half hstack index isinf isnan le lerp less linalg_norm
linalg_vector_norm log log1p logical_and logical_not logical_or lt masked_fill
matmul maximum mean minimum mm moveaxis movedim mul multiply narrow ne neg
negative norm pad permute positive pow reciprocal relu repeat reshape roll rsqrt
rsub select sigmoid sign silu sin split split_with_sizes sqrt square squeeze
stack std sub subtract sum swapaxes t tanh tensor_split tile to transpose
true_divide type type_as unbind unflatten unsqueeze var view view_as vstack
where __abs__ __add__ __div__ __eq__ __ge__ __getitem__ __gt__ __le__ __lt__
__matmul__ __mul__ __ne__ __neg__ __pos__ __pow__ __radd__ __rdiv__ __rmul__
__rpow__ __rsub__ __rtruediv__ __setitem__ __sub__ __truediv__ add_ clamp_ copy_
div_ fill_ mul_ sub_ __iadd__ __idiv__ __imul__ __isub__ __itruediv__
"""
#: Functions that take a tensor's shape and dtype, and no numbers.
_OF_SHAPES = """
empty_like full_like ones_like rand_like randn_like zeros_like new_empty
new_full new_ones new_zeros
"""
_BY_OPERATORS, _BY_SHAPES = set(_OF_OPERATORS.split()), set(_OF_SHAPES.split())
_LIKE_ANOTHER = frozenset(("view_as", "expand_as"))
_KEY = torch._C.DispatchKey.ADInplaceOrView
#: Torch keeps no books of views of a tensor without memory; :class:`Family` does.
_BOOKS = torch._C.DispatchKeySet(_KEY)


class HostError(Exception):
    """An operator that the host must compute."""


class Value:
    """An array that is on the devices, or will be.

    Args:
        array: ``None`` until ``run`` has made it.
        waits: whether ``run`` makes a call that waits for a second one.
    """

    __slots__ = ("__weakref__", "array", "run", "waits")

    def __init__(
        self,
        array: Any = None,
        run: Callable[[], None] | None = None,
        *,
        waits: bool = False,
    ) -> None:
        self.array, self.run, self.waits = array, run, waits

    def answered(self, array: Any) -> None:
        """Take the array."""
        self.array, self.run, self.waits = array, None, False

    def get(self) -> Any:
        """The array."""
        if self.array is None:
            assert self.run is not None
            self.run()
        assert self.array is not None
        return self.array


Records = Callable[[Any, Any, Any], Any]
"""Gives the result of an operator on its arguments, to be computed on the devices.

Raises :class:`HostError` if the host must compute it.
"""


class _Recording(threading.local):
    by: Records | None = None


_recording = _Recording()


class View(NamedTuple):
    """One operator that makes a view: of a tensor on the host in place of ``None``."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The view."""
        found: torch.Tensor = self.operator(tensor, *self.args, **self.kwargs)
        return found


class Family:
    """A tensor and its views: what is written to one is seen in all.

    On the host they are views of one tensor.

    Args:
        shape, strides, dtype: of the tensor.

    Attributes:
        host: the tensor on the host, if something has read it or a view.
        seen: how often that was written to by then.
    """

    __slots__ = ("_dtype", "_members", "_shape", "_strides", "host", "seen")

    def __init__(
        self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._shape, self._strides, self._dtype = shape, strides, dtype
        self._members: list[weakref.ref[DeviceTensor]] = []
        self.host: torch.Tensor | None = None
        self.seen = 0

    def add(self, tensor: DeviceTensor) -> None:
        """A tensor becomes a member."""
        self._members = [one for one in self._members if one() is not None]
        self._members.append(weakref.ref(tensor))

    def members(self) -> list[DeviceTensor]:
        """Those that somebody holds."""
        return [one for ref in self._members if (one := ref()) is not None]

    @property
    def writes(self) -> int:
        """How often the host wrote to a member."""
        return 0 if self.host is None else version(self.host) - self.seen

    def read(self) -> torch.Tensor:
        if self.host is None:
            members = self.members()
            whole = next((one for one in members if not one.path), None)
            # Torch counts no writes to what is made in inference mode.
            with torch.inference_mode(False), torch.no_grad():
                self.host = self._between(members) if whole is None else whole.copied()
            self.seen = version(self.host)
        return self.host

    def _between(self, views: Iterable[DeviceTensor]) -> torch.Tensor:
        """A tensor with the numbers of views; nobody sees the others."""
        made = torch.empty_strided(self._shape, self._strides, dtype=self._dtype)
        for one in views:
            _write(one.view_of(made), one.copied())
        return made


def version(tensor: torch.Tensor) -> int:
    """How often a tensor was written to; 0 where torch does not count."""
    if isinstance(tensor, DeviceTensor):
        return tensor.writes + tensor.family.writes
    return 0 if tensor.is_inference() else tensor._version


def _write(view: torch.Tensor, numbers: torch.Tensor) -> None:
    """Give a view its numbers; an axis without a stride has one of each."""
    for axis, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[axis] > 1:
            view, numbers = view.narrow(axis, 0, 1), numbers.narrow(axis, 0, 1)
    view.copy_(numbers)


class DeviceTensor(torch.Tensor):
    """A tensor of the host whose numbers are copied when something asks for them.

    Args:
        shape, dtype, strides: of the tensor.
        value: what the devices have, or will.
        read: makes the tensor on the host from the array.
        arithmetic: records operators; by default the host computes.
        view_of: the tensor that this is a view of, and how.

    Attributes:
        writes: how often the devices wrote to the tensor.
        path: how it is a view of the first of its family.
    """

    value: Value
    writes: int
    path: tuple[View, ...]
    family: Family
    arithmetic: Records | None
    _host: torch.Tensor | None
    _read: Callable[[Any], torch.Tensor]
    _asked: list[None]

    @staticmethod
    def __new__(
        cls: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        value: Value,
        *,
        read: Callable[[Any], torch.Tensor],
        strides: tuple[int, ...] | None = None,
        arithmetic: Records | None = None,
        view_of: tuple[DeviceTensor, View] | None = None,
    ) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device="cpu"
        )
        made.value, made.arithmetic = value, arithmetic
        made._read, made._asked = read, []
        made._host, made.writes, made.path = None, 0, ()
        if view_of is None:
            with torch._C.DisableTorchFunctionSubclass():
                made.family = Family(tuple(shape), made.stride(), dtype)
        else:
            base, view = view_of
            made.family, made.path = base.family, (*base.path, view)
        made.family.add(made)
        return made

    def ask(self) -> Value | None:
        """What the devices have; ``None`` if host code may have written since."""
        self._asked[:] = [None]
        return None if self.written else self.value

    @property
    def written(self) -> bool:
        """Whether host code may have written to the tensor since it was read."""
        host = self.family.host
        return host is not None and (host.is_inference() or self.family.writes > 0)

    @property
    def on_devices(self) -> Any:
        """The array; ``None`` if host code may have written to the tensor since."""
        value = self.ask()
        return None if value is None else value.get()

    def alone(self) -> bool:
        """Whether no view and no host code can see what is written to the tensor."""
        return self.family.host is None and len(self.family.members()) == 1

    def view_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Of the first of the family on the host, this view."""
        for view in self.path:
            tensor = view.of(tensor)
        return tensor

    def on_host(self) -> torch.Tensor:
        """The tensor as torch knows tensors; the same one at every call."""
        if self._host is None:
            self._asked[:] = [None]
            self._host = self.view_of(self.family.read())
        return self._host

    def copied(self) -> torch.Tensor:
        """The numbers, in torch's order in memory."""
        found = self._read(self.value.get())
        with torch._C.DisableTorchFunctionSubclass():
            strides = self.stride()
        if found.stride() == strides or 0 in strides:
            return found
        return torch.empty_strided(found.shape, strides, dtype=found.dtype).copy_(found)

    def later(self, *, always: bool = False) -> Callable[[], torch.Tensor | None]:
        """What gives the numbers as they are now.

        It gives ``None`` if nothing has asked for the numbers by then, and nothing can,
        because nobody holds the tensor: many answers of a module are not read.

        Args:
            always: whether the numbers are wanted in any case.
        """
        array, read, asked, held = (
            self.value.get(),
            self._read,
            self._asked,
            weakref.ref(self),
        )

        array = readable(array)  # by all processes now: one alone may ask later

        def numbers() -> torch.Tensor | None:
            wanted = always or asked or held() is not None
            return read(array).clone() if wanted else None

        return numbers

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in _LIKE_ANOTHER and not isinstance(args[0], cls):
            # A view of the host: only the shape of the other one is asked for.
            args = (args[0], *tree_map_only(cls, cls.shape_on_host, args[1:]))
        if name in _BY_OPERATORS and (by := _computing((args, kwargs))) is not None:
            before, _recording.by = _recording.by, by
            try:
                with (
                    torch._C.DisableTorchFunctionSubclass(),
                    torch._C._ExcludeDispatchKeyGuard(_BOOKS),
                ):
                    return func(*args, **kwargs)
            except HostError:
                pass
            finally:
                _recording.by = before
        to_host = cls.shape_on_host if name in _BY_SHAPES else cls.on_host
        args, kwargs = tree_map_only(cls, to_host, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if _recording.by is not None:
            return _recording.by(func, args, kwargs or {})
        args, kwargs = tree_map_only(cls, cls.on_host, (args, kwargs or {}))
        return func(*args, **kwargs)

    def shape_on_host(self) -> torch.Tensor:
        """A tensor on the host of this shape, with any numbers."""
        if self._host is not None:
            return self._host
        with torch._C.DisableTorchFunctionSubclass():
            size, strides, dtype = self.size(), self.stride(), self.dtype
        return torch.empty_strided(size, strides, dtype=dtype)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.on_host().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.on_host().__reduce_ex__(protocol)


def _computing(given: Any) -> Records | None:
    """What computes on tensors; ``None`` where the host does."""
    tensors = [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
    if torch.is_grad_enabled() and any(map(_needs_grad, tensors)):
        return None
    for one in tensors:
        if isinstance(one, DeviceTensor) and one.arithmetic is not None and one.ask():
            return one.arithmetic
    return None


def _needs_grad(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or its copy on the host, asks for gradients."""
    if isinstance(tensor, DeviceTensor):
        return tensor._host is not None and tensor._host.requires_grad
    return tensor.requires_grad
