"""What a step will need and take on machines that are not here: ``python -m mpmd plan``."""

import os
import sys

if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # the compiler for GPUs says that there is no GPU
    import jax

    if not jax.config.jax_platforms:
        jax.config.update("jax_platforms", "cpu")

    from mpmd.planning.command import main

    sys.exit(main())
