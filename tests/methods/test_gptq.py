"""GPTQ against an oracle that inverts the remaining Hessian anew at every step, in float64."""

import numpy as np
import pytest
import torch

from qtool.errors import SourceError
from qtool.methods import gptq, rtn
from qtool.scheme import Scheme
from support.methods import integer_grids
from support.methods.sweep_reference import output_error, problem, static_grid, sweep_reference

CASES = [
    (Scheme(4, 16, False), gptq.Options(mse=False)),
    (Scheme(4, 16, False), gptq.Options(mse=False, act_order=False, static_groups=False)),
    (Scheme(3, 16, True), gptq.Options(mse=False, act_order=True, static_groups=False)),
    (Scheme(2, 32, False), gptq.Options(mse=False, act_order=False)),
    (Scheme(8, -1, True), gptq.Options(mse=False)),
    (Scheme(4, -1, False), gptq.Options(mse=False, act_order=True, static_groups=False)),
    (Scheme(4, 32, True), gptq.Options(mse=False, act_order=True, static_groups=False)),
]


@pytest.mark.parametrize(("scheme", "options"), CASES)
@pytest.mark.parametrize("seed", [0, 1])
def test_float64_codes_equal_the_oracle(scheme: Scheme, options: gptq.Options, seed: int) -> None:
    weight, gram = problem(seed)
    static = static_grid(weight, scheme, options)
    given = gptq.factor(gram, options, dtype=np.float64)
    quant = gptq.quantize_with(weight.astype(np.float64), given, scheme, options)
    expected, values = sweep_reference(weight.astype(np.float64), gram, scheme, options, static)
    assert (quant.codes == expected).all()
    assert np.allclose(quant.dequantize(), values, rtol=1e-6, atol=1e-7)
    # The sweep must have moved codes, or the comparison says nothing.
    if static is not None:
        nearest = integer_grids.rounded(weight, static, scheme)
        assert (quant.codes != nearest.codes).mean() > 0.05


@pytest.mark.parametrize(("scheme", "options"), CASES)
def test_float32_path_is_as_good(scheme: Scheme, options: gptq.Options) -> None:
    weight, gram = problem(2, rows=96)
    quant = gptq.quantize_with(
        weight, gptq.factor(gram.astype(np.float32), options), scheme, options
    )
    static = static_grid(weight, scheme, options)
    codes, values = sweep_reference(weight.astype(np.float64), gram, scheme, options, static)
    assert (quant.codes != codes).mean() <= 1e-3
    expected = output_error(weight, values, gram)
    assert output_error(weight, quant.dequantize(), gram) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "options", [gptq.Options(mse=False), gptq.Options(mse=False, act_order=False)]
)
def test_factor_is_the_textbook_one(options: gptq.Options) -> None:
    _, gram = problem(3, columns=600)  # wide enough for the recursive inverse
    given = gptq.factor(gram, options, dtype=np.float64)
    damped = gram / np.diagonal(gram).mean() + 0.01 * np.eye(600)
    inverse = np.linalg.inv(damped[np.ix_(given.order, given.order)])
    assert np.allclose(given.upper, np.linalg.cholesky(inverse).T, rtol=1e-8, atol=1e-10)
    assert given.upper.flags.c_contiguous
    cost = np.empty(600)
    cost[given.order] = 1 / np.diagonal(given.upper) ** 2
    assert np.allclose(given.importance, cost, rtol=1e-5)
    assert np.allclose(gptq.importance(gram, options), cost, rtol=1e-3)


@pytest.mark.parametrize("together", [1, 4, 8])
def test_neighbours_that_keep_together_are_put_in_order_as_one(together: int) -> None:
    """The strongest unit first; those last of which all channels are always zero."""
    _, gram = problem(4)
    gram[40:60] = gram[:, 40:60] = 0
    found = gptq.factor(gram, gptq.Options(), dtype=np.float64, together=together)
    units = found.order.reshape(-1, together)
    assert (units[:, 0] % together == 0).all() and (np.diff(units) == 1).all()
    strength = np.diagonal(gram)[units].sum(axis=1)
    assert (np.diff(strength) <= 0).all() and (strength[: -(20 // together)] > 0).all()
    assert sorted(found.order) == list(range(64))
    cost = 1 / np.square(np.diagonal(found.upper))
    live = (found.order < 40) | (found.order >= 60)
    np.testing.assert_allclose(found.importance[found.order[live]], cost[live], rtol=1e-6)
    dead = found.importance[40:60]
    np.testing.assert_allclose(dead, 0.01, rtol=1e-5)  # a difference in float32
    assert (np.delete(found.importance, np.s_[40:60]) > dead.max()).all()
    if together == 1:
        assert gptq.importance(gram, gptq.Options())[40:60] == pytest.approx(0.01, rel=1e-4)


def test_the_thread_count_changes_nothing() -> None:
    _, gram = problem(4, columns=512)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        found.append(gptq.factor(gram, gptq.Options(mse=False)).upper.tobytes())
        assert torch.get_num_threads() == threads
    torch.set_num_threads(before)
    assert found[0] == found[1]


def test_groups_of_the_file() -> None:
    weight, gram = problem(5)
    scheme = Scheme(4, 16, False)
    static = gptq.quantize_with(
        weight, gptq.factor(gram, gptq.Options(mse=False)), scheme, gptq.Options(mse=False)
    )
    assert static.g_idx is None
    options = gptq.Options(mse=False, static_groups=False)
    dynamic = gptq.quantize_with(weight, gptq.factor(gram, options), scheme, options)
    assert dynamic.g_idx is not None
    assert np.bincount(dynamic.g_idx).tolist() == [16] * 4
    first = np.argsort(-np.diagonal(gram), kind="stable")[:16]
    assert (dynamic.g_idx[first] == 0).all()
    plain = rtn.quantize(weight, None, scheme, rtn.Options()).quant
    worst = output_error(weight, plain.dequantize(), gram)
    for quant in (static, dynamic):
        assert output_error(weight, quant.dequantize(), gram) < 0.6 * worst


def test_ranges_are_those_of_columns_that_see_something() -> None:
    """Weights of dead columns that are as large as others, or twice as large, hardly cost these."""
    weight, gram = problem(6, columns=256)
    dead = np.random.default_rng(6).random(256) < 0.3
    gram[dead] = gram[:, dead] = 0
    scheme, given = Scheme(4, 64, True), gptq.factor(gram, gptq.Options())

    def lost(factor: float) -> float:
        changed = np.where(dead, np.float32(factor) * weight, weight)
        quant = gptq.quantize_with(changed, given, scheme, gptq.Options())
        return output_error(np.where(dead, 0, changed), np.where(dead, 0, quant.dequantize()), gram)

    assert lost(1.0) < 1.05 * lost(0.0)
    assert lost(2.0) < 1.5 * lost(0.0)


def test_dead_columns_are_rounded_to_nearest() -> None:
    weight, gram = problem(6)
    gram[[3, 40]] = 0
    gram[:, [3, 40]] = 0
    scheme = Scheme(4, 16, False)
    given = gptq.factor(gram, gptq.Options(mse=False))
    quant = gptq.quantize_with(weight, given, scheme, gptq.Options(mse=False))
    plain = rtn.quantize(weight, None, scheme, rtn.Options()).quant
    assert (quant.codes[:, [3, 40]] == plain.codes[:, [3, 40]]).all()
    assert given.notes == ("2 of 64 input channels are always zero",)
    nothing = gptq.factor(np.zeros((64, 64)), gptq.Options(mse=False))
    untouched = gptq.quantize_with(weight, nothing, scheme, gptq.Options(mse=False))
    assert (untouched.codes == plain.codes).all()


def test_damping_is_raised_until_the_factorization_holds() -> None:
    random = np.random.default_rng(7)
    gram = np.eye(32) + 0.05 * np.diag(np.ones(31), 1) + 0.05 * np.diag(np.ones(31), -1)
    gram[0, 1] = gram[1, 0] = 1.05  # not positive definite until 0.05 and more is added
    given = gptq.factor(gram, gptq.Options(mse=False))
    assert given.notes == ("damping raised from 1.00% to 10.00%",)
    weight = random.normal(size=(8, 32)).astype(np.float32)
    quant = gptq.quantize_with(weight, given, Scheme(4, 16, False), gptq.Options(mse=False))
    assert np.abs(quant.dequantize() - weight).mean() < 0.3


def test_a_gram_matrix_of_few_tokens_is_damped_more() -> None:
    _, gram = problem(9)
    options = gptq.Options(damp_percent=0.01)
    few, exact = gptq.factor(gram, options, tokens=160), gptq.factor(gram, options)
    same = gptq.factor(gram, gptq.Options(damp_percent=0.41))
    assert np.allclose(few.upper, same.upper, rtol=1e-5)
    assert not np.allclose(few.upper, exact.upper, rtol=1e-2)
    assert few.notes == ()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_an_undefined_gram_matrix_is_refused(bad: float) -> None:
    gram = np.eye(8)
    gram[2, 2] = bad
    with pytest.raises(SourceError, match=f"^the Gram matrix has {bad:.3g} on its diagonal"):
        gptq.factor(gram, gptq.Options(mse=False))


def test_no_damping_helps() -> None:
    gram = np.eye(8)
    gram[0, 1] = gram[1, 0] = 1e4
    with pytest.raises(SourceError, match="cannot be factored"):
        gptq.factor(gram, gptq.Options(mse=False))


def test_missing_statistics_name_the_command() -> None:
    with pytest.raises(SourceError, match="qtool calibrate"):
        gptq.quantize(
            np.ones((2, 16), np.float32), None, Scheme(4, 16, False), gptq.Options(mse=False)
        )


def test_clip_search_lowers_the_error() -> None:
    weight, gram = problem(8, rows=128)
    scheme = Scheme(3, 32, False)
    found = []
    for options in (gptq.Options(mse=False), gptq.Options()):
        quant = gptq.quantize_with(weight, gptq.factor(gram, options), scheme, options)
        found.append(output_error(weight, quant.dequantize(), gram))
    assert found[1] < 0.95 * found[0]


def test_token_damping_adds_in_features_over_tokens() -> None:
    """64 columns and 256 tokens: a quarter of the mean diagonal more, unless turned off."""
    x = np.random.default_rng(7).standard_normal((256, 64)).astype(np.float32)
    gram = x.T @ x
    quarter = gptq.factor(gram, gptq.Options(damp_percent=0.26), 256 * 10**9)
    added = gptq.factor(gram, gptq.Options(damp_percent=0.01), 256)
    plain = gptq.factor(gram, gptq.Options(damp_percent=0.01, token_damping=False), 256)
    exact = gptq.factor(gram, gptq.Options(damp_percent=0.01))
    np.testing.assert_allclose(added.upper, quarter.upper, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(plain.upper, exact.upper)
    assert not np.allclose(plain.upper, added.upper, rtol=1e-2)
