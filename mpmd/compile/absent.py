"""Names the equation that needs the device itself, where a program for absent devices cannot be compiled."""

import contextlib
from collections.abc import Iterator

from mpmd import _jax_compat as compat

_CALLBACKS = ("debug_print", "debug_callback", "pure_callback", "io_callback")


@contextlib.contextmanager
def needs_said(program: compat.XlaProgram) -> Iterator[None]:
    """Explains errors of lowering or compiling a program inside this context. On present devices they are unchanged.

    Raises:
      ValueError: the devices are described, and the program has an equation that compiles only where they are.
    """
    try:
        yield
    except Exception as error:
        device = program.mesh.devices.flat[0]
        needs = dict.fromkeys(_needs(program.closed.jaxpr)) if compat.is_described(device) else {}
        if not needs:
            raise
        first = str(error).strip().partition("\n")[0]
        lines = "\n".join(f"  It has {need}" for need in needs)
        raise ValueError(
            f"{program.name} cannot be compiled for {device.device_kind}, which is not here: {first}\n{lines}\n"
            "  Leave it out for the plan, or compile on a machine that has such a device."
        ) from error


def _needs(jaxpr: compat.Jaxpr) -> Iterator[str]:
    """Yields, in words and with the user's lines, why equations need the device."""
    for eqn in jaxpr.eqns:
        name, where = eqn.primitive.name, compat.source_line(eqn)
        if name in _CALLBACKS:
            yield f"{name} at {where}: a program that calls Python is compiled where the device is."
        elif name == "ffi_call":
            target = eqn.params["target_name"]
            yield (
                f"ffi_call of {target!r} at {where}: the library of the kernel has to be loaded, and the kernel"
                ' registered for CUDA (jax.ffi.register_ffi_target(..., platform="CUDA")).'
            )
        elif name in ("pallas_call", "mpmd_map"):
            yield f"{name} at {where}: a kernel whose compiler may ask the device."
        else:
            for inner in compat.jaxprs_in(eqn.params):
                yield from _needs(inner)
