"""Cross entropy of a linear layer, without ever storing the logits.

Letters: T tokens, H width, V vocabulary (rows of w over the whole group), R rows of a chunk.

The rows go through in chunks. A chunk's logits [R, V_local] are one GEMM into a workspace of a few MB; one pass gives
each row's log-sum-exp and target logit; when gradients are needed, a second pass turns the workspace into d logits in
place, and two GEMMs add the chunk to dw and write its rows of dh: three GEMMs in all, as many as the plain form has.
The gradients are those of the *sum*; backward only scales them. (The idea of computing them in the forward: Liger
Kernel, Hsu et al. 2024; of the vocabulary-parallel loss: Megatron-LM, Shoeybi et al. 2019.)

Under a group each rank holds some rows of w. Per chunk the ranks exchange two numbers a row, and combine them in rank
order, so every rank has the same bits of the loss. dw needs no communication; dh is summed over the group once.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from pyfast import kernels
from pyfast.comm import Group
from pyfast.kernels.dtypes import sum_dtype
from pyfast.ops.checks import autocast, check_float, check_number, check_same
from pyfast.ops.dispatch import Op, differentiable, refuse_second_derivative
from pyfast.ops.vocabulary import VocabularyGradients, VocabularyProblem

REDUCTIONS = ("sum", "none", "mean")


def linear_cross_entropy(
    h: Tensor,
    w: Tensor,
    target: Tensor,
    *,
    group: Group | dist.ProcessGroup | None = None,
    ignore_index: int = -100,
    softcap: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "sum",
    vocab: int | None = None,
    name: str = "linear_cross_entropy",
) -> Tensor:
    """Sum over tokens of cross_entropy(softmax(h @ w.T), target) + z_loss * logsumexp^2, computed in chunks of tokens.

    Args:
        h: [..., H] float32, bfloat16, float16 or float64, any strides; the same on every rank of `group`.
            Under torch.autocast h and w are cast to its dtype first, as torch casts a product; the loss is float32.
        w: [V_local, H], h's dtype: this rank's rows of the vocabulary, in rank order.
        target: [...] int64, ids in the whole vocabulary, or `ignore_index`; the same on every rank.
        group: the ranks over which the vocabulary is cut; None: w is all of it.
        ignore_index: tokens with this target count for nothing, whatever their h: no loss, no gradient, no work.
        softcap: logits become softcap * tanh(logits / softcap); 0: they stay as they are.
        z_loss: coefficient of the squared log-sum-exp, which keeps it near 0; 0: none.
        reduction: "sum", "mean" (over the tokens that count; 0 if there is none) or "none" (one loss a token, 0 where
            ignored; costs a fourth GEMM in backward).
        vocab: V. Without it the ranks of a group tell each other their V_local first; with it w must have the rows
            numpy.array_split gives this rank (as even as possible, larger first).
        name: what the collectives are called in records and errors.

    Returns:
        float32 (float64 for float64): a scalar, or [...] for "none"; sums are kept in that dtype or better.

    Raises:
        TypeError, ValueError: naming the argument that does not fit, before anything is computed or sent; for a target
            outside the vocabulary with its value.
    """
    h, w = autocast(h, w)
    _check(h, w, target, ignore_index, reduction)
    softcap, z_loss = check_number("softcap", softcap, least=0), check_number("z_loss", z_loss, least=0)
    group_name = _group_name(group)
    if reduction == "none":
        losses, _ = _token_losses(h, w, target, ignore_index, softcap, z_loss, vocab, group_name, name)
        return losses
    grad_enabled = torch.is_grad_enabled()
    loss, _, _ = _summed_loss(
        h, w, target, ignore_index, softcap, z_loss, grad_enabled and h.requires_grad, grad_enabled and w.requires_grad,
        vocab, group_name, name,
    )  # fmt: skip
    return loss if reduction == "sum" else loss / (target != ignore_index).sum().clamp(min=1)


def _check(h: Tensor, w: Tensor, target: Tensor, ignore_index: int, reduction: str) -> None:
    check_float("h", h)
    check_same("w", w, "h", h)
    if h.dim() < 1 or w.dim() != 2 or w.shape[1] != h.shape[-1]:
        raise ValueError(
            f"w has shape {tuple(w.shape)}; it must be (rows of the vocabulary, {h.shape[-1] if h.dim() else 'H'}), "
            "the last being h's width"
        )
    if not isinstance(target, Tensor) or target.dtype != torch.int64:
        kind = target.dtype if isinstance(target, Tensor) else type(target).__name__
        raise TypeError(f"target is {kind}; an int64 tensor is needed: convert it with .long()")
    if target.shape != h.shape[:-1] or target.device != h.device:
        raise ValueError(
            f"target has shape {tuple(target.shape)} on {target.device}; it must be {tuple(h.shape[:-1])} on "
            f"{h.device}: one id for each row of h"
        )
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction is {reduction!r}; allowed are {', '.join(REDUCTIONS)}")
    if not isinstance(ignore_index, int):
        raise TypeError(f"ignore_index is {ignore_index!r}; an integer is needed")


def _group_name(group: Group | dist.ProcessGroup | None) -> str:
    """What stands for a group in an op's schema: its process group's name, "" for one rank."""
    if isinstance(group, dist.ProcessGroup):
        return group.group_name if group.size() > 1 else ""
    group = Group.wrap(group)
    return group.process_group.group_name if group.size > 1 else ""


# ---- the sum, with gradients on the way -----------------------------------------------------------------------------


def _sum(
    h: Tensor, w: Tensor, target: Tensor, ignore_index: int, softcap: float, z_loss: float, need_dh: bool,
    need_dw: bool, vocab: int | None, group: str, name: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(summed loss, this rank's part of dh in h's shape, dw); gradients unscaled, in the accumulation dtype."""
    problem = VocabularyProblem.create(h, w, target, ignore_index, softcap, z_loss, vocab, group, name)
    gradients = VocabularyGradients(problem, need_dh, need_dw)
    kernel, workspace = kernels.for_device(h.device), problem.workspace()
    total = torch.zeros((), dtype=torch.float64, device=h.device)
    # exp(x - max) can stay in the workspace for the gradient unless a softcap needs x itself again.
    keep = gradients.needed and softcap == 0
    for chunk in problem.chunks():
        hidden, ids = problem.hidden(chunk), problem.target[chunk]
        logits = problem.logits(hidden, workspace)
        lse, picked, largest = kernel.cross_entropy_rows(logits, ids, problem.start, softcap, keep)
        lse, picked = problem.combine(lse, picked)
        total += (lse - picked + z_loss * lse.square()).double().sum()
        if gradients.needed:
            kernel.cross_entropy_gradient_(
                logits, ids, problem.start, lse, largest if keep else None, None, softcap, z_loss
            )
            gradients.add(chunk, hidden, logits)
    dh = gradients.dh.view(h.shape) if need_dh else gradients.dh
    return total.to(sum_dtype(h.dtype)), dh, gradients.dw


def _sum_fake(h, w, target, ignore_index, softcap, z_loss, need_dh, need_dw, vocab, group, name):
    wide = sum_dtype(h.dtype)
    return (
        h.new_empty((), dtype=wide),
        h.new_empty(h.shape if need_dh else (0,), dtype=wide),
        w.new_empty(w.shape if need_dw else (0,), dtype=wide),
    )


def _sum_setup(ctx, inputs, output) -> None:
    h, w, _, _, _, _, _, _, _, ctx.group, ctx.name = inputs
    _, dh, dw = output
    ctx.dtype = h.dtype
    ctx.save_for_backward(dh, dw)
    ctx.mark_non_differentiable(dh, dw)


def _sum_gradients(ctx, grad: Tensor, _dh, _dw):
    refuse_second_derivative("linear_cross_entropy")
    dh, dw = ctx.saved_tensors
    need_dh, need_dw = ctx.needs_input_grad[:2]
    grad_h = grad_w = None
    if need_dh:
        grad_h = dh * grad
        if ctx.group:
            grad_h = _group_sum(grad_h, ctx.group, f"{ctx.name} hidden gradient")
        grad_h = grad_h.to(ctx.dtype)
    if need_dw:
        grad_w = (dw * grad).to(ctx.dtype)
    return grad_h, grad_w, None, None, None, None, None, None, None, None, None


def _sum_over_group(x: Tensor, group: str, name: str) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    Group.named(group).all_reduce(x, name=name, out=out)
    return out


# ---- one loss a token: gradients in backward, from logits computed again --------------------------------------------


def _tokens(
    h: Tensor, w: Tensor, target: Tensor, ignore_index: int, softcap: float, z_loss: float, vocab: int | None,
    group: str, name: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(loss of each token in target's shape, 0 where ignored; lse of the tokens that count, at the front of [T])."""
    problem = VocabularyProblem.create(h, w, target, ignore_index, softcap, z_loss, vocab, group, name)
    kernel, workspace, wide = kernels.for_device(h.device), problem.workspace(), sum_dtype(h.dtype)
    losses, lses = (torch.zeros(target.numel(), dtype=wide, device=h.device) for _ in range(2))
    for chunk in problem.chunks():
        logits = problem.logits(problem.hidden(chunk), workspace)
        lse, picked, _ = kernel.cross_entropy_rows(logits, problem.target[chunk], problem.start, softcap, False)
        lse, picked = problem.combine(lse, picked)
        loss = lse - picked + z_loss * lse.square()
        where = torch.arange(chunk.start, chunk.stop, device=h.device) if problem.rows is None else problem.rows[chunk]
        losses.index_copy_(0, where, loss)
        lses[chunk] = lse
    return losses.view(target.shape), lses


def _tokens_fake(h, w, target, ignore_index, softcap, z_loss, vocab, group, name):
    wide = sum_dtype(h.dtype)
    return h.new_empty(target.shape, dtype=wide), h.new_empty(target.numel(), dtype=wide)


def _tokens_backward(
    grad: Tensor, lses: Tensor, h: Tensor, w: Tensor, target: Tensor, ignore_index: int, softcap: float, z_loss: float,
    need_dh: bool, need_dw: bool, vocab: int | None, group: str, name: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dh, dw) from each token's upstream gradient; dh summed over the group."""
    problem = VocabularyProblem.create(h, w, target, ignore_index, softcap, z_loss, vocab, group, name)
    gradients = VocabularyGradients(problem, need_dh, need_dw)
    kernel, workspace = kernels.for_device(h.device), problem.workspace()
    grad = grad.reshape(-1)
    grad = (grad if problem.rows is None else grad[problem.rows]).contiguous()
    for chunk in problem.chunks():
        hidden, ids = problem.hidden(chunk), problem.target[chunk]
        logits = problem.logits(hidden, workspace)
        if softcap > 0:
            kernel.cross_entropy_rows(logits, ids, problem.start, softcap, False)  # logits -> x
        kernel.cross_entropy_gradient_(logits, ids, problem.start, lses[chunk], None, grad[chunk], softcap, z_loss)
        gradients.add(chunk, hidden, logits)
    dh = gradients.dh.view(h.shape) if need_dh else gradients.dh
    if need_dh:
        problem.group.all_reduce(dh, name=f"{name} hidden gradient")
    return dh.to(h.dtype), gradients.dw.to(w.dtype)


def _tokens_backward_fake(
    grad, lses, h, w, target, ignore_index, softcap, z_loss, need_dh, need_dw, vocab, group, name
):
    return h.new_empty(h.shape if need_dh else (0,)), w.new_empty(w.shape if need_dw else (0,))


def _tokens_setup(ctx, inputs, output) -> None:
    h, w, target, *ctx.settings = inputs
    _, lses = output
    ctx.save_for_backward(lses, h, w, target)
    ctx.mark_non_differentiable(lses)


def _tokens_gradients(ctx, grad: Tensor, _lses):
    need_dh, need_dw = ctx.needs_input_grad[:2]
    ignore_index, softcap, z_loss, vocab, group, name = ctx.settings
    dh, dw = _tokens_backward_op(
        grad, *ctx.saved_tensors, ignore_index, softcap, z_loss, need_dh, need_dw, vocab, group, name
    )
    return dh if need_dh else None, dw if need_dw else None, None, None, None, None, None, None, None


_SETTINGS = "int ignore_index, float softcap, float z_loss"
_GROUP = "SymInt? vocab, str group, str name"
_sum_op = Op(
    "linear_cross_entropy",
    f"(Tensor h, Tensor w, Tensor target, {_SETTINGS}, bool need_dh, bool need_dw, {_GROUP}) "
    "-> (Tensor, Tensor, Tensor)",
    _sum,
    _sum_fake,
)
_tokens_op = Op(
    "linear_cross_entropy_tokens",
    f"(Tensor h, Tensor w, Tensor target, {_SETTINGS}, {_GROUP}) -> (Tensor, Tensor)",
    _tokens,
    _tokens_fake,
)
_tokens_backward_op = Op(
    "linear_cross_entropy_tokens_backward",
    f"(Tensor grad, Tensor lses, Tensor h, Tensor w, Tensor target, {_SETTINGS}, bool need_dh, bool need_dw, {_GROUP}) "
    "-> (Tensor, Tensor)",
    _tokens_backward,
    _tokens_backward_fake,
)
_group_sum = Op("sum_over_group", "(Tensor x, str group, str name) -> Tensor", _sum_over_group, lambda x, group, name: (
    torch.empty_like(x, memory_format=torch.contiguous_format)
))  # fmt: skip
_summed_loss = differentiable(_sum_op, _sum_setup, _sum_gradients)
_token_losses = differentiable(_tokens_op, _tokens_setup, _tokens_gradients)
