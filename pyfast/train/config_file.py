"""The form of a YAML config file, checked before jsonargparse reads it: what YAML itself would pass over in silence.

YAML lets the last of two equal keys win, and a section of the wrong form would only show much later. Values and names
of keys are not looked at here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import yaml

from pyfast.train.errors import UnknownKey, yaml_word

_FORM = "must be a mapping of keys, as in `train: {steps: 50}`"


def check_config_file(value: str, sections: Sequence[str]) -> bool:
    """Check the file (or the YAML text) given to --config; returns whether it sets any key.

    Raises `UnknownKey` naming the file, and the line where there is one: a file that cannot be read, is not UTF-8, is
    not YAML, or is not a mapping of sections; a section that is no mapping; a key that is given twice.
    """
    name, text = _read(value)
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UnknownKey(f"{name} is not YAML: {_problem(error)}") from error
    if content is None:
        return False
    if not isinstance(node, yaml.MappingNode) or not isinstance(content, dict):
        raise UnknownKey(f"{name}: {_FORM}; it is a {type(content).__name__}")
    _check_duplicates(node, name, set())
    for key, part in content.items():
        if not isinstance(key, str):
            raise UnknownKey(f"{name}: there is no key {yaml_word(key)}. Sections: {', '.join(sections)}")
        if key in sections and not isinstance(part, dict):
            raise UnknownKey(f"{name}: {key} = {yaml_word(part)}: {_FORM}. Without keys, leave the section out.")
        for inner in part if key in sections else ():
            if f"{key}.{inner}" in content:
                raise UnknownKey(f"{name}: {key}.{inner} is given twice; keep one")
    if "config" in content:
        raise UnknownKey(f"{name}: config is no key of a file; give --config more than once to read several")
    return bool(content)


def _read(value: str) -> tuple[str, str]:
    """(name for messages, text) of a file, or of YAML text given in its place."""
    if not os.path.exists(value) and ":" in value:
        return "--config", value
    name = f"--config {value}"
    if not os.path.isfile(value):
        what = "is not a file" if os.path.exists(value) else "there is no such file"
        raise UnknownKey(f"--config = {value!r}: {what}. Give the path of a YAML file.")
    try:
        with open(value, encoding="utf-8-sig") as file:
            return name, file.read()
    except OSError as error:
        raise UnknownKey(f"{name} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UnknownKey(f"{name} is not UTF-8 text at byte {error.start}; save it as UTF-8") from error


def _check_duplicates(node: yaml.Node, name: str, seen: set[int], prefix: str = "") -> None:
    if id(node) in seen:  # an anchor that is used again, perhaps inside itself
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for part in node.value:
            _check_duplicates(part, name, seen, prefix)
    if not isinstance(node, yaml.MappingNode):
        return
    lines: dict[str, int] = {}
    for key, part in node.value:
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and key.value in lines:
            first = lines[key.value]
            raise UnknownKey(f"{name}: {prefix}{key.value} is given twice, in lines {first} and {line}; keep one")
        if isinstance(key, yaml.ScalarNode):
            lines[key.value] = line
        _check_duplicates(part, name, seen, f"{prefix}{key.value}." if isinstance(key, yaml.ScalarNode) else prefix)


def _problem(error: Exception) -> str:
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position}: {error.reason}"
    if mark is None:
        return "it is nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())
    text = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    return text + (" (indent with spaces, not with tabs)" if "'\\t'" in str(error) else "")
