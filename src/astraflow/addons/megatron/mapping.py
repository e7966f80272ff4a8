"""How the weights of a model folder lie in the parameters of megatron-core's GPTModel, on one rank.

    folder                             parameter of a stage                        cut over `tensor`
    model.embed_tokens.weight          embedding.word_embeddings.weight            rows
    layers.L.self_attn.{q,k,v}_proj    layers.l.self_attention.linear_qkv          rows, by groups of heads
    layers.L.self_attn.o_proj          layers.l.self_attention.linear_proj         columns
    layers.L.self_attn.{q,k}_norm      layers.l.self_attention.{q,k}_layernorm     -
    layers.L.mlp.{gate,up}_proj        layers.l.mlp.linear_fc1                     rows
    layers.L.mlp.down_proj             layers.l.mlp.linear_fc2                     columns
    layers.L.*_layernorm, model.norm   layers.l.*_layernorm, final_layernorm       -
    lm_head.weight                     output_layer.weight                         rows

`linear_qkv` has, for each group, its query heads, its key head and its value head. `linear_fc1` has all rows
of the gate, then all of `up`. The last of several stages has a copy of a tied embedding table.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from astraflow.addons.megatron.shape import ModelShape

__all__ = ["WeightPiece", "pieces_of_stage", "stage_of"]


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """A weight of the folder, or this rank's part of it, in a parameter."""

    name: str
    """Name in the folder."""
    parameter: str
    """Name in the stage's model."""
    dim: int | None
    """Dimension along which ranks have parts of the weight; None if each has all of it."""
    cut: Callable[[Tensor], Tensor]
    """The part as a view of the parameter, with the same order of values but perhaps more dimensions."""
    is_copy: bool = False
    """Whether another stage owns the weight."""

    def read(self, parameter: Tensor) -> Tensor:
        """The part in the layout of the folder, perhaps as a copy."""
        view = self.cut(parameter)
        rest = parameter.shape[1:]
        return view.reshape(-1, *rest)

    def write(self, parameter: Tensor, part: Tensor) -> None:
        """Overwrites the part in the parameter."""
        view = self.cut(parameter)
        view.copy_(part.reshape(view.shape))


def stage_of(name: str, shape: ModelShape, pipeline: int) -> int:
    """The stage that owns a weight of the folder."""
    if name.startswith("model.layers."):
        return int(name.split(".")[2]) // (shape.num_layers // pipeline)
    return 0 if name == "model.embed_tokens.weight" else pipeline - 1


def pieces_of_stage(shape: ModelShape, *, stage: int, tensor: int, pipeline: int) -> list[WeightPiece]:
    """All pieces of a rank's model, in the order of the table above."""
    num_layers = shape.num_layers // pipeline
    is_last = stage == pipeline - 1
    pieces: list[WeightPiece] = []
    if stage == 0:
        pieces.append(_whole("model.embed_tokens.weight", "embedding.word_embeddings.weight", 0))
    for layer in range(num_layers):
        folder = f"model.layers.{stage * num_layers + layer}"
        own = f"decoder.layers.{layer}"
        pieces += _attention(shape, folder, own, tensor=tensor)
        pieces += _mlp(shape, folder, own, tensor=tensor)
        pieces.append(_whole(f"{folder}.input_layernorm.weight", f"{own}.input_layernorm.weight"))
        pieces.append(_whole(f"{folder}.post_attention_layernorm.weight", f"{own}.pre_mlp_layernorm.weight"))
    if is_last:
        pieces.append(_whole("model.norm.weight", "decoder.final_layernorm.weight"))
        if not shape.is_tied:
            pieces.append(_whole("lm_head.weight", "output_layer.weight", 0))
        elif stage:
            pieces.append(_whole("model.embed_tokens.weight", "output_layer.weight", 0, is_copy=True))
    return pieces


def _whole(name: str, parameter: str, dim: int | None = None, *, is_copy: bool = False) -> WeightPiece:
    """A piece that is a whole parameter."""
    return WeightPiece(name, parameter, dim, lambda own: own, is_copy)


def _attention(shape: ModelShape, folder: str, own: str, *, tensor: int) -> list[WeightPiece]:
    num_groups = shape.num_key_heads // tensor
    num_queries = shape.num_heads // shape.num_key_heads
    heads = {"q": (0, num_queries), "k": (num_queries, 1), "v": (num_queries + 1, 1)}

    def heads_of(first: int, count: int) -> Callable[[Tensor], Tensor]:
        def cut(parameter: Tensor) -> Tensor:
            grouped = parameter.view(num_groups, num_queries + 2, shape.head_dim, *parameter.shape[1:])
            return grouped[:, first : first + count]

        return cut

    pieces = [
        WeightPiece(
            f"{folder}.self_attn.{which}_proj.{kind}",
            f"{own}.self_attention.linear_qkv.{kind}",
            0,
            heads_of(*place),
        )
        for which, place in heads.items()
        for kind in (("weight", "bias") if shape.has_qkv_bias else ("weight",))
    ]
    pieces.append(_whole(f"{folder}.self_attn.o_proj.weight", f"{own}.self_attention.linear_proj.weight", 1))
    if shape.has_qk_norm:
        for which in ("q", "k"):
            norm = f"{own}.self_attention.{which}_layernorm.weight"
            pieces.append(_whole(f"{folder}.self_attn.{which}_norm.weight", norm))
    return pieces


def _mlp(shape: ModelShape, folder: str, own: str, *, tensor: int) -> list[WeightPiece]:
    num_rows = shape.mlp_width // tensor
    parameter_name = f"{own}.mlp.linear_fc1.weight"
    return [
        WeightPiece(
            f"{folder}.mlp.gate_proj.weight", parameter_name, 0, lambda parameter: parameter[:num_rows]
        ),
        WeightPiece(
            f"{folder}.mlp.up_proj.weight", parameter_name, 0, lambda parameter: parameter[num_rows:]
        ),
        _whole(f"{folder}.mlp.down_proj.weight", f"{own}.mlp.linear_fc2.weight", 1),
    ]
