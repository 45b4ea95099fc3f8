"""All that is judged of an artifact beside its source, each thing once: what a matrix is told to be
is not told again by the checks behind it."""

from collections.abc import Mapping, Sequence

from qtool.verification.against import (
    biases,
    error,
    folds,
    gains,
    made_of,
    outlying,
    swapped,
    unquantized,
)
from qtool.verification.against.compared import Compared
from qtool.verification.against.multiples import check_multiples
from qtool.verification.against.norms import CHECK as NORMS
from qtool.verification.against.norms import check_norms
from qtool.verification.against.side_by_side import Floats
from qtool.verification.finding import Finding, said_by
from qtool.verification.subject import Subject

CHECKS = (error.CHECK, swapped.CHECK, "folds", NORMS, made_of.CHECK)


def judged(
    subject: Subject,
    norms: Mapping[str, Mapping[str, Floats]],
    compared: Sequence[Compared],
    findings: Sequence[Finding],
) -> tuple[list[Finding], list[Compared]]:
    """The findings with those beside the source, and the quantized matrices as they were judged.

    norms: see folds.changed_norms. compared: quantized matrices. findings: those so far.
    """
    findings = [*findings]
    others, changed = unquantized.dense_compared(subject, norms, compared)
    findings += changed
    before = [*compared, *others]
    everything, said = check_multiples(subject, before)
    known = {c.name for c, now in zip(before, everything, strict=True) if c is not now}
    findings += said
    everything = folds.settled(subject, everything)
    compared = [c for c in everything if c.groups]
    exchanged = swapped.swapped(subject, compared)
    findings += swapped.check_swapped(exchanged)
    known |= {*exchanged}  # what they are is said by then
    findings = [f for f in findings if f.check != "alike" or f.name not in known]
    own = [c for c in compared if c.name not in exchanged]
    findings += said_by(error.CHECK, error.check_errors(subject, own))
    findings += said_by(error.CHECK, biases.check_biases(subject, everything, norms))
    findings += folds.check_folds(subject, everything, norms, exchanged)
    if not made_of.rotated(subject):
        words = " ".join(f.message for f in changed if f.severity == "error")
        rest = {
            block: {key: ratio for key, ratio in of.items() if key.split(" ")[0] not in words}
            for block, of in norms.items()
        }
        said, readers = check_norms(subject, everything, rest, known)
        findings += said
        known |= readers
    findings += said_by(error.CHECK, gains.check_gains(subject, everything, known))
    findings += said_by(made_of.CHECK, made_of.check_made_of(subject))
    findings += outlying.told(error.CHECK, subject, findings)
    return findings, compared
