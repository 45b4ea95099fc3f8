"""Special tokens of a tokenizer as GGUF keys: ids, which are added around a text, chat templates.

The ids come from the names in tokenizer_config.json, looked up among tokenizer.json's added
tokens, else from config.json; whether bos, eos and sep are added comes from tokenizer.json's
post-processor, else from tokenizer_config.json. These are the rules of llama.cpp's converter
(gguf-py's SpecialVocab), so that both write the same keys.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qtool.errors import FormatError
from qtool.formats.gguf_values import Value, boolean, string, strings, u32
from qtool.gguf.tokenizer.hf_json import CONFIG, NAMED, check_text, read_object

# seperator is llama.cpp's spelling; cls has no key, so its id is not stored.
ID_KEYS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "unk": "tokenizer.ggml.unknown_token_id",
    "sep": "tokenizer.ggml.seperator_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
    "mask": "tokenizer.ggml.mask_token_id",
    "eot": "tokenizer.ggml.eot_token_id",
    "eom": "tokenizer.ggml.eom_token_id",
}
ADD_KEYS = {kind: f"tokenizer.ggml.add_{kind}_token" for kind in ("bos", "eos", "sep")}
TEMPLATE = "tokenizer.chat_template"
TEMPLATES = "tokenizer.chat_templates"


def special_metadata(
    folder: Path,
    data: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    config: Mapping[str, Any],
    limit: int,
    usual: Mapping[str, str],
) -> dict[str, Value]:
    """Keys for special tokens, in the converter's order; ids from `limit` on are left out.

    data: tokenizer.json, or {} where the folder has none. config: the model's config.json. usual:
    tokens of the architecture by their kinds, which count where nothing is said of a kind.
    """
    # A name may also be an object with the text in `content`; the converter compares such an object
    # with a text and then takes a bos that is added for one that is not.
    named = {key: value for key, value in tokenizer_config.items() if key.endswith("_token")}
    named |= {f"{kind}_token": _text(named.get(f"{kind}_token")) for kind in NAMED if named}
    adds: dict[str, bool] = {}
    extra: list[str] = []
    if data:
        _copy_if_missing(named, "bos_token", "cls_token")
        _copy_if_missing(named, "eos_token", "sep_token")
        processor = data.get("post_processor") or {}
        if not isinstance(processor, dict):
            raise FormatError(f"{folder}: the post_processor of tokenizer.json is not an object")
        parts = processor.get("processors")
        for part in parts if isinstance(parts, list) and parts else [processor]:
            _read_processor(part, named, adds, extra)
    ids: dict[str, int] = {}
    for kind in (*NAMED, *extra) if tokenizer_config else ():
        given = named.get(f"add_{kind}_token")
        if isinstance(given, bool):
            adds.setdefault(kind, given)
        text = named.get(f"{kind}_token")
        for token in _added(data) if text is not None else ():
            if token.get("content") == text:
                _set_id(ids, kind, token.get("id"), limit)
                break
    inner = config.get("text_config")
    for kind in (*NAMED, *extra):
        number = config.get(f"{kind}_token_id")
        if number is None and isinstance(inner, Mapping):
            number = inner.get(f"{kind}_token_id")
        _set_id(ids, kind, number, limit)
    added = {token.get("content"): token.get("id") for token in _added(data)}
    for kind, text in usual.items():
        _set_id(ids, kind, added.get(text), limit)
    keys = {ID_KEYS[kind]: u32(number) for kind, number in ids.items() if kind in ID_KEYS}
    keys |= {ADD_KEYS[kind]: boolean(value) for kind, value in adds.items() if kind in ADD_KEYS}
    if tokenizer_config:
        keys |= template_metadata(_templates(folder, tokenizer_config), folder)
    if isinstance(normalizer := data.get("normalizer"), dict):
        keys |= _normalizer(normalizer)
    return keys


def end_metadata(folder: Path, config: Mapping[str, Any], limit: int) -> dict[str, Value]:
    """Where a text and a turn end by config.json's eod_token_id and generation_config.json."""
    ids: dict[str, int] = {}
    _set_id(ids, "eos", config.get("eod_token_id"), limit)
    ends = read_object(folder / "generation_config.json").get("eos_token_id")
    if isinstance(ends, list) and len(ends) >= 2:
        _set_id(ids, "eot", ends[0], limit)
    return {ID_KEYS[kind]: u32(number) for kind, number in ids.items()}


def special_named(tokenizer_config: Mapping[str, Any], text: str, kind: str) -> dict[str, Value]:
    """The key of a kind with the special token of this text, where tokenizer_config.json has it."""
    entries = tokenizer_config.get("added_tokens_decoder")
    for number, entry in entries.items() if isinstance(entries, dict) else ():
        if isinstance(entry, dict) and entry.get("content") == text and entry.get("special"):
            return {ID_KEYS[kind]: u32(int(number))} if str(number).isdecimal() else {}
    return {}


def fixed_metadata(
    data: Mapping[str, Any], fixed: Mapping[str, str], limit: int
) -> dict[str, Value]:
    """Special tokens by their texts, where tokenizer.json has these."""
    ids: dict[str, int] = {}
    added = {token.get("content"): token.get("id") for token in _added(data)}
    for kind, text in fixed.items():
        _set_id(ids, kind, added.get(text), limit)
    return {ID_KEYS[kind]: u32(number) for kind, number in ids.items()}


def _added(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [token for token in data.get("added_tokens") or () if isinstance(token, dict)]


def _set_id(ids: dict[str, int], kind: str, number: Any, limit: int) -> None:
    """Keeps the first id told for a kind; not null, a list (of ends), or -1, which means none."""
    if type(number) is int and 0 <= number < limit:
        ids.setdefault(kind, number)


def _text(entry: Any) -> str | None:
    text = entry.get("content") if isinstance(entry, dict) else entry
    return text if isinstance(text, str) else None


def _copy_if_missing(named: dict[str, Any], kind: str, other: str) -> None:
    if not named.get(kind) and named.get(other):
        named[kind] = named[other]


def _token_of(item: Any, part: str) -> str | None:
    """The id of an item of a template, if it is of that kind (SpecialToken or Sequence)."""
    inner = item.get(part) if isinstance(item, dict) else None
    text = inner.get("id") if isinstance(inner, dict) else None
    return text if isinstance(text, str) else None


def _read_processor(
    part: Any, named: dict[str, Any], adds: dict[str, bool], extra: list[str]
) -> None:
    """Which special tokens one post-processor adds; it may also name tokens in `named`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "ByteLevel":
        adds.setdefault("bos", False)
        adds.setdefault("eos", False)
    elif kind == "RobertaProcessing":
        adds |= {"bos": True, "eos": True, "sep": True}
        for name in ("cls", "sep"):
            given = part.get(name)
            if named and not named.get(f"{name}_token") and isinstance(given, list) and given:
                named[f"{name}_token"] = given[0]
    elif kind == "TemplateProcessing":
        _read_template(part, named, adds, extra)


def _read_template(
    part: Mapping[str, Any], named: dict[str, Any], adds: dict[str, bool], extra: list[str]
) -> None:
    single, pair = part.get("single") or [], part.get("pair") or []
    if not isinstance(single, list) or not isinstance(pair, list):
        raise FormatError(
            "tokenizer.json: a TemplateProcessing post_processor has no list 'single'"
        )
    known = bool(named)  # without a tokenizer_config.json nothing says what bos and eos are
    bos, cls, eos, sep = (named.get(f"{kind}_token") for kind in ("bos", "cls", "eos", "sep"))
    first = last = None
    if len(single) > 1:
        if first := _token_of(single[0], "SpecialToken"):
            if not known:
                bos = first
            elif first not in (bos, cls):
                if not bos:
                    named["bos_token"] = bos = first
                if not cls:
                    named["cls_token"] = cls = first
            adds["bos"] = first in (bos, cls)
        if last := _token_of(single[-1], "SpecialToken"):
            if not known:
                eos = last
            elif last != eos:
                # The token that a text ends with is the end for llama.cpp; the named one becomes
                # the end of a turn.
                for other in ("eot", "eom"):
                    if other not in extra:
                        extra.append(other)
                        named[f"{other}_token"] = eos
                        break
                named["eos_token"] = eos = last
            adds["eos"] = last == eos
    if not pair:
        return
    start = 1 if first and _token_of(pair[0], "SpecialToken") == first else 0
    stop = -1 if last and _token_of(pair[-1], "SpecialToken") == last else None
    pair = pair[start:stop]
    if not pair or (_token_of(pair[0], "Sequence"), _token_of(pair[-1], "Sequence")) != ("A", "B"):
        return
    if between := pair[1:-1]:
        add_sep = _token_of(between[0], "SpecialToken") in (sep, eos) and not last
        if len(between) == 2 and _token_of(between[1], "SpecialToken") in (sep, eos):
            add_sep = True
        adds["sep"] = add_sep
        if add_sep and not sep and known:
            named["sep_token"] = eos


def _templates(folder: Path, tokenizer_config: Mapping[str, Any]) -> Any:
    """The chat template, or a list of named ones: tokenizer_config.json's, else a file's own."""
    if "chat_template" in tokenizer_config:
        return tokenizer_config["chat_template"]
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        default = _read_text(jinja)
        every = (folder / "additional_chat_templates").glob("*.jinja")
        more = sorted(path for path in every if path.is_file())
        if not more:
            return default
        return [
            {"name": "default", "template": default},
            *({"name": path.stem, "template": _read_text(path)} for path in more),
        ]
    return read_object(folder / "chat_template.json").get("chat_template")


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise FormatError(f"{path}: is not UTF-8 text; get the file again") from None


def template_metadata(given: Any, folder: Path) -> dict[str, Value]:
    """Keys of one chat template, or of named ones, the name's odd characters made underscores."""
    where = str(folder / CONFIG)
    if isinstance(given, str):
        return {TEMPLATE: string(check_text(given, where))}
    keys: dict[str, Value] = {}
    default: str | None = None
    names: list[str] = []
    for entry in given if isinstance(given, Sequence) else ():
        if not isinstance(entry, dict):
            raise FormatError(f"{where}: a chat template in the list is not an object with a name")
        name = re.sub("[^A-Za-z0-9]", "_", str(entry.get("name", "")))
        text = entry.get("template")
        if not name or not isinstance(text, str):
            continue
        if name == "default":
            default = check_text(text, where)
        else:
            keys[f"{TEMPLATE}.{name}"] = string(check_text(text, where))
            names.append(name)
    if names:
        keys[TEMPLATES] = strings(list(dict.fromkeys(names)))
    if default is not None:
        keys[TEMPLATE] = string(default)
    return keys


def _normalizer(normalizer: Mapping[str, Any]) -> dict[str, Value]:
    """The two normalizer flags that llama.cpp knows."""
    found: dict[str, bool] = {}

    def walk(entry: Mapping[str, Any]) -> None:
        kind = entry.get("type")
        if kind == "Lowercase":
            found["lowercase"] = True
        elif kind == "StripAccents":
            found["strip_accents"] = True
        elif kind == "BertNormalizer":
            for name in ("lowercase", "strip_accents"):
                if isinstance(entry.get(name), bool):
                    found[name] = bool(entry[name])
        elif kind == "Sequence":
            inside = entry.get("normalizers")
            for inner in inside if isinstance(inside, list) else ():
                if isinstance(inner, dict):
                    walk(inner)

    walk(normalizer)
    order = ("lowercase", "strip_accents")
    return {f"tokenizer.ggml.normalizer.{n}": boolean(found[n]) for n in order if n in found}
