"""Pre-tokenizers: how a text is cut into words before byte-level BPE, and llama.cpp's name for it.

GGUF stores a name (tokenizer.ggml.pre), tokenizer.json the cutting itself. Both ways go through
TABLE: the steps as a tokenizer.json tells them. Many names share one cutting and differ in nothing
else, so the exact name is told, where it can be, by llama.cpp's own fingerprint (pre_hashes.py).
Sources: the tokenizer.json files of the models named, and llama.cpp's src/llama-vocab.cpp.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtool.errors import UnsupportedError

# A step: (type, what tells it). The word cutting itself is always the last step's or a "split".
Step = tuple[str, str]

BYTE_LEVEL: Step = ("ByteLevel", "")  # spells bytes only
GPT2: Step = ("ByteLevel", "gpt2")  # cuts with GPT-2's regular expression first
DIGITS: Step = ("Digits", "each")
DIGIT_RUNS: Step = ("Digits", "runs")

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"


def _cased(ending: str, digits: str) -> str:
    """The cutting of o200k and Tekken, which parts a word where its case changes."""
    return (
        f"{_LEAD}{_UPPER}*{_LOWER}+{ending}|{_LEAD}{_UPPER}+{_LOWER}*{ending}|{digits}{_REST_SLASH}"
    )


GPT2_CUT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
QWEN2 = rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}{_REST}"
QWEN35 = (
    rf"{_CONTRACTIONS}|{_LEAD}[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = _cased(_CONTRACTIONS + "?", r"\p{N}{1,3}")
TEKKEN = _cased("", r"\p{N}")
_COMPLETE = (CL100K, QWEN2, QWEN35, O200K, TEKKEN)  # match a text from its start to its end
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|{_LEAD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BAILING = (
    rf"{_CONTRACTIONS}|{_LEAD}\p{{L}}+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    _cased(_CONTRACTIONS + "?", r"\p{N}"),
)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Latin, Greek, Cyrillic, Armenian, Georgian, Cherokee ... letters that have a case. The escaped
# ones are those that an editor may replace by their canonical equivalents.
_DEEPSEEK_LETTERS = (
    r"\s?"
    "[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿ"
    "ᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴ"
    "ῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-"
    "ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)


def _split(*patterns: str) -> tuple[Step, ...]:
    return tuple(("Split", pattern) for pattern in patterns)


@dataclass(frozen=True)
class PreTokenizer:
    """One row: llama.cpp's names for a cutting, the one to take when nothing tells more first."""

    names: tuple[str, ...]
    steps: tuple[Step, ...]
    ignore_merges: bool = False  # a word that is a token is taken whole, without merging
    normalizer: str | None = None  # NFC or none; llama.cpp does not normalize either way
    adds_bos: tuple[str, ...] = ()  # the names with which a text begins with BOS unless told


_LLAMA3 = (
    "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
    "jina-v5-nano",
)  # fmt: skip
TABLE = (
    PreTokenizer(
        (*_LLAMA3, "glm4"), (*_split(CL100K), BYTE_LEVEL), ignore_merges=True, adds_bos=_LLAMA3
    ),
    PreTokenizer(("dbrx", "smaug-bpe", "chatglm-bpe"), (*_split(CL100K), BYTE_LEVEL)),
    PreTokenizer(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "hunyuan", "solar-open",
         "grok-2"),
        (*_split(QWEN2), BYTE_LEVEL), normalizer="NFC",
    ),
    PreTokenizer(("stablelm2",), (*_split(QWEN2), BYTE_LEVEL)),
    PreTokenizer(("qwen35",), (*_split(QWEN35), BYTE_LEVEL)),
    PreTokenizer(
        ("smollm", "refact", "starcoder", "codeshell", "exaone", "minerva-7b", "mellum2"),
        (DIGITS, GPT2),
    ),
    PreTokenizer(("command-r",), (DIGITS, GPT2), normalizer="NFC"),
    PreTokenizer(
        ("gpt-2", "phi-2", "jina-v2-es", "jina-v2-de", "gigachat", "a.x-4.0", "mellum", "jais",
         "exaone4", "trillion", "granite-docling"),
        (GPT2,),
    ),
    PreTokenizer(("olmo", "mpt", "modern-bert"), (GPT2,), normalizer="NFC"),
    PreTokenizer(
        ("tekken",), (*_split(TEKKEN), BYTE_LEVEL), ignore_merges=True, adds_bos=("tekken",)
    ),
    PreTokenizer(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (*_split(O200K), BYTE_LEVEL)),
    PreTokenizer(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        (*_split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3), BYTE_LEVEL),
    ),
    PreTokenizer(("bailingmoe2", "bailingmoe"), (*_split(_BAILING), BYTE_LEVEL)),
    PreTokenizer(("youtu",), (*_split(*_YOUTU), BYTE_LEVEL), ignore_merges=True),
    PreTokenizer(("exaone-moe",), (*_split(_EXAONE_MOE), BYTE_LEVEL)),
    PreTokenizer(
        ("deepseek-coder",),
        (*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+"), DIGITS, BYTE_LEVEL),
    ),
    PreTokenizer(
        ("deepseek-llm",),
        (*_split(r"[\r\n]", _DEEPSEEK_LETTERS, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$",
                 "[一-龥ࠀ-一가-퟿]+"), DIGITS, BYTE_LEVEL),
    ),
    PreTokenizer(
        ("falcon",),
        (("Punctuation", "Contiguous"), GPT2, DIGIT_RUNS, *_split("[0-9][0-9][0-9]")),
    ),
    PreTokenizer(  # what llama.cpp does where a file does not say: none of its converters writes it
        ("default",),
        (*_split(r"[\p{P}\$\+<=>\^~\|]+", GPT2_CUT), DIGIT_RUNS, *_split("[0-9][0-9][0-9]"),
         BYTE_LEVEL),
    ),
    PreTokenizer(("bloom", "poro-chat", "gpt3-finnish"), (*_split(_BLOOM), BYTE_LEVEL)),
    PreTokenizer(("viking",), (*_split(_BLOOM), DIGITS, BYTE_LEVEL)),
)  # fmt: skip


def find_row(name: str) -> PreTokenizer | None:
    """The row of a name, or None."""
    return next((row for row in TABLE if name in row.names), None)


def adds_bos(model: object, pre: object) -> bool:
    """Whether llama.cpp begins a text with BOS where tokenizer.ggml.add_bos_token is not there.

    model, pre: tokenizer.ggml.model and .pre, None where a file has no such key.
    """
    if model != "gpt2":
        return model in ("llama", "gemma4")
    return any(pre in row.adds_bos for row in TABLE)


def match_row(data: Mapping[str, Any]) -> PreTokenizer | None:
    """The row that cuts as a tokenizer.json does; with its normalizer, else with any."""
    steps = read_steps(data.get("pre_tokenizer"))
    whole = bool(data["model"].get("ignore_merges", False))
    rows = [row for row in TABLE if row.steps == steps and row.ignore_merges == whole]
    forms = normal_forms(data.get("normalizer"))
    if not rows or forms is None or len(forms) > 1:
        return None
    form = forms[0] if forms else None
    return next((row for row in rows if row.normalizer == form), rows[0])


def normal_forms(normalizer: Any) -> list[str] | None:
    """NFC, NFKC ... of a normalizer, in order; None if it does anything else."""
    if normalizer is None:
        return []
    if not isinstance(normalizer, dict):
        return None
    if normalizer.get("type") == "Sequence":
        parts = [normal_forms(part) for part in normalizer.get("normalizers") or ()]
        return None if None in parts else [form for part in parts for form in part or ()]
    kind = normalizer.get("type")
    return [kind] if kind in ("NFC", "NFD", "NFKC", "NFKD") else None


def read_steps(entry: Any) -> tuple[Step, ...] | None:
    """The steps of a tokenizer.json's pre_tokenizer; None if one of them is of no known kind."""
    if not isinstance(entry, dict):
        return None
    kind = entry.get("type")
    if kind == "Sequence":
        parts = [read_steps(part) for part in entry.get("pretokenizers") or ()]
        return None if None in parts else tuple(step for part in parts for step in part or ())
    if kind == "ByteLevel" and entry.get("add_prefix_space") is False:
        return (GPT2,) if entry.get("use_regex", True) else (BYTE_LEVEL,)
    if kind == "Digits":
        return (DIGITS,) if entry.get("individual_digits") else (DIGIT_RUNS,)
    if kind == "Punctuation":
        return (("Punctuation", str(entry.get("behavior", "Isolated"))),)
    pattern = entry.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    if kind != "Split" or not isinstance(regex, str):
        return None
    regex = _spelling(regex)
    how = (entry.get("behavior"), bool(entry.get("invert")))
    # To remove what does not match removes nothing where everything does.
    if how == ("Isolated", False) or (how == ("Removed", True) and regex in _COMPLETE):
        return (("Split", regex),)
    return None


# Spellings of the same thing that are met in tokenizer.json files.
_SPELLINGS = (
    ("\r", r"\r"), ("\n", r"\n"), ("'(?i:[sdmt]|ll|ve|re)", _CONTRACTIONS),
    ("(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])", _CONTRACTIONS),
    ("]?+", "]?"), ("]++", "]+"),  # what follows them takes none of their characters
)  # fmt: skip


def _spelling(regex: str) -> str:
    for other, usual in _SPELLINGS:
        regex = regex.replace(other, usual)
    return regex


def write_steps(name: str) -> dict[str, Any]:
    """The pre_tokenizer of a tokenizer.json that cuts as llama.cpp does for a name.

    Errors: UnsupportedError for a name that the table does not have.
    """
    row = find_row(name)
    if row is None:
        known = ", ".join(sorted(name for row in TABLE for name in row.names))
        raise UnsupportedError(
            f"tokenizer.ggml.pre is {name!r}, and how that cuts a text is not in the table of "
            f"pre-tokenizers ({known}); take the tokenizer files of the original model instead"
        )
    parts = [_write_step(step) for step in row.steps]
    return parts[0] if len(parts) == 1 else {"type": "Sequence", "pretokenizers": parts}


def _write_step(step: Step) -> dict[str, Any]:
    kind, told = step
    if kind == "ByteLevel":
        return {
            "type": kind, "add_prefix_space": False, "trim_offsets": True,
            "use_regex": step == GPT2,
        }  # fmt: skip
    if kind == "Digits":
        return {"type": kind, "individual_digits": step == DIGITS}
    if kind == "Punctuation":
        return {"type": kind, "behavior": told}
    return {"type": kind, "pattern": {"Regex": told}, "behavior": "Isolated", "invert": False}
