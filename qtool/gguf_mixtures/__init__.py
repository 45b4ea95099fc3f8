"""llama.cpp's mixtures: which type each kind of tensor gets under a file type's name."""
