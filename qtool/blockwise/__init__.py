"""Methods that look at activations, one decoder block after another, each fed by quantized ones.

run                    all blocks, then head.py: the output head
one_block              measured, transformed, quantized site by site, tuned, written
given, site_statistics the text, or statistics, that a recipe needs; those of some sites
quantize_site          the matrices that read one input; input_scale.py: the scale of that
output_errors          what their outputs lose
row_feedback, row_rounding
                       rows that compensate for what rows before them have lost
originals              the original model's states beside the quantized one's
tuning, tune_block     scales moved until the block gives back what the original gives
experts, siblings      how evenly the text reached them; what those read that it did not reach
"""
