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

from tpuport.core.mesh.compiler_flags import flags_for
from tpuport.core.reports import Reporter
from tpuport.core.seam.arithmetic import Arithmetic
from tpuport.core.seam.devices import Devices
from tpuport.core.seam.entry import Entry
from tpuport.core.seam.journal import Journal
from tpuport.core.seam.standing import Standing, has_hooks
from tpuport.core.seam.target import Target
from tpuport.core.weights.gathering import room_for_weights


class Seam(Standing):
    """Runs the forwards of some components as programs until :meth:`close`.

    Args:
        components: by name; modules and schedulers are stood at.
        target: what programs are made for.
        reporter: told of programs that are compiled.
        entry: makes what answers the calls of a module.
        devices: makes what compiles programs and holds arrays.

    Attributes:
        entries: the modules that were called, by name; the last one called is last.
    """

    def __init__(
        self,
        components: Mapping[str, Any],
        target: Target,
        reporter: Reporter,
        entry: Callable[..., Entry] = Entry,
        devices: Callable[[Target], Devices] = Devices,
    ) -> None:
        self.target = target
        self.entries: OrderedDict[str, Entry] = OrderedDict()
        self._entry = entry
        super().__init__(components, Journal(reporter))
        for remark in flags_for(target.mesh.devices.flat[0]).remarks():
            reporter.say(remark)
        self.arithmetic = Arithmetic(devices(target), self.journal)
        self.journal.between = self.arithmetic

    def close(self) -> None:
        """Give the modules their own forward back, and the devices their memory.

        What was recorded is computed before: somebody may read it.
        """
        entries = list(self.entries.values())
        self.entries.clear()
        super().close()
        with contextlib.ExitStack() as stack:
            for entry in entries:
                stack.callback(entry.free)
            stack.callback(self.arithmetic.compute)

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
                self.arithmetic.wait()
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

    def _stand_at_forward(self, name: str, module: torch.nn.Module) -> None:
        answer = functools.partial(self._answered, name, module)
        self._stand_at(name, module, "forward", answer)

    def _answered(
        self,
        name: str,
        module: torch.nn.Module,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        entry = self.entries.get(name)
        inside = list(module.modules())[1:] if entry is None else entry.inside
        # Hooks of diffusers within a module decide what is called: such a forward
        # stays on the host, and the forwards that it calls are programs.
        if any(map(has_hooks, inside)):
            return original(*args, **kwargs)
        if entry is None:
            shared = self.arithmetic, self._make_room
            entry = self.entries[name] = self._entry(module, original, name, *shared)
        self.entries.move_to_end(name)
        return entry(*args, **kwargs)
