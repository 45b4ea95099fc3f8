"""Slopes of the model's loss: by what each block gives, and by what an error in each matrix costs.

measure, head, sums    a pass forwards and one backwards
before, passing        what comes before the blocks; states on their way, in files
kept                   what of these passes is finished
slope, slopes_file     what a matrix costs, and how that is stored
sampled                rows that speak for all of a matrix
ends                   by what each block gives, for rows that make up for each other
"""
