"""A YAML file of settings: a key may stand once, and aliases are refused."""

from __future__ import annotations

from typing import Any

from tpuport.core.files.atomic import one_line
from tpuport.core.files.typed import read_text
from tpuport.core.spec import kinds
from tpuport.core.spec.run_settings import read_value
from tpuport.errors import UsageError


def load_mapping(file: str) -> dict[Any, Any]:
    """The keys and values of a YAML file; empty for an empty file."""
    import yaml

    class Strict(yaml.SafeLoader):
        """Plain YAML without aliases, and with each key once."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                event = self.peek_event()  # type: ignore[no-untyped-call]
                raise UsageError(
                    f"config file {file}: line {event.start_mark.line + 1} has the "
                    f"alias *{event.anchor}; write the value out"
                )
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            first: dict[str, int] = {}
            for key, _ in node.value:
                line = key.start_mark.line + 1
                if line != first.setdefault(str(key.value), line):
                    raise UsageError(
                        f"config file {file}: lines {first[str(key.value)]} and {line} "
                        f"both have the key {key.value!r}; keep one of them"
                    )
            return super().construct_mapping(node, deep)

    path = read_value(kinds.path, file, "--config")
    text = read_text(path, "config file")
    try:
        data = yaml.load(text, Strict)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"config file {file} is not YAML: {one_line(error)}"
        ) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(
            f"config file {file} holds {type(data).__name__}; write one `key: value` "
            "on each line"
        )
    return data
