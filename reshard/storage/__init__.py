"""From a checkpoint folder to the arrays in its files: paths, types, chunks and checksums."""
