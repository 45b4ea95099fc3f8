"""One forward and one backward pass: gradients of the model's loss, and what errors cost.

measure, head, sums             the two passes
before, passing                 what comes before the blocks; states on their way, in files
kept                            what of these passes is finished
sensitivity, sensitivity_file   what an error in each matrix costs, and how that is stored
sampled                         rows that speak for all of a matrix
block_gradients                 by what each block gives, for rows that compensate for each other
"""
