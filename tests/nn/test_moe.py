"""`pyfast.nn.MoE` against dense float64 maths and against the blocks of transformers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from pyfast.nn import MoE
from pyfast.nn.layout import Layout, get_layout, has_layout

DOUBLE = {"dtype": torch.float64}
SIZES = (12, 7, 8, 3)  # H, F, E, K
KINDS = {
    "softmax": {"normalize": False},
    "softmax, normalised": {"normalize": True, "routed_scale": 0.7},
    "sigmoid": {"score": "sigmoid", "normalize": False},
    "DeepSeek": {
        "score": "sigmoid",
        "normalize": True,
        "routed_scale": 2.5,
        "num_groups": 4,
        "topk_groups": 2,
        "balancing_bias": True,
        "shared_experts": 2,
    },
    "shared": {"normalize": True, "shared_experts": 1},
    "shared, gated": {
        "normalize": False,
        "shared_expert_width": 5,
        "shared_expert_gate": True,
    },
}


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layer_of(options: dict, dtype: torch.dtype = torch.float64, sizes: tuple[int, ...] = SIZES) -> MoE:
    layer = MoE(*sizes, **options, dtype=dtype)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(randn(*parameter.shape, seed=seed) * 0.5)
        if layer.balancing_bias is not None:
            layer.balancing_bias.copy_(randn(sizes[2], seed=50) * 0.3)
    return layer


def dense(layer: MoE, x: torch.Tensor, options: dict) -> torch.Tensor:
    """Every expert on every token [T, H], in x's dtype; then the chosen ones are picked."""
    logits = x @ layer.router.t()
    scores = logits.sigmoid() if options.get("score") == "sigmoid" else logits.softmax(-1)
    choice = scores if layer.balancing_bias is None else scores + layer.balancing_bias
    if "num_groups" in options:
        groups = choice.unflatten(-1, (options["num_groups"], -1))
        best = groups.topk(2, -1)[0].sum(-1).topk(options["topk_groups"], -1)[1]
        kept = torch.zeros_like(groups[..., 0]).scatter(-1, best, 1).bool()
        choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    ids = choice.topk(layer.experts_per_token, -1)[1]
    weights = options.get("routed_scale", 1.0) * scores.gather(-1, ids)
    if options["normalize"]:
        weights = weights / scores.gather(-1, ids).sum(-1, keepdim=True)
    gate, up = torch.einsum("th,efh->tef", x, layer.w_gate_up).chunk(2, -1)
    out = torch.einsum("tef,ehf->teh", F.silu(gate) * up, layer.w_down)
    y = (out.gather(1, ids[..., None].expand(-1, -1, x.shape[-1])) * weights[..., None]).sum(1)
    if layer.shared is None:
        return y
    gate, up = F.linear(x, layer.shared.gate_up.weight).chunk(2, -1)
    shared = F.linear(F.silu(gate) * up, layer.shared.down.weight)
    return y + (shared if layer.shared_gate is None else F.linear(x, layer.shared_gate).sigmoid() * shared)


def with_gradients(y: torch.Tensor, inputs, loss: torch.Tensor | float = 0.0) -> tuple[torch.Tensor, ...]:
    upstream = randn(*y.shape, seed=9).to(y.dtype)
    return (y.detach(), *torch.autograd.grad((y * upstream).sum() + loss, inputs))


def assert_equal(got, want, tolerance: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and b.norm() > 0
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_equal_dense_maths(kind):
    layer, x = layer_of(KINDS[kind]), randn(2, 11, 12, seed=3).requires_grad_()
    inputs = (x, *layer.parameters())
    want = dense(layer, x.flatten(0, 1), KINDS[kind]).view_as(x)
    out = layer(x)
    assert_equal(with_gradients(out.y, inputs), with_gradients(want, inputs), 1e-12)
    assert out.losses == {} and out.counts.sum() == 2 * 11 * 3 and out.dropped == 0


@pytest.mark.parametrize("kind", ["softmax", "DeepSeek"])
def test_bfloat16_routes_in_float32(kind):
    """Against the exact result of the same rounded weights; a router in bfloat16 would choose others."""
    layer = layer_of(KINDS[kind], torch.bfloat16, (64, 32, 8, 2))
    x = randn(300, 64, seed=3).bfloat16()
    exact = copy.deepcopy(layer).double()
    logits = x.double() @ exact.router.t()
    assert not torch.equal((x @ layer.router.t()).topk(2)[1], logits.topk(2)[1])  # the test can fail
    inputs, exact_inputs = (tuple(module.parameters()) for module in (layer, exact))
    got, want = with_gradients(layer(x).y, inputs), with_gradients(dense(exact, x.double(), KINDS[kind]), exact_inputs)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a - b).norm() <= 6e-3 * b.norm()


# ---- transformers' blocks ----

BLOCKS = {
    "mixtral": (
        "MixtralSparseMoeBlock",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 7},
        {"normalize": True},
    ),
    "qwen3_moe": (
        "Qwen3MoeSparseMoeBlock",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 7, "norm_topk_prob": False},
        {"normalize": False},
    ),
    "qwen2_moe": (
        "Qwen2MoeSparseMoeBlock",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 7, "shared_expert_intermediate_size": 5},
        {"normalize": False, "shared_expert_width": 5, "shared_expert_gate": True},
    ),
    "deepseek_v3": (
        "DeepseekV3MoE",
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 7,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
        },
        KINDS["DeepSeek"],
    ),
}


def block_of(family: str) -> torch.nn.Module:
    """A block of transformers in its own loop over the experts."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("transformers.integrations.moe", reason="an older transformers stores its experts otherwise")
    name, options, _ = BLOCKS[family]
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=[name])
    prefix = {"mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe", "qwen2_moe": "Qwen2Moe", "deepseek_v3": "DeepseekV3"}
    config = getattr(transformers, f"{prefix[family]}Config")(hidden_size=SIZES[0], **options)
    config._experts_implementation = "eager"
    block = getattr(module, name)(config)
    with torch.no_grad():
        for seed, tensor in enumerate(block.state_dict().values()):
            tensor.copy_(randn(*tensor.shape, seed=seed) * 0.5)
    return block


def their_tensors(block: torch.nn.Module, of: str) -> dict[str, torch.Tensor]:
    """`of` ("data" or "grad") of the block's parameters, under our names."""
    theirs = {name: getattr(parameter, of) for name, parameter in block.named_parameters()}
    ours = {
        "router": theirs.pop("gate.weight"),
        "w_gate_up": theirs.pop("experts.gate_up_proj"),
        "w_down": theirs.pop("experts.down_proj"),
    }
    if "shared_expert_gate.weight" in theirs:
        ours["shared_gate"] = theirs.pop("shared_expert_gate.weight")
    if theirs:
        gate, up, down = theirs.values()
        ours |= {"shared.gate_up.weight": torch.cat([gate, up]), "shared.down.weight": down}
    return ours


@pytest.mark.parametrize("family", BLOCKS)
def test_outputs_and_gradients_equal_transformers(family):
    block = block_of(family)
    layer = MoE(*SIZES, **BLOCKS[family][2])
    with torch.no_grad():
        weights = their_tensors(block, "data")
        assert set(weights) == {name for name, _ in layer.named_parameters()}
        for name, parameter in layer.named_parameters():
            parameter.copy_(weights[name])
        if layer.balancing_bias is not None:
            layer.balancing_bias.copy_(block.gate.e_score_correction_bias)
            assert layer.balancing_bias.norm() > 0
    x, upstream = randn(2, 11, 12, seed=3).float(), randn(2, 11, 12, seed=4).float()
    x_ours, x_theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, out = block(x_theirs), layer(x_ours)
    want.backward(upstream)
    out.y.backward(upstream)
    gradients = their_tensors(block, "grad")
    pairs = [(out.y, want), (x_ours.grad, x_theirs.grad)]
    pairs += [(parameter.grad, gradients[name]) for name, parameter in layer.named_parameters()]
    assert_equal(*zip(*pairs, strict=True), tolerance=1e-5)


# ---- padding, capacity, recomputation, losses ----


def losses_of(layer: MoE, x: torch.Tensor, *args, **options):
    """(output, its y with gradients by x and the parameters, the auxiliary losses included)."""
    out = layer(x, *args, **options)
    return out, with_gradients(out.y, (x, *layer.parameters()), sum(out.losses.values()))


LOSSES = {"aux_loss_weight": 0.3, "z_loss_weight": 0.02}


def test_auxiliary_losses_are_named_and_equal_dense_maths():
    layer = layer_of({"normalize": True, "name": "layer 3 moe", **LOSSES})
    x = randn(9, 12, seed=3).requires_grad_()
    out, got = losses_of(layer, x)
    logits = x @ layer.router.t()
    p = logits.softmax(-1)
    load = torch.zeros(8, dtype=torch.int64).scatter_add(0, p.topk(3)[1].flatten(), torch.ones(27, dtype=torch.int64))
    balance, z = 8 / (3 * 9) * (load * p.sum(0)).sum(), logits.logsumexp(-1).square().sum()
    want = {"layer 3 moe.balance": 0.3 * balance, "layer 3 moe.z": 0.02 * z}
    assert out.losses.keys() == want.keys()
    for name, loss in want.items():
        torch.testing.assert_close(out.losses[name], loss, rtol=1e-12, atol=0)
    assert torch.equal(out.load, load) and torch.equal(out.counts, load)
    dense_y = dense(layer, x, {"normalize": True})
    assert_equal(got, with_gradients(dense_y, (x, *layer.parameters()), sum(want.values())), 1e-12)


def test_a_sequence_balances_by_itself():
    """[B, S, H] are B documents, like packed ones; a micro-batch is one."""
    layer, x = layer_of({**LOSSES, "balance": "sequence"}), randn(3, 5, 12, seed=3)
    together = layer(x).losses["moe.balance"]
    alone = sum(layer(x[i : i + 1]).losses["moe.balance"] for i in range(3))
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=0)
    packed = layer(x.flatten(0, 1), cu_seqlens=torch.tensor([0, 5, 10, 15], dtype=torch.int32)).losses["moe.balance"]
    assert torch.equal(packed, together)
    layer.balance = "micro_batch"
    assert abs(layer(x).losses["moe.balance"] / together - 1) > 1e-3


def test_micro_batches_with_the_counts_of_the_step_add_up_to_one_batch():
    layer, x = layer_of({**LOSSES, "balance": "global_batch"}), randn(10, 12, seed=3)
    load, tokens = (
        layer.eval()(x, global_load=torch.zeros(8, dtype=torch.int64), global_valid_tokens=torch.tensor(1)).load,
        torch.tensor(10),
    )
    layer.train()

    def gradient(*batches):
        loss = sum(sum(layer(part, global_load=load, global_valid_tokens=tokens).losses.values()) for part in batches)
        return (loss.detach(), torch.autograd.grad(loss, layer.router)[0])

    assert_equal(gradient(x[:3], x[3:4], x[4:]), gradient(x), 1e-12)


@pytest.mark.parametrize("kind", ["softmax", "DeepSeek", "shared, gated"])
@pytest.mark.parametrize("padding", [3.0, torch.nan, torch.inf])
def test_padding_changes_no_loss_no_count_and_no_gradient(kind, padding):
    layer, x = layer_of({**KINDS[kind], **LOSSES, "capacity_factor": 0.8}), randn(2, 7, 12, seed=3)
    valid = torch.rand(2, 7, generator=torch.Generator().manual_seed(0)) < 0.6
    alone, (y, dx, *want) = losses_of(layer, x[valid].requires_grad_())
    assert alone.dropped > 0
    x = x.masked_fill(~valid[..., None], padding).requires_grad_()
    out = layer(x, valid)
    assert torch.equal(out.y[valid], y) and out.y[~valid].eq(0).all()
    assert out.losses.keys() == alone.losses.keys() and len(out.losses) == 2
    for name, loss in alone.losses.items():
        torch.testing.assert_close(out.losses[name], loss, rtol=1e-12, atol=0)
    for field in ("counts", "load", "dropped"):
        assert torch.equal(getattr(out, field), getattr(alone, field))
    upstream = torch.ones_like(out.y)
    upstream[valid] = randn(*y.shape, seed=9)
    loss = (out.y * upstream).sum() + sum(out.losses.values())
    got_dx, *got = torch.autograd.grad(loss, (x, *layer.parameters()))
    assert_equal((got_dx[valid], *got), (dx, *want), 1e-12)
    assert got_dx[~valid].eq(0).all()


def test_the_first_tokens_can_be_the_valid_ones():
    layer, x = layer_of(LOSSES), randn(9, 12, seed=3)
    want = layer(x, torch.arange(9) < 4)
    for valid in (4, torch.tensor(4)):
        out = layer(x, valid)
        assert torch.equal(out.y, want.y) and torch.equal(out.load, want.load) and out.losses == want.losses


def test_dropped_tokens_go_on_through_the_residual():
    layer, x = layer_of({"capacity": 2, "normalize": True}, sizes=(12, 7, 4, 1)), randn(30, 12, seed=3).requires_grad_()
    out = layer(x)
    assert out.counts.max() == 2 and out.dropped == 30 - out.counts.sum() and out.load.sum() == 30
    gone = out.y.eq(0).all(1)
    assert gone.sum() == out.dropped and not gone[:2].any()  # by position: the first tokens stay
    (gradient,) = torch.autograd.grad((x + out.y)[gone].sum(), x)
    assert torch.equal(gradient, gone[:, None].expand(-1, 12).double())


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed pre-activation"])
def test_recomputation_counts_tokens_once_and_changes_no_bit(recompute):
    layer = layer_of({**KINDS["DeepSeek"], **LOSSES, "recompute": recompute, "jitter": 0.1, "seed": 1})
    x, bias = randn(2, 7, 12, seed=3).requires_grad_(), layer.balancing_bias.clone()
    out, want = losses_of(layer, x, step=5)
    again = checkpoint(layer, x, step=5, use_reentrant=False)
    got = with_gradients(again.y, (x, *layer.parameters()), sum(again.losses.values()))
    assert torch.equal(again.load, out.load) and again.load.sum() == 2 * 7 * 3
    assert torch.equal(layer.balancing_bias, bias)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_jitter_is_for_training_and_a_function_of_the_step():
    layer, x = layer_of({"jitter": 0.5, "seed": 7}), randn(9, 12, seed=3)
    plain = layer_of({})(x).y
    first, second = layer(x, step=1).y, layer(x, step=2).y
    assert torch.equal(layer(x, step=1).y, first)
    assert not torch.equal(first, second) and not torch.equal(first, plain)
    with pytest.raises(ValueError, match="step is missing"):
        layer(x)
    assert torch.equal(layer.eval()(x).y, plain)


# ---- the balancing bias ----


def test_the_balancing_bias_moves_once_a_step_towards_even_loads():
    layer = layer_of({"balancing_bias": True, "score": "sigmoid"})
    before = layer.balancing_bias.clone()
    load = sum(layer(randn(5, 12, seed=seed)).load for seed in range(3))
    assert load.dtype == torch.int64 and load.sum() == 45 and torch.equal(layer.balancing_bias, before)
    layer.update_balancing_bias(load, rate=0.01)
    want = before + 0.01 * torch.sign(45 / 8 - load.double()).float()
    torch.testing.assert_close(layer.balancing_bias, want, rtol=0, atol=1e-7)
    assert not torch.equal(layer.balancing_bias, before)
    with pytest.raises(ValueError, match="no balancing bias"):
        layer_of({}).update_balancing_bias(load)


def test_the_bias_evens_the_loads_out():
    layer = layer_of({"balancing_bias": True, "score": "sigmoid"}, sizes=(12, 7, 8, 2))
    layer.balancing_bias.zero_()
    x = randn(400, 12, seed=3) + 1.0
    first = layer(x).load
    for _ in range(300):
        layer.update_balancing_bias(layer(x).load, rate=0.01)
    last = layer(x).load
    assert first.max() > 1.5 * 100 and (last - 100).abs().max() < 15


@pytest.mark.parametrize(
    "convert", [lambda m: m.bfloat16(), lambda m: m.half(), lambda m: m.double(), lambda m: m.to(torch.bfloat16)]
)
def test_the_balancing_bias_stays_float32(convert):
    layer = layer_of({"balancing_bias": True}, torch.float32)
    bias = layer.balancing_bias.clone()
    model = convert(torch.nn.Sequential(layer))
    assert next(model.parameters()).dtype != torch.float32
    assert layer.balancing_bias.dtype == torch.float32 and torch.equal(layer.balancing_bias, bias)
    state = {name: tensor.bfloat16() for name, tensor in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    assert layer.balancing_bias.dtype == torch.float32 and torch.equal(layer.balancing_bias, bias.bfloat16().float())


def test_the_balancing_bias_is_saved_and_moved():
    layer = layer_of({"balancing_bias": True}, torch.float32)
    assert "balancing_bias" in layer.state_dict() and "balancing_bias" not in layer_of({}).state_dict()
    assert copy.deepcopy(layer).to("meta").bfloat16().balancing_bias.is_meta


# ---- main_grad, autocast, compile ----


@pytest.mark.parametrize("deferred", [False, True])
def test_main_grads_get_the_gradients_of_the_experts(deferred):
    layer, x = layer_of({"normalize": True}, torch.float32), randn(2, 12, seed=3).float()
    layer(x).y.sum().backward()
    want = [parameter.grad.clone() for parameter in layer.parameters()]
    layer.zero_grad(set_to_none=True)
    main_grads, later = tuple(torch.full_like(w, 7.0) for w in (layer.w_gate_up, layer.w_down)), []
    layer(x, main_grads=main_grads, defer=later.append if deferred else None).y.sum().backward()
    if deferred:
        assert all(grad.eq(7).all() for grad in main_grads) and later
        for closure in later:
            closure()
    assert layer.w_gate_up.grad is None and layer.w_down.grad is None
    torch.testing.assert_close([layer.router.grad, *(grad - 7 for grad in main_grads)], want, rtol=1e-5, atol=1e-5)
    idle = layer(x).counts == 0
    assert idle.any() and all(grad[idle].eq(7.0).all() for grad in main_grads)


def test_the_router_computes_in_float32_under_autocast():
    layer, x = layer_of({"normalize": True}, torch.float32, (64, 32, 8, 2)), randn(300, 64, seed=3).float()
    want = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
        assert not torch.equal((x @ layer.router.t()).topk(2)[1], (x.double() @ layer.router.double().t()).topk(2)[1])
    assert torch.equal(out.load, want.load)
    assert 0 < (out.y - want.y).norm() <= 8e-3 * want.y.norm()
    out.y.float().sum().backward()
    assert layer.router.grad.dtype == torch.float32


def test_one_graph_when_compiled():
    layer = layer_of({**KINDS["DeepSeek"], **LOSSES}, torch.float32)
    x = randn(2, 7, 12, seed=3).float().requires_grad_()
    inputs = (x, *layer.parameters())
    want = layer(x)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(got.load, want.load) and got.losses.keys() == want.losses.keys()
    pair = (with_gradients(out.y, inputs, sum(out.losses.values())) for out in (got, want))
    assert_equal(*pair, tolerance=1e-6)


# ---- construction ----


def test_every_parameter_has_its_layout_and_keeps_it():
    layer = MoE(12, 7, 8, 3, shared_experts=2, shared_expert_gate=True, balancing_bias=True)
    assert get_layout(layer.router) == Layout((8, 12))
    assert get_layout(layer.w_gate_up) == Layout((8, 14, 12)) and get_layout(layer.w_down) == Layout((8, 12, 7))
    assert get_layout(layer.shared_gate) == Layout((1, 12)) and layer.shared.down.weight.shape == (12, 14)
    expected = {name: get_layout(parameter) for name, parameter in layer.named_parameters()}
    for made in (
        copy.deepcopy(layer),
        pickle.loads(pickle.dumps(layer)),
        copy.deepcopy(layer).to("meta").to_empty(device="cpu"),
        copy.deepcopy(layer).bfloat16(),
    ):
        assert all(has_layout(parameter) for parameter in made.parameters())
        assert {name: get_layout(parameter) for name, parameter in made.named_parameters()} == expected


def test_experts_start_like_linear_layers():
    torch.manual_seed(0)
    layer = MoE(100, 400, 8, 2)
    for weight, bound in ((layer.router, 0.1), (layer.w_gate_up, 0.1), (layer.w_down, 0.05)):
        assert weight.abs().max() <= bound and abs(weight.std().item() / (bound / 3**0.5) - 1) < 0.05


@pytest.mark.parametrize(
    "options,error,named",
    [
        ({"score": "tanh"}, ValueError, "score is 'tanh'"),
        ({"num_groups": 3}, ValueError, "num_groups is 3"),
        ({"topk_groups": 2}, ValueError, "topk_groups is 2"),
        ({"capacity": 1, "capacity_factor": 1.0}, ValueError, "capacity and capacity_factor"),
        ({"jitter": 0.1}, ValueError, "seed is missing"),
        ({"routed_scale": -1.0}, ValueError, "scale is -1"),
        ({"aux_loss_weight": -1.0}, ValueError, "aux_loss_weight is -1"),
        ({"z_loss_weight": "big"}, TypeError, "z_loss_weight is 'big'"),
        ({"balance": "layer"}, ValueError, "balance is 'layer'"),
        ({"shared_expert_gate": True}, ValueError, "shared_expert_gate=True without shared_experts"),
        ({"shared_experts": -1}, ValueError, "shared_experts is -1"),
        ({"dropout": 0.1}, TypeError, "dropout is no argument of MoE"),
        ({"valid": None}, TypeError, "valid is no argument of MoE"),
    ],
)
def test_options_that_do_not_fit_are_named_when_the_layer_is_made(options, error, named):
    with pytest.raises(error, match=named):
        MoE(*SIZES, **options)


@pytest.mark.parametrize(
    "sizes,named", [((0, 7, 8, 3), "width is 0"), ((12, 7, 2, 3), "k is 3"), ((12, 7.0, 8, 3), "expert_width is 7.0")]
)
def test_sizes_that_do_not_fit_are_named(sizes, named):
    with pytest.raises((ValueError, TypeError), match=named):
        MoE(*sizes)


@pytest.mark.parametrize(
    "x,arguments,named",
    [
        ((5, 11), {}, r"x has shape \(5, 11\)"),
        ((12,), {}, r"x has shape \(12,\)"),
        ((5, 12), {"valid": torch.ones(4, dtype=torch.bool)}, r"valid has shape \(4,\)"),
        ((5, 12), {"valid": torch.ones(5)}, "valid is torch.float32"),
        ((5, 12), {"valid": True}, "valid is True"),
        ((5, 12), {"token_ids": torch.arange(4)}, r"token_ids has shape \(4,\)"),
        ((1, 5, 12), {"cu_seqlens": torch.tensor([0, 5], dtype=torch.int32)}, "with cu_seqlens it must be packed"),
        ((5, 12), {"global_load": torch.ones(8, dtype=torch.int64)}, "global_load is given without balance"),
    ],
)
def test_arguments_that_do_not_fit_are_named(x, arguments, named):
    with pytest.raises(ValueError, match=named):
        MoE(*SIZES)(torch.zeros(x), **arguments)


def test_no_tokens_are_no_trouble():
    layer = layer_of({**KINDS["DeepSeek"], **LOSSES})
    out = layer(torch.zeros(0, 12, dtype=torch.float64))
    (out.y.sum() + sum(out.losses.values())).backward()
    assert out.y.shape == (0, 12) and out.load.sum() == 0 and layer.w_down.grad.eq(0).all()
