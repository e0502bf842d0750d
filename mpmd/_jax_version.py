"""Imported before everything else, so that an older JAX fails here, in words."""

import jax

_NEEDED = (0, 10, 2)

if jax.__version_info__[:3] < _NEEDED:
    raise ImportError(
        f"jax-mpmd needs jax>={'.'.join(map(str, _NEEDED))}; jax {jax.__version__} is installed."
        " Upgrade it: pip install -U jax"
    )
