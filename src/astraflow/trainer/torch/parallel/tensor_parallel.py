"""Cuts the layers of a model over the ranks that compute the same batch (tensor and expert parallelism).

The plan that comes with a transformers model (`base_model_tp_plan`) says which projections are cut and how:
`colwise` projections produce a part of the outputs (heads, or MLP entries), and `rowwise` ones consume such a
part and sum over ranks. So ranks communicate only once forward, after the rowwise projection, and once
backward, before the colwise ones. Experts are divided among ranks: each rank computes the tokens of its
experts, and the sum over ranks is the layer's output. Norms, routers, embeddings and the output head are
complete on every rank, and all ranks compute the same with them.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv:1909.08053), section 3.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from astraflow.errors import ConfigError
from astraflow.trainer.torch.parallel.grid import RankGrid

__all__ = ["LayerCuts", "cut_layers"]

_EXPERTS = "moe_tp_experts"
"""A plan's style for the module with a layer's experts."""


@dataclass(frozen=True, slots=True)
class LayerCuts:
    """Which weights are cut, by their names in the model."""

    dims: Mapping[str, int]
    """Weight -> the dimension along which it is cut into equal parts."""
    partial: frozenset[str] = frozenset()
    """Uncut weights that each rank uses only for its own heads, so that their gradients must be summed."""


@torch.no_grad()
def cut_layers(model: nn.Module, grid: RankGrid) -> LayerCuts:
    """Leaves each rank its part of every layer, and makes the layers compute with it.

    Raises: ConfigError if the model has no plan or an unsupported one, or cannot be cut into this many parts.
    """
    _check_heads(model, grid.tensor)
    dims: dict[str, int] = {}
    partials: set[str] = set()
    parents: set[str] = set()
    modules: dict[str, nn.Module] = dict(cast("Any", model).named_modules())
    num_experts_cut = 0
    for name, style in _read_plan(model):
        module = modules[name]
        foreign = cast("Any", module)
        if isinstance(module, nn.Linear) and style == "colwise":
            dims |= _cut(module, name, grid, {"weight": 0, "bias": 0})
            parents.add(name.rpartition(".")[0])
        elif isinstance(module, nn.Linear) and style == "rowwise":
            dims |= _cut(module, name, grid, {"weight": 1})
            foreign.forward = partial(_rowwise, module, grid.model_group)
        elif style == "replicated_with_grad_allreduce":
            partials |= {f"{name}.{own}" for own, _ in module.named_parameters()}
        elif style == _EXPERTS:
            if grid.cuts_experts:
                dims |= _cut(module, name, grid, dict.fromkeys(dict(module.named_parameters()), 0))
                foreign.num_experts //= grid.tensor
                foreign.forward = partial(_own_experts, foreign.forward, grid, foreign.num_experts)
                num_experts_cut += 1
        else:
            raise ConfigError(
                f"train.shard.tensor = {grid.tensor}: the plan of {type(model).__name__} has style {style!r} "
                f"for {name}, which is not supported; set train.shard.tensor: 1"
            )
    if grid.cuts_experts and not num_experts_cut:
        raise ConfigError(
            f"train.shard.expert = {grid.tensor}: {type(model).__name__} has no experts that its plan cuts; "
            "set train.shard.expert: 1"
        )
    for name in parents:
        _check_known(modules[name], name, {*dims, *partials})
        modules[name].register_forward_pre_hook(partial(_enter, grid.model_group), with_kwargs=True)
    return LayerCuts(dims, frozenset(partials))


def _read_plan(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Reads the model's plan: the name of each module in it, and the style in which the module is cut."""
    plan = cast("dict[str, str] | None", getattr(model.config, "base_model_tp_plan", None))
    if not plan:
        raise ConfigError(
            f"train.shard.tensor: {type(model).__name__} has no plan for cutting its layers "
            "(base_model_tp_plan in transformers); set train.shard.tensor: 1"
        )
    whole = cast("Any", model)
    prefix: str = next(name for name, module in whole.named_modules() if module is whole.base_model)
    names: list[str] = [name for name, _ in whole.base_model.named_modules()]
    for name in names:
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style is not None:
            yield f"{prefix}.{name}" if prefix else name, style


def _check_heads(model: nn.Module, tensor: int) -> None:
    sizes: Any = model.config
    for key in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(sizes, key, None)  # an optional attribute of third-party configs
        if heads is not None and heads % tensor:
            raise ConfigError(
                f"train.shard.tensor = {tensor} does not divide the model's {key} = {heads}; choose a divisor"
            )


def _check_known(module: nn.Module, name: str, known: set[str]) -> None:
    """Raises: ConfigError unless each weight of a module with cut weights is cut, or has gradients that are
    known to be summed."""
    for own, _ in module.named_parameters():
        is_known = f"{name}.{own}" in known or own.endswith(
            ".bias"
        )  # a rowwise bias is added once, after the sum
        if not is_known:
            raise ConfigError(
                f"train.shard.tensor: the plan of the model's family does not cover {name}.{own}, which is "
                "in a module with cut weights; set train.shard.tensor: 1"
            )


def _cut(module: nn.Module, name: str, grid: RankGrid, dims: Mapping[str, int]) -> dict[str, int]:
    """Leaves a module only this rank's part of some of its weights. Returns weight name -> dimension."""
    cut_dims: dict[str, int] = {}
    for own, dim in dims.items():
        weight = cast("nn.Parameter | None", getattr(module, own))
        if weight is None:
            continue
        if weight.shape[dim] % grid.tensor:
            raise ConfigError(
                f"train.shard.tensor = {grid.tensor} does not divide {weight.shape[dim]}, a dimension of "
                f"{name}.{own} with shape {tuple(weight.shape)}; choose a divisor"
            )
        size = weight.shape[dim] // grid.tensor
        part = (
            weight.detach()
            .narrow(dim, grid.model_rank * size, size)
            .clone(memory_format=torch.contiguous_format)
        )
        setattr(module, own, nn.Parameter(part, requires_grad=weight.requires_grad))
        cut_dims[f"{name}.{own}"] = dim
    return cut_dims


class _SumGradients(torch.autograd.Function):
    """Forward: the value itself. Backward: the sum over ranks."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        total = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Forward: the sum over ranks, in place. Backward: the gradient itself."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        dist.all_reduce(value, group=group)
        ctx.mark_dirty(value)
        return value

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - the decorator hides the names
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor, None]:
        del ctx
        return grad_outputs[0], None


def _enter(group: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes the gradient of the hidden states that enter a cut module the sum over ranks."""
    if args:
        return (_SumGradients.apply(args[0], group), *args[1:]), kwargs
    if "hidden_states" not in kwargs:
        raise ConfigError(
            f"train.shard.tensor: {type(module).__name__} is called without hidden_states; set "
            "train.shard.tensor: 1"
        )
    return args, {**kwargs, "hidden_states": _SumGradients.apply(kwargs["hidden_states"], group)}


def _rowwise(module: nn.Linear, group: Any, hidden: Tensor) -> Tensor:
    total = cast("Tensor", _Sum.apply(functional.linear(hidden, module.weight), group))
    bias = cast("Tensor | None", module.bias)
    return total if bias is None else total + bias


def _own_experts(  # noqa: PLR0917 - the last three are those that models pass by position
    original: Callable[..., Tensor],
    grid: RankGrid,
    num_own: int,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """[N, D]: sum over chosen experts of the output, computed on the expert's rank, times its weight [N, K].

    This rank's experts get one row, with weight 1, per token that chose them, so they compute nothing for
    other tokens.
    """
    group = grid.model_group
    hidden = cast("Tensor", _SumGradients.apply(hidden_states, group))
    weights = cast("Tensor", _SumGradients.apply(top_k_weights, group))
    own = top_k_index - grid.model_rank * num_own
    rows, choices = ((own >= 0) & (own < num_own)).nonzero(as_tuple=True)
    factors = weights[rows, choices]
    if not len(rows):
        # One row with weight 0, since the backward pass must reach this collective on every rank.
        rows = choices = rows.new_zeros(1)
        factors = 0.0 * weights[rows, choices]
    experts = own[rows, choices].clamp(0, num_own - 1)[:, None]
    outputs = original(hidden[rows], experts, torch.ones_like(factors)[:, None]) * factors[:, None]
    output = torch.zeros_like(hidden).index_add(0, rows, outputs.to(hidden.dtype))
    return cast("Tensor", _Sum.apply(output, group))
