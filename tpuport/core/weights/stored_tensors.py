"""Tensors of safetensors files that are read in slices, when something asks for them.

Upstream's ``from_pretrained`` is given such tensors in place of numbers. The tensors go
where upstream puts them, and take a dtype with nothing read. Placement then reads the
slices that the devices of this process hold. Whatever else asks for the numbers reads
the whole tensor, once.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch.utils._pytree import tree_map_only

from tpuport.core.arrays import all_finite
from tpuport.core.weights.file_parts import (
    IN_FLIGHT,
    Bytes,
    FileInStore,
    Index,
    bytes_of,
    opened,
)
from tpuport.errors import damaged

#: Dtypes by the names in a file's header. Others are read whole, by safetensors.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
#: What may be asked of a tensor without reading the numbers; attributes are too.
_OF_SHAPES = """
size dim ndimension numel nelement stride is_contiguous element_size __len__
is_floating_point is_complex is_inference requires_grad_ storage_offset get_device
__get__
"""
_ABOUT = frozenset(_OF_SHAPES.split())


@dataclass(kw_only=True, eq=False)
class Stored:
    """Where the numbers of a tensor are.

    Attributes:
        source: what the user named, for messages.
        file: the safetensors file.
        key: the tensor's name there.
        content: of the file.
        start: the first byte of the tensor.
        shape: in the file and in the module.
        written: the dtype in the file.
        dtype: the dtype that is wanted.
        bytes_read: of the file so far.
        host: the whole tensor, once something has asked for the numbers.
    """

    source: str
    file: Path
    key: str
    content: Bytes = field(repr=False)
    start: int
    shape: tuple[int, ...]
    written: torch.dtype
    dtype: torch.dtype
    bytes_read: int = 0
    host: torch.Tensor | None = field(default=None, repr=False)
    _lock: Any = field(default_factory=threading.RLock, init=False, repr=False)

    @property
    def in_store(self) -> bool:
        """Whether a read waits for a store, so that several are made at a time."""
        return self.host is None and isinstance(self.content, FileInStore)

    @property
    def bytes_stored(self) -> int:
        """Bytes of the whole tensor in the file."""
        return int(np.prod(self.shape)) * self.written.itemsize

    def read(self, index: Index) -> torch.Tensor:
        """A part of the tensor, in memory of its own.

        Raises:
            WeightsError: the part holds NaN or infinite values, or the file has
                changed since it was opened.
            StoreError: the same of an object, or the store does not answer.
        """
        if self.host is not None:
            return self.host[index].clone(memory_format=torch.contiguous_format)
        part, taken = self.content.part(
            self.start, self.shape, self.written.itemsize, index
        )
        with self._lock:
            self.bytes_read += taken
        found = torch.from_numpy(part).view(self.written).to(self.dtype)
        if not all_finite(found):
            raise damaged(
                f"{self.source}: {self.file.parent.name}: {self.key} holds NaN or "
                "infinite values",
                "the folder",
            )
        return found

    def whole(self) -> torch.Tensor:
        """The tensor on the host; the same one at every call."""
        with self._lock:
            if self.host is None:
                # Torch counts no writes to what is made in inference mode.
                with torch.inference_mode(False), torch.no_grad():
                    self.host = self.read((slice(None),) * len(self.shape))
            return self.host


class StoredTensor(torch.Tensor):
    """A tensor of the host whose numbers are read when something asks for them.

    Attributes:
        stored: where they are; a detached tensor has the same.
    """

    stored: Stored

    @staticmethod
    def __new__(cls: Any, stored: Stored) -> StoredTensor:
        made: StoredTensor = torch.Tensor._make_wrapper_subclass(
            cls, stored.shape, dtype=stored.dtype, device="cpu"
        )
        made.stored = stored
        return made

    def on_host(self) -> torch.Tensor:
        """The tensor as torch knows tensors; the same one at every call."""
        return self.stored.whole()

    def data_ptr(self) -> int:
        """What differs for another tensor; there is no memory to point to."""
        return id(self.stored)

    @property
    def _version(self) -> int:
        host = self.stored.host
        return 0 if host is None else host._version

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__set__":
            return cls._set(func, *args)
        if name in _ABOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], cls):
            found = args[0]._unread(name, args[1:], kwargs)
            if found is not None:
                return found
        args, kwargs = tree_map_only(cls, cls.on_host, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # of ``tensor.data``
            return cls(args[0].stored)
        args, kwargs = tree_map_only(cls, cls.on_host, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def _set(cls, func: Any, tensor: Any, value: Any) -> None:
        """``tensor.data = value`` gives the tensor other numbers."""
        with torch._C.DisableTorchFunctionSubclass():
            func(tensor, value)
        if isinstance(tensor, cls) and func.__self__.__name__ == "data":
            if isinstance(value, cls):
                tensor.stored = value.stored
            else:
                given, shape = value.detach(), tuple(value.shape)
                now = replace(tensor.stored, shape=shape, dtype=given.dtype)
                now.host, tensor.stored = given, now

    def _unread(self, name: str, args: Any, kwargs: Any) -> torch.Tensor | None:
        """What a method of the tensor gives, if the method needs no numbers."""
        if name == "detach":
            return StoredTensor(self.stored)
        if name in ("contiguous", "cpu") and not args and not kwargs:
            return self
        if name != "to":
            return None
        try:
            device, dtype, _, order = torch._C._nn._parse_to(*args, **kwargs)
        except (TypeError, RuntimeError):  # such as copy=True
            return None
        stored = self.stored
        if order is not None or (device is not None and device.type != "cpu"):
            return None
        if dtype in (None, stored.dtype):
            return self
        plain = stored.host is None and stored.dtype == stored.written
        return StoredTensor(replace(stored, dtype=dtype)) if plain else None

    def __deepcopy__(self, memo: Any) -> StoredTensor:
        made = StoredTensor(replace(self.stored))
        if self.stored.host is not None:
            made.stored.host = self.stored.host.clone()
        made.requires_grad_(self.requires_grad)
        made._is_param = getattr(self, "_is_param", False)
        memo[id(self)] = made
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.on_host().__reduce_ex__(protocol)


class StoredFile:
    """A safetensors file, as ``safetensors.safe_open`` opens one."""

    def __init__(self, source: str, file: Any, **how: Any) -> None:
        # It checks the header, and that the file has what the header tells.
        self._opened: Any = opened(Path(file), **how)
        self._source, self._file = source, Path(file)
        self._content = bytes_of(source, self._file)
        size = int.from_bytes(self._content.head(8), "little")
        self._data = 8 + size
        self._header: dict[str, Any] = json.loads(self._content.head(self._data)[8:])

    def __enter__(self) -> StoredFile:
        return self

    def __exit__(self, *_: Any) -> None:
        """Nothing: the tensors outlive this, and unmap the file when they go."""

    def metadata(self) -> Any:
        return self._opened.metadata()

    def keys(self) -> list[str]:
        return list(self._opened.keys())

    offset_keys = keys  # of safetensors before 0.8

    def get_tensor(self, key: str) -> torch.Tensor:
        told = self._header[key]
        written, shape = _DTYPES.get(told["dtype"]), tuple(told["shape"])
        if written is None or 0 in shape:
            if not isinstance(self._content, FileInStore):
                found: torch.Tensor = self._opened.get_tensor(key)
                return found
            data = self._content.between(
                *(self._data + n for n in told["data_offsets"])
            )
            alone = {key: {**told, "data_offsets": [0, len(data)]}}
            header = json.dumps(alone).encode()
            head = len(header).to_bytes(8, "little") + header
            return safetensors.torch.load(head + data)[key]
        stored = Stored(
            source=self._source,
            file=self._file,
            key=key,
            content=self._content,
            start=self._data + told["data_offsets"][0],
            shape=shape,
            written=written,
            dtype=written,
        )
        return StoredTensor(stored)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {key: self.get_tensor(key) for key in self.keys()}

    def get_slice(self, key: str) -> _Slice:
        return _Slice(self, key)


@dataclass(frozen=True)
class _Slice:
    """A tensor of a file, as ``get_slice`` of safetensors gives one."""

    _file: StoredFile
    _key: str

    def __getitem__(self, index: Any) -> torch.Tensor:
        found = self._file.get_tensor(self._key)
        return found if index is ... else found[index]

    def get_shape(self) -> list[int]:
        return list(self._file._header[self._key]["shape"])

    def get_dtype(self) -> str:
        return str(self._file._header[self._key]["dtype"])


@contextlib.contextmanager
def unread(source: str) -> Iterator[None]:
    """``from_pretrained`` of upstream's libraries reads no weights in this context.

    diffusers 0.42 opens files by ``load_file``, transformers 5 by ``safe_open``.

    Args:
        source: what the user named, for messages.
    """

    import transformers.modeling_utils

    def stored(file: Any, **how: Any) -> StoredFile:
        return StoredFile(source, file, **how)

    places: list[Any] = [safetensors.torch, transformers.modeling_utils]
    before = [place.safe_open for place in places]
    for place in places:
        place.safe_open = stored
    try:
        yield
    finally:
        for place, found in zip(places, before, strict=True):
            place.safe_open = found


def stored_in(tensors: Iterable[torch.Tensor]) -> list[Stored]:
    """Where the numbers of tensors are; of those that are stored, each once."""
    found = [one.stored for one in tensors if isinstance(one, StoredTensor)]
    return list({id(one): one for one in found}.values())


def read_whole(module: torch.nn.Module) -> None:
    """Read what is unread of a module: tensors as torch knows tensors take over.

    Tied parameters stay tied.

    Raises:
        WeightsError: a tensor holds NaN or infinite values.
    """
    waiting = stored_in((*module.parameters(), *module.buffers()))
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        list(pool.map(Stored.whole, (one for one in waiting if one.in_store)))
    made: dict[int, Any] = {}
    for child in module.modules():
        for own in (child._parameters, child._buffers):
            for name, tensor in own.items():
                if not isinstance(tensor, StoredTensor):
                    continue
                if id(tensor) not in made:
                    host, asks = tensor.on_host(), tensor.requires_grad
                    if isinstance(tensor, torch.nn.Parameter):
                        host = torch.nn.Parameter(host, requires_grad=asks)
                    made[id(tensor)] = host
                own[name] = made[id(tensor)]


def part_of(tensor: torch.Tensor, index: Index) -> torch.Tensor:
    """A part of a tensor in memory of its own; of a stored one nothing else is read."""
    if isinstance(tensor, StoredTensor):
        return tensor.stored.read(index)
    return tensor[index].clone(memory_format=torch.contiguous_format)
