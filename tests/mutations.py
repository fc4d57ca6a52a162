"""Damaged and hostile model files, made from the tiny model: every mutation follows from its seed.

A GGUF file is taken apart into `GGUFParts`, which can be put together again whatever they hold; `gguf` writers refuse
most of what is of interest here.
"""

from __future__ import annotations

import json
import random
import shutil
import struct
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

# Kinds of metadata values, as the format numbers them.
UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
_PACKED = {UINT8: "B", INT8: "b", UINT16: "H", INT16: "h", UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "B"}
_PACKED |= {UINT64: "Q", INT64: "q", FLOAT64: "d"}

_NUMBERS = (0, 1, 2, 3, 5, 7, 255, 256, 4097, 2**16, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, -1, -(2**31))
_FLOATS = (0.0, -1.0, 1e-45, 1e-12, 1e30, 3e38, -3e38, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "\0", "llama", "gpt2", "x" * 70000, "é" * 300, "{{", "{% for %}", "\ud800", "../../etc/passwd")
_VALUES: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"a": {"b": []}}, "x", *_NUMBERS, *_FLOATS, *_TEXTS)
_VALUES += (1e300, 1e30, 10**400, [1] * 50, [None], {"rope_type": "linear"}, {"rope_type": [], "factor": "x"}, "1", 2.5)


_SIZES = (
    "expert_count",
    "expert_used_count",
    "expert_group_count",
    "nextn_predict_layers",
    "leading_dense_block_count",
)
_SIZES += (
    "attention.sliding_window",
    "attention.scale",
    "attention.layer_norm_epsilon",
    "attention.causal",
    "vocab_size",
)
_SIZES += ("attention.max_alibi_bias", "attention.key_length_mla", "attention.clamp_kqv", "logit_scale", "pooling_type")
_SIZES += ("rope.scale_linear", "rope.scaling.factor", "rope.dimension_sections")
_MORE_KEYS = [f"llama.{name}".encode() for name in _SIZES]
_MORE_KEYS += [b"general.alignment", b"split.count", b"general.file_type", b"tokenizer.ggml.scores"]
_MORE_KEYS += [b"tokenizer.ggml.eot_token_id", b"tokenizer.ggml.precompiled_charsmap"]
_ARCHITECTURES = (
    "qwen2",
    "gemma",
    "gemma2",
    "falcon",
    "mpt",
    "bert",
    "t5",
    "phi3",
    "gpt2",
    "bloom",
    "baichuan",
    "mamba",
)
_ARCHITECTURES += ("deepseek2", "stablelm", "olmo", "x", "clip")


@dataclass
class GGUFParts:
    """A GGUF file in parts that can be changed one by one.

    Attributes:
        fields: (key, kind, value); an array's value is (kind of elements, list).
        tensors: (name, dimensions, type, offset).
        data: what stands after the header.
        counts: overrides the number of tensors and of fields that the header announces.
    """

    fields: list[tuple[bytes, int, Any]]
    tensors: list[tuple[bytes, list[int], int, int]]
    data: bytes
    version: int = 3
    counts: dict[str, int] = field(default_factory=dict)

    def set(self, key: str, kind: int, value: Any) -> None:
        """Give a field this value, in its place or at the end."""
        at = next((i for i, (found, *_) in enumerate(self.fields) if found == key.encode()), len(self.fields))
        self.fields[at : at + 1] = [(key.encode(), kind, value)]

    def to_bytes(self) -> bytes:
        tensors, fields = self.counts.get("tensors", len(self.tensors)), self.counts.get("fields", len(self.fields))
        out = bytearray(struct.pack("<4sIQQ", b"GGUF", self.version, tensors % 2**64, fields % 2**64))
        for key, kind, value in self.fields:
            out += _text(key) + struct.pack("<I", kind) + _value(kind, value)
        for name, dims, kind, offset in self.tensors:
            out += _text(name) + struct.pack("<I", len(dims))
            out += b"".join(struct.pack("<Q", size % 2**64) for size in dims)
            out += struct.pack("<IQ", kind % 2**32, offset % 2**64)
        return bytes(out) + b"\0" * (-len(out) % 32) + self.data


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _text(value)
    if kind == ARRAY:
        element, values = value
        return struct.pack("<IQ", element, len(values)) + b"".join(_value(element, item) for item in values)
    if kind not in _PACKED:
        return bytes(value)
    code = _PACKED[kind]
    if code in "fd":
        return struct.pack(f"<{code}", value)
    size = struct.calcsize(code)
    return int(value % 2 ** (8 * size)).to_bytes(size, "little")


def parts_of(path: Path) -> GGUFParts:
    """Take a whole little-endian GGUF file apart."""
    import gguf

    reader = gguf.GGUFReader(path)
    fields = []
    for key, found in reader.fields.items():
        if key.startswith("GGUF."):
            continue
        kinds = [int(kind) for kind in found.types]
        contents = found.contents()
        value: Any = contents
        if kinds[0] == STRING:
            value = contents.encode()
        elif kinds[0] == ARRAY:
            value = (kinds[1], [item.encode() if kinds[1] == STRING else item for item in contents])
        fields.append((key.encode(), kinds[0], value))
    start = min(tensor.data_offset for tensor in reader.tensors)
    tensors = [
        (
            tensor.name.encode(),
            [int(size) for size in tensor.shape],
            int(tensor.tensor_type),
            tensor.data_offset - start,
        )
        for tensor in reader.tensors
    ]
    return GGUFParts(fields, tensors, path.read_bytes()[int(start) :])


_parts_of = cache(parts_of)


def mutate_gguf(whole: Path, seed: int) -> tuple[str, bytes]:
    """What was done, and the bytes of the mutated file."""
    rng = random.Random(seed)
    if rng.random() < 0.4:
        return _mutate_bytes(whole.read_bytes(), rng, header=9000)
    kept = _parts_of(whole)
    parts = replace(kept, fields=list(kept.fields), tensors=list(kept.tensors), counts={})
    done = rng.choice(_MUTATIONS)(parts, rng)
    return done, parts.to_bytes()


def _mutate_bytes(content: bytes, rng: random.Random, header: int) -> tuple[str, bytes]:
    data = bytearray(content)
    place = rng.randrange(min(header, len(data)))
    how = rng.choice(("noise", "noise", "large", "cut", "insert", "remove"))
    if how == "noise":
        size = rng.choice((1, 1, 4, 8))
        data[place : place + size] = rng.randbytes(size)
    elif how == "large":
        data[place : place + 8] = struct.pack("<q", rng.choice(_NUMBERS))
    elif how == "cut":
        place = rng.randrange(len(data))
        del data[place:]
    elif how == "insert":
        data[place:place] = rng.randbytes(rng.choice((1, 8, 100)))
    else:
        del data[place : place + rng.choice((1, 8, 100))]
    return f"{how} at {place}", bytes(data)


def _other_value(parts: GGUFParts, rng: random.Random) -> str:
    i = rng.randrange(len(parts.fields))
    key, kind, value = parts.fields[i]
    if kind == STRING:
        value = rng.choice(_TEXTS).encode("utf-8", "surrogatepass")
    elif kind == ARRAY:
        return _other_array(parts, rng)
    else:
        value = rng.choice(_FLOATS) if kind in (FLOAT32, FLOAT64) else rng.choice(_NUMBERS)
    parts.fields[i] = (key, kind, value)
    return f"{key.decode()} = {value!r:.60}"


def _other_kind(parts: GGUFParts, rng: random.Random) -> str:
    i = rng.randrange(len(parts.fields))
    key, _, _ = parts.fields[i]
    kind = rng.choice((UINT8, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, FLOAT64, 13, 2**31))
    value: Any = rng.choice(_NUMBERS)
    if kind in (FLOAT32, FLOAT64):
        value = rng.choice(_FLOATS)
    elif kind == STRING:
        value = rng.choice(_TEXTS).encode("utf-8", "surrogatepass")
    elif kind == ARRAY:
        value = (rng.choice((UINT8, INT32, FLOAT32)), [1] * rng.choice((0, 1, 2, 300)))
    elif kind > FLOAT64:
        value = rng.randbytes(8)
    parts.fields[i] = (key, kind, value)
    return f"{key.decode()} is of kind {kind}: {value!r:.60}"


def _other_array(parts: GGUFParts, rng: random.Random) -> str:
    places = [i for i, (_, kind, _) in enumerate(parts.fields) if kind == ARRAY]
    i = rng.choice(places)
    key, kind, (element, values) = parts.fields[i]
    values = list(values)
    how = rng.choice(("shorter", "longer", "empty", "item"))
    if how == "shorter":
        del values[rng.randrange(len(values)) :]
    elif how == "longer":
        values += values[: rng.randrange(1, 100)]
    elif how == "empty":
        values = []
    elif element == STRING:
        values[rng.randrange(len(values))] = rng.choice((b"", b"\xff\xfe", b"a", b"a b c", b"x" * 5000, values[0]))
    else:
        values[rng.randrange(len(values))] = rng.choice(_NUMBERS)
    parts.fields[i] = (key, kind, (element, values))
    return f"{key.decode()}: array {how}, {len(values)} left"


def _fewer(parts: GGUFParts, rng: random.Random) -> str:
    from_ = rng.choice((parts.fields, parts.tensors))
    gone = from_.pop(rng.randrange(len(from_)))
    return f"without {gone[0]!r}"


def _other_tensor(parts: GGUFParts, rng: random.Random) -> str:
    i = rng.randrange(len(parts.tensors))
    name, dims, kind, offset = parts.tensors[i]
    how = rng.choice(("name", "dims", "rank", "kind", "offset", "twice"))
    if how == "name":
        name = rng.choice((b"", b"x" * 200, b"blk.0.attn_q.bias", b"\xff", b"rope_freqs.weight", parts.tensors[0][0]))
    elif how == "dims":
        dims = [rng.choice((*_NUMBERS, dims[0])) for _ in dims]
    elif how == "rank":
        dims = dims * rng.choice((0, 2, 3))
    elif how == "kind":
        kind = rng.choice((1, 2, 3, 6, 8, 10, 14, 16, 24, 30, 39, 99, 2**31))
    elif how == "offset":
        offset = rng.choice((1, 16, offset + 32, 2**40, 2**63, 0))
    else:
        parts.tensors.append(parts.tensors[i])
    parts.tensors[i] = (name, dims, kind, offset)
    return f"tensor {i}: {how}: {name[:40]!r} {dims} {kind} {offset}"


def _other_counts(parts: GGUFParts, rng: random.Random) -> str:
    which = rng.choice(("tensors", "fields", "version"))
    count = rng.choice(_NUMBERS)
    if which == "version":
        parts.version = count % 2**32
    else:
        parts.counts[which] = count
    return f"{which} = {count}"


def _more(parts: GGUFParts, rng: random.Random) -> str:
    key, kind = rng.choice(_MORE_KEYS), rng.choice((UINT32, UINT32, INT32, FLOAT32, BOOL, UINT64))
    value = rng.choice(_FLOATS if kind == FLOAT32 else _NUMBERS)
    if rng.random() < 0.3:
        parts.fields.append((key, ARRAY, (kind, [value] * rng.choice((0, 1, 2, 4, 600)))))
    else:
        parts.fields.append((key, kind, value))
    return f"{key.decode()} added: {kind} {value!r:.60}"


def _other_architecture(parts: GGUFParts, rng: random.Random) -> str:
    name = rng.choice(_ARCHITECTURES).encode()
    for i, (key, kind, value) in enumerate(parts.fields):
        renamed = key.replace(b"llama.", name + b".", 1) if key.startswith(b"llama.") else key
        parts.fields[i] = (renamed, kind, name if key == b"general.architecture" else value)
    return f"architecture {name.decode()}"


_MUTATIONS = (_other_value, _other_value, _other_kind, _other_array, _fewer, _more, _more, _other_tensor, _other_counts)
_MUTATIONS += (_other_architecture,)


def mutate_folder(whole: Path, target: Path, seed: int) -> str:
    """Copy a Hugging Face folder with one thing wrong in it; what was done."""
    rng = random.Random(seed)
    shutil.copytree(whole, target)
    name = rng.choice(("config.json",) * 6 + tuple(sorted(path.name for path in whole.iterdir())))
    path = target / name
    if path.suffix == ".json" and name != "tokenizer.json" and rng.random() < 0.85:
        return f"{name}: {_mutate_json(path, rng)}"
    if name == "tokenizer.json" and rng.random() < 0.7:
        return f"{name}: {_mutate_deep(path, rng)}"
    if rng.random() < 0.1:
        path.unlink()
        return f"without {name}"
    done, content = _mutate_bytes(path.read_bytes(), rng, header=2000)
    path.write_bytes(content)
    return f"{name}: {done}"


def _mutate_json(path: Path, rng: random.Random) -> str:
    data = json.loads(path.read_text(encoding="utf-8"))
    extra = ("rope_scaling", "rope_parameters", "sliding_window", "tie_word_embeddings", "partial_rotary_factor")
    extra += ("attention_bias", "quantization_config", "eos_token_id", "add_bos_token", "unk_token", "rope_theta")
    key = rng.choice((*data, *data, *extra))
    if rng.random() < 0.1:
        data.pop(key, None)
        done = f"without {key}"
    else:
        data[key] = rng.choice(_VALUES)
        done = f"{key} = {data[key]!r:.60}"
    path.write_text(json.dumps(data), encoding="utf-8")
    return done


def _mutate_deep(path: Path, rng: random.Random) -> str:
    """Change one value at any depth of the tokenizer."""
    data = json.loads(path.read_text(encoding="utf-8"))
    at, trail = data, ""
    while True:
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        key = rng.choice(keys)
        trail += f".{key}"
        if isinstance(at[key], (dict, list)) and at[key] and rng.random() < 0.8:
            at = at[key]
            continue
        at[key] = rng.choice(_VALUES)
        path.write_text(json.dumps(data), encoding="utf-8")
        return f"{trail[:60]} = {at[key]!r:.60}"
