"""Training of block-parallel drafters: dataset folders, the grain pipeline, the jitted step and the loop around it."""
