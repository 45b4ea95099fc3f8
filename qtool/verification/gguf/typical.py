"""How far each type of GGUF is from what it is made of."""

# The relative error that each type makes of normal numbers, without importance: measured with our
# encoders over 64 rows of 4096.
TYPICAL = {
    "Q4_0": 0.086, "Q4_1": 0.078, "Q5_0": 0.043, "Q5_1": 0.038, "Q8_0": 0.005, "Q2_K": 0.297,
    "Q3_K": 0.151, "Q4_K": 0.071, "Q5_K": 0.036, "Q6_K": 0.018, "IQ2_XXS": 0.344, "IQ2_XS": 0.300,
    "IQ3_XXS": 0.214, "IQ1_S": 0.486, "IQ4_NL": 0.076, "IQ3_S": 0.166, "IQ2_S": 0.265,
    "IQ4_XS": 0.077, "IQ1_M": 0.583, "TQ1_0": 0.808, "TQ2_0": 0.808, "MXFP4": 0.115,
    "NVFP4": 0.095, "Q1_0": 0.600, "Q2_0": 0.719, "F16": 0.0003, "BF16": 0.0017,
}  # fmt: skip
COARSE = 0.16  # typical error: in lattices of 3 bits and fewer GPTQ leaves single parts as far off
