"""Names in qtool.json, the record of how an artifact was made, for who writes and who reads it."""

FILE_NAME = "qtool.json"
LAYERS = "layers"  # name, scheme, relative_error and of what, of each quantized matrix
FILES = "files"  # of the artifact, each with its SHA-256
CARD = "README.md"  # which people write in; no engine reads it
OUTLIERS = "outliers"  # columns of inputs that LLM.int8() keeps apart
