"""Mapping files: how the tensors of a Hugging Face folder become the arrays of a model, and the way back.

    stack: [layers]                      # these nodes' numbered entries become one array each
    sizes: {heads: num_attention_heads}  # names used in `axes`, from config.json
    ignore: ["*.rotary_emb.inv_freq"]    # tensors that are no weights
    rules:
      - {tensor: model.embed_tokens.weight, array: embed}
      - tensor: model.layers.{layer}.self_attn.q_proj.weight
        array: layers/{layer}/attention/query
        axes: (heads dim) model -> model heads dim
      - {tensor: lm_head.weight, array: head, axes: vocab model -> model vocab, optional: true}

A name in braces stands for a number. Several tensors in a list are joined into one array, along one of the axes; one
tensor is cut into several arrays in the same way:

      - tensor: ["model.layers.{layer}.mlp.gate_proj.weight", "model.layers.{layer}.mlp.up_proj.weight"]
        array: layers/{layer}/mlp/gate_and_up
        axes: hidden model -> model hidden
        along: hidden

`parts` has the sizes of the parts where they differ: names of `sizes`, or numbers. If only the joined side names
`along`, it is an index: `(hidden which) model -> model hidden` with `along: which` takes turns.
"""

import dataclasses
import re
from collections.abc import Mapping as Map
from pathlib import Path as File
from typing import Any

from mpmd.errors import ReshardError
from reshard.edits.axes import AxesRule
from reshard.storage.documents import read_document
from reshard.storage.huggingface import CONFIG
from scheduler.base.texts import counted

_BUILT_IN = File(__file__).parent / "mappings"
_KNOWN_FIELDS = {"tensor", "array", "axes", "along", "parts", "optional"}
_MOST_FAULTS = 10


@dataclasses.dataclass(frozen=True)
class MappingRule:
    """Tensors of a folder and arrays of ours that have the same elements; only one side may have several."""

    tensors: tuple[str, ...]
    arrays: tuple[str, ...]
    axes: AxesRule | None = None
    along: str | None = None
    parts: tuple[str | int, ...] | None = None
    optional: bool = False


@dataclasses.dataclass(frozen=True)
class Mapping:
    """The content of a mapping file."""

    name: str  # in messages
    rules: tuple[MappingRule, ...]  # in order; the first rule that names a tensor or array takes it
    stack: tuple[str, ...] = ()  # nodes with numbered entries that are stacked, innermost first
    sizes: Map[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # by name, where config.json may say it
    ignore: tuple[str, ...] = ()  # patterns of tensors that are left out
    architectures: tuple[str, ...] = ()  # the architectures in config.json that it is for


def built_in() -> list[str]:
    """Returns the names of the built-in mappings."""
    return sorted(file.stem for file in _BUILT_IN.glob("*.yaml"))


def read_mapping(mapping: str | File | Mapping, folder: File | None) -> Mapping:
    """Reads a mapping.

    Args:
        mapping: the name of a built-in mapping, a file, or "auto" to choose by the architectures in config.json.
        folder: the Hugging Face folder, for "auto".

    Raises:
        ReshardError: there is no mapping of this name, or the file is not a mapping; lists its faults.
    """
    if isinstance(mapping, Mapping):
        return mapping
    name = str(mapping)
    if name == "auto":
        return _mapping_of_model(folder)
    if name in built_in():
        return parse_mapping(read_document(_BUILT_IN / f"{name}.yaml", "a mapping"), name)
    file = File(mapping).expanduser()
    if not file.exists():
        raise ReshardError(f"there is no mapping {name!r}: give a file, auto, or one of {', '.join(built_in())}.")
    return parse_mapping(read_document(file, "a mapping"), str(file))


def _mapping_of_model(folder: File | None) -> Mapping:
    found = config_of(folder).get("architectures")
    named = [name for name in found if isinstance(name, str)] if isinstance(found, list) else []
    for name in built_in():
        mapping = read_mapping(name, None)
        if set(named) & set(mapping.architectures):
            return mapping
    raise ReshardError(
        f"no mapping is known for {', '.join(named) or 'a model without architectures'}"
        f" ({folder / CONFIG if folder else CONFIG}): give a mapping file, or one of {', '.join(built_in())}."
    )


def config_of(folder: File | None) -> dict[str, object]:
    """Returns the content of config.json, with the content of its `text_config`; empty if there is no file. Raises a
    ReshardError if the file cannot be read.
    """
    if folder is None or not (folder / CONFIG).exists():
        return {}
    config = read_document(folder / CONFIG, "a configuration")
    if not isinstance(config, dict):
        raise ReshardError(f"{folder / CONFIG} is not an object of JSON.")
    text = config.get("text_config")
    return {**text, **{k: v for k, v in config.items() if v is not None}} if isinstance(text, dict) else config


def parse_mapping(document: object, name: str) -> Mapping:
    """Makes a mapping from the content of a file. A ReshardError lists the faults."""
    faults: list[str] = []
    if not isinstance(document, dict) or not isinstance(document.get("rules"), list):
        raise ReshardError(f"{name} is not a mapping: it has no list of rules.")
    unknown = sorted(str(key) for key in document.keys() - {"rules", "stack", "sizes", "ignore", "architectures"})
    if unknown:
        faults.append(f"it has {', '.join(unknown)}; known are rules, stack, sizes, ignore and architectures")
    sizes = document.get("sizes", {})
    if not isinstance(sizes, dict):
        faults.append("sizes is no table of names and entries of config.json")
        sizes = {}
    mapping = Mapping(
        name,
        tuple([_rule(rule, f"rules[{i}]", faults) for i, rule in enumerate(document["rules"])]),
        _texts(document.get("stack", []), "stack", faults),
        {str(key): _texts(value, f"sizes.{key}", faults) for key, value in sizes.items()},
        _texts(document.get("ignore", []), "ignore", faults),
        _texts(document.get("architectures", []), "architectures", faults),
    )
    if faults:
        shown = [f"  {fault[:500]}." for fault in faults[:_MOST_FAULTS]]
        raise ReshardError(f"{name} is not a mapping:\n" + "\n".join(shown))
    return mapping


def _texts(value: Any, name: str, faults: list[str]) -> tuple[str, ...]:
    values = value if isinstance(value, list) else [value]
    if not all(isinstance(one, str) and one for one in values):
        faults.append(f"{name} is {value!r}, but must be a text or a list of texts")
        return ()
    return tuple(values)


def _rule(value: object, name: str, faults: list[str]) -> MappingRule:
    if not isinstance(value, dict):
        faults.append(f"{name} is {value!r}, but must have tensor and array")
        return MappingRule((), ())
    if unknown := sorted(str(key) for key in value.keys() - _KNOWN_FIELDS):
        faults.append(f"{name} has {', '.join(unknown)}; known are {', '.join(sorted(_KNOWN_FIELDS))}")
    tensors = _texts(value.get("tensor"), f"{name}.tensor", faults)
    arrays = _texts(value.get("array"), f"{name}.array", faults)
    along, parts, axes = value.get("along"), value.get("parts"), None
    if parts is not None and not (isinstance(parts, list) and all(type(n) in (int, str) for n in parts)):
        faults.append(f"{name}.parts is {parts!r}, but must be a list of names of sizes, or numbers")
        parts = None
    try:
        if value.get("axes") is not None:
            axes = AxesRule.parse(str(value["axes"]))
            axes.check(along)
    except ValueError as error:
        faults.append(f"{name}.axes: {error}")
    several = max(len(tensors), len(arrays))
    if min(len(tensors), len(arrays)) > 1:
        faults.append(f"{name} has {len(tensors)} tensors and {len(arrays)} arrays; one of the two must be one")
    if several > 1 and (axes is None or not isinstance(along, str)):
        faults.append(f"{name} joins {several}, so it needs axes and along")
    elif several > 1 and axes is not None:
        one = axes.left if len(tensors) == 1 else axes.right
        if along not in {n for axis in one for n in axis}:
            faults.append(f"{name}.along is {along!r}, which is no axis of the one that has all")
    if parts is not None and len(parts) != several:
        faults.append(f"{name}.parts has {counted(len(parts), 'entry')} for {several}")
    in_braces = [re.findall(r"\{(\w+)\}", text) for text in (*tensors, *arrays)]
    if any(len(set(names)) < len(names) or not all(map(str.isidentifier, names)) for names in in_braces):
        faults.append(f"{name}: what stands in braces must be a name, once in each tensor and array")
    if len(set(map(frozenset, in_braces))) > 1:
        faults.append(f"{name}: tensor and array do not name the same numbers in braces")
    optional = value.get("optional", False)
    return MappingRule(tensors, arrays, axes, along, tuple(parts) if parts is not None else None, bool(optional))
