"""Teaches a copy of a pretrained model demonstrations before a run: supervised fine-tuning.

If a model never solves a task, reinforcement learning has nothing to reinforce. A few worked examples change
that.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from astraflow.addons.tiny_models.demonstrations import Demonstration, make_demonstrations
from astraflow.addons.tiny_models.folder import holds_model, shared_folder, write_origin
from astraflow.addons.tiny_models.spec import TaughtModel
from astraflow.addons.tiny_models.warmstart import IGNORED, padded, torch_threads, train_on
from astraflow.config import Use
from astraflow.errors import ConfigError
from astraflow.models.hub import model_path
from astraflow.models.loading import load_causal_lm
from astraflow.recipe.gallery import SPECS, build_models, gallery_root, model_folder
from astraflow.rollout.renderer import load_renderer, load_tokenizer
from astraflow.service.progress_bars import progress_bars_off
from astraflow.user_input.mistakes import nearest_hint
from astraflow.user_input.own_sources import own_files

__all__ = ["teach_model"]

_Tell = Callable[[str], None]
_Row = tuple[list[int], list[int]]
"""The token ids of a conversation up to a reply, and its targets, which are `IGNORED` before the reply."""


def teach_model(spec: TaughtModel, out: Path, *, tell: _Tell) -> Path:
    """Writes a taught copy of `spec.base` into the folder `out`, and returns the folder.

    A folder that already has it is left unchanged.

    Raises: ConfigError for a bad spec or if the base is missing; DataError if `out` holds anything else.
    """
    origin = f"{spec.base}, taught by the spec {spec.name} ({_fingerprint(spec)})"
    if holds_model(out, origin):
        tell(f"model {spec.name}: {out} is up to date")
        return out
    base = model_folder(spec.base)
    build_models([base], tell)
    if not model_path(base).is_dir():
        known = [file.stem for file in (gallery_root() / SPECS).glob("*.yaml")]
        raise ConfigError(
            f"base = {spec.base!r}: there is no such model folder or spec{nearest_hint(spec.base, known)}"
        )
    start = spec.warm_start
    demonstrations = list(
        make_demonstrations(spec.demonstrations, num=start.steps * start.batch_size, seed=spec.seed)
    )
    if start.shuffle:
        random.Random(spec.seed).shuffle(demonstrations)
    rows = _encode(demonstrations, model_path(base))
    with shared_folder(out) as fresh:
        tell(f"model {spec.name}: {len(rows):,} examples for a copy of {base}")
        _teach(model_path(base), rows, spec, fresh, tell)
        write_origin(fresh, origin)
    return out


def _fingerprint(spec: TaughtModel) -> str:
    """Returns a hex digest of the spec, and of the user's code that makes the demonstrations."""
    digest = hashlib.sha256(spec.model_dump_json().encode())
    if isinstance(spec.demonstrations, Use):
        for file in own_files(spec.demonstrations.use.partition(":")[0]):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _encode(demonstrations: Sequence[Demonstration], base: Path) -> list[_Row]:
    """Encodes each of the assistant's messages with all that precedes it, as a rollout would.

    Raises: ConfigError if a demonstration has no message of the assistant.
    """
    renderer = load_renderer(base)
    tokenizer = load_tokenizer(base)
    rows: list[_Row] = []
    for demonstration in demonstrations:
        chat = demonstration.conversation
        places = [place for place, message in enumerate(chat) if message.role == "assistant"]
        if not places:
            raise ConfigError(f"the demonstration {chat!r} has no message of the role `assistant` to learn")
        for place in places:
            prompt = renderer.with_tools(demonstration.tools).render(chat[:place])
            words: list[int] = tokenizer.encode(chat[place].content, add_special_tokens=False)
            reply = [*words, tokenizer.eos_token_id]
            rows.append(([*prompt, *reply], [IGNORED] * len(prompt) + reply))
    return rows


def _teach(base: Path, rows: Sequence[_Row], spec: TaughtModel, folder: Path, tell: _Tell) -> None:
    """Trains on the rows, and writes the model into an empty folder, in bfloat16."""
    model = cast("Any", load_causal_lm(base))
    model.set_attn_implementation("eager")  # on a CPU, half as dear as the fused one in bfloat16
    tokenizer = load_tokenizer(base)

    def loss_of(batch: Sequence[_Row]) -> Tensor:
        # Later tokens don't change earlier ones, so what pads a row on the right doesn't matter.
        ids, targets = padded(batch, pad_id=0)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            learned = targets[:, 1:] != IGNORED  # the output at each position predicts the next token
            logits = model.get_output_embeddings()(hidden[learned])
        return cross_entropy(logits.float(), targets[:, 1:][learned])

    config = spec.warm_start
    with torch_threads(config.num_threads):
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=0.0, fused=True)
        train_on(rows, loss_of, model=model, optimizers=[optimizer], config=config, progress=tell)
    with progress_bars_off():
        model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
