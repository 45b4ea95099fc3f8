"""How good an artifact is: what it says of a text, beside what the unquantized model says."""
