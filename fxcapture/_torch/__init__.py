"""Every private name of torch that is used, by the part of torch it belongs to.

Each says why it is needed; each file, on which versions it was tested.  Nothing here
imports Dynamo: a process that never compiles never loads it.
"""

from __future__ import annotations

from typing import Any

from fxcapture._torch import dynamo
from fxcapture._torch.aot_inductor import aoti_load, aoti_package
from fxcapture._torch.checkpoints import while_recomputing
from fxcapture._torch.compilers import (
    Compiled,
    late_compilation,
    resolve_backend,
    reuses_outputs,
    without_disable,
)
from fxcapture._torch.dynamo import (
    constant,
    is_traced,
    is_written_down,
    no_tracing,
    outside_dynamo,
    own_code,
    recompile_limit,
    skip_untraced,
    untraced,
)
from fxcapture._torch.fakes import fake_mode, is_fake, no_data_errors
from fxcapture._torch.function_modes import (
    call_without_modes,
    function_mode,
    num_function_modes,
    traceable,
)
from fxcapture._torch.graphs import (
    copy_node_source,
    extend_pytree_output,
    fake_mode_of,
    fake_mode_of_values,
    graph_module_like,
    has_pytree_output,
    make_aten_graph,
    own_pytree_output,
    rename_node,
    trace_on_fake,
)
from fxcapture._torch.modules import (
    call_uncompiled,
    has_forward_hooks,
    has_forward_pre_hooks,
    has_hooks,
    hook_guards,
    hook_tables,
    hooks_made,
    is_compiled_in_place,
    is_initialised,
    out_of_sight,
    override_states,
    share_tables,
    unwrap_optimized,
)
from fxcapture._torch.operators import (
    flop_formula,
    is_higher_order,
    operator_name_of,
    schemas_of,
    schemas_of_name,
)
from fxcapture._torch.pytrees import (
    flatten_arguments,
    map_nodes,
    output_paths,
    output_spec_with,
    plain_spec,
    register_pytree,
    unflatten,
)
from fxcapture._torch.storages import (
    is_dense,
    is_recorded,
    is_subclass,
    storage_id,
    surely_equal,
    version_of,
)
from fxcapture._torch.transforms import (
    in_transform,
    indexing_by_tensors,
    is_transformed,
    transform_function,
)

__all__ = [
    "Compiled",
    "aoti_load",
    "aoti_package",
    "call_uncompiled",
    "call_without_modes",
    "constant",
    "copy_node_source",
    "extend_pytree_output",
    "fake_mode",
    "fake_mode_of",
    "fake_mode_of_values",
    "flatten_arguments",
    "flop_formula",
    "function_mode",
    "graph_module_like",
    "has_forward_hooks",
    "has_forward_pre_hooks",
    "has_hooks",
    "has_pytree_output",
    "hook_guards",
    "hook_tables",
    "hooks_made",
    "in_transform",
    "indexing_by_tensors",
    "is_compiled_in_place",
    "is_dense",
    "is_fake",
    "is_higher_order",
    "is_initialised",
    "is_recorded",
    "is_subclass",
    "is_traced",
    "is_transformed",
    "is_written_down",
    "late_compilation",
    "make_aten_graph",
    "map_nodes",
    "no_data_errors",
    "no_tracing",
    "num_function_modes",
    "operator_name_of",
    "out_of_sight",
    "output_paths",
    "output_spec_with",
    "outside_dynamo",
    "override_states",
    "own_code",
    "own_pytree_output",
    "plain_spec",
    "recompile_limit",
    "register_pytree",
    "rename_node",
    "resolve_backend",
    "reuses_outputs",
    "schemas_of",
    "schemas_of_name",
    "share_tables",
    "skip_untraced",
    "storage_id",
    "surely_equal",
    "trace_on_fake",
    "traceable",
    "transform_function",
    "unflatten",
    "untraced",
    "unwrap_optimized",
    "version_of",
    "while_recomputing",
    "without_disable",
]


def __getattr__(name: str) -> Any:
    # Dynamo's exceptions are looked up on first use.
    return getattr(dynamo, name)
