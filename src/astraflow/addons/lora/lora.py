"""Trains LoRA on linear projections, `W x + scale * B A x` with only A and B trained, and on experts
(`lora_experts`).

The factors are parameters of the projection's module, so all other weights keep their names. Source: Hu et
al. 2021 (arXiv:2106.09685): A random, B zero, scale alpha / r.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from astraflow.addons.lora.lora_experts import FusedWeight, adapt_experts, fused_weights
from astraflow.errors import ConfigError, DataError, WeightsError
from astraflow.models.adapters import adapted_names, merge_adapters, merge_weight, peft_names
from astraflow.models.export import begin_export, part_of
from astraflow.models.file_layout import file_names
from astraflow.models.loading import DTYPES, DtypeName, format_names, host_tensor, host_view, torch_tensor
from astraflow.trainer.backend_config import LoraConfig
from astraflow.trainer.torch.parallel.sharding import ModelWeights
from astraflow.types.host_tensors import HostTensor
from astraflow.weights.snapshot import ADAPTER_FILE, ADAPTER_FOLDER, read_safetensors, write_adapter

__all__ = ["Lora"]

_FACTORS = (".lora_A", ".lora_B")


@dataclass(frozen=True, slots=True)
class Lora:
    """The adapters of one model.

    Example: `lora = Lora.add_to(model, LoraConfig(rank=8), base=folder, seed=0)`, train `model`, then
    `lora.export(...)`.
    """

    model: nn.Module
    config: LoraConfig
    base: Path
    """Folder of the model."""
    published: dict[str, str] = field(default_factory=dict[str, str])
    """Name of each projection's weight in the model -> its name in the folder."""
    experts: dict[str, FusedWeight] = field(default_factory=dict[str, FusedWeight])
    """Prefix of the published names of the factors of each adapted expert parameter -> its weights."""
    _base: list[Sequence[HostTensor]] = field(default_factory=list[Sequence[HostTensor]])
    """This rank's part of the frozen weights in published form; empty before the first merged export."""
    _digest: list[str] = field(default_factory=list[str])
    """Digest of the frozen weights; empty before its first use."""

    @classmethod
    def add_to(cls, model: nn.Module, config: LoraConfig, *, base: Path, seed: int) -> "Lora":
        """Freezes the model, and adds factors to its target projections.

        Raises: ConfigError if the model has no projection with a target's name, or no linear layers at all.
        """
        random = torch.Generator().manual_seed(seed)
        model.requires_grad_(False)
        lora = cls(model, config, base)
        by_name: dict[str, list[nn.Linear]] = {}
        for name, module in cast("Iterable[tuple[str, nn.Module]]", model.named_modules()):
            if isinstance(module, nn.Linear):
                by_name.setdefault(name.rsplit(".", 1)[-1], []).append(module)
        fused = fused_weights(model)
        for target in _targets(model, config, by_name, fused.values()):
            for linear in by_name.get(target, ()):
                lora._adapt(linear, config.rank, random)
        factors = lora._adapt_experts(fused, config, random)
        lora.published.update(file_names(model))
        lora.experts.update(
            {lora.published[f"{own}.lora_A"].removesuffix(".lora_A"): w for own, w in factors.items()}
        )
        return lora

    @property
    def scale(self) -> float:
        """Multiplier of the contribution of the factors."""
        return self.config.alpha / (self.config.rank**0.5 if self.config.rslora else self.config.rank)

    def export(
        self,
        weights: ModelWeights,
        *,
        publish: str,
        dtype: DtypeName,
        elements: Mapping[str, tuple[int, int]],
    ) -> Iterable[HostTensor]:
        """The weights in published form: plain weights in `dtype` (`merged`), or the factors alone
        (`adapters`), in float32 under PEFT's names. The factors are copied now; all other work happens during
        iteration.

        `elements`: the `[first, last)` elements to export of each published tensor.
        """
        factors = tuple(self._factors(weights))
        if publish == "adapters":
            return tuple(part_of(factor, *elements[factor.name]) for factor in factors)
        if not self._base:  # frozen, so copied once
            base = weights.gather(lambda name: not name.endswith(_FACTORS), dtype=DTYPES[dtype])
            self._base.append(tuple(begin_export(base, dtype, elements=elements)))
        return _merge((*self._base[0], *factors))

    def published_table(
        self, weights: ModelWeights, *, publish: str, dtype: DtypeName
    ) -> list[tuple[str, tuple[int, ...], str]]:
        """Name, shape and dtype of each tensor that `export` yields, in the same order."""
        if publish == "merged":
            return [(name, shape, dtype) for name, shape in weights.shapes if not name.endswith(_FACTORS)]
        factors = [(name, shape) for name, shape in weights.shapes if name.endswith(_FACTORS)]
        return [(each, shape[-2:], "float32") for name, shape in factors for each in self._peft_names(name)]

    def base_digest(self, weights: ModelWeights) -> str:
        """xxh3-128 of the frozen weights, which a checkpoint does not contain. Every rank must call it."""
        if not self._digest:
            digest = xxhash.xxh3_128()
            for name, weight in weights.gather(lambda name: not name.endswith(_FACTORS)):
                digest.update(host_view(name, weight.cpu().contiguous()).data.data)
            self._digest.append(digest.hexdigest())
        return self._digest[0]

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Writes the unscaled factors to `folder/adapter` in PEFT's format, and merges them into the weights
        that they change.

        `tensors`: all complete weights of the model, in host memory; afterwards, those of a plain model.
        """
        factors: list[HostTensor] = []
        scaled: dict[str, HostTensor] = {}
        for name in [name for name in tensors if name.endswith(_FACTORS)]:
            for each, part in self._parts(name, tensors.pop(name)):
                factors.append(host_tensor(each, part))
                scaled[each] = host_tensor(each, self._scale(name, part))
        for name in adapted_names(scaled):
            tensors[name] = torch_tensor(merge_weight(host_view(name, tensors[name]), scaled))
        scaling = (self.config.alpha, self.config.rslora)
        write_adapter(folder / ADAPTER_FOLDER, factors, base=str(self.base), scaling=scaling)

    def load(self, folder: Path, weights: ModelWeights) -> None:
        """Restores the factors that `save` wrote. Raises: WeightsError or DataError if they do not fit."""
        path = folder / ADAPTER_FOLDER / ADAPTER_FILE
        if not path.is_file():
            raise DataError(
                f"{path} does not exist, so this is not a checkpoint of LoRA training; set "
                "train.backend.lora.rank: 0, or begin a new run"
            )
        saved = {tensor.name: torch_tensor(tensor) for tensor in read_safetensors(path)}
        own: dict[str, Tensor] = {}
        for name, shape in weights.shapes:
            if name.endswith(_FACTORS):
                names = self._peft_names(name)
                if missing := [each for each in names if each not in saved]:
                    raise WeightsError(
                        f"{path} lacks {format_names(missing)}; were other lora.targets trained?"
                    )
                parts = [saved.pop(each) for each in names]
                own[name] = parts[0] if len(shape) == 2 else torch.stack(parts)
        if saved:
            raise WeightsError(f"{path} has {format_names(list(saved))}, which this recipe does not train")
        weights.install(own, keep=lambda name: name.endswith(_FACTORS))

    def _factors(self, weights: ModelWeights) -> Iterator[HostTensor]:
        """All factors, complete: they are small, and merging needs them."""
        for name, factor in weights.gather(lambda name: name.endswith(_FACTORS)):
            for each, part in self._parts(name, factor):
                yield host_tensor(each, self._scale(name, part))

    def _parts(self, name: str, factor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The factors in one parameter, under PEFT's names."""
        parts = factor.reshape(-1, *factor.shape[-2:])
        return zip(self._peft_names(name), parts, strict=True)

    def _scale(self, name: str, factor: Tensor) -> Tensor:
        return (1.0 if name.endswith(".lora_A") else self.scale) * factor

    def _peft_names(self, name: str) -> list[str]:
        """PEFT's name of a factor. For experts, the names of all factors in the parameter."""
        projection, _, kind = name.rpartition(".")
        if projection in self.experts:
            weights = self.experts[projection].parts
        else:
            weight = f"{projection}.weight"  # some families already use the folder's name
            weights = (self.published.get(weight, weight),)
        return [peft_names(weight)[kind == "lora_B"] for weight in weights]

    def _adapt_experts(
        self, fused: Mapping[str, FusedWeight], config: LoraConfig, random: torch.Generator
    ) -> dict[str, FusedWeight]:
        """Adds factors to experts whose projections are targets. Returns the name of the factors of each
        parameter -> its weights."""
        modules: dict[str, list[FusedWeight]] = {}
        for name, weight in fused.items():
            named = weight.projections & set(config.targets)
            if config.targets == "all-linear" or not named:
                continue
            if missing := weight.projections - named:
                raise ConfigError(
                    f"train.backend.lora.targets: {name} contains {' and '.join(sorted(weight.projections))} "
                    f"of all experts, which get factors together; add {', '.join(sorted(missing))}"
                )
            modules.setdefault(name.rpartition(".")[0], []).append(weight)
        adapted_weights: dict[str, FusedWeight] = {}
        for path, weights in modules.items():
            adapted = adapt_experts(weights[0].module, weights, config.rank, self.scale, random)
            adapted_weights |= {f"{path}.{name}": weight for name, weight in adapted.items()}
        return adapted_weights

    def _adapt(self, linear: nn.Linear, rank: int, random: torch.Generator) -> None:
        device = "cpu" if linear.weight.is_meta else linear.weight.device  # until the weights are filled
        bound = linear.in_features**-0.5
        down = (2 * torch.rand(rank, linear.in_features, generator=random) - 1) * bound
        linear.register_parameter("lora_A", nn.Parameter(down.to(device)))
        linear.register_parameter(
            "lora_B", nn.Parameter(torch.zeros(linear.out_features, rank, device=device))
        )
        linear.register_forward_hook(self._add)

    def _add(self, linear: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        low = functional.linear(inputs[0], _factor(linear, "lora_A"))
        return output + self.scale * functional.linear(low, _factor(linear, "lora_B"))


def _merge(tensors: Sequence[HostTensor]) -> Iterator[HostTensor]:
    yield from merge_adapters(tensors, is_rounded=True)  # computed during iteration


def _targets(
    model: nn.Module,
    config: LoraConfig,
    by_name: Mapping[str, Sequence[nn.Linear]],
    fused: Iterable[FusedWeight],
) -> Sequence[str]:
    """The last names of the projections to adapt."""
    family = type(model).__name__
    head = cast("Any", model).get_output_embeddings() if isinstance(model, PreTrainedModel) else None
    inner = sorted(name for name, linears in by_name.items() if head not in linears)
    if not inner:
        raise ConfigError(
            f"train.backend.lora: {family} has no linear layers except its output head, so LoRA has nothing "
            "to adapt; set rank to 0, which trains all parameters"
        )
    if config.targets == "all-linear":
        return inner
    known = set(by_name).union(*(weight.projections for weight in fused))
    for target in config.targets:
        if target not in known:
            raise ConfigError(
                f'train.backend.lora.targets: {family} has no projection "{target}" (choices: '
                f"{', '.join(sorted(known))}); use one of these, or set `targets: all-linear`"
            )
    return config.targets


def _factor(linear: nn.Module, name: str) -> Tensor:
    return linear.get_parameter(name)
