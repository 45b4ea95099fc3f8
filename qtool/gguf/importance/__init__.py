"""llama.cpp's importance matrix: read, written, measured and kept."""
