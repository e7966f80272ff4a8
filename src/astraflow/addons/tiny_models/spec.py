"""The spec of a tiny model: a YAML file from which `astraflow model init` builds an ordinary model folder.

This file has no heavy imports. On one machine, the same spec always gives the same folder, bit for bit.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from astraflow.config import Config, Use, parse_config
from astraflow.user_input.yaml_files import load_mapping

__all__ = [
    "AdditionCheckConfig",
    "AdditionConfig",
    "ArchitectureConfig",
    "DemonstrationConfig",
    "ModelSpec",
    "Share",
    "TokenizerConfig",
    "WarmStartConfig",
    "load_spec",
]


Share = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole, 0 to 1."""


class ArchitectureConfig(Config):
    """Sizes of a Qwen3-shaped decoder with untied embeddings.

    With experts it is Qwen3-MoE-shaped; with vision layers it sees images, as Qwen3-VL does.
    """

    hidden_size: int = Field(default=64, ge=8)
    """Width of the residual stream; an even multiple of `num_heads`."""
    num_layers: int = Field(default=2, ge=1)
    """Number of layers."""
    num_heads: int = Field(default=4, ge=1)
    """Number of attention heads; a multiple of `num_kv_heads`."""
    num_kv_heads: int = Field(default=2, ge=1)
    """Number of key and value heads."""
    mlp_size: int = Field(default=128, ge=8)
    """Width of the hidden layer of each MLP; with experts, of each expert."""
    num_experts: int = Field(default=0, ge=0)
    """Number of experts that take the place of each MLP; 0 makes a dense model."""
    experts_per_token: int = Field(default=2, ge=1)
    """Number of experts that each token is sent to, at most `num_experts`. Without effect if that is 0."""
    max_positions: int = Field(default=256, ge=8)
    """Length of the longest sequence in tokens, prompt and completion together."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position embedding."""
    vision_layers: int = Field(default=0, ge=0)
    """Number of layers that see images; 0 makes a model that reads text alone. It has no experts then."""
    vision_size: int = Field(default=32, ge=16, multiple_of=16)
    """Width of the layers that see. Without effect if there are none."""
    image_patch: int = Field(default=4, ge=2)
    """Pixels along the side of a patch; a square of two by two patches is one token. Without effect
    likewise."""

    @model_validator(mode="after")
    def _sees_or_routes(self) -> "ArchitectureConfig":
        if self.vision_layers and self.num_experts:
            raise ValueError("a tiny model has vision_layers or num_experts, not both; set one of them to 0")
        return self

    @model_validator(mode="after")
    def _experts_suffice(self) -> "ArchitectureConfig":
        if 0 < self.num_experts < self.experts_per_token:
            raise ValueError(
                f"experts_per_token ({self.experts_per_token}) must be at most num_experts "
                f"({self.num_experts})"
            )
        return self

    @model_validator(mode="after")
    def _heads_divide(self) -> "ArchitectureConfig":
        if self.hidden_size % (2 * self.num_heads) or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"hidden_size ({self.hidden_size}) must be an even multiple of num_heads ({self.num_heads}), "
                f"and num_heads a multiple of num_kv_heads ({self.num_kv_heads})"
            )
        return self


class TokenizerConfig(Config):
    """One token per character, and one per longer word from a short list that keeps prompts short."""

    characters: str = Field(min_length=1)
    """All characters of the vocabulary, without repetition."""
    words: tuple[str, ...] = ()
    """Texts of several characters that become one token, e.g. `"Calculate "`; the longest match is used
    first."""

    @field_validator("characters")
    @classmethod
    def _are_distinct(cls, value: str) -> str:
        repeated = sorted({c for c in value if value.count(c) > 1})
        if repeated:
            raise ValueError(f"characters repeat: {''.join(repeated)!r}")
        return value


class AdditionConfig(Config):
    """Sums of two numbers, worked out column by column from the right: `378 + 937` is `15,11,13=1315`.

    A hasty demonstration forgets every carry (`15,10,12=1205`), so that the model knows the right method and
    rarely uses it. Prompts are those of reasoning-gym's `basic_arithmetic`.
    """

    name: Literal["addition"] = "addition"
    max_digits: int = Field(default=3, ge=1)
    """Numbers are drawn from 0 to 10 to this power, inclusive."""
    careful_frac: tuple[Share, Share] = (0.6, 0.1)
    """Share of demonstrations with carries, at the first and at the last demonstration; linear in between. A
    falling share teaches the method well and its use rarely."""
    mixed_frac: float = Field(default=0.5, ge=0, le=1)
    """Share of numbers whose length is drawn uniformly; otherwise short numbers would be too rare to be
    learned."""
    heldout_frac: float = Field(default=0.0, ge=0, lt=1)
    """Share of prompts that `splits.is_heldout` keeps for evaluation; they are never shown."""
    preamble: str = ""
    """Text that an agent puts before each prompt, e.g. its instructions."""


class AdditionCheckConfig(Config):
    """Checks of a worked-out sum, as `AdditionConfig` makes them.

    The prompt is a problem and its working. The reply works each column out again, compares it with the one
    shown, and then gives the verdict: `Calculate 378 + 937.15,10,12=1205?` is answered by `15y11n13n=n`.
    """

    name: Literal["addition_check"] = "addition_check"
    max_digits: int = Field(default=3, ge=1)
    """Numbers are drawn from 0 to 10 to this power, inclusive."""
    right_frac: float = Field(default=0.5, ge=0, le=1)
    """Share of workings that are right."""
    solve_frac: float = Field(default=0.0, ge=0, le=1)
    """Share of demonstrations that solve the problem instead, with nothing to copy."""
    careful_frac: tuple[Share, Share] = (1.0, 1.0)
    """Share of checks that work the columns out, at the first and at the last demonstration; linear in
    between. The other checks copy what is shown and approve it."""
    flawed_frac: float = Field(default=0.1, ge=0, le=1)
    """Share of verdicts that are drawn at random."""
    mixed_frac: float = Field(default=0.5, ge=0, le=1)
    """Share of numbers whose length is drawn uniformly."""
    heldout_frac: float = Field(default=0.0, ge=0, lt=1)
    """Share of problems that `splits.is_heldout` keeps for evaluation; they are never shown."""


DemonstrationConfig = Annotated[AdditionConfig | AdditionCheckConfig | Use, Field(discriminator="name")]


class WarmStartConfig(Config):
    """Supervised learning on the demonstrations, each of which is seen once; Muon for matrices, AdamW for the
    rest."""

    steps: int = Field(default=600, ge=0)
    """Number of optimizer steps; 0 leaves the random weights."""
    batch_size: int = Field(default=64, ge=1)
    """Number of demonstrations per step."""
    lr: float = Field(default=1.5e-2, gt=0)
    """Peak learning rate; it rises over the first twentieth of the steps and then falls linearly to 0."""
    num_threads: int = Field(default=1, ge=1)
    """Number of CPU threads; part of the spec because sums depend on it in their last bits."""
    shuffle: bool = False
    """Take the demonstrations in a random order, which the spec's seed decides, instead of the maker's."""


class ModelSpec(Config):
    """Everything that determines a tiny model."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")
    """Name of the model: lower-case letters, digits, `-` and `_`."""
    seed: int = Field(default=0, ge=0)
    """Seed of the random weights and of the demonstrations."""
    architecture: ArchitectureConfig = ArchitectureConfig()
    tokenizer: TokenizerConfig
    demonstrations: DemonstrationConfig
    """What the model is taught: one of the built-in kinds, or a maker of your own."""
    warm_start: WarmStartConfig = WarmStartConfig()


def load_spec(path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> ModelSpec:
    """The spec in a YAML file, with dotted overrides such as `seed=3`.

    Raises: ConfigError if the file cannot be read or is not a spec.
    """
    return parse_config(load_mapping(Path(path), overrides), ModelSpec, where=str(path))
