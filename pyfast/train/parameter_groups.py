"""Which update rule, weight decay and learning rate each parameter gets.

By default matrices decay and norm weights and biases do not; under Muon the embeddings, the head and whatever is no
matrix are AdamW's. `optimizer.groups` changes that by regular expression.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from pyfast.train.config import OptimizerConfig

_SETTINGS = ("weight_decay", "rate", "rule")
_NOT_FOR_MUON = re.compile(r"(^|\.)(embedding|head)(\.|$)")  # they turn tokens into vectors, not vectors into vectors


@dataclass(frozen=True)
class ParameterGroup:
    """What parameters have in common for the optimizer.

    weight_decay, rule: None: the optimizer's. rate: factor of the learning rate. pattern: of `optimizer.groups`, None
    for a default.
    """

    weight_decay: float | None = None
    rate: float = 1.0
    rule: str | None = None
    pattern: str | None = None


DECAY, NO_DECAY = ParameterGroup(), ParameterGroup(weight_decay=0.0)


def parameter_group(
    name: str, parameter: Tensor, config: OptimizerConfig | None = None, *, decay_all: bool = False
) -> ParameterGroup:
    """The group of a parameter under `config`; without one, by whether it is a matrix alone."""
    decay_all = decay_all or (config is not None and config.decay_all)
    default = DECAY if decay_all or parameter.dim() > 1 else NO_DECAY
    if config is None:
        return default
    rule = None
    if config.name == "muon" and (parameter.dim() not in (2, 3) or _NOT_FOR_MUON.search(name)):
        rule = "adamw"
    for pattern, settings in (config.groups or {}).items():
        if re.search(pattern, name):
            return ParameterGroup(
                settings.get("weight_decay", default.weight_decay),
                settings.get("rate", 1.0),
                settings.get("rule", rule),
                pattern,
            )
    return ParameterGroup(default.weight_decay, rule=rule)


def check_groups(groups: Mapping[str, Any], optimizer: str) -> None:
    """Raise ValueError for a pattern that is no regular expression, and for settings that a group does not have."""
    for pattern, settings in groups.items():
        where = f"the group {pattern!r}"
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"{where} is no regular expression: {error}") from error
        if not isinstance(settings, Mapping) or not settings or not set(settings) <= set(_SETTINGS):
            raise ValueError(f"{where} must be a mapping with some of {', '.join(_SETTINGS)}")
        for name in ("weight_decay", "rate"):
            value = settings.get(name, 0.0)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{where} has {name} {value!r}; a number of at least 0 is needed")
        if "rule" in settings and (optimizer != "muon" or settings["rule"] not in ("muon", "adamw")):
            raise ValueError(f"{where} has a rule; allowed are muon and adamw, with optimizer.name = muon")


def check_matches(named_parameters: Iterable[tuple[str, Tensor]], config: OptimizerConfig) -> None:
    """Raise ValueError for a pattern of `config.groups` that decides for no parameter, and for Muon on vectors."""
    unused = dict(config.groups or {})
    for name, parameter in named_parameters:
        group = parameter_group(name, parameter, config)
        unused.pop(group.pattern, None)
        if group.rule == "muon" and parameter.dim() not in (2, 3):
            raise ValueError(f"optimizer.groups: the group {group.pattern!r} gives {name} to muon, but it is no matrix")
    if unused:
        raise ValueError(
            f"optimizer.groups: the group {next(iter(unused))!r} decides for no parameter: it matches none, or an "
            "earlier group takes all that it matches"
        )


def describe_groups(named_parameters: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> list[str]:
    """One line a parameter group, for the start of a run."""
    groups: dict[ParameterGroup, list[Tensor]] = {}
    for name, parameter in named_parameters:
        groups.setdefault(parameter_group(name, parameter, config), []).append(parameter)
    return [_describe(group, parameters, config) for group, parameters in groups.items()]


def _describe(group: ParameterGroup, parameters: list[Tensor], config: OptimizerConfig) -> str:
    decay = config.weight_decay if group.weight_decay is None else group.weight_decay
    text = f"{group.rule or config.name}, weight decay {decay:g}"
    if group.rate != 1.0:
        text += f", learning rate x {group.rate:g}"
    if group.pattern is not None:
        return f"{text}: {len(parameters)} that match {group.pattern}"
    vectors = sum(parameter.dim() < 2 for parameter in parameters)
    what = (
        "matrices" if not vectors else "norms and biases" if vectors == len(parameters) else "parameters, all of them"
    )
    return f"{text}: {len(parameters)} {what}"
