"""Configs of a checkpoint, held against the upstream class that they build.

A component's config goes into upstream's constructor, which takes what it gets: a text
where a number belongs fails calls later, and a hundred million layers hang. What each
value may be is told by the constructor itself, by its annotations and defaults.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import re
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from tpuport.core.files.atomic import one_line
from tpuport.core.weights.absent_packages import absent_of
from tpuport.errors import TpuportError, WeightsError, damaged, quoted

#: Names of fields that count modules: each module has a stored tensor.
_DEPTH = re.compile(r"(num_.*)?(layers|blocks)(_per_block)?")
#: The most modules of a component whose stored tensors are not there to be counted.
_DEEPEST = 1000
#: A number may be this many times its default, or the least bound.
_TIMES, _LEAST, _UNKNOWN = 64, 4096, 1 << 20
_LONGEST_LIST = 1024
#: Fields of configs of transformers that name an activation function.
_ACTIVATIONS = ("hidden_act", "feed_forward_proj")


def check_config(
    cls: Any, config: Mapping[str, Any], file: str, stored: int | None
) -> None:
    """Refuse a config whose values are not what the constructor of ``cls`` declares.

    Fields that the constructor does not name are left alone, as upstream leaves them.

    Args:
        cls: of diffusers, or a model of transformers.
        file: what the config was read from, for messages.
        stored: how many tensors the component has in files, if that is known.

    Raises:
        WeightsError: a value of another type, an empty list, a number that is not
            finite, not positive or far beyond its default, more layers than the
            files hold tensors, or an activation function or a model that there is not.
    """
    owner = cls if hasattr(cls, "from_config") else getattr(cls, "config_class", cls)
    for name, parameter in inspect.signature(owner.__init__).parameters.items():
        if name not in config:
            continue
        value = config[name]
        problem = _type_problem(value, parameter)
        deep = type(value) is int and _DEPTH.fullmatch(name)
        if not problem and deep and value > (_DEEPEST if stored is None else stored):
            limit = _DEEPEST if stored is None else f"the {stored} tensors stored"
            problem = f"more than {limit}"
        problem = problem or _range_problem(name, value, parameter.default)
        problem = problem or _activation_problem(name, value)
        if problem:
            raise _unfit(cls, file, name, value, problem)
    if hasattr(owner, "model_type"):
        _check_computed(cls, owner, config, file)


def _unfit(cls: Any, file: str, name: str, value: Any, problem: str) -> WeightsError:
    return damaged(
        f"{file}: {name} is {quoted(value)}: {problem}; {cls.__name__} cannot be "
        "built from it"
    )


def _check_computed(cls: Any, owner: Any, config: Mapping[str, Any], file: str) -> None:
    """Refuse what a config of transformers takes in place of what it computes."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig

    kind = config.get("model_type", owner.model_type)
    if kind != owner.model_type and not (
        isinstance(kind, str) and kind in CONFIG_MAPPING
    ):
        raise _unfit(cls, file, "model_type", kind, "transformers has no such model")
    given = inspect.signature(owner.__init__).parameters
    own = config.keys() - vars(PreTrainedConfig()).keys() - given.keys()
    with building(cls.__name__, file):
        computed = vars(owner(**{n: config[n] for n in given if n in config}))
    for name in sorted(own & computed.keys()):
        kinds = {type(computed[name])}
        if kinds <= {bool, int, str} and type(config[name]) not in kinds:
            problem = f"{_in_words(kinds)} is needed"
            raise _unfit(cls, file, name, config[name], problem)


@contextlib.contextmanager
def building(what: str, file: str) -> Iterator[None]:
    """Whatever upstream raises while it builds ``what`` is a fault of ``file``.

    A package that is missing is none.

    Raises:
        WeightsError: in place of any other exception.
    """
    try:
        yield
    except TpuportError:
        raise
    except Exception as error:
        if package := absent_of(error):
            raise WeightsError(
                f"{what} needs a package that is not installed: pip install {package}"
            ) from error
        words = f" ({type(error).__name__}: {one_line(error)[:120]})"
        if isinstance(error, NameError):  # of upstream's code, which took no branch
            words = ": a value is none that upstream knows"
        raise damaged(f"{file} does not build a {what}{words}") from error


def _kinds(annotation: Any) -> set[type] | None:
    """The types that a value from JSON may have; ``None`` where anything goes."""
    if annotation is None:
        return {types.NoneType}
    if annotation in (types.NoneType, int, bool, str, dict, float):
        return {annotation} | ({int} if annotation is float else set())
    origin = get_origin(annotation) or annotation
    if origin in (list, tuple):
        return {list, tuple}
    if origin is Literal:
        return {type(word) for word in get_args(annotation)}
    if origin in (Union, types.UnionType):
        return _kinds_of_any(get_args(annotation))
    return None


def _kinds_like(default: Any) -> set[type]:
    return _kinds(type(default)) or {type(default)}


def _kinds_of_any(annotations: Iterable[Any]) -> set[type] | None:
    found = [_kinds(part) for part in annotations]
    known = [kinds for kinds in found if kinds is not None]
    return set.union(*known) if known and len(known) == len(found) else None


def _type_problem(value: Any, parameter: inspect.Parameter) -> str:
    default, annotation = parameter.default, parameter.annotation
    kinds, given = _kinds(annotation), default is not inspect.Parameter.empty
    if kinds is None and given and default is not None:
        kinds = set()
    if kinds is not None and given:
        # Upstream's annotations are not always true of its own defaults.
        kinds |= _kinds_like(default)
    if kinds is not None and type(default) is float:
        kinds -= {types.NoneType}  # nothing is computed with null
    if kinds is not None and type(value) not in kinds:
        return f"{_in_words(kinds)} is needed"
    if get_origin(annotation) is Literal and value not in get_args(annotation):
        return f"one of {', '.join(map(str, get_args(annotation)))} is needed"
    entries = _entries(annotation, default) if isinstance(value, list) else None
    if entries and any(type(entry) not in entries for entry in value):
        return f"every entry must be {_in_words(entries)}"
    return ""


def _entries(annotation: Any, default: Any) -> set[type] | None:
    """The types of a list's entries, by the default's own or by the annotation."""
    if isinstance(default, list | tuple) and default:
        return set[type]().union(*(_kinds_like(entry) for entry in default))
    for part in (annotation, *get_args(annotation)):
        if get_origin(part) in (list, tuple):
            return _kinds_of_any(arg for arg in get_args(part) if arg is not ...)
    return None


def _in_words(kinds: set[type]) -> str:
    kinds = kinds - {int} if float in kinds else kinds
    return " or ".join(sorted({_WORDS.get(kind, kind.__name__) for kind in kinds}))


_WORDS = {
    types.NoneType: "null",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list",
    tuple: "a list",
    dict: "an object",
}


def _range_problem(name: str, value: Any, default: Any) -> str:
    """What is wrong with a number, or with those of a list."""
    if isinstance(value, list | tuple):
        if not value and default:
            return "it must not be empty"
        if len(value) > _LONGEST_LIST:
            return f"{len(value)} entries are too many"
        bound = max(default) if default and type(default[0]) is int else None
        # 0 in a list is a place, such as of a layer.
        some = (_range_problem(name, v, bound) for v in value if v != 0)
        return next(filter(None, some), "")
    if type(value) not in (int, float):
        return ""
    if not math.isfinite(value):
        return "" if value == default else "it must be finite"
    plain = type(default) in (int, float)
    if name.endswith(("_id", "_ids")):
        return ""
    # No share of what is dropped is a share; other numbers above 0 divide something.
    if value <= 0 and plain and default > 0 and not (value == 0 and "drop" in name):
        return "it must be above 0"
    if type(value) is int:
        whole = type(default) is int or name.endswith("_ratio")
        limit = max(_LEAST, int(_TIMES * default)) if plain and whole else _UNKNOWN
        if abs(value) > limit:
            return f"at most {limit} is possible"
    return ""


def _activation_problem(name: str, value: Any) -> str:
    if name not in _ACTIVATIONS:
        return ""
    from transformers.activations import ACT2FN

    known = str(value).removeprefix("gated-") in ACT2FN
    return "" if known else "transformers has no such activation function"
