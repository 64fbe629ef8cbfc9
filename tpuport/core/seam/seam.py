"""The place between upstream's pipeline and its modules.

Upstream's code on the host calls a module; the outermost ``forward`` that is called
runs as a compiled program. A loop that upstream keeps on the host (chunks, frames,
tiles of an autoencoder) stays there, and the forwards that the loop calls are the
programs.
"""

from __future__ import annotations

import contextlib
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from tpuport.core.reports import Reporter
from tpuport.core.seam.entry import Entry
from tpuport.core.seam.journal import Journal, Uploads
from tpuport.core.seam.target import Target
from tpuport.core.tracing.context import tracing_now
from tpuport.core.weights.gathering import room_for_weights
from tpuport.errors import UsageError

#: Marks a forward that a seam stands at; false once the seam is closed.
_MARK = "_tpuport_seam"
#: Where diffusers keeps the hooks of a module, such as those of ``enable_cache``.
_HOOKS = "_diffusers_hook"


class Seam:
    """Stands at the forwards of some components until :meth:`close`.

    Args:
        components: name -> module. Every ``forward`` in them is taken over.
        target: what programs are made for.
        reporter: told of programs that are compiled.
        entry: makes what answers the calls of a module.

    Attributes:
        entries: the modules that were called, by name; the last one called is last.
    """

    def __init__(
        self,
        components: Mapping[str, torch.nn.Module],
        target: Target,
        reporter: Reporter,
        entry: Callable[..., Entry] = Entry,
    ) -> None:
        self.target = target
        self.journal = Journal(reporter)
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self._entry = entry
        self._uploads = Uploads()
        self._held: list[tuple[torch.nn.Module, Any, Any]] = []
        for name, component in components.items():
            _check_untouched(name, component)
        for name, component in components.items():
            for path, module in component.named_modules():
                self._stand_at(f"{name}.{path}".rstrip("."), module)

    def close(self) -> None:
        """Give the modules their own forward back, and the devices their memory.

        A call that waits runs before: somebody may read its answer.
        """
        entries = list(self.entries.values())
        self.entries.clear()
        for module, before, stood in reversed(self._held):
            # Hooks of upstream that came later stand before the seam's forward, and
            # put it back when they go.
            stood.__dict__[_MARK] = False
            if module.__dict__.get("forward") is stood:
                del module.__dict__["forward"]
                if before is not None:
                    module.__dict__["forward"] = before
        self._held.clear()
        with contextlib.ExitStack() as stack:
            for entry in entries:
                stack.callback(entry.free)

    def _make_room(self, wanted: Entry) -> None:
        """Let other components go where their weights do not fit beside ``wanted``'s.

        Those that were called longest ago go first.
        """
        room = room_for_weights(self.target.mesh.devices.flat)
        held = sum(e.bytes_per_device for e in self.entries.values() if e.placed)
        for entry in self.entries.values():
            if held + wanted.bytes_per_device <= room:
                return
            if entry is not wanted and entry.placed:
                entry.free()
                held -= entry.bytes_per_device
                self.journal.reporter.say(
                    f"{entry.name} leaves the devices to make room for {wanted.name}"
                )

    def patches(self) -> list[dict[str, Any]]:
        """What became of each patch, over all programs."""
        found: dict[str, dict[str, Any]] = {}
        for entry in self.entries.values():
            for status in entry.patches:
                found.setdefault(status.name, asdict(status))
        return list(found.values())

    def _stand_at(self, name: str, module: torch.nn.Module) -> None:
        if isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
            return
        own, kind = vars(module).get("forward"), type(module)

        # Of its class at the time of a call: a patch may stand there while tracing.
        def original(*args: Any, **kwargs: Any) -> Any:
            found = kind.forward.__get__(module) if own is None else own
            return found(*args, **kwargs)

        entries, journal = self.entries, self.journal
        target, uploads = self.target, self._uploads
        make, room = self._entry, self._make_room

        @functools.wraps(module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if tracing_now() or not forward.__dict__[_MARK]:
                return original(*args, **kwargs)
            entry = entries.get(name)
            inside = list(module.modules())[1:] if entry is None else entry.inside
            # Hooks of diffusers within a module decide what is called: such a forward
            # stays on the host, and the forwards that it calls are programs.
            if any(map(_has_hooks, inside)):
                return original(*args, **kwargs)
            if entry is None:
                entry = make(module, original, name, target, uploads, journal, room)
                entries[name] = entry
            entries.move_to_end(name)
            return entry(*args, **kwargs)

        forward.__dict__[_MARK] = True
        self._held.append((module, own, forward))
        module.__dict__["forward"] = forward


def is_ported(module: torch.nn.Module) -> bool:
    """Whether a seam stands at the module's forward."""
    stands = getattr(vars(module).get("forward"), "__dict__", {})
    return bool(stands.get(_MARK))


def _has_hooks(module: torch.nn.Module) -> bool:
    registry = vars(module).get(_HOOKS)  # an empty one marks where hooks may come
    return bool(registry is not None and registry.hooks)


def _check_untouched(name: str, component: torch.nn.Module) -> None:
    for path, module in component.named_modules():
        where = f"{name}.{path}".rstrip(".")
        if is_ported(module):
            raise UsageError(
                f"{where} is ported already; call tpuport.unport() first, or port a "
                "pipeline that was loaded by itself"
            )
        if _has_hooks(module) or "_hf_hook" in vars(module):
            raise UsageError(
                f"{where} has hooks of diffusers or accelerate (offloading, a cache); "
                "port the pipeline first, and call enable_cache after"
            )
        if any(t.device.type not in ("cpu", "meta") for t in module.parameters(False)):
            raise UsageError(
                f"{where} is on {next(module.parameters()).device}; load the pipeline "
                'on the CPU: its weights go to the mesh. Use pipe.to("cpu")'
            )
