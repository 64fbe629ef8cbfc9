"""Stands at the calls of components: whatever answers, upstream's code calls as ever.

Upstream's pipeline calls a component: its ``forward``, or a method that loops over
forwards, such as an autoencoder's ``decode``. The outermost of these calls is told to
the journal, which may answer the call by itself. The journal makes the steps of
schedulers too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tpuport.core.seam.journal import Asked, Journal
from tpuport.core.tracing.context import tracing_now
from tpuport.errors import UsageError

#: Marks a method that is stood at; false once the stand is closed.
_MARK = "_tpuport_seam"
#: Where diffusers keeps the hooks of a module, such as those of ``enable_cache``.
_HOOKS = "_diffusers_hook"
#: Methods of components that pipelines call beside forward.
METHODS = ("encode", "decode", "generate", "get_text_features", "get_image_features")


class Standing:
    """Stands at the calls of some components until :meth:`close`.

    By itself a stand lets upstream's own code answer.

    Args:
        components: by name. Every ``forward`` in the modules is stood at, and the
            other methods that pipelines call; ``step`` of schedulers; nothing else.
        journal: told of every call that begins outside of the components.
    """

    def __init__(self, components: Mapping[str, Any], journal: Journal) -> None:
        self.journal = journal
        self._held: list[tuple[Any, str, Any, Any]] = []
        modules = {
            name: component
            for name, component in components.items()
            if isinstance(component, torch.nn.Module)
        }
        for name, component in modules.items():
            _check_untouched(name, component)
        for name, component in components.items():
            scheduler = name == "scheduler" or hasattr(component, "set_timesteps")
            if scheduler and hasattr(component, "step"):
                self._hold(component, "step", Stepping(component, weakref.ref(journal)))
        for name, component in modules.items():
            for path, module in component.named_modules():
                if not isinstance(module, torch.nn.ModuleList | torch.nn.ModuleDict):
                    self._stand_at_forward(f"{name}.{path}".rstrip("."), module)
            for method in METHODS:
                if hasattr(type(component), method):
                    self._stand_at(f"{name}.{method}", component, method, _upstreams)

    def close(self) -> None:
        """Give the components their own methods back."""
        for module, method, before, stood in reversed(self._held):
            # Hooks of upstream that came later stand before the seam's forward, and
            # put it back when they go.
            stood.__dict__[_MARK] = False
            if module.__dict__.get(method) is stood:
                del module.__dict__[method]
                # What stood there may have been closed in between.
                if getattr(before, "__dict__", {}).get(_MARK, before is not None):
                    module.__dict__[method] = before
        self._held.clear()

    def _stand_at_forward(self, name: str, module: torch.nn.Module) -> None:
        self._stand_at(name, module, "forward", _upstreams)

    def _stand_at(
        self,
        name: str,
        module: torch.nn.Module,
        method: str,
        answer: Callable[..., Any],
    ) -> None:
        """Let calls of a method go to ``answer``, which gets upstream's own first."""
        own, kind = vars(module).get(method), type(module)
        journal = self.journal

        # Of its class at the time of a call: a patch may stand there while tracing.
        def original(*args: Any, **kwargs: Any) -> Any:
            found = getattr(kind, method).__get__(module) if own is None else own
            return found(*args, **kwargs)

        @functools.wraps(getattr(module, method))
        def stood(*args: Any, **kwargs: Any) -> Any:
            if tracing_now() or not stood.__dict__[_MARK]:
                return original(*args, **kwargs)
            made = functools.partial(answer, original)
            return journal.call(Asked(name, module, args, kwargs, made))

        self._hold(module, method, stood)

    def _hold(self, component: Any, method: str, stood: Any) -> None:
        """Put what stands in the place of a method there."""
        stood.__dict__[_MARK] = True
        self._held.append((component, method, vars(component).get(method), stood))
        vars(component)[method] = stood


def _upstreams(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return original(*args, **kwargs)


class Stepping:
    """In place of a scheduler's ``step``, with upstream's signature.

    A pipeline may copy its scheduler, for sound say: the copy has its own. A scheduler
    may outlive its pipeline, so the journal, which knows the modules, is held weakly.
    """

    def __init__(self, scheduler: Any, journal: weakref.ref[Journal]) -> None:
        self._scheduler, self._journal = scheduler, journal
        functools.update_wrapper(self, type(scheduler).step.__get__(scheduler))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = type(self._scheduler).step
        run = functools.partial(step, self._scheduler, *args, **kwargs)
        journal = self._journal()
        return run() if journal is None else journal.step(self._scheduler, run)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = Stepping(memo[id(self._scheduler)], self._journal)
        vars(copied)[_MARK] = vars(self).get(_MARK, False)
        return copied

    def is_for(self, journal: Journal) -> bool:
        """Whether the journal hears of the steps."""
        return self._journal() is journal


def is_ported(component: Any) -> bool:
    """Whether a seam stands at a module's forward."""
    own = getattr(component, "__dict__", {}).get("forward")
    return bool(getattr(own, "__dict__", {}).get(_MARK))


def is_heard(component: Any, journal: Journal) -> bool:
    """Whether the journal hears of a module's calls, or of a scheduler's steps."""
    step = getattr(component, "__dict__", {}).get("step")
    if isinstance(step, Stepping):
        return step.is_for(journal)
    return is_ported(component)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether diffusers has hooks on the module, which decide what is called."""
    registry = vars(module).get(_HOOKS)  # an empty one marks where hooks may come
    return bool(registry is not None and registry.hooks)


def _hooks_of(module: torch.nn.Module) -> str:
    """Which hooks a module has, and what to do without them."""
    if "_hf_hook" in vars(module):
        names = {"group_offloading"}  # accelerate's hooks offload too
    else:
        names = {*vars(module)[_HOOKS].hooks}
    if "layerwise_casting" in names:
        return (
            "layerwise casting: leave it out, and load the pipeline anew in the dtype "
            "of the run"
        )
    if any("offload" in name for name in names):
        return (
            "offloading: leave it out, and load the pipeline anew; its weights go to "
            "the mesh, and components take turns there"
        )
    return (
        f"hooks of diffusers ({', '.join(sorted(names))}); port the pipeline first, "
        "and call enable_cache after"
    )


def _check_untouched(name: str, component: torch.nn.Module) -> None:
    for path, module in component.named_modules():
        where = f"{name}.{path}".rstrip(".")
        if is_ported(module):
            raise UsageError(
                f"{where} is ported already; call tpuport.unport() first, or port a "
                "pipeline that was loaded by itself"
            )
        if has_hooks(module) or "_hf_hook" in vars(module):
            raise UsageError(f"{where} has {_hooks_of(module)}")
        if any(t.device.type not in ("cpu", "meta") for t in module.parameters(False)):
            raise UsageError(
                f"{where} is on {next(module.parameters()).device}; load the pipeline "
                'on the CPU: its weights go to the mesh. Use pipe.to("cpu")'
            )
