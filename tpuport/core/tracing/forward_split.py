"""Where a transformer's forward splits: at its last block.

A plugin declares the lists of blocks in a :class:`ForwardSplit`. :func:`capture` keeps
the state before or after the last block while the module runs. :func:`resume` puts a
state back in place of all that comes before. Both override ``forward`` of block
instances while they hold; the module's own forward is upstream's, unchanged. In a
resumed forward the skipped blocks leave nothing in the compiled program, and XLA drops
whatever fed only them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tpuport.core.tracing.block_stacks import forwards_replaced
from tpuport.errors import PluginError

if TYPE_CHECKING:
    import torch

Where = Literal["before_last", "after_last"]
State = Mapping[str, Any]
"""Tensors (or arrays) by their name in :attr:`ForwardSplit.state`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForwardSplit:
    """How the blocks of a module hand their state on.

    Every block takes the tensors of ``state`` by keyword or as its first positional
    arguments in that order, and returns them: as a tuple, or bare if there is one.

    Attributes:
        blocks: dotted names of the ``ModuleList`` s of blocks, in the order they run.
        state: the names under which a block takes what the block before returned.
        head: names that forward still reads after the last block; ``None`` for all.
        places: where a block takes each of ``state`` by position; ``None`` for the
            first positions, in their order.
    """

    blocks: tuple[str, ...]
    state: tuple[str, ...] = ("hidden_states", "encoder_hidden_states")
    head: tuple[str, ...] | None = None
    places: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if not self.blocks or not self.state:
            raise PluginError(
                f"a ForwardSplit names blocks and state; got blocks {self.blocks!r}, "
                f"state {self.state!r}"
            )
        unknown = sorted(set(self.head or ()) - set(self.state))
        if unknown or self.head == ():
            raise PluginError(
                f"ForwardSplit head {self.head!r} must be some of its state "
                f"{self.state!r}, or None for all"
            )

    def named(self) -> Iterator[tuple[int, str]]:
        """The names of the state, each with its place among positional arguments."""
        places = range(len(self.state)) if self.places is None else self.places
        return zip(places, self.state, strict=True)

    def names(self, where: Where) -> tuple[str, ...]:
        """The names of a state captured at ``where``."""
        if where == "before_last" or self.head is None:
            return self.state
        return self.head


@contextlib.contextmanager
def capture(
    module: torch.nn.Module, split: ForwardSplit, where: Where
) -> Iterator[dict[str, Any]]:
    """Keep the state at ``where`` of the single forward that runs in this context.

    Yields:
        A dict that the forward fills: a tensor per name of ``split.names(where)``.

    Raises:
        PluginError: the module is not as declared, or forward did not run exactly once.
    """
    *_, (path, last) = _blocks(module, split)
    original = last.forward
    state: dict[str, Any] = {}

    def keep(values: Mapping[str, Any]) -> None:
        # A copy: code after this point may write into the tensor in place.
        state.update({name: values[name].clone() for name in split.names(where)})

    def forward(*args: Any, **kwargs: Any) -> Any:
        if state:
            raise PluginError(f"{path} ran twice while its state was captured")
        values = _arguments(path, split, args, kwargs)
        if where == "before_last":
            keep(values)
        out = original(*args, **kwargs)
        if where == "after_last":
            keep(_returned(path, split, out))
        return out

    with forwards_replaced([(last, forward)]):
        yield state
    if not state:
        raise PluginError(f"{path} did not run; is it the last block of the forward?")


@contextlib.contextmanager
def resume(
    module: torch.nn.Module, split: ForwardSplit, where: Where, state: State
) -> Iterator[None]:
    """In this context forward starts at ``state``; earlier blocks do nothing.

    From ``"before_last"`` the last block runs on the state; from ``"after_last"`` it
    returns the state without running.

    Raises:
        PluginError: the module or the state is not as declared, or the last block did
            not run.
    """
    if set(state) != set(split.names(where)):
        raise PluginError(
            f"a state {where} has {sorted(split.names(where))}, not {sorted(state)}"
        )
    *before, (last_path, last) = _blocks(module, split)
    original = last.forward
    ran = False

    def nothing(path: str) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return _as_returned(split, _arguments(path, split, args, kwargs))

        return forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal ran
        ran = True
        values = {**_arguments(last_path, split, args, kwargs), **state}
        if where == "after_last":
            return _as_returned(split, values)
        for index, name in split.named():
            if name in kwargs:
                kwargs[name] = values[name]
            else:
                args = (*args[:index], values[name], *args[index + 1 :])
        return original(*args, **kwargs)

    skipped = [(block, nothing(path)) for path, block in before]
    with forwards_replaced([*skipped, (last, forward)]):
        yield
    if not ran:
        raise PluginError(f"{last_path} did not run, so the state was not used")


def _blocks(
    module: torch.nn.Module, split: ForwardSplit
) -> list[tuple[str, torch.nn.Module]]:
    """All blocks with their dotted names, in the order they run."""
    import torch

    name = type(module).__name__
    found: list[tuple[str, torch.nn.Module]] = []
    for path in split.blocks:
        try:
            blocks = module.get_submodule(path)
        except AttributeError:
            raise PluginError(
                f"ForwardSplit: {name} has no blocks {path!r}; it has "
                + ", ".join(n for n, _ in module.named_children())
            ) from None
        if not isinstance(blocks, torch.nn.ModuleList):
            raise PluginError(
                f"ForwardSplit: {path!r} of {name} is a {type(blocks).__name__}, not a "
                "ModuleList of blocks"
            )
        found += [(f"{path}.{i}", block) for i, block in enumerate(blocks)]
    if not found:
        raise PluginError(f"ForwardSplit: {name} has no block in {split.blocks!r}")
    if len({id(block) for _, block in found}) < len(found):
        raise PluginError(
            f"ForwardSplit: a block of {name} runs more than once in {split.blocks!r}"
        )
    return found


def _arguments(
    path: str, split: ForwardSplit, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """The state among the arguments of a block."""
    values = {name: args[i] for i, name in split.named() if i < len(args)}
    values |= {name: kwargs[name] for name in split.state if name in kwargs}
    for name in split.state:
        if name not in values:
            raise PluginError(
                f"ForwardSplit: {path} was called without {name!r}: "
                f"{len(args)} positional arguments and {sorted(kwargs)}"
            )
    return values


def _returned(path: str, split: ForwardSplit, out: Any) -> dict[str, Any]:
    """The state in what a block returned."""
    values = (out,) if len(split.state) == 1 else out
    if not isinstance(values, tuple | list) or len(values) != len(split.state):
        raise PluginError(
            f"ForwardSplit: {path} returned a {type(out).__name__}, not the "
            f"{len(split.state)} tensors {split.state!r}"
        )
    return dict(zip(split.state, values, strict=True))


def _as_returned(split: ForwardSplit, values: Mapping[str, Any]) -> Any:
    """``values`` as a block returns them."""
    ordered = tuple(values[name] for name in split.state)
    return ordered[0] if len(ordered) == 1 else ordered
