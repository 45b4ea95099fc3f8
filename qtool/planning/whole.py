"""What makes another model of a source's weights, or half of one: a config.json or a tokenizer of
another, or none, tensors that are missing."""

from dataclasses import replace

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.structure import NAMELESS, names_model
from qtool.errors import QtoolError, SourceError, UnsupportedError
from qtool.formats.layer_names import experts_of


def refuse_other_config(checkpoint: Checkpoint) -> None:
    """UnsupportedError where tensors of a known architecture have other shapes than config.json
    says: no engine would load what is made of them."""
    from qtool.artifacts.artifact import Artifact
    from qtool.verification import by_table
    from qtool.verification.subject import subject_of

    row = by_table.row_of(checkpoint.config)
    if row is None:
        return
    # Experts are many, and the table says nothing of the shapes of single ones.
    few = {name: one for name, one in checkpoint.tensors.items() if experts_of(name) is None}
    try:
        subject = subject_of(checkpoint.path, Artifact.of(replace(checkpoint, tensors=few)), None)
        wrong = list(by_table.other_shapes(subject, *row))
    except QtoolError:
        return  # is told where it matters
    if wrong:
        whose = f"{by_table.OF_OTHERS}: put the model's own config.json beside its weights"
        if by_table.stray(subject, wrong):
            whose = f"{by_table.ALONE}: fetch the model again"
        raise UnsupportedError(f"{checkpoint.path}: {by_table.said_shapes(wrong)}; {whose}")


def refuse_no_config(checkpoint: Checkpoint) -> None:
    """SourceError where a folder has no config.json, or that names no model: no engine loads what
    is made of it. A file that is given by itself, and has none beside it, may be of whatever a
    program reads by tensors alone."""
    there = (checkpoint.folder / "config.json").is_file()
    if checkpoint.path.is_dir() and not there:
        raise SourceError(
            f"{checkpoint.path}: has no config.json, without which no engine loads what is made of "
            "it; put the model's own beside its weights"
        )
    if there and not names_model(checkpoint.config):
        raise SourceError(f"{checkpoint.path}: {NAMELESS}; put the model's own beside its weights")


def check_whole(checkpoint: Checkpoint) -> list[str]:
    """UnsupportedError where tensors are sure to be missing; or what seems to be wrong: blocks that
    are not there, lack what others have or are not counted, no head, tensors that the class does
    not know, a tokenizer of another model."""
    from qtool.artifacts.artifact import Artifact
    from qtool.verification import by_table
    from qtool.verification.beyond import blocks_not_counted
    from qtool.verification.heads import lacks_head, said_headless
    from qtool.verification.subject import subject_of
    from qtool.verification.tensors import lacking
    from qtool.verification.tokens import of_another_model

    if not checkpoint.config:
        return []
    try:
        subject = subject_of(checkpoint.path, Artifact.of(checkpoint), None)
        found, odd = lacking(subject)
        other = of_another_model(subject)
        row = by_table.row_of(checkpoint.config)
        bare = None if row is None else by_table.bare_name(subject.present, row[0])
        headless = said_headless(subject) if lacks_head(subject) else None
        named = row is not None and by_table.named_so(subject, *row)
        extra = by_table.extra_by_table(subject, *row) if row is not None and named else []
        uncounted = blocks_not_counted(subject)
    except QtoolError:
        return []  # is told where it matters
    if found is not None:
        raise UnsupportedError(f"{checkpoint.path}: {found}; fetch it again, or check config.json")
    if headless is not None and named:
        raise UnsupportedError(
            f"{checkpoint.path}: {headless}; fetch the model again or, where its embedding is its "
            "head, correct tie_word_embeddings"
        )
    said = [f"{one}; is a part of it missing?" for one in filter(None, [*odd, headless])]
    if bare is not None:
        said.append(by_table.said_bare(*bare))
    if extra and row is not None:
        said.append(by_table.said_extra(extra, row[1]))
    return [*said, *filter(None, (uncounted, other))]
