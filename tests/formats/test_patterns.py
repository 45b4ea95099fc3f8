"""Expressions from files: the answers are Python's own, without its backtracking."""

import random
import re
import time

import pytest

from qtool.formats.compressed_tensors_config import chosen_group, named
from qtool.formats.gptq_dynamic import entry_for
from qtool.formats.patterns import any_of, matches

Q = "model.layers.1.self_attn.q_proj"


@pytest.mark.parametrize(
    ("expression", "answer"),
    [
        (r"model\.layers\.[1-9]{1}\.self_attn\..*", True),
        (r".*layers\.(1|2)?\.self_attn.*", True),
        (r".*layers\.(0|2)?\.self_attn.*", False),
        (r"^(?:model\.)+layers\.\d{1,2}\.(?!mlp).*_proj$", True),
        (r"(?P<all>.*)(q|k)_proj", True),
        (r".*\bq_proj\Z", True),
        ("model.layers.1.self_attn.q_proj.weight", False),
        ("self_attn", False),  # from the start
        (r"(?i)MODEL.*", None),
        (r".*(?<=q)_proj", None),
        (r"(m)odel\.\1.*", None),
        ("(unclosed", None),
        ("*", None),
        ("a" * 5000, None),
        ("(" * 50 + "a" + ")" * 50, None),
    ],
)
def test_what_is_known(expression: str, answer: bool | None) -> None:
    assert matches(expression, Q) is answer


def test_no_expression_takes_long() -> None:
    start = time.process_time()
    for expression in ("(.*)*x", "(a+)+" * 50 + "$", "(((a*)*)*)*b", "(?:a|a)*" * 40 + "b"):
        assert matches(expression, "a" * 400) in (False, None, True)
    assert time.process_time() - start < 2


_ATOMS = [
    "a", "b", "1", "_", r"\.", ".", r"\d", r"\w", r"\D", r"\W", "[ab]", "[^a]", "[a-b1]", r"[\d.]",
    "{", "}", "]", "[]a]", "-", "^", "$", r"\b", r"\B",
]  # fmt: skip
_TIMES = ["", "*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "*?", "+?", "{,}", "{0}"]


def _expression(rng: random.Random, depth: int = 0) -> str:
    """Any of those that are matched here, and some that nobody reads."""
    kind = rng.randrange(8)
    if kind < 3 or depth > 4:
        return rng.choice(_ATOMS) + rng.choice(_TIMES)
    one, other = _expression(rng, depth + 1), _expression(rng, depth + 1)
    if kind == 3:
        return f"({one}|{other}){rng.choice(_TIMES)}"
    if kind == 4:
        return f"(?{rng.choice('=!:')}{one}){rng.choice(_TIMES)}"
    return one + other


def test_the_answers_are_pythons() -> None:
    rng = random.Random(0)
    answers = {True: 0, False: 0}
    for _ in range(3000):
        expression = _expression(rng)
        try:
            compiled = re.compile(expression)
        except re.error:
            compiled = None
        for _ in range(4):
            name = "".join(rng.choice("ab.1_") for _ in range(rng.randrange(1, 9)))
            found = matches(expression, name)
            if compiled is None:
                assert found is None, expression
            elif found is not None:
                assert found is (compiled.match(name) is not None), (expression, name)
                answers[found] += 1
    assert min(answers.values()) > 1000


def test_what_depends_on_an_unknown_one_is_not_known() -> None:
    assert [any_of(a) for a in ([False, None], [None, True], [False], [])] == [
        None, True, False, False,
    ]  # fmt: skip
    unknown = "re:(?i)MODEL.*"
    assert named(unknown, Q) is None
    assert chosen_group([["Linear"], [unknown]], Q) is None
    assert chosen_group([["Linear"], ["re:.*q_proj$"], [unknown]], Q) == 1
    assert chosen_group([["LlamaAttention"], ["Linear"]], Q) == 1
    assert entry_for(["-:(?i)MODEL.*", "+:.*"], Q) == (None, False)
    assert entry_for(["-:.*k_proj", "+:.*q_proj", "-:.*"], Q) == ("+:.*q_proj", True)
