"""A file of weights without any, and a model folder that is good enough to be checked."""

from pathlib import Path

__all__ = ["NO_TENSORS", "write_model_folder"]

NO_TENSORS = b"\x02" + bytes(7) + b"{}"
"""A safetensors file whose header names no tensor."""


def write_model_folder(folder: Path, config: str = '{"model_type": "qwen3"}') -> Path:
    """Makes a folder with a config, weights without any tensor, and tokenizer files that nobody reads."""
    folder.mkdir()
    (folder / "config.json").write_text(config)
    (folder / "model.safetensors").write_bytes(NO_TENSORS)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    return folder
