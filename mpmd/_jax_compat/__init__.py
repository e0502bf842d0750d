"""Everything that uses undocumented parts of JAX, in one folder.

Each function here relies on a private name. The rest of the package imports private names only from this folder, so
a new JAX release requires a look at this folder alone. The fast paths (`load_on`, `stored`, `put`) each have a
documented alternative; correctness never depends on the private one.
"""
# ruff: noqa: F401 (names to import from here)

from pathlib import Path

from jax._src import traceback_util
from jax._src.api_util import InternalFloatingPointError
from jax._src.core import trace_state_clean
from jax._src.sharding_impls import UNSPECIFIED
from jax._src.traceback_util import api_boundary  # errors come with the user's frames alone
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import Primitive, jaxpr_as_fun, unmapped_aval
from jax.interpreters import ad, batching, mlir
from jax.interpreters import partial_eval as pe

from mpmd._jax_compat.arrays import (
    devices,
    explain_mismatches,
    put,
    put_on_one_device,
    register_array_type,
    row_major,
    shards,
    typed_as,
)
from mpmd._jax_compat.described import (
    Device,
    default_memory_kind,
    described_gpus,
    described_options,
    described_tpus,
    is_described,
)
from mpmd._jax_compat.executables import (
    LoadedProgram,
    XlaProgram,
    abstract,
    compile_program,
    load_stored,
    named_sharding,
)
from mpmd._jax_compat.fingerprints import fingerprint
from mpmd._jax_compat.jaxpr_keys import equation_key, jaxpr_key, traced_again_key
from mpmd._jax_compat.jaxprs import (
    CHECKPOINT,
    Aval,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    call,
    called_from,
    called_jaxpr,
    constvars_to_invars,
    effects_outside,
    has_effects,
    is_ordered,
    is_recomputed,
    is_ref,
    is_transposed,
    jit_p,
    kept_in_shard_map,
    make_jaxpr,
    memory_kind,
    new_jaxpr,
    new_vars,
    physical_aval,
    register_dce_rule,
    renamed,
    renamed_equations,
    scan_params,
    scan_sizes,
    shaped_array,
    source_line,
    users_stack,
    with_new_vars,
    within,
    without_unread,
    without_unused,
    written_out,
)
from mpmd._jax_compat.parameters import all_equations, equations_inside, jaxprs_in, kernel_grid, mapped
from mpmd._jax_compat.processes import (
    KeyValueStore,
    abandon_distributed,
    backends_are_initialized,
    bind_cpu_collectives,
    coordinator_address,
    distributed_client,
    forget_collectives,
    forget_topology,
    gather_by,
    has_cross_host_put,
    num_cpu_devices,
    observe_callbacks,
    pci_bus_id,
    start_coordination_service,
    start_transfer_server,
)
from mpmd._jax_compat.rebasing import rebase
from mpmd._jax_compat.stablehlo import exported_specs, exported_stablehlo
from mpmd._jax_compat.tracing_hooks import (
    current_mesh,
    is_profiling,
    lowering,
    no_mesh,
    setting,
    sharding_here,
    trace_context,
    trace_settings,
    tracing,
    use_abstract_mesh,
)

# Errors and `explain()` name the user's line, not ours.
_PACKAGES = Path(__file__).parents[2]
source_info_util.register_exclusion(str(_PACKAGES / "mpmd"))
for _package in ("mpmd", "reshard", "scheduler"):
    traceback_util.register_exclusion(str(_PACKAGES / _package))
