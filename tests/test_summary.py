"""What a run says at its end."""

from qtool.runs.summary import by_kind


def test_notes_of_many_layers_are_one_line() -> None:
    zero = (
        "the input of model.layers.{}.self_attn.o_proj.weight: {} of 768 channels are always zero"
    )
    notes = [zero.format(n, 192) for n in range(30)]
    notes += [zero.format(30, 64), "1 layer is rounded coarsely: model.layers.2.mlp.up_proj"]
    assert by_kind(notes) == [f"{zero.format('*', 192)} (30 layers)", *notes[30:]]
