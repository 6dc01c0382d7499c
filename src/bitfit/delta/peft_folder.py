"""A PEFT adapter folder, read without trust: its settings as typed values, its tensors by name and shape.

Only safetensors is read, never pickle. No text of the folder is evaluated: PEFT's patterns are compared as plain names.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..arrays import Tensors
from ..errors import DeltaError
from ..values import read_known
from .meta import Meta, read_meta
from .safefile import ENTRY, MAX_NAME, MAX_TENSORS, NAME

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
MAX_CONFIG = 1 << 20  # bytes

METHODS = ("LORA", "BEFT")
BIASES = ("none", "all", "lora_only")
FLOATS = ("F64", "F32", "F16", "BF16")
# Initialisations that leave the base's weights as they are. Others, such as PiSSA, move some of them into A and B.
PLAIN_STARTS = ("gaussian", "eva", "orthogonal")

# Settings that are not needed: the names of the tensors tell which modules were adapted, and some matter only in
# training.
_NO_EFFECT = {
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
    *("inference_mode", "lora_dropout", "fan_in_fan_out", "init_weights", "peft_version", "lora_bias"),
    *("megatron_core", "qalora_group_size", "ensure_weight_tying", "runtime_config", "eva_config"),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings in adapter_config.json that change what the adapter computes."""

    peft_type: str
    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None  # of the base
    auto_mapping: dict[str, Any] | None = None
    bias: str = "none"
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, float] | None = None
    init_lora_weights: bool | str | None = True

    def __post_init__(self) -> None:
        if self.peft_type not in METHODS:
            raise ValueError(
                f"peft_type {self.peft_type[:40]}: bitfit imports LORA and BEFT; for others merge in PEFT "
                "(merge_and_unload, save_pretrained) and use the merged folder as a base"
            )
        if self.bias not in BIASES:
            raise ValueError(f"bias: must be one of {', '.join(BIASES)}")
        if not 0 < self.r <= 1 << 16 or not 0 < self.lora_alpha < math.inf:
            raise ValueError("r and lora_alpha: must be above 0")
        start = self.init_lora_weights
        if isinstance(start, str) and start.lower() not in PLAIN_STARTS:
            raise ValueError(
                f"init_lora_weights {start[:40]}: this start moves some of the base's weights into A and B; save it "
                "again in PEFT with path_initial_model_for_weight_conversion"
            )
        for pattern in (*(self.rank_pattern or ()), *(self.alpha_pattern or ())):
            if not re.fullmatch(r"\^?[A-Za-z0-9_.]+", pattern):
                raise ValueError(f"rank_pattern, alpha_pattern: {pattern[:40]!r} is not a plain module name")

    def rank(self, module: str) -> int:
        """The rank of the pair at a module."""
        return int(_matched(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """The number that B A x is multiplied with."""
        rank = self.rank(module)
        alpha = _matched(self.alpha_pattern, module, self.lora_alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank


def _matched(patterns: Mapping[str, float] | None, module: str, default: float) -> float:
    """The entry for a module: as in PEFT, the first key that the module's name ends in."""
    for pattern, value in (patterns or {}).items():
        name = pattern.removeprefix("^")
        inside = not pattern.startswith("^") and module.endswith(f".{name}")
        if module == name or inside:
            return value
    return default


@dataclass(frozen=True)
class PeftFolder:
    """A folder's settings and, by the names of the model's modules and parameters, which tensors it has."""

    path: Path
    settings: Settings
    pairs: Mapping[str, Mapping[str, str]]  # module -> role (A, B, bias) -> name in the file
    offsets: Mapping[str, str]  # module -> name in the file of what is added to its outputs
    values: Mapping[str, str]  # parameter -> name in the file
    shapes: Mapping[str, tuple[int, ...]]  # by name in the file
    origin: Meta | None  # the metadata of the delta that bitfit made the folder from

    def load(self) -> Tensors:
        """All tensors as float32, by name in the file; DeltaError if one is not finite."""
        import numpy as np
        import torch
        from safetensors import SafetensorError, safe_open

        tensors: Tensors = {}
        try:
            with safe_open(self.path / WEIGHTS, framework="pt") as file:
                for name in self.shapes:
                    tensors[name] = file.get_tensor(name).to(torch.float32).numpy()
        except (OSError, SafetensorError) as error:
            raise DeltaError(f"{self.path / WEIGHTS}: cannot be read ({error})") from error
        for name, array in tensors.items():
            if not np.isfinite(array).all():
                raise DeltaError(f"{self.path / WEIGHTS}: {name} contains NaN or infinity")
        return tensors


def read_folder(path: Path) -> PeftFolder:
    """The folder as far as it can be checked without its base; DeltaError if it cannot be a delta."""
    settings = _settings(path)
    shapes, metadata = _header(path)
    pairs: dict[str, dict[str, str]] = {}
    offsets: dict[str, str] = {}
    values: dict[str, str] = {}
    used: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        kind, target, role = _meaning(path, name)
        if kind == "unused":
            continue
        used[name] = shape
        if kind == "pair":
            pairs.setdefault(target, {})[role] = name
        elif kind == "offset":
            offsets[target] = name
        else:
            values[target] = name
    for module, roles in pairs.items():
        if not {"A", "B"} <= set(roles):
            raise DeltaError(f"{path / WEIGHTS}: lora at {module} has no A or no B")
    return PeftFolder(path, settings, pairs, offsets, values, used, _origin(path, metadata))


def _settings(path: Path) -> Settings:
    file = path / CONFIG
    if not path.exists():
        raise DeltaError(f"{path}: no such folder")
    if not file.is_file():
        raise DeltaError(f"{path}: not a PEFT folder: it has no {CONFIG}")
    try:
        with file.open("rb") as source:
            text = source.read(MAX_CONFIG + 1)
        table = json.loads(text.decode()) if len(text) <= MAX_CONFIG else None
    except OSError as error:
        raise DeltaError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise DeltaError(f"{file}: is not JSON ({str(error)[:100]})") from error
    if not isinstance(table, dict):
        raise DeltaError(f"{file}: is not a JSON object of settings, or is larger than 1 MB")
    settings = read_known(Settings, table, str(file), DeltaError)
    known = {field.name for field in fields(Settings)} | _NO_EFFECT
    for key, value in table.items():
        if key not in known and value:
            raise DeltaError(
                f"{file}: sets {key[:40]}, which a delta cannot represent; merge the adapter in PEFT "
                "(merge_and_unload, save_pretrained) and use the merged folder as a base"
            )
    return settings


def _header(path: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shapes of the tensors, and the file's metadata."""
    from safetensors import SafetensorError, safe_open

    file = path / WEIGHTS
    if not file.is_file():
        if (path / PICKLE).exists():
            raise DeltaError(
                f"{path / PICKLE}: is a pickle file, which can run code, so bitfit does not read it; load it in PEFT, "
                f"then save it as {WEIGHTS}: save_pretrained(safe_serialization=True)"
            )
        raise DeltaError(f"{path}: not a PEFT folder: it has no {WEIGHTS}")
    shapes = {}
    try:
        with safe_open(file, framework="pt") as source:
            metadata = source.metadata() or {}
            names = list(source.keys())
            if len(names) > MAX_TENSORS:
                raise DeltaError(f"{file}: has more than {MAX_TENSORS:,} tensors")
            for name in names:
                tensor = source.get_slice(name)
                if tensor.get_dtype() not in FLOATS:
                    raise DeltaError(f"{file}: {name[:80]} has type {tensor.get_dtype()}; a delta holds floats")
                shapes[name] = tuple(tensor.get_shape())
    except (OSError, SafetensorError) as error:
        raise DeltaError(f"{file}: not a usable safetensors file ({str(error)[:100]})") from error
    return shapes, metadata


def _meaning(path: Path, key: str) -> tuple[str, str, str]:
    """What a tensor is: its kind (pair, offset, value, unused), its module or parameter, and its role in a pair."""
    name = key.removeprefix(PREFIX)
    if name == key or len(name) > MAX_NAME or not NAME.fullmatch(name):
        raise DeltaError(f"{path / WEIGHTS}: {key[:80]!r} is not the name of a tensor of PEFT")
    if ".original_module." in name or ".modules_to_save." in name:
        return "unused", name, ""  # the untrained copy, or a second name of one that is trained
    if match := re.fullmatch(r"(.+)\.lora_(A|B)\.(weight|bias)", name):
        return "pair", match[1], match[2] if match[3] == "weight" else f"bias_{match[2]}"
    if match := re.fullmatch(r"(.+)\.beft_bias", name):
        return "offset", match[1], ""
    for mark, what in _FOREIGN.items():
        if mark in name:
            raise DeltaError(
                f"{path / WEIGHTS}: {name} belongs to {what}, which a delta cannot represent; merge in PEFT "
                "(merge_and_unload, save_pretrained) and use the merged folder as a base"
            )
    return "value", name.replace(".base_layer.", "."), ""


_FOREIGN = {
    "lora_embedding_": "LoRA on embeddings",
    "lora_magnitude_vector": "DoRA",
    ".token_adapter.": "trainable tokens",
    ".lora_": "a kind of LoRA that bitfit does not know",
    ".beft_": "a kind of BEFT that bitfit does not know",
}


def _origin(path: Path, metadata: Mapping[str, str]) -> Meta | None:
    if ENTRY not in metadata:
        return None
    try:
        table = json.loads(metadata[ENTRY])
    except (ValueError, RecursionError) as error:
        raise DeltaError(f"{path / WEIGHTS}: its bitfit metadata is not JSON") from error
    if not isinstance(table, dict):
        raise DeltaError(f"{path / WEIGHTS}: its bitfit metadata is not a table")
    return read_meta(table, str(path / WEIGHTS))
