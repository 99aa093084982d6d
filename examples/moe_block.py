"""pyfast's experts in a transformers model, and `pyfast.nn.MoE` as a layer of one's own. Runs on a CPU in seconds.

pip install '.[test]'
python examples/moe_block.py
"""

from __future__ import annotations

import time

import torch
from torch import nn

from pyfast.nn import MoE, RMSNorm


def inside_transformers() -> None:
    """The same model with both implementations of the experts: equal loss and gradients."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    from pyfast.integrations.transformers import register

    register()  # once a process
    config = MixtralConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=16,
        num_experts_per_tok=2,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    ids = torch.randint(0, 256, (4, 128))
    results = {}
    for implementation in ("eager", "pyfast"):
        model.set_experts_implementation(implementation)
        for _ in range(2):  # the first warms up
            model.zero_grad()
            start = time.perf_counter()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            seconds = time.perf_counter() - start
        gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        results[implementation] = gradient
        print(f"experts by {implementation:7s} loss {loss.item():.6f}, {seconds * 1e3:.0f} ms forward + backward")
    difference = (results["pyfast"] - results["eager"]).norm() / results["eager"].norm()
    print(f"the gradients differ by {difference:.1e}, relative")


class Block(nn.Module):
    """A residual block around a DeepSeek-style mixture: sigmoid scores, a shared expert, balance without a loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = RMSNorm(width)
        self.moe = MoE(width, 32, 16, 2, score="sigmoid", normalize=True, shared_experts=1, balancing_bias=True)

    def forward(self, x: torch.Tensor):
        out = self.moe(self.norm(x))
        return x + out.y, out


def as_a_layer() -> None:
    """Train a block on a made-up regression; the experts' loads even out through the balancing bias."""
    torch.manual_seed(0)
    block, teacher = Block(32), nn.Linear(32, 32)
    optimizer = torch.optim.AdamW(block.parameters(), lr=3e-3)
    for step in range(201):
        x = torch.randn(512, 32) + 0.5  # off centre, so that some experts start as favourites
        y, out = block(x)
        loss = (y - teacher(x).tanh()).square().mean()
        optimizer.zero_grad()
        (loss + sum(out.losses.values()) / x.shape[0]).backward()
        optimizer.step()
        block.moe.update_balancing_bias(out.load, rate=0.01)
        if step % 50 == 0:
            busiest = out.load.max() / out.load.float().mean()
            print(f"step {step:3d}, loss {loss.item():.4f}, the busiest expert has {busiest:.2f} x its share")


if __name__ == "__main__":
    inside_transformers()
    as_a_layer()
