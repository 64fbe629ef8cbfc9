"""What the words of a source mean for its port: tables of :mod:`source_scan`."""

from __future__ import annotations

import re

#: Packages of CUDA kernels -> what runs in their place.
KERNELS = {
    **dict.fromkeys(
        ("flash_attn", "xformers", "sageattention"),
        "call torch's scaled_dot_product_attention, which runs as splash",
    ),
    "flash_attn_interface": "call torch's scaled_dot_product_attention",
    "triton": "write the kernel in Pallas, or take torch's own operators",
    "apex": "take torch's own layer",
    "bitsandbytes": "load the weights in bfloat16",
    "deepspeed": "leave it out: the mesh splits the work",
}
TO_BUILD = {"load", "load_inline", "CUDAExtension", "CppExtension"}
REGISTERED = {"torch.library.custom_op"}
#: Methods that hand a tensor's values to Python.
VALUES = {
    "item": "a number",
    "tolist": "a list",
    "numpy": "an array",
    "cpu": "a tensor on the host",
}
#: Functions whose result has a shape that depends on values.
SHAPED_BY_VALUES = {
    **dict.fromkeys(
        ("nonzero", "masked_select", "argwhere"), "torch.where with a mask of full size"
    ),
    **dict.fromkeys(
        ("unique", "unique_consecutive"), "a table that is made on the host"
    ),
    "bincount": "torch.nn.functional.one_hot and a sum",
}
REDUCTIONS = {"any", "all", "sum", "max", "min", "mean", "equal", "allclose"}
TYPES = {"Optional", "Union", "List", "Dict", "Tuple", "list", "dict", "tuple", "type"}
MASKS = ("mask", "valid", "keep", "selected")
#: Functions and methods whose result is a mask.
MAKE_MASKS = {"bool", "isnan", "isinf", "isfinite", "isclose", "isin"}
MAKE_MASKS |= {"gt", "ge", "lt", "le", "eq", "ne", "greater", "less", "not_equal"}
MAKE_MASKS |= {f"logical_{name}" for name in ("and", "or", "xor", "not")}
DISTRIBUTED = "torch.distributed", "leave it out: the mesh splits the work"
CUDA = "torch.cuda", "leave it out, or ask for it on CUDA alone"
CUDA_NAME = "a CUDA device by name", "take the device of an argument"
OWN = "an operator of its own"
#: Modules that are built from C++ or CUDA, by their names.
BUILT = re.compile(r"_C|_?ext|\w+_(cuda|ext|kernels?)|cuda_\w+")
OF_TORCH = ("torch", "torchvision", "torchaudio", "torch_xla")
BY_VALUES = (
    "Python that depends on values",
    "use torch.where, or hand the answer in as an argument",
)
NUMBER = "values as a number", "keep the tensor"
BY_INDEX = "a write by index, in place"
#: Methods that end like those in place, and write no values.
NO_WRITES = {"requires_grad_", "share_memory_", "resize_", "rename_"}
#: Methods whose result is a view.
VIEWS = {"select", "narrow", "view", "reshape", "flatten", "unflatten", "diagonal"}
VIEWS |= {"transpose", "t", "permute", "movedim", "swapaxes", "squeeze", "unsqueeze"}
VIEWS |= {"chunk", "split", "unbind", "unfold", "expand", "view_as", "contiguous"}
#: Those whose result may be a copy.
PERHAPS_COPIES = {"reshape", "flatten", "contiguous"}
BY_METHOD = "a write to a view, in place", "write to the tensor by an index"
TO_A_COPY = (
    "a write to a view or a copy, in place",
    "write to view() or to clone(): strides decide which it is",
)
BY_SLICES = "a write to slices, in place", "use torch.where or torch.cat"
ON_INDEXED = "a write to an indexed view, in place", "write to the tensor by an index"
RESHAPED = "a write to a reshaped slice, in place", "write to the slice by an index"
#: Kinds that run since a patch -> the target of that patch.
COVERED = {
    BY_SLICES[0]: "torchax.tensor:Tensor.__setitem__",
    BY_METHOD[0]: "torchax.tensor:Tensor.__setattr__",
    ON_INDEXED[0]: "torchax.tensor:Environment._get_op_or_decomp",
    RESHAPED[0]: "torchax.view:View.__getattribute__",
}
#: Methods of a tensor whose result is none; functions of torch likewise.
NO_TENSORS = {"size", "dim", "numel", "item", "tolist", "stride", "element_size"}
NO_TENSORS |= {"type", "get_device", "device", "Size", "finfo", "iinfo", "Generator"}
NO_TENSORS |= {"chunk", "split", "unbind", "is_tensor", "is_floating_point", "numpy"}
NO_TENSORS |= {"is_grad_enabled", "get_default_dtype", "meshgrid", "broadcast_shapes"}
#: Names of numbers.
COUNT = re.compile(
    r"[a-su-w]|num|(num|n)_\w+|\w*_(size|factor|frames|heads|groups|num)"
    r"|factor|repeats?|frames|height|width|scale|heads|times"
)
