"""What a streamed forward pass (qtool.streaming) measures, block by block.

sites, probe_trace     which matrices read which input, seen at the calls themselves
stats, stats_file      sums over what they read; and in a file
placed                 a block and a stream as a device sees them
groups                 inputs that are measured together
pairs, guidance        an input beside the original one; tokens that count by what is read of them
cache, ranges, outliers keys and values, cut-offs, columns kept apart
"""
