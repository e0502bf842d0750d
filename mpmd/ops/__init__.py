"""From the user's calls (stage ends, loops, reductions, values across groups) to primitives for the passes."""
