"""Every class of experts that the installed transformers has, against its own forward."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

from pyfast.integrations import transformers_experts  # noqa: E402

if not transformers_experts.register():
    pytest.skip("this transformers takes no experts_implementation from outside", allow_module_level=True)

EXPERTS = 6
SMALL = {
    "hidden_size": 24,
    "moe_hidden_size": 24,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "moe_latent_size": None,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
}


class SmallConfig:
    """A model's own config with the sizes that matter made small."""

    def __init__(self, config) -> None:
        self._config, self._experts_implementation = config, "eager"

    def __getattr__(self, name: str):
        return SMALL[name] if name in SMALL else getattr(self._config, name)


def classes_of_experts() -> list[tuple[str, str]]:
    """(module, class) of what is decorated with @use_experts_implementation, found by reading the source."""
    found = []
    for file in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        names = re.findall(r"^@use_experts_implementation.*\nclass (\w+)\(", file.read_text(), re.MULTILINE)
        found += [(f"transformers.models.{file.parent.name}.{file.stem}", name) for name in names]
    return found


def experts_of(module: str, name: str) -> torch.nn.Module:
    """Made from the first config in its module that has what it asks for."""
    module = importlib.import_module(module)
    for config in vars(module).values():
        if inspect.isclass(config) and issubclass(config, transformers.PretrainedConfig):
            try:
                experts = getattr(module, name)(SmallConfig(config()))
            except (AttributeError, TypeError, KeyError):  # the config of another part of the model
                continue
            return experts.double()
    raise AssertionError(f"no config of {module.__name__} makes {name}")


def results(experts: torch.nn.Module, implementation: str) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    x = torch.randn(17, SMALL["hidden_size"], generator=generator, dtype=torch.float64, requires_grad=True)
    scores = torch.randn(17, EXPERTS, generator=generator, dtype=torch.float64)
    weights, index = scores.softmax(1).topk(2)
    weights.requires_grad_()
    experts.config._experts_implementation = implementation
    y = experts(x, index, weights)
    upstream = torch.randn(y.shape, generator=generator, dtype=torch.float64)
    return [y.detach(), *torch.autograd.grad(y, (x, weights, *experts.parameters()), upstream)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("module", "name"), classes_of_experts(), ids=lambda value: value.rpartition(".")[2])
def test_outputs_and_gradients_equal_its_own(module, name):
    experts = experts_of(module, name)
    for got, want in zip(results(experts, "pyfast"), results(experts, "eager"), strict=True):
        assert want.norm() > 0
        assert (got - want).norm() <= 1e-6 * want.norm()  # some compute a part in float32 whatever the dtype
