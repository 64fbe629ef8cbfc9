"""Tensors of a program's results, which stay on the devices until host code reads them.

A cache of frames goes from one call of a decoder to the next: upstream's loop hands
the cache on and reads nothing. Such a tensor is never copied to the host. A call may
also wait until its result is read; see ``pairs.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

#: What upstream may ask of a tensor without reading the numbers.
_ABOUT = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "requires_grad", "is_meta")
) | {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.numel,
    torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    torch.Tensor.ndim.__get__,
}


class DeviceTensor(torch.Tensor):
    """A tensor of the host whose numbers are copied when something asks for them.

    Args:
        shape, dtype: of the tensor.
        read: makes the tensor on the host from the array.
        array: on the devices; ``None`` while the call waits.
        run: makes the call that waits, which ends in :meth:`answered`.
    """

    _array: Any
    _read: Callable[[Any], torch.Tensor]
    _run: Callable[[], None]
    _host: torch.Tensor | None
    _asked: list[None]

    @staticmethod
    def __new__(
        cls: Any,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        read: Callable[[Any], torch.Tensor],
        array: Any = None,
        run: Callable[[], None] = lambda: None,
    ) -> DeviceTensor:
        made: DeviceTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device="cpu"
        )
        made._array, made._read, made._run, made._host = array, read, run, None
        made._asked = []
        return made

    def answered(self, array: Any) -> None:
        """Take the result of the call that waited."""
        self._array, self._run = array, lambda: None

    def _on_devices(self) -> Any:
        if self._array is None:
            self._run()
        assert self._array is not None
        return self._array

    @property
    def on_devices(self) -> Any:
        """The array; ``None`` if host code may have written to the tensor since."""
        host = self._host
        self._asked.append(None)
        if host is None or (not host.is_inference() and host._version == 0):
            return self._on_devices()
        return None

    @property
    def present(self) -> Any:
        """The array; ``None`` while the call waits for another one."""
        return self._array

    @property
    def host(self) -> torch.Tensor | None:
        """The tensor on the host, if something has read it."""
        return self._host

    def on_host(self) -> torch.Tensor:
        """The tensor as torch knows tensors; the same one at every call."""
        if self._host is None:
            self._asked.append(None)
            self._host = self._read(self._on_devices())
        return self._host

    def later(self) -> Callable[[], torch.Tensor | None]:
        """What gives the numbers as they are now.

        It gives ``None`` if nothing has asked for the numbers by then, and nothing can,
        because nobody holds the tensor: many answers of a module are not read.
        """
        array, read, asked, held = (
            self._on_devices(),
            self._read,
            self._asked,
            weakref.ref(self),
        )

        def numbers() -> torch.Tensor | None:
            return read(array).clone() if asked or held() is not None else None

        return numbers

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        args, kwargs = tree_map_only(cls, cls.on_host, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(cls, cls.on_host, (args, kwargs or {}))
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.on_host().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.on_host().__reduce_ex__(protocol)
