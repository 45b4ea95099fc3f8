"""Runs with llama.cpp's sources at hand: the tokenizer keys that its converter writes.

Argument, as JSON: {"source": llama.cpp's folder, "jobs": [[checkpoint, output], ...]}. Each output
is a JSON file: [key, kind, kind of elements or null, value] of each key, in order. SentencePiece
need not be installed: its pieces are read from pieces.json beside tokenizer.model.
"""

import json
import sys
import types
from pathlib import Path


class Pieces:
    """As much of SentencePieceProcessor as the converter asks for."""

    def LoadFromFile(self, path: str) -> None:
        self.pieces = json.loads((Path(path).parent / "pieces.json").read_text())

    def vocab_size(self) -> int:
        return len(self.pieces)

    def IdToPiece(self, number: int) -> str:
        return self.pieces[number][0]

    def GetScore(self, number: int) -> float:
        return self.pieces[number][1]

    def IsUnknown(self, number: int) -> bool:
        return self.pieces[number][2] == 2

    def IsControl(self, number: int) -> bool:
        return self.pieces[number][2] == 3

    def IsUnused(self, number: int) -> bool:
        return self.pieces[number][2] == 5

    def IsByte(self, number: int) -> bool:
        return self.pieces[number][2] == 6


def main() -> None:
    request = json.loads(sys.argv[1])
    sys.path[:0] = [request["source"], str(Path(request["source"]) / "gguf-py")]
    import gguf
    from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

    # Only now: transformers looks on import whether the real one is installed.
    sys.modules["sentencepiece"] = types.SimpleNamespace(SentencePieceProcessor=Pieces)
    for folder, output in request["jobs"]:
        settings = ModelBase.load_hparams(Path(folder), False)
        model = get_model_class(get_model_architecture(settings, ModelType.TEXT))
        made = model(Path(folder), gguf.LlamaFileType.MOSTLY_F16, Path(output), hparams=settings)
        before = set(made.gguf_writer.kv_data[0])
        made.set_vocab()
        keys = []
        for key, value in made.gguf_writer.kv_data[0].items():
            if key in before:
                continue
            content, element = value.value, value.sub_type
            if value.type is gguf.GGUFValueType.ARRAY:
                content = [x.decode() if isinstance(x, bytes) else x for x in content]
                element = element or gguf.GGUFValueType.get_type(content[0])
            keys.append([key, int(value.type), element and int(element), content])
        Path(output).write_text(json.dumps(keys))
    print(len(request["jobs"]))


main()
