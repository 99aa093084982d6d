"""Weights from and to transformers, bit for bit: model objects, and directories of config.json + safetensors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from pyfast.models.config import TransformerConfig
from pyfast.models.hugging_face_config import config_from_hugging_face, config_to_hugging_face
from pyfast.models.initialize import copy_shard
from pyfast.models.transformer import Transformer
from pyfast.nn.layout import get_layout
from pyfast.ops.checks import FLOAT_DTYPES

_INDEX = "model.safetensors.index.json"
_LAYER_NAMES = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.output": ("self_attn.o_proj",),
    "attention.q_norm": ("self_attn.q_norm",),
    "attention.k_norm": ("self_attn.k_norm",),
    "ffn_norm": ("post_attention_layernorm",),
    "ffn.gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "ffn.down": ("mlp.down_proj",),
}
_TOP_NAMES = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


def hugging_face_names(name: str) -> list[str]:
    """transformers' names of the tensors that, stacked along dimension 0, are our parameter `name`."""
    module, kind = name.rsplit(".", 1)
    if module in _TOP_NAMES:
        return [f"{_TOP_NAMES[module]}.{kind}"]
    _, index, rest = module.split(".", 2)
    return [f"model.layers.{index}.{theirs}.{kind}" for theirs in _LAYER_NAMES[rest]]


def from_hugging_face(
    source: nn.Module | str | Path,
    mesh: object | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    residual_dtype: str | None = None,
) -> Transformer:
    """A Transformer with the weights of a transformers model, or of a directory holding config.json and safetensors.

    Families: Llama, Mistral, Qwen2, Qwen3. The directory form does not import transformers and holds one tensor in
    memory at a time. mesh: cut over its tensor-parallel ranks, each of which reads for itself. dtype: None keeps the
    stored one, and the bits. Raises ValueError naming what is missing, left over or not supported, and for weights of
    several dtypes unless `dtype` says which to take.
    """
    if isinstance(source, nn.Module):
        config = config_from_hugging_face(source.config.to_dict())
        tensors: Mapping[str, Tensor] = source.state_dict()
    else:
        directory = Path(source).expanduser()
        config_file = directory / "config.json"
        if not config_file.is_file():
            raise ValueError(
                f"{directory} holds no config.json; give a directory that transformers' save_pretrained wrote"
            )
        config = config_from_hugging_face(_read_json(config_file))
        tensors = SafetensorsDirectory(directory)
    config = replace(config, residual_dtype=residual_dtype)
    first = hugging_face_names("embedding.weight")[0]
    if first not in tensors:
        raise ValueError(f"tensor {first} is missing from {_describe(source)}")
    target = tensors[first].dtype if dtype is None else dtype
    if target not in FLOAT_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES)
        raise ValueError(f"the weights would be {target}; dtype={allowed} are supported")
    model = Transformer(config, mesh=mesh, dtype=target, device=device, seed=None)
    _load(model, tensors, _describe(source), convert=dtype is not None)
    return model


def to_hugging_face(model: Transformer) -> dict[str, Tensor]:
    """The unsharded state dict under transformers' names; its `load_state_dict(strict=True)` takes it.

    Collective when the model is cut over ranks: every rank calls it and gets all of it. Tensors are detached and may
    share memory with the model, and with each other (lm_head and the embedding, when they are tied).
    """
    return dict(_unsharded(model))


def save_hugging_face(model: Transformer, directory: str | Path) -> None:
    """Write config.json and model.safetensors, which transformers' from_pretrained loads.

    Every rank of a model that is cut calls it; the first writes. Raises ValueError before writing when no family of
    transformers can hold the config.
    """
    config = config_to_hugging_face(model.config)
    state = to_hugging_face(model)
    if model.config.tied_embeddings:
        del state["lm_head.weight"]
    config["torch_dtype"] = str(next(iter(state.values())).dtype).removeprefix("torch.")
    failure = None
    if model.mesh is None or model.mesh.group("world").rank == 0:
        try:
            _write(Path(directory).expanduser(), config, state)
        except OSError as error:
            failure = error
    if model.mesh is not None:  # one rank writes, all of them hear how it went
        failure = model.mesh.group("world").all_gather_object(failure, name="save_hugging_face")[0]
    if failure is not None:
        raise failure


def _write(directory: Path, config: dict, state: dict[str, Tensor]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    # clone: pieces of a fused weight are views, which a file cannot hold
    state = {name: tensor.cpu().clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}
    unfinished = directory / "model.safetensors.unfinished"
    save_file(state, unfinished, metadata={"format": "pt"})
    unfinished.replace(directory / "model.safetensors")  # a crash before leaves the weights that were there
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class SafetensorsDirectory(Mapping[str, Tensor]):
    """Tensors by name from model.safetensors or from the files its index lists; each is read when asked for."""

    def __init__(self, directory: Path) -> None:
        index, path = directory / _INDEX, directory / "model.safetensors"
        if path.is_file():  # first, as in transformers, should both be there
            with _open(path) as file:
                self._files = dict.fromkeys(file.keys(), path)
        elif index.is_file():
            self._files = {name: directory / file for name, file in _weight_map(index).items()}
        else:
            raise ValueError(
                f"{directory} holds neither model.safetensors nor {_INDEX}; convert the weights to safetensors"
            )
        lost = sorted({str(path) for path in self._files.values() if not path.is_file()})
        if lost:
            raise ValueError(f"{_INDEX} names files that are not there: {', '.join(lost)}")

    def __getitem__(self, name: str) -> Tensor:
        path = self._files[name]
        with _open(path) as file:
            if name not in file.keys():
                raise ValueError(f"{path} does not hold the tensor {name} that {_INDEX} promises")
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is no whole safetensors file ({error}); copy or download it again") from None


def _read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:  # neither JSON nor text
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, a JSON object is needed")
    return content


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor: names of files beside the index, nothing else on this machine."""
    files = _read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{index} has no weight_map of tensor names and files")
    for file in files.values():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} names the file {file!r}; only files in its own directory are read")
    return files


@torch.no_grad()
def _load(model: Transformer, tensors: Mapping[str, Tensor], source: str, convert: bool) -> None:
    parameters = dict(model.named_parameters())
    wanted = [name for ours in parameters for name in hugging_face_names(ours)]
    missing = sorted(set(wanted) - set(tensors))
    left = sorted(name for name in set(tensors) - set(wanted) if not name.endswith("rotary_emb.inv_freq"))
    if model.config.tied_embeddings and "lm_head.weight" in left:
        if not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
            raise ValueError(f"{source} ties its embeddings, but lm_head.weight differs from model.embed_tokens.weight")
        left.remove("lm_head.weight")
    if missing or left:
        raise ValueError(
            f"{source} does not fit its config: missing {missing or 'nothing'}, left over {left or 'nothing'}"
        )
    for ours, parameter in parameters.items():
        pieces = [tensors[name] for name in hugging_face_names(ours)]
        expected = _piece_shapes(model.config, ours, parameter)
        for name, piece, shape in zip(hugging_face_names(ours), pieces, expected, strict=True):
            if tuple(piece.shape) != shape:
                raise ValueError(f"{source}: tensor {name} has shape {tuple(piece.shape)}, the config asks for {shape}")
            if piece.dtype != parameter.dtype and not convert:
                raise ValueError(
                    f"{source}: tensor {name} is {piece.dtype}, others {parameter.dtype}; say which: dtype=..."
                )
        copy_shard(parameter, pieces[0] if len(pieces) == 1 else torch.cat(pieces), model.mesh)


def _piece_shapes(config: TransformerConfig, name: str, parameter: nn.Parameter) -> list[tuple[int, ...]]:
    shape = get_layout(parameter).shape
    return [(rows, *shape[1:]) for rows in _piece_rows(config, name, shape[0])]


def _piece_rows(config: TransformerConfig, name: str, rows: int) -> list[int]:
    if ".attention.qkv." in name:
        return [heads * config.head_size for heads in (config.heads, config.kv_heads, config.kv_heads)]
    return [config.ffn_width] * 2 if ".ffn.gate_up." in name else [rows]


def _unsharded(model: Transformer) -> Iterator[tuple[str, Tensor]]:
    for ours, parameter in model.named_parameters():
        full = parameter.detach()
        if model.mesh is not None:
            full = get_layout(parameter).unshard(full, model.mesh)
        yield from zip(
            hugging_face_names(ours), full.split(_piece_rows(model.config, ours, full.shape[0])), strict=True
        )
        if ours == "embedding.weight" and model.config.tied_embeddings:
            yield "lm_head.weight", full


def _describe(source: nn.Module | str | Path) -> str:
    return type(source).__name__ if isinstance(source, nn.Module) else str(source)
