"""Recipes drawn at random from all keys, so that options meet which nobody put together."""

import random
from typing import Any

from qtool.gguf_mixtures.table import FILE_TYPES, TYPES

Table = dict[str, Any]


def _maybe(rng: random.Random, often: float, **values: list[Any]) -> Table:
    """Some of the keys, each with one of its values."""
    return {key: rng.choice(those) for key, those in values.items() if rng.random() < often}


def _weights(rng: random.Random) -> Table:
    kind = rng.choices(["int", "fp8", "mxfp8", "nvfp4", "mxfp4"], [8, 2, 1, 1, 1])[0]
    if kind == "fp8":
        size = rng.choice([-1, 128])
        rows = rng.choice([1, -1]) if size == -1 else rng.choice([1, 128])
        return {"type": kind, "bits": 8, "group_size": size, "symmetric": True, "rows": rows}
    if kind != "int":
        bits, size = {"mxfp8": (8, 32), "nvfp4": (4, 16), "mxfp4": (4, 32)}[kind]
        return {"type": kind, "bits": bits, "group_size": size, "symmetric": True}
    bits = rng.choices([2, 3, 4, 5, 6, 7, 8], [2, 3, 8, 1, 1, 1, 5])[0]
    size = rng.choice([-1, 16, 32, 64, 128, 256, 512])
    return {"bits": bits, "group_size": size, "symmetric": rng.random() < 0.5}


def _activations(rng: random.Random, weights: Table) -> Table:
    kind = weights.get("type", "int")
    if kind in ("nvfp4", "mxfp4"):
        return {"bits": 4, "type": kind} | ({"dynamic": False} if kind == "nvfp4" else {})
    found: Table = {"bits": 8, "type": "int" if kind == "int" else "float"}
    found |= _maybe(rng, 0.3, dynamic=[False], scale=["tensor"], group_size=[128, 64])
    if found.get("dynamic") is False:
        found |= _maybe(rng, 0.5, observer=["percentile", "mse"])
    return found


def _transforms(rng: random.Random, most: int) -> list[str]:
    names = ["rotate", "smooth", "smooth-attention", "awq"]
    return rng.sample(names, rng.choice([0, 0, 0, 1, 1, min(2, most)]))


def _options(rng: random.Random, chain: list[str], *, gguf: bool) -> Table:
    """Tables of the transforms that act, and now and then of one that does not."""
    found: Table = {}
    if "rotate" in chain:
        kinds = ["hadamard", "random"] + ([] if gguf else ["learned"])
        found["rotate"] = _maybe(rng, 0.4, kind=kinds, r1=[False, True], r2=[False, True], seed=[3])
        if not gguf:
            found["rotate"] |= _maybe(rng, 0.2, r3=[True], r4=[True])
            if found["rotate"].get("kind") == "learned":
                found["rotate"]["steps"] = 2
    if "smooth" in chain:
        found["smooth"] = _maybe(rng, 0.5, alpha=[0.3, 0.8, "search"], sites=["all"], grid=[3])
    if "smooth-attention" in chain:
        found["smooth_attention"] = _maybe(rng, 0.5, alpha=[0.3, 1.0])
    return {key: table for key, table in found.items() if table}


def safetensors(rng: random.Random) -> Table:
    """A recipe for safetensors; most of them make sense."""
    method = rng.choice(
        [["rtn"], ["rtn"], ["gptq"], ["awq"], ["awq", "gptq"], ["none"], ["awq", "rtn"]]
    )
    format_ = rng.choices(
        ["awq", "gptq", "compressed-tensors", "fp8", "bitsandbytes", "qserve", "mlx", "dense"],
        [3, 3, 8, 1, 1, 1, 2, 1],
    )[0]
    made: Table = {"method": method[0] if len(method) == 1 else method, "format": format_}
    weights = _weights(rng)
    if format_ in ("awq", "gptq") and rng.random() < 0.9:
        bits = 4 if format_ == "awq" else rng.choice([2, 3, 4, 8])
        weights = {"bits": bits, "group_size": rng.choice([-1, 32, 64, 128, 512]),
                   "symmetric": format_ == "gptq" and rng.random() < 0.5}  # fmt: skip
    if format_ == "mlx" and rng.random() < 0.9:
        weights = {"bits": rng.choice([2, 3, 4, 5, 6, 8]), "group_size": rng.choice([32, 64, 128]),
                   "symmetric": rng.random() < 0.5}  # fmt: skip
    if format_ == "fp8" and rng.random() < 0.9:
        weights = {"type": "fp8", "bits": 8, "group_size": 128, "symmetric": True, "rows": 128}
    if format_ == "bitsandbytes" and rng.random() < 0.9:
        weights = {"bits": 8, "group_size": -1, "symmetric": True}
    if method != ["none"] or rng.random() < 0.1:
        made["weights"] = weights
    if rng.random() < 0.25:
        made["activations"] = _activations(rng, weights)
    if rng.random() < 0.15 or method == ["none"]:
        made["kv_cache"] = {"bits": 8, "type": rng.choice(["int", "float"])}
        made["kv_cache"] |= _maybe(rng, 0.3, scale=["head"], dynamic=[True], bits=[4])
    chain = _transforms(rng, 2)
    if chain:
        made["transforms"] = chain
    made |= _options(rng, chain, gguf=False)
    made |= _maybe(rng, 0.5, indivisible=["dense", "smaller-group", "dense"])
    for key, table in (
        ("rtn", _maybe(rng, 0.3, clip=[True, False]) if "rtn" in method else {}),
        ("gptq", _maybe(rng, 0.2, act_order=[False], damp_percent=[0.1], token_damping=[False],
                        static_groups=[False], mse=[False],
                        layout=["v1", "v2"]) if "gptq" in method or format_ == "gptq" else {}),
        ("awq", _maybe(rng, 0.3, grid=[3], clip=[False],
                       layout=["gemv", "gemv_fast", "llm_awq"]) if "awq" in method else {}),
        ("llm_int8", _maybe(rng, 0.5, threshold=[0.0, 3.0], outliers=[True])
         if format_ == "bitsandbytes" else {}),
    ):  # fmt: skip
        if table:
            made[key] = table
    overrides: list[Table] = []
    for match in rng.sample(
        ["*.down_proj", "*v_proj*", "*.0.*", "lm_head", "*gate*", "*o_proj"], 2
    ):
        if rng.random() < 0.15:
            other: Table = {"dense": True}
            if rng.random() < 0.6:
                other = {"weights": _maybe(rng, 0.6, bits=[3, 4, 8], group_size=[32, 64, -1],
                                           symmetric=[True, False])}  # fmt: skip
            overrides.append({"match": match} | other)
    if overrides:
        made["overrides"] = overrides
    return made


def gguf(rng: random.Random) -> Table:
    """A recipe for GGUF."""
    made: Table = {"format": "gguf", "type": rng.choice([*FILE_TYPES]).lower()}
    types = [name.lower() for name in TYPES]
    made |= _maybe(rng, 0.4, method=["gptq", "gptq", "rtn"])
    made |= _maybe(rng, 0.2, pure=[True], importance=[True, True, False], leave_output=[True])
    made |= _maybe(rng, 0.15, output_type=types, embedding_type=types)
    chain = _transforms(rng, 3)
    if chain:
        made["transforms"] = chain
    made |= _options(rng, chain, gguf=True)
    if made.get("method") == "gptq" and (table := _maybe(
        rng, 0.2, act_order=[False], damp_percent=[0.1], token_damping=[False]
    )):  # fmt: skip
        made["gptq"] = table
    overrides: list[Table] = []
    for match in rng.sample(["attn_v", "*ffn_down*", r"blk\.0\.", "ffn_(gate|up)", "output"], 2):
        if rng.random() < 0.2:
            other = {"dense": True} if rng.random() < 0.3 else {"type": rng.choice(types)}
            overrides.append({"match": match} | other)
    if overrides:
        made["overrides"] = overrides
    return made


def drawn(rng: random.Random) -> Table:
    """Either, with little to calibrate on."""
    made = gguf(rng) if rng.random() < 0.4 else safetensors(rng)
    made["calibration"] = {"samples": rng.choice([6, 9]), "length": rng.choice([64, 100])}
    return made
