"""Methods that look at activations, one decoder block after another, each fed by quantized ones."""
