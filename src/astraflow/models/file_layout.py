"""The names and layout of a model's weights in its folder, and the folder's tensors that are not its weights.

A version has the names of the files that it came from, whatever class trains it. A folder may hold more than
that class: a vision tower next to the text model, or heads that predict several tokens. This rest is kept as
it is, and belongs to every version.

There is one mapping. It is what transformers does when it loads the files' headers into the model's class,
reversed, and is checked both ways: each weight is one tensor of the files, and each tensor of the files is a
weight, or is known to belong to the rest. A model without files has the names that transformers would save.
"""

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from astraflow.errors import DataError
from astraflow.service.progress_bars import progress_bars_off

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "FileView",
    "LoadedHeaders",
    "adopt_layout",
    "file_names",
    "file_views",
    "load_headers",
    "quiet_loading",
    "rest_of",
    "tied_names",
    "weights_by_name",
]

_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the files differ from what transformers would save; attached to a model as `file_layout`."""

    prefix: str = ""
    """Prefix of the model's body, if the files have it for all weights, or for none."""
    is_added: bool = False
    """Whether the files have the prefix where transformers would not write it; else, the other way round."""
    rest: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])
    """The tensors of the folder that are not the model's; without values if only their shapes are known."""

    def name(self, usual: str) -> str:
        """Name in the files of a tensor that transformers would save as `usual`."""
        return self.prefix + usual if self.is_added else usual.removeprefix(self.prefix)


def _layout_of(model: nn.Module) -> _Layout:
    return getattr(model, "file_layout", None) or _Layout()


def rest_of(model: nn.Module) -> Mapping[str, Tensor]:
    """The tensors of a model's folder that are not the model's, by name. They never change."""
    return _layout_of(model).rest


def adopt_layout(
    model: "PreTrainedModel", tensors: Mapping[str, Tensor], loaded: "LoadedHeaders | None" = None
) -> bool:
    """Gives a model's weights the names that they have among the tensors of a folder or a version.

    Returns whether that is possible. If not, the weights have the names that transformers would save.
    `tensors`: may be on `meta`. `loaded`: what `load_headers` returned for them.
    """
    own = cast("Any", model)
    own._weight_conversions = own.file_layout = None
    if not tensors.keys() - _matches(model, tensors, _Layout()):
        return True
    loaded = loaded or load_headers(model, tensors)
    if not loaded.fits:
        return False
    own._weight_conversions = loaded.conversions
    prefix = f"{model.base_model_prefix}."
    for layout in (_Layout(), _Layout(prefix), _Layout(prefix, is_added=True)):
        if used := _matches(model, tensors, layout):
            rest = {name: tensors[name] for name in sorted(tensors.keys() - used)}
            own.file_layout = replace(layout, rest=rest)
            if loaded.sources.items() <= file_names(model).items():
                return True
    own._weight_conversions = own.file_layout = None
    return False


def _matches(model: nn.Module, tensors: Mapping[str, Tensor], layout: _Layout) -> set[str]:
    """The tensors that are weights of the model; none unless each weight is among them in its shape."""
    used: set[str] = set()
    for names, weight in tied_names(model):
        aliases = {layout.name(name) for name in names}
        own = {name for name in aliases & tensors.keys() if tensors[name].shape == weight.shape}
        if not own:
            return set()
        used |= own
    return used


@dataclass(frozen=True, slots=True)
class LoadedHeaders:
    """What transformers makes of the headers of files."""

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    """Tensors of the files that are neither the model's nor known to belong to the rest."""
    misshapen: Sequence[tuple[str, Sequence[int], Sequence[int]]] = ()
    """Name, shape in the files, and shape in the model."""
    error: str = ""
    """Why it can't convert the tensors; empty if it can."""
    tied: Sequence[tuple[str, str]] = ()
    """Pairs of tensors of the files that the model ties."""
    doubled: Sequence[tuple[str, str]] = ()
    """Pairs of tensors of the files for one weight, with and without the prefix of the model's body."""
    conversions: Sequence[Any] = ()
    """The renamings and conversions that it applied."""
    sources: Mapping[str, str] = field(default_factory=dict[str, str])
    """Weight of the model -> the tensor that it loaded there unchanged, for weights that are not tied."""

    @property
    def fits(self) -> bool:
        """Whether the files hold the model's weights and nothing unknown."""
        return not (self.missing or self.unexpected or self.misshapen or self.error)


def load_headers(model: "PreTrainedModel", tensors: Mapping[str, Tensor]) -> LoadedHeaders:
    """Loads the names and shapes of tensors into another model of the same class."""
    loaded = _load_into(type(model), model.config, tensors)
    config = getattr(model, "folder_config", None)
    whole = _whole_class(config)
    if loaded.unexpected and whole not in (None, type(model)):
        # What belongs to the whole model is the rest of the text model's folder.
        others = _load_into(whole, config, tensors)
        if not others.error:
            missing = [*loaded.missing, *others.missing]
            loaded = replace(loaded, unexpected=others.unexpected, missing=missing)
    text = model.config.get_text_config()
    if getattr(text, "num_nextn_predict_layers", 0):
        # Layers after the last predict further tokens, and transformers knows their names for some models.
        last = int(text.num_hidden_layers)
        ours = [n for n in loaded.unexpected if not ((found := _LAYER.search(n)) and int(found[1]) >= last)]
        loaded = replace(loaded, unexpected=ours)
    return loaded


def _whole_class(config: Any) -> Any:
    """The class that a folder's config names, if transformers has it."""
    import transformers

    names = getattr(config, "architectures", None) or [""]
    return getattr(transformers, names[0], None)


@contextmanager
def quiet_loading() -> Generator[None]:
    """Keeps transformers from printing bars, and a table of the tensors that a model does not have."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with progress_bars_off():
            yield
    finally:
        logging.set_verbosity(verbosity)


def _load_into(model_class: Any, config: Any, tensors: Mapping[str, Tensor]) -> LoadedHeaders:
    empty = {name: torch.empty(tensor.shape, device="meta") for name, tensor in tensors.items()}
    try:
        with quiet_loading():
            loaded, info = model_class.from_pretrained(
                None,
                config=config,
                state_dict=empty,
                dtype=torch.float32,
                device_map="meta",
                output_loading_info=True,
                ignore_mismatched_sizes=True,
            )
    except Exception as err:  # noqa: BLE001 - a damaged folder may break its code anywhere
        return LoadedHeaders(error=(str(err) or type(err).__name__).splitlines()[0])
    # A parameter shares the storage of the tensor that was loaded into it.
    names = {_address(tensor)[0]: name for name, tensor in empty.items()}
    state = cast("Mapping[str, Tensor]", loaded.state_dict(keep_vars=True))
    tied = [
        tuple(names.get(_address(state[name])[0], "") for name in pair)
        for pair in loaded.all_tied_weights_keys.items()
    ]
    found = {name: names.get(_address(tensor)[0], "") for name, tensor in state.items()}
    used = set(found.values())
    aliases = {name for pair in loaded.all_tied_weights_keys.items() for name in pair}
    prefixed = [(name, f"{loaded.base_model_prefix}.{name}") for name in tensors]
    return LoadedHeaders(
        sorted(info["missing_keys"]),
        sorted(info["unexpected_keys"]),
        sorted(info["mismatched_keys"]),
        tied=[(one, other) for one, other in tied if one and other and one != other],
        doubled=[pair for pair in prefixed if pair[1] in tensors and not used.issuperset(pair)],
        conversions=loaded._weight_conversions,
        sources={name: source for name, source in found.items() if source and name not in aliases},
    )


def weights_by_name(model: nn.Module) -> list[tuple[str, Tensor]]:
    """All weights with their names in the folder, in the model's own memory. A tied weight occurs once, under
    its first name."""
    return [(names[0], tensor) for names, tensor in tied_names(model)]


@dataclass(frozen=True, slots=True)
class FileView:
    """A tensor of a model folder as a view of one weight of the model, which is contiguous."""

    name: str
    """Name of the tensor in the folder."""
    weight: str
    """Name of the weight in the model."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Number of elements of the weight before the tensor's first."""

    def cut(self, weight: Tensor) -> Tensor:
        """The view of a whole weight, in the same memory."""
        return weight.as_strided(self.shape, self.stride, weight.storage_offset() + self.offset)


def file_views(model: nn.Module) -> tuple[FileView, ...]:
    """The tensors of `weights_by_name`, as views of the model's weights under the model's own names."""
    state = cast("dict[str, Tensor]", model.state_dict(keep_vars=True))
    places = {name: _address(tensor) for name, tensor in state.items()}
    views: list[FileView] = []
    for names, tensor in tied_names(model):
        memory, first = _address(tensor)
        own = next(
            name
            for name, (storage, start) in places.items()
            if storage == memory and start <= first <= start + max(0, state[name].nbytes - 1)
        )
        offset = (first - places[own][1]) // tensor.element_size()
        views.append(FileView(names[0], own, tuple(tensor.shape), tensor.stride(), offset))
    return tuple(views)


def file_names(model: nn.Module) -> dict[str, str]:
    """Name of each weight in the model -> its name in a model folder, for weights that are one tensor
    there."""
    state = cast("dict[str, Tensor]", model.state_dict())
    published = {_place(tensor): names[0] for names, tensor in tied_names(model)}
    return {name: published[_place(tensor)] for name, tensor in state.items() if _place(tensor) in published}


def tied_names(model: nn.Module) -> list[tuple[list[str], Tensor]]:
    """Each distinct tensor of a model folder with all of its names, as a view of the model's memory.

    A tied weight has several names for one place in memory.
    """
    state = cast("dict[str, Tensor]", model.state_dict(keep_vars=True))
    weights: dict[tuple[Any, ...], tuple[list[str], Tensor]] = {}
    layout = _layout_of(model)
    for name, tensor in _to_file_layout(model, state).items():
        weights.setdefault(_place(tensor), ([], tensor))[0].append(layout.name(name))
    return list(weights.values())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return *_address(tensor), tuple(tensor.shape), tensor.stride()


def _address(tensor: Tensor) -> tuple[int, int]:
    """A tensor's storage, and its first byte there: tensors on `meta` have a storage, but no memory."""
    storage = cast("Any", tensor.untyped_storage())
    return storage._cdata, int(tensor.storage_offset()) * tensor.element_size()


class _UncopiedView(Tensor):
    """A tensor whose `contiguous` does not copy, so transformers' conversions return views of its memory."""

    def contiguous(self, *args: Any, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        del args, kwargs
        return self


def _to_file_layout(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Converts a model's weights to the names and shapes of Hugging Face folders.

    Some transformers models store their weights differently from their folders: all experts of a layer are
    one parameter, and some parameters have other names. Inference servers read the layout of the folders.
    Raises: DataError if a tensor of the folder is not a part of the model's memory.
    """
    from transformers import PreTrainedModel
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import revert_weight_conversion

    if not isinstance(model, PreTrainedModel):
        return state
    adopted = getattr(model, "_weight_conversions", None)
    if not (get_model_conversion_mapping(model, add_legacy=False) if adopted is None else adopted):
        return state
    # A tied weight must keep the name that comes first in the model: servers skip it under any other name.
    first: dict[str, Tensor] = {}
    aliases: dict[str, Tensor] = {}
    places: set[tuple[Any, ...]] = set()
    for name, tensor in state.items():
        targets = aliases if _place(tensor) in places else first
        targets[name] = tensor.detach().as_subclass(_UncopiedView)
        places.add(_place(tensor))
    memory = {_address(tensor)[0] for tensor in first.values()}
    tensors: dict[str, Tensor] = {}
    for part in (first, aliases):
        converted = cast("dict[str, Tensor]", revert_weight_conversion(model, part))
        tensors |= {name: tensor.as_subclass(Tensor) for name, tensor in converted.items()}
    for name, tensor in tensors.items():
        if _address(tensor)[0] not in memory:
            raise DataError(
                f"its tensor {name} consists of several weights of a {type(model).__name__}, so versions "
                f"can't have it, and the family {model.config.model_type} can't be trained"
            )
    return tensors
