"""The command line of `pyfast train`: YAML files and `--section.key value` for every key of the config."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import itertools
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from jsonargparse import ActionConfigFile, ArgumentParser, Namespace

from pyfast.train.config import (
    PARALLEL_HELP,
    PARALLEL_READY,
    TrainConfig,
    describe_allowed,
    field_types,
    from_dict,
    sections,
    to_dict,
)
from pyfast.train.config_file import check_config_file
from pyfast.train.errors import ConfigError, TrainingError, UnknownKey, yaml_word

USAGE = "pyfast train [--config FILE.yaml] [--section.key value ...]"
ABOUT = """Train a decoder-only transformer. Without arguments: a small byte-level model on the source of the Python
standard library, in 2 processes. Keys stand in a YAML file, on the command line, or both; the later one wins."""


_HOW_TO = ". Keys are given as --section.key value, lists as '[a, b]'; see pyfast train --help."


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The config of a command line. Raises `ConfigError` or `UnknownKey`; `--help` and `--print_config` exit."""
    parser = _parser()
    try:
        parsed = parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise _readable(str(error)) from None
    values = {name: _plain(getattr(parsed, name)) for name in sections()}
    return from_dict(values)


def all_keys() -> dict[str, tuple[dataclasses.Field, Any]]:
    """Every key, `section.key` -> (field, type)."""
    found = {}
    for name, section in sections().items():
        hints = field_types(section)
        found.update({f"{name}.{item.name}": (item, hints[item.name]) for item in dataclasses.fields(section)})
    return found


class _ConfigFile(ActionConfigFile):
    """`--config FILE.yaml`, checked first for what jsonargparse and YAML pass over."""

    def __call__(self, parser: Any, namespace: Any, value: str, option: str | None = None) -> None:
        if check_config_file(value, list(sections())):
            super().__call__(parser, namespace, value, option)


class _Parser(ArgumentParser):
    """jsonargparse's parser with one line of help a key."""

    def format_help(self) -> str:
        return format_help(min(shutil.get_terminal_size((120, 40)).columns, 150))


def _parser() -> ArgumentParser:
    parser = _Parser(prog="pyfast train", exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--config", action=_ConfigFile, help="YAML file")
    defaults = to_dict(TrainConfig())
    for name, (item, hint) in all_keys().items():
        section = name.split(".")[0]
        parser.add_argument(f"--{name}", type=hint, default=defaults[section][item.name], help=help_line(name, item))
    return parser


def help_line(name: str, item: dataclasses.Field) -> str:
    """What a key is for, and whether it works yet."""
    section, word = name.split(".")
    later = item.metadata.get("later") or (section == "parallel" and word not in PARALLEL_READY)
    text = item.metadata.get("help") or PARALLEL_HELP.get(word, "")
    return f"{text} (not supported yet)" if later else text


def format_help(width: int = 120) -> str:
    """The help of `pyfast train`: for each key its default, what is allowed and what it is for."""
    lines = [f"usage: {USAGE}", "", *textwrap.wrap(" ".join(ABOUT.split()), width), ""]
    lines += [
        "  --config FILE.yaml         read keys from a YAML file (may be given more than once)",
        "  --print_config             print the whole config as YAML and exit",
        "  -h, --help                 print this help and exit",
        "",
        "Each line: the key, its [default], what it is for; what is allowed.",
    ]
    defaults = to_dict(TrainConfig())
    section = ""
    for name, (item, hint) in all_keys().items():
        if name.split(".")[0] != section:
            section = name.split(".")[0]
            lines += ["", f"{section}:"]
        default = yaml_word(defaults[section][item.name])
        head = f"  --{name:<28} [{default}]"
        text = f"{help_line(name, item)}; {describe_allowed(item, hint)}"
        lines += textwrap.wrap(
            f"{head:<50} {text}", width, subsequent_indent=" " * 51, break_on_hyphens=False, drop_whitespace=True
        ) or [head]
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Namespace):
        return {name: _plain(part) for name, part in vars(value).items()}
    return value


def _readable(message: str) -> TrainingError:
    """jsonargparse's message in our words: key, value, what is allowed, the closest key."""
    wrong = re.search(r'Parser key "([\w.]+)":.*?(?:Got|Given) value: (.*)', message, re.DOTALL)
    keys = all_keys()
    if wrong and wrong[1] in keys:
        item, hint = keys[wrong[1]]
        return ConfigError(wrong[1], _literal(wrong[2].strip()), f"allowed is {describe_allowed(item, hint)}")
    unknown = re.search(r"Option '([^']+)' is not accepted", message) or re.search(
        r"unrecognized arguments: --?([\w.+-]+)", message
    )
    if unknown:
        return UnknownKey(_unknown_key(unknown[1].strip("+"), list(keys)))
    bare = re.search(r"unrecognized arguments: (\S.*)", message)
    if bare:
        return UnknownKey(_bare_words(bare[1].split()))
    return UnknownKey(" ".join(message.split()) + _HOW_TO)


def _bare_words(words: list[str]) -> str:
    """What to say of words that no key stands before: most likely a file, of text or of keys."""
    paths = list(itertools.takewhile(lambda word: not word.startswith("--"), words))
    if os.path.exists(" ".join(paths)):  # the message does not tell a name with spaces from several words
        paths = [" ".join(paths)]
    file = paths[0]
    text = f"{file}: no key stands before it"
    if file.endswith((".yaml", ".yml")):
        return f"{text}. If it is a file of keys: --config {shlex.quote(file)}."
    value = paths[0] if len(paths) == 1 else f"[{', '.join(paths)}]"
    return f"{text}. If it is text to train on: --data.paths {shlex.quote(value)}. See pyfast train --help."


def _literal(text: str) -> Any:
    """The value that jsonargparse wrote into its message."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _unknown_key(name: str, keys: list[str]) -> str:
    section = name.split(".")[0]
    near = difflib.get_close_matches(name, keys, n=1, cutoff=0.5)
    same_end = [one for one in keys if one.split(".")[1] == name.split(".")[-1]]
    best = (near if near and near[0].split(".")[0] == section else same_end or near)[:1]
    names = [one.split(".")[1] for one in keys if one.startswith(section + ".")]
    text = f"{name}: there is no such key."
    if best:
        text += f" Did you mean {best[0]}?"
    if names:
        return f"{text} Keys of {section}: {', '.join(names)}."
    return f"{text} Sections: {', '.join(sections())}; see pyfast train --help."
