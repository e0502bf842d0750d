"""Pipeline-parallel training steps for JAX: one step, many programs."""
