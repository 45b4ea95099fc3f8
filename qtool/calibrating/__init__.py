"""A forward pass, one block of weights in memory: what it measures and quantizes on its way."""
