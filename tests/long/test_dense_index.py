"""A dense index with a tiny encoder, as `astraflow data index --encoder` builds it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from astraflow.addons.search.retrieval.config import FolderIndexConfig
from astraflow.addons.search.retrieval.dense import EncoderSettings
from astraflow.addons.search.retrieval.index import build_index, check_index, open_index
from astraflow.cli.main import app
from astraflow.errors import ConfigError

pytest.importorskip("faiss", reason="needs the extra `dense`: `make test-all` installs it")

pytestmark = pytest.mark.long

TEXTS = ["robeka lives in dage", "dage lies in tifa", "nobody knows", "the end"]


def silent(_: str) -> None:
    """Nobody reads the progress."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random BERT of one layer, with the words of TEXTS, saved as sentence-transformers saves a model."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    words = ["[PAD]", "[UNK]", *sorted({word for text in TEXTS for word in text.split()})]
    tokenizer = Tokenizer(WordLevel({word: idx for idx, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder / "bert")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    BertModel(BertConfig(vocab_size=len(words), **sizes)).save_pretrained(folder / "bert")
    layers = Transformer(str(folder / "bert"), max_seq_length=32)
    whole = SentenceTransformer(modules=[layers, Pooling(32)])
    whole.save(str(folder / "whole"))
    return folder / "whole"


@pytest.fixture
def documents(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"title": "", "text": text}) + "\n" for text in TEXTS))
    return path


def test_the_nearest_text_is_found_first(encoder: Path, documents: Path, tmp_path: Path) -> None:
    settings = EncoderSettings(str(encoder), query_prefix="", text_prefix="")
    manifest = build_index(documents, tmp_path / "index", encoder=settings, progress=silent)
    assert (manifest.kind, manifest.num_documents) == ("dense", 4)
    config = FolderIndexConfig(path=str(tmp_path / "index"))
    check_index(config)
    index = open_index(config)
    for text in TEXTS:
        assert index.search(text, num=2)[0].text == text
    assert len(index.search("tifa", num=9)) == 4


def test_the_command_builds_one(encoder: Path, documents: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    done = CliRunner().invoke(
        app, ["data", "index", str(documents), "--out", str(out), "--encoder", str(encoder), "--limit", "3"]
    )
    assert done.exit_code == 0, done.output
    assert f"{out}: dense index of 3 documents (faiss " in done.output
    assert len(open_index(FolderIndexConfig(path=str(out)))) == 3


def test_what_cannot_be_built_is_explained(encoder: Path, documents: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the encoder 'none' .*`hf download intfloat"):
        build_index(documents, tmp_path / "a", encoder=EncoderSettings("none"), progress=silent)
    settings = EncoderSettings(str(encoder), factory="Round")
    with pytest.raises(ConfigError, match="'Round' is not an index that faiss can make"):
        build_index(documents, tmp_path / "b", encoder=settings, progress=silent)
    assert not (tmp_path / "a").exists()
    assert not (tmp_path / "b").exists()


def test_an_encoder_that_is_gone_is_named(encoder: Path, documents: Path, tmp_path: Path) -> None:
    build_index(documents, tmp_path / "index", encoder=EncoderSettings(str(encoder)), progress=silent)
    settings = tmp_path / "index" / "encoder.json"
    settings.write_text(settings.read_text().replace(str(encoder), "/nowhere"))
    with pytest.raises(ConfigError, match="the encoder '/nowhere' is not a folder"):
        open_index(FolderIndexConfig(path=str(tmp_path / "index")))
