"""What a streamed forward pass (qtool.streaming) measures and quantizes, block by block."""
