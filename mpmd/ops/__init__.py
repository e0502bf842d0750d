"""From what a user writes (stage ends, loops, reductions, values across groups) to primitives for the passes."""
