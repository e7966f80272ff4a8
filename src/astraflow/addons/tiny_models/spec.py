"""The spec of a tiny model: a YAML file from which `astraflow model init` builds an ordinary model folder.

On one machine, the same spec always gives the same folder, bit for bit. This module has no heavy imports.
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
    "TaughtModel",
    "TokenizerConfig",
    "WarmStartConfig",
    "load_spec",
    "load_taught",
]


Share = Annotated[float, Field(ge=0, le=1)]
"""A part of a whole, from 0 to 1."""


class ArchitectureConfig(Config):
    """Sizes of a Qwen3-shaped decoder with untied embeddings.

    With experts, the model is Qwen3-MoE-shaped. With vision layers, it accepts images, like Qwen3-VL.
    """

    hidden_size: int = Field(default=64, ge=8)
    """Width of the residual stream. It must be an even multiple of `num_heads`."""
    num_layers: int = Field(default=2, ge=1)
    """Number of layers."""
    num_heads: int = Field(default=4, ge=1)
    """Number of attention heads. It must be a multiple of `num_kv_heads`."""
    num_kv_heads: int = Field(default=2, ge=1)
    """Number of key and value heads."""
    mlp_size: int = Field(default=128, ge=8)
    """Width of the hidden layer of each MLP or, with experts, of each expert."""
    num_experts: int = Field(default=0, ge=0)
    """Number of experts that replace each MLP; 0 makes a dense model."""
    experts_per_token: int = Field(default=2, ge=1)
    """Number of experts that each token is sent to, at most `num_experts`. Ignored if `num_experts` is 0."""
    max_positions: int = Field(default=256, ge=8)
    """Length of the longest sequence in tokens, including prompt and completion."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position embedding."""
    vision_layers: int = Field(default=0, ge=0)
    """Number of layers of the vision encoder; 0 makes a text-only model. A vision model has no experts."""
    vision_size: int = Field(default=32, ge=16, multiple_of=16)
    """Width of the layers of the vision encoder. Ignored if `vision_layers` is 0."""
    image_patch: int = Field(default=4, ge=2)
    """Side length of a patch in pixels. A square of two by two patches is one token. Ignored if
    `vision_layers` is 0."""

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
    """A tokenizer with a token per character, and a token per word of a list that keeps prompts short."""

    characters: str = Field(min_length=1)
    """All characters of the vocabulary, without repetition."""
    words: tuple[str, ...] = ()
    """Texts of several characters that become one token, such as `"Calculate "`. The longest match wins."""

    @field_validator("characters")
    @classmethod
    def _are_distinct(cls, value: str) -> str:
        repeated = sorted({c for c in value if value.count(c) > 1})
        if repeated:
            raise ValueError(f"characters repeat: {''.join(repeated)!r}")
        return value


class AdditionConfig(Config):
    """Sums of two numbers, worked out column by column from the right: `378 + 937` is `15,11,13=1315`.

    A hasty demonstration forgets every carry (`15,10,12=1205`). The model thus learns the right method but
    rarely uses it. Prompts look like those of reasoning-gym's `basic_arithmetic`.
    """

    name: Literal["addition"] = "addition"
    max_digits: int = Field(default=3, ge=1)
    """Numbers are drawn from 0 to 10 to this power, inclusive."""
    careful_frac: tuple[Share, Share] = (0.6, 0.1)
    """Share of demonstrations with carries, for the first and the last demonstration, and linear in between.
    A falling share teaches the method well, but teaches the model to use it rarely."""
    mixed_frac: float = Field(default=0.5, ge=0, le=1)
    """Share of numbers whose length is drawn uniformly. Without them, short numbers would be too rare to be
    learned."""
    heldout_frac: float = Field(default=0.0, ge=0, lt=1)
    """Share of prompts that `splits.is_heldout` keeps for evaluation. They are never shown."""
    preamble: str = ""
    """Text that an agent puts before each prompt, such as its instructions."""


class AdditionCheckConfig(Config):
    """Checks of workings of sums. The workings look like those of `AdditionConfig`.

    The prompt is a problem and its working. The reply works out each column again, compares it with the shown
    one, and then gives the verdict: the reply to `Calculate 378 + 937.15,10,12=1205?` is `15y11n13n=n`.
    """

    name: Literal["addition_check"] = "addition_check"
    max_digits: int = Field(default=3, ge=1)
    """Numbers are drawn from 0 to 10 to this power, inclusive."""
    right_frac: float = Field(default=0.5, ge=0, le=1)
    """Share of workings that are right."""
    solve_frac: float = Field(default=0.0, ge=0, le=1)
    """Share of demonstrations that solve the problem instead. Their prompts show no working to copy."""
    careful_frac: tuple[Share, Share] = (1.0, 1.0)
    """Share of checks that work out the columns, for the first and the last demonstration, and linear in
    between. The other checks copy the shown working and approve it."""
    flawed_frac: float = Field(default=0.1, ge=0, le=1)
    """Share of verdicts that are drawn at random."""
    mixed_frac: float = Field(default=0.5, ge=0, le=1)
    """Share of numbers whose length is drawn uniformly."""
    heldout_frac: float = Field(default=0.0, ge=0, lt=1)
    """Share of problems that `splits.is_heldout` keeps for evaluation. They are never shown."""


DemonstrationConfig = Annotated[AdditionConfig | AdditionCheckConfig | Use, Field(discriminator="name")]


class WarmStartConfig(Config):
    """Supervised learning on the demonstrations, each of which is used once. Muon optimizes matrices, and
    AdamW optimizes all other parameters."""

    steps: int = Field(default=600, ge=0)
    """Number of optimizer steps; 0 keeps the random weights."""
    batch_size: int = Field(default=64, ge=1)
    """Number of demonstrations per step."""
    lr: float = Field(default=1.5e-2, gt=0)
    """Peak learning rate. The rate rises over the first twentieth of the steps, then falls linearly to 0."""
    num_threads: int = Field(default=1, ge=1)
    """Number of CPU threads. It is part of the spec because the last bits of sums depend on it."""
    shuffle: bool = False
    """Use the demonstrations in a random order, given by the spec's seed, instead of the maker's order."""


ModelName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$")]


class ModelSpec(Config):
    """Everything that determines a tiny model."""

    name: ModelName
    """Name of the model: lowercase letters, digits, `-`, and `_`."""
    seed: int = Field(default=0, ge=0)
    """Seed of the random weights and of the demonstrations."""
    architecture: ArchitectureConfig = ArchitectureConfig()
    tokenizer: TokenizerConfig
    demonstrations: DemonstrationConfig
    """What the model learns from: a built-in kind, or your own function that makes demonstrations."""
    warm_start: WarmStartConfig = WarmStartConfig()


class TaughtModel(Config):
    """A copy of a pretrained model that learns demonstrations before a run."""

    name: ModelName
    """Name of the model: lowercase letters, digits, `-`, and `_`."""
    base: str = Field(min_length=1)
    """The model that is copied: the name of another spec, such as `smollm2`, or a model folder."""
    seed: int = Field(default=0, ge=0)
    """Seed of the demonstrations."""
    demonstrations: DemonstrationConfig
    """What the model learns from."""
    warm_start: WarmStartConfig
    """AdamW optimizes all weights, in bfloat16 with float32 masters."""


def load_taught(path: Path, overrides: Sequence[str] = ()) -> TaughtModel:
    """Loads such a spec. Raises: ConfigError if the file cannot be read or isn't one."""
    return parse_config(load_mapping(path, overrides), TaughtModel, where=str(path))


def load_spec(path: str | Path, overrides: Mapping[str, Any] | Sequence[str] = ()) -> ModelSpec:
    """Loads the spec from a YAML file, with dotted overrides such as `seed=3`.

    Raises: ConfigError if the file cannot be read or isn't a spec.
    """
    return parse_config(load_mapping(Path(path), overrides), ModelSpec, where=str(path))
