"""Builds a tiny model from its spec: random weights, character tokenizer, warm start, Hugging Face folder.

The result is an ordinary folder that `AutoModelForCausalLM` and `AutoTokenizer` can load. The folder appears
only when it is complete. Its file `astraflow_model.json` holds the spec that made it. A cache keeps models by
a hash of their spec, this code, and the library versions, so a second call only copies a folder.
"""

import hashlib
import json
import logging
import random
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

from astraflow.addons.tiny_models import demonstrations, tokenizer, warmstart
from astraflow.addons.tiny_models import spec as spec_module
from astraflow.addons.tiny_models.demonstrations import make_demonstrations
from astraflow.addons.tiny_models.folder import MARKER, read_marker
from astraflow.addons.tiny_models.spec import ArchitectureConfig, ModelSpec
from astraflow.addons.tiny_models.tokenizer import IMAGE_TOKEN, make_tokenizer
from astraflow.addons.tiny_models.warmstart import Progress, TinyModel, torch_threads, warm_start
from astraflow.config import Use
from astraflow.errors import DataError
from astraflow.models import images, vision
from astraflow.models.images import ImageRules
from astraflow.user_input.new_folder import is_free, new_folder
from astraflow.user_input.own_sources import own_files

__all__ = ["init_model", "model_fingerprint"]

_LOG = logging.getLogger(__name__)
_MERGE = 2
"""Number of patches along each side of the square that makes one token, as in Qwen-VL."""
_PLACES = 64
"""Number of learned position embeddings of patches, which form a square. Other grids interpolate them."""
_MAX_TOKENS = 64
"""Largest number of tokens of an image. Larger images are shrunk."""


def init_model(
    spec: ModelSpec, out: Path, *, cache: Path | None = None, progress: Progress = _LOG.info
) -> Path:
    """Writes the spec's model to folder `out`, and returns the folder. Builds it only if `cache` lacks it.

    If `out` is a folder that this function made for another spec, a rename replaces it.

    Raises: ConfigError for a bad spec; DataError if `out` holds anything else.
    """
    fingerprint = model_fingerprint(spec)
    if read_marker(out, "fingerprint") == fingerprint:
        progress(f"model {spec.name}: {out} is up to date")
        return out
    if not is_free(out) and not (out / MARKER).is_file():
        raise DataError(
            f"{out} exists and was not made by `astraflow model init`; choose another folder or remove it"
        )
    if cache is None:
        with new_folder(out, replaces=True) as fresh:
            _build(spec, fresh, fingerprint, progress)
        return out
    entry = cache / fingerprint
    if read_marker(entry, "fingerprint") != fingerprint:
        with new_folder(entry, replaces=True) as fresh:
            _build(spec, fresh, fingerprint, progress)
    else:
        progress(f"model {spec.name}: taken from the cache {entry}")
    with new_folder(out, replaces=True) as fresh:
        shutil.copytree(entry, fresh, dirs_exist_ok=True)
    return out


def model_fingerprint(spec: ModelSpec) -> str:
    """Returns a hex digest of everything that determines the folder: spec, code, and library versions.

    The code is that of this package and, if the user's own function makes the demonstrations, its module and
    the user's modules that it imports.
    """
    digest = hashlib.sha256(spec.model_dump_json().encode())
    digest.update(f"{torch.__version__} {transformers.__version__}".encode())
    if isinstance(spec.demonstrations, Use):
        for file in own_files(spec.demonstrations.use.partition(":")[0]):
            digest.update(file.read_bytes())
    for module in (demonstrations, images, spec_module, tokenizer, vision, warmstart):
        digest.update(Path(str(module.__file__)).read_bytes())
    digest.update(Path(__file__).read_bytes())
    return digest.hexdigest()[:32]


def _build(spec: ModelSpec, folder: Path, fingerprint: str, progress: Progress) -> None:
    tokenizer = make_tokenizer(spec.tokenizer, sees=spec.architecture.vision_layers > 0)
    images = _image_rules(spec.architecture, tokenizer)
    steps = spec.warm_start.steps
    batch_size = spec.warm_start.batch_size
    demonstrations = list(make_demonstrations(spec.demonstrations, num=steps * batch_size, seed=spec.seed))
    if spec.warm_start.shuffle:
        random.Random(spec.seed).shuffle(demonstrations)
    with torch_threads(spec.warm_start.num_threads):
        model = _random_model(spec.architecture, tokenizer, seed=spec.seed)
        progress(
            f"model {spec.name}: {model.num_parameters():,} parameters, {len(demonstrations):,} examples"
        )
        warm_start(model, tokenizer, demonstrations, config=spec.warm_start, progress=progress, images=images)
    with _no_bars():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if images is not None:
        (folder / "preprocessor_config.json").write_text(_preprocessor(images), encoding="utf-8")
    marker = {"fingerprint": fingerprint, "spec": spec.model_dump(mode="json")}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _random_model(sizes: ArchitectureConfig, tokenizer: PreTrainedTokenizerFast, *, seed: int) -> TinyModel:
    end = cast("int", tokenizer.eos_token_id)
    pad = cast("int", tokenizer.pad_token_id)
    shared: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.mlp_size,
        "num_hidden_layers": sizes.num_layers,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.hidden_size // sizes.num_heads,
        "max_position_embeddings": sizes.max_positions,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.rope_theta},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
    }
    experts: dict[str, Any] = {
        "num_experts": sizes.num_experts,
        "num_experts_per_tok": sizes.experts_per_token,
        "moe_intermediate_size": sizes.mlp_size,
        "norm_topk_prob": True,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if sizes.vision_layers:
            model = Qwen3VLForConditionalGeneration(_vision_config(sizes, shared, tokenizer)).float()
        elif sizes.num_experts:
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**shared, **experts)).float()
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**shared)).float()
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=end, pad_token_id=pad)
    return model


def _vision_config(
    sizes: ArchitectureConfig, text: dict[str, Any], tokenizer: PreTrainedTokenizerFast
) -> Qwen3VLConfig:
    """Returns the config of a vision model. `text`: the config of its text model."""
    half = text["head_dim"] // 2
    # A head's rotary frequencies for time, height, and width. Time gets the remainder.
    sections = [half - 2 * (half // 4), half // 4, half // 4]
    rope = {**text["rope_parameters"], "mrope_section": sections, "mrope_interleaved": True}
    unused = cast("int", tokenizer.pad_token_id)
    return Qwen3VLConfig(
        text_config={**text, "rope_parameters": rope},
        vision_config={
            "depth": sizes.vision_layers,
            "hidden_size": sizes.vision_size,
            "intermediate_size": 2 * sizes.vision_size,
            "num_heads": sizes.vision_size // 16,
            "patch_size": sizes.image_patch,
            "spatial_merge_size": _MERGE,
            "temporal_patch_size": 1,
            "out_hidden_size": sizes.hidden_size,
            "num_position_embeddings": _PLACES,
            "deepstack_visual_indexes": [0],
        },
        image_token_id=cast("int", tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)),
        video_token_id=unused,
        vision_start_token_id=unused,
        vision_end_token_id=unused,
        tie_word_embeddings=False,
    )


def _image_rules(sizes: ArchitectureConfig, tokenizer: PreTrainedTokenizerFast) -> ImageRules | None:
    if not sizes.vision_layers:
        return None
    side = _MERGE * sizes.image_patch
    return ImageRules(
        token_id=cast("int", tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)),
        patch=sizes.image_patch,
        merge=_MERGE,
        frames=1,
        min_pixels=side * side,
        max_pixels=_MAX_TOKENS * side * side,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
    )


def _preprocessor(rules: ImageRules) -> str:
    """Returns the text of `preprocessor_config.json`, in the format of the published Qwen-VL folders."""
    settings = {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": rules.patch,
        "merge_size": rules.merge,
        "temporal_patch_size": rules.frames,
        "size": {"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels},
        "image_mean": rules.mean,
        "image_std": rules.std,
    }
    return json.dumps(settings, indent=2) + "\n"


@contextmanager
def _no_bars() -> Generator[None]:
    """Turns off the progress bars of transformers within the block."""
    was_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            transformers_logging.enable_progress_bar()
