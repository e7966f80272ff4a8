"""Cuts the layers of a model over the ranks that compute the same batch (tensor and expert parallelism).

Which projections are cut, and how, says the plan that a model of transformers brings along
(`base_model_tp_plan`): `colwise` ones make a part of the outputs (heads, entries of an MLP), `rowwise` ones
take such a part and add up over ranks. Between them nothing is exchanged: once forward, behind the rowwise
projection, and once backward, in front of the colwise ones. Experts are cut by whole experts: each rank
computes the tokens of its own, and the sum over ranks is the layer's output. Norms, routers, embeddings and
the output head are whole on every rank, which all compute the same with them.

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

__all__ = ["Cuts", "cut_layers"]

_EXPERTS = "moe_tp_experts"
"""What a plan calls the module with a layer's experts."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """What is cut. Names are the model's own."""

    dims: Mapping[str, int]
    """Weight -> the dimension by which it is cut into equal parts."""
    partial: frozenset[str] = frozenset()
    """Whole weights that each rank uses for its own heads alone, so that their gradients add up."""


@torch.no_grad()
def cut_layers(model: nn.Module, grid: RankGrid) -> Cuts:
    """Leaves each rank its part of every layer, and lets it compute with that.

    Raises: ConfigError if the model brings no plan, or one that is not understood, or if it cannot be cut
    into so many parts.
    """
    _check_heads(model, grid.tensor)
    dims: dict[str, int] = {}
    partials: set[str] = set()
    parents: set[str] = set()
    modules: dict[str, nn.Module] = dict(cast("Any", model).named_modules())
    num_experts_cut = 0
    for name, style in _planned(model):
        module = modules[name]
        foreign = cast("Any", module)
        if isinstance(module, nn.Linear) and style == "colwise":
            dims |= _cut(module, name, grid, {"weight": 0, "bias": 0})
            parents.add(name.rpartition(".")[0])
        elif isinstance(module, nn.Linear) and style == "rowwise":
            dims |= _cut(module, name, grid, {"weight": 1})
            foreign.forward = partial(_rowwise, module, grid.place_group)
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
                f"train.shard.tensor = {grid.tensor}: the plan of {type(model).__name__} wants {name} to be "
                f"{style!r}, which is not built; set train.shard.tensor: 1"
            )
    if grid.cuts_experts and not num_experts_cut:
        raise ConfigError(
            f"train.shard.expert = {grid.tensor}: {type(model).__name__} has no experts that its plan cuts; "
            "set train.shard.expert: 1"
        )
    for name in parents:
        _check_known(modules[name], name, {*dims, *partials})
        modules[name].register_forward_pre_hook(partial(_enter, grid.place_group), with_kwargs=True)
    return Cuts(dims, frozenset(partials))


def _planned(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Own name of each module that the model's plan names, and how it is to be cut."""
    plan = cast("dict[str, str] | None", getattr(model.config, "base_model_tp_plan", None))
    if not plan:
        raise ConfigError(
            f"train.shard.tensor: {type(model).__name__} brings no plan of how its layers are cut "
            "(base_model_tp_plan of transformers); set train.shard.tensor: 1"
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
        heads = getattr(sizes, key, None)  # a foreign config: where it is absent, there is no such number
        if heads is not None and heads % tensor:
            raise ConfigError(
                f"train.shard.tensor = {tensor}: the model has {key} = {heads}, no multiple of it; choose a "
                "divisor"
            )


def _check_known(module: nn.Module, name: str, known: set[str]) -> None:
    """Each weight beside a cut one must be cut, or be known to have gradients that add up."""
    for own, _ in module.named_parameters():
        is_known = f"{name}.{own}" in known or own.endswith(
            ".bias"
        )  # a rowwise bias is added once, after the sum
        if not is_known:
            raise ConfigError(
                f"train.shard.tensor: the plan of the model's family says nothing about {name}.{own}, which "
                "stands beside weights that are cut; set train.shard.tensor: 1"
            )


def _cut(module: nn.Module, name: str, grid: RankGrid, dims: Mapping[str, int]) -> dict[str, int]:
    """Leaves a module this rank's part of some of its weights. Returns: own name -> dimension."""
    found: dict[str, int] = {}
    for own, dim in dims.items():
        weight = cast("nn.Parameter | None", getattr(module, own))
        if weight is None:
            continue
        if weight.shape[dim] % grid.tensor:
            raise ConfigError(
                f"train.shard.tensor = {grid.tensor}: {name}.{own} has shape {tuple(weight.shape)}, and "
                f"{weight.shape[dim]} is no multiple of it; choose a divisor"
            )
        size = weight.shape[dim] // grid.tensor
        part = (
            weight.detach().narrow(dim, grid.place * size, size).clone(memory_format=torch.contiguous_format)
        )
        setattr(module, own, nn.Parameter(part, requires_grad=weight.requires_grad))
        found[f"{name}.{own}"] = dim
    return found


# --- what is computed -----------------------------------------------------------------------------


class _SumGradients(torch.autograd.Function):
    """The same value; backward, the sum over ranks."""

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
    """The sum over ranks, in place; backward, the gradient as it is."""

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
    """Marks the hidden states that a cut module gets, each rank for its own part."""
    if args:
        return (_SumGradients.apply(args[0], group), *args[1:]), kwargs
    if "hidden_states" not in kwargs:
        raise ConfigError(
            f"train.shard.tensor: {type(module).__name__} gets no hidden_states; set train.shard.tensor: 1"
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
    """[N, D]: sum over experts, each computed on the rank that has it, of its output times its weight [N, K].

    This rank's experts get one row per token that chose them, and count 1 there; so they compute nothing for
    the others.
    """
    group = grid.place_group
    hidden = cast("Tensor", _SumGradients.apply(hidden_states, group))
    weights = cast("Tensor", _SumGradients.apply(top_k_weights, group))
    own = top_k_index - grid.place * num_own
    rows, choices = ((own >= 0) & (own < num_own)).nonzero(as_tuple=True)
    factors = weights[rows, choices]
    if not len(rows):
        # One row that counts 0: the backward pass needs to come by here on every rank.
        rows = choices = rows.new_zeros(1)
        factors = 0.0 * weights[rows, choices]
    experts = own[rows, choices].clamp(0, num_own - 1)[:, None]
    outputs = original(hidden[rows], experts, torch.ones_like(factors)[:, None]) * factors[:, None]
    found = torch.zeros_like(hidden).index_add(0, rows, outputs.to(hidden.dtype))
    return cast("Tensor", _Sum.apply(found, group))
