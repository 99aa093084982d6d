"""torch.compile sees the whole model as one graph, and the compiled model gives the results of the plain one."""

from __future__ import annotations

import pytest
import torch

from pyfast.models import Transformer, TransformerConfig

CONFIG = TransformerConfig(layers=2, width=16, heads=4, kv_heads=2, ffn_width=20, vocab=31, max_positions=64)
CU_SEQLENS = torch.tensor([0, 3, 12], dtype=torch.int32)


def logits(model: Transformer, ids: torch.Tensor, **options) -> torch.Tensor:
    return model(ids, **options).square().sum()


def loss(model: Transformer, ids: torch.Tensor, **options) -> torch.Tensor:
    return model.loss(ids, ids.roll(-1), **options)


@pytest.mark.parametrize("shape,options", [((2, 6), {}), ((12,), {"cu_seqlens": CU_SEQLENS})], ids=["batch", "packed"])
@pytest.mark.parametrize("result", [logits, loss])
def test_one_graph_gives_the_same_result_and_gradients(result, shape, options):
    model = Transformer(CONFIG, dtype=torch.float64)
    ids = torch.randint(0, CONFIG.vocab, shape, generator=torch.Generator().manual_seed(0))
    values, gradients = [], []
    torch.compiler.reset()
    for function in (result, torch.compile(result, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        value = function(model, ids, **options)
        value.backward()
        values.append(value.detach())
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-9, atol=1e-12)
