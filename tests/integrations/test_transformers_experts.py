"""`experts_implementation="pyfast"` against transformers' own loop over the experts."""

from __future__ import annotations

import copy
import inspect
import sys

import pytest
import torch
import torch.nn.functional as F

from pyfast import ops

transformers = pytest.importorskip("transformers")
from pyfast.integrations import transformers_experts  # noqa: E402

if not transformers_experts.register():
    pytest.skip("this transformers takes no experts_implementation from outside", allow_module_level=True)

from transformers.models.aria.modeling_aria import AriaExperts  # noqa: E402
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts  # noqa: E402
from transformers.models.mixtral.modeling_mixtral import MixtralExperts  # noqa: E402

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
QWEN = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12, "decoder_sparse_step": 1}
FAMILIES = {
    "Mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "Mixtral, gelu": {"num_local_experts": 6, "num_experts_per_tok": 2, "hidden_act": "gelu"},
    "Qwen3Moe": {**QWEN, "head_dim": 8},
    "Qwen3Moe, normalised": {**QWEN, "head_dim": 8, "norm_topk_prob": True},
    "Qwen2Moe": {**QWEN, "shared_expert_intermediate_size": 15},
    "Olmoe": {"num_experts": 5, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 12,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 0,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 6,
    },
    "GptOss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8, "layer_types": None},
}


def model_of(family: str, dtype: torch.dtype = torch.float32, **options) -> torch.nn.Module:
    """A tiny model in eager mode, with weights far from their initial values."""
    name = family.split(",")[0]
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **FAMILIES[family], **options})
    config._attn_implementation = config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *(b for n, b in model.named_buffers() if n.endswith("correction_bias"))):
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2 + (tensor.dim() == 1))
    return model.to(dtype).train()


def logits_and_gradients(model: torch.nn.Module, implementation: str, tokens: int = 17) -> dict[str, torch.Tensor]:
    model.set_experts_implementation(implementation)
    model.zero_grad(set_to_none=True)
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(0, SIZES["vocab_size"], (2, 2, tokens), generator=generator)
    logits = model(input_ids=ids).logits
    F.cross_entropy(logits.flatten(0, 1).to(torch.float64), labels.flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": logits.detach(), **gradients}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], tolerance: float) -> None:
    assert got.keys() == want.keys()
    for name, expected in want.items():
        scale = expected.norm().item()
        assert scale > 0, name
        assert (got[name] - expected).norm().item() <= tolerance * scale, name


@pytest.fixture
def fused_calls(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the expert weights of every call of `ops.moe_mlp`."""
    calls, moe_mlp = [], ops.moe_mlp

    def counting(x, experts, weights, w_gate_up, w_down, **options):
        calls.append(tuple(w_gate_up.shape))
        return moe_mlp(x, experts, weights, w_gate_up, w_down, **options)

    monkeypatch.setattr(ops, "moe_mlp", counting)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_eager(family, fused_calls):
    model = model_of(family)
    want = logits_and_gradients(model, "eager")
    assert fused_calls == []
    assert_equal(logits_and_gradients(model, "pyfast"), want, 1e-5)
    assert len(fused_calls) == (0 if family in ("GptOss", "Mixtral, gelu") else 2)  # one a layer, or none


@pytest.mark.parametrize("family", FAMILIES)
def test_they_equal_eager_in_float64(family):
    # One layer: the routers compute in float32, where inputs that differ in their last float64 bit can part.
    model = model_of(family, torch.float64, num_hidden_layers=1)
    assert_equal(logits_and_gradients(model, "pyfast"), logits_and_gradients(model, "eager"), 1e-10)


@pytest.mark.parametrize("family", ["Mixtral", "Qwen2Moe", "DeepseekV3", "GptOss"])
def test_experts_that_no_token_chose_get_zero_gradients(family):
    model = model_of(family, num_hidden_layers=1)
    want, got = (logits_and_gradients(model, kind, tokens=2) for kind in ("eager", "pyfast"))
    name = next(name for name in want if name.endswith("experts.down_proj"))
    idle = want[name].flatten(1).eq(0).all(1)
    assert idle.any() and not idle.all()
    assert got[name][idle].eq(0).all() and got[name.replace("down", "gate_up")][idle].eq(0).all()
    assert_equal(got, want, 1e-5)


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_recomputation_changes_no_bit(family, fused_calls):
    model = model_of(family)
    want = logits_and_gradients(model, "pyfast")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    got = logits_and_gradients(model, "pyfast")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)
    assert len(fused_calls) == (6 if family == "Mixtral" else 0)


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_a_compiled_model_is_one_graph(family):
    model = model_of(family, num_hidden_layers=1)
    want = logits_and_gradients(model, "pyfast")
    block = model.model.layers[0].mlp
    model.model.layers[0].mlp = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = {name.replace("_orig_mod.", ""): value for name, value in logits_and_gradients(model, "pyfast").items()}
    assert_equal(got, want, 1e-6)


EXPERTS = {
    "Mixtral": (MixtralExperts, transformers.MixtralConfig, FAMILIES["Mixtral"]),
    "GptOss": (GptOssExperts, transformers.GptOssConfig, FAMILIES["GptOss"]),
    "Aria": (AriaExperts, transformers.AriaTextConfig, {"moe_num_experts": 6}),
}


def experts_of(kind: str, dtype: torch.dtype, **sizes) -> torch.nn.Module:
    cls, config, options = EXPERTS[kind]
    module = cls(config(**{**SIZES, **options, **sizes}))
    module.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module.to(dtype)


def run(module: torch.nn.Module, implementation: str, x, index, weights) -> dict[str, torch.Tensor]:
    module.config._experts_implementation = implementation
    module.zero_grad(set_to_none=True)
    x, weights = (t.detach().clone().requires_grad_() for t in (x, weights))
    y = module(x, index, weights)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype))
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **gradients}


def routed(tokens: int, width: int, experts: int, k: int = 2):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    weights, index = torch.randn(tokens, experts, generator=generator, dtype=torch.float64).softmax(1).topk(k)
    return x, index, weights


@pytest.mark.parametrize("kind", EXPERTS)
def test_every_storage_of_the_weights_equals_eager(kind):
    if not hasattr(EXPERTS[kind][0], "_apply_gate"):
        pytest.skip("in this transformers these experts have no other implementations")
    module = experts_of(kind, torch.float64)
    x, index, weights = routed(33, 24, 6)
    assert_equal(run(module, "pyfast", x, index, weights), run(module, "eager", x, index, weights), 1e-12)


def kind_of_experts(option: str, value: bool):
    """transformers' decorator of a class of experts with `option`."""
    from transformers.integrations.moe import use_experts_implementation

    if option not in inspect.signature(use_experts_implementation).parameters:
        pytest.skip(f"this transformers knows no {option}")
    return use_experts_implementation(**{option: value})


def test_a_norm_after_each_expert_equals_eager():
    @kind_of_experts("has_post_expert_norm", True)
    class Normed(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = 6
            self.gate_up_proj = torch.nn.Parameter(torch.randn(6, 16, 24, dtype=torch.float64))
            self.down_proj = torch.nn.Parameter(torch.randn(6, 24, 8, dtype=torch.float64))
            self.post_expert_norm = torch.nn.RMSNorm(24, dtype=torch.float64)
            self.act_fn = torch.nn.SiLU()

        def forward(self, x, index, weights):  # every expert for every token
            up = torch.einsum("th,efh->tef", x, self.gate_up_proj)
            out = torch.einsum("tef,ehf->teh", self._apply_gate(up), self.down_proj)
            out = self.post_expert_norm(out).gather(1, index[..., None].expand(-1, -1, 24))
            return (out * weights[..., None]).sum(1)

    torch.manual_seed(0)
    module = Normed(transformers.MixtralConfig())
    x, index, weights = routed(33, 24, 6)
    assert_equal(run(module, "pyfast", x, index, weights), run(module, "eager", x, index, weights), 1e-12)


def test_experts_without_a_gate_equal_eager():
    @kind_of_experts("has_gate", False)
    class Ungated(torch.nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = 6
            self.up_proj = torch.nn.Parameter(torch.randn(6, 8, 24, dtype=torch.float64))
            self.down_proj = torch.nn.Parameter(torch.randn(6, 24, 8, dtype=torch.float64))
            self.act_fn = torch.nn.GELU()

        def forward(self, x, index, weights):
            up = self.act_fn(torch.einsum("th,efh->tef", x, self.up_proj))
            out = torch.einsum("tef,ehf->teh", up, self.down_proj).gather(1, index[..., None].expand(-1, -1, 24))
            return (out * weights[..., None]).sum(1)

    torch.manual_seed(0)
    module = Ungated(transformers.MixtralConfig())
    x, index, weights = routed(33, 24, 6)
    assert_equal(run(module, "pyfast", x, index, weights), run(module, "eager", x, index, weights), 1e-12)


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_bfloat16_errs_no_more_than_eager(kind):
    module = experts_of(kind, torch.bfloat16, hidden_size=64, intermediate_size=96)
    x, index, weights = routed(200, 64, 6)
    x, weights = x.bfloat16(), weights.bfloat16()
    exact = run(copy.deepcopy(module).double(), "eager", x.double(), index, weights.double())
    eager, ours = (run(module, kind, x, index, weights) for kind in ("eager", "pyfast"))
    # Around a gate of the model's own the roundings are eager's, in another order.
    allowed = 1.0 if kind == "Mixtral" else 1.05
    for name, truth in exact.items():
        assert ours[name].dtype == torch.bfloat16
        wrong, wrong_eager = ((result[name].double() - truth).norm() / truth.norm() for result in (ours, eager))
        assert wrong <= allowed * wrong_eager, name


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_autocast_gives_the_input_dtype_back(kind):
    module = experts_of(kind, torch.float32)
    x, index, weights = (t if t.dtype == torch.int64 else t.float() for t in routed(200, 24, 6))
    exact = run(module, "eager", x, index, weights)
    with torch.autocast("cpu", torch.bfloat16):
        got = run(module, "pyfast", x, index, weights)
    for name, truth in exact.items():
        assert got[name].dtype == torch.float32
        wrong = (got[name] - truth).norm() / truth.norm()
        assert 1e-4 < wrong < 2**-7, name  # it was in bfloat16; two of its roundings


def test_experts_of_other_ranks_add_nothing():
    """transformers' expert parallelism marks their slots by an id one beyond the last."""
    module = experts_of("Mixtral", torch.float64)
    x, index, weights = routed(33, 24, 8)
    elsewhere = index >= 6
    assert elsewhere.any()
    weights = weights.masked_fill(elsewhere, 0)
    want = run(module, "eager", x, index.masked_fill(elsewhere, 0), weights)
    module._is_expert_parallel = True
    got = run(module, "pyfast", x, index.masked_fill(elsewhere, 6), weights)
    want["weights"][elsewhere] = 0  # not that of expert 0, which stood in
    assert_equal(got, want, 1e-12)
    assert got["weights"][elsewhere].eq(0).all()


def test_weights_for_every_expert_are_refused():
    module = experts_of("Mixtral", torch.float32)
    x, index, _ = routed(3, 24, 6)
    with pytest.raises(ValueError, match=r"top_k_weights has shape \(3, 6\); it must be \(3, 2\)"):
        transformers_experts.experts_forward(module, x.float(), index, torch.ones(3, 6))


@pytest.mark.parametrize("kind", ["Mixtral", "GptOss"])
def test_quantised_weights_are_refused(kind):
    module = experts_of(kind, torch.float32)
    module.down_proj = torch.nn.Parameter(module.down_proj.to(torch.int8), requires_grad=False)
    x, index, weights = routed(3, 24, 6)
    with pytest.raises(TypeError, match="int8"):
        transformers_experts.experts_forward(module, x.float(), index, weights)


def test_the_name_is_accepted_when_a_model_is_made(fused_calls):
    config = transformers.MixtralConfig(**SIZES, **FAMILIES["Mixtral"])
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="pyfast")
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert fused_calls == [(6, 40, 24)] * 2


@pytest.mark.parametrize("version,known", [("4.56.2", False), ("5.6.2", False), ("5.7.0.dev0", True), ("6.0.0", True)])
def test_a_transformers_without_the_interface_is_told(monkeypatch, version, known):
    from pyfast.integrations.transformers import register

    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    assert register() == (True, known)
    assert register().experts is known


def test_attention_and_experts_together():
    from pyfast.integrations.transformers import register

    register()
    model = model_of("Qwen3Moe")
    want = logits_and_gradients(model, "eager")
    model.set_attn_implementation("pyfast")
    assert_equal(logits_and_gradients(model, "pyfast"), want, 1e-5)


def test_another_name():
    assert transformers_experts.register("pyfast_too")
    model = model_of("Mixtral", num_hidden_layers=1)
    want, got = (logits_and_gradients(model, name) for name in ("pyfast", "pyfast_too"))
    assert all(torch.equal(got[name], want[name]) for name in want)
