"""Every private name of torch that the package uses, each with why and where tested.

Tested on torch 2.13.0 and 2.14.1.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn

__all__ = [
    "constant",
    "copy_node_source",
    "fake_mode_of",
    "graph_module_like",
    "has_forward_hooks",
    "in_transform",
    "indexing_by_tensors",
    "is_compiled_in_place",
    "is_dense",
    "is_higher_order",
    "is_traced",
    "is_transformed",
    "late_compilation",
    "no_tracing",
    "override_states",
    "resolve_backend",
    "reuses_outputs",
    "schemas_of",
    "storage_id",
    "surely_equal",
    "transform_function",
    "unwrap_optimized",
    "while_recomputing",
    "without_disable",
]


F = TypeVar("F", bound=Callable[..., Any])


def constant(function: F) -> F:
    """``torch.compiler.assume_constant_result``, which would import Dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def is_traced() -> bool:
    """Whether the code that asks is being traced.

    ``torch.compiler.is_compiling`` says so of the process: it is true in every thread
    while one of them compiles.  Dynamo takes ``is_dynamo_compiling`` for true where it
    traces, and it is false elsewhere; the tracers that run the code for real
    (non-strict export, ``make_fx``) have a dispatch mode on this thread.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether something runs between ``forward`` and its caller; no public way."""
    return bool(module._forward_hooks or torch.nn.modules.module._global_forward_hooks)


def has_forward_pre_hooks(module: nn.Module) -> bool:
    """Whether something runs between the module's caller and ``forward``."""
    return bool(
        module._forward_pre_hooks or torch.nn.modules.module._global_forward_pre_hooks
    )


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called on it."""
    return module._compiled_call_impl is not None


def override_states(modules: Sequence[nn.Module]) -> list[tuple[bool, bool]]:
    """What decides how modules have to be overridden: hooked, compiled in place."""
    hooked = bool(torch.nn.modules.module._global_forward_hooks)
    return [
        (hooked or bool(m._forward_hooks), is_compiled_in_place(m)) for m in modules
    ]


def unwrap_optimized(model: nn.Module) -> nn.Module:
    """The module that ``torch.compile(module)`` wrapped; others as they are.

    ``OptimizedModule`` documents no public attribute for what it wraps.
    """
    while "_orig_mod" in model._modules:
        model = model._modules["_orig_mod"]  # type: ignore[assignment]
    return model


def is_higher_order(node: fx.Node) -> bool:
    """Whether a node calls an operator that takes sub-graphs."""
    return node.op == "call_function" and isinstance(
        node.target, torch._ops.HigherOrderOperator
    )


def transform_function(name: str) -> Callable[..., Any]:
    """What Dynamo's graphs call to take a value out of a function transform."""
    from torch._functorch import predispatch

    return getattr(predispatch, name)  # type: ignore[no-any-return]


def is_transformed(value: torch.Tensor) -> bool:
    """Whether a tensor belongs to a level of a function transform."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(value))


def in_transform() -> bool:
    """Whether a function transform (``vmap``, ``grad``, ...) runs eagerly around us."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def schemas_of(target: Any) -> tuple[Any, ...]:
    """Schemas of an operator, one per overload; empty for anything else.

    The classes of operators and overloads have no public names.
    """
    if isinstance(target, torch._ops.OpOverload):
        return (target._schema,)
    if isinstance(target, torch._ops.OpOverloadPacket):
        names = target.overloads()  # type: ignore[no-untyped-call]
        return tuple(getattr(target, name)._schema for name in names)
    return ()


def storage_id(value: torch.Tensor) -> int | None:
    """A number that two tensors share where they share memory; ``None`` if unknown.

    Public storages can be compared by address only, and fake tensors have none.
    """
    if is_transformed(value):
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse, wrapped by a transform, ...
        return None


def surely_equal(left: Any, right: Any) -> bool:
    """Whether two sizes are equal whatever the symbolic ones turn out to be.

    ``==`` on symbolic sizes would add a guard.
    """
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(left == right)


def is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor's elements surely lie side by side, none of them twice."""
    expected: Any = 1
    dims = [
        (stride, size)
        for size, stride in zip(value.shape, value.stride(), strict=True)
        if not surely_equal(size, 1)
    ]
    while dims:
        match = next((d for d in dims if surely_equal(d[0], expected)), None)
        if match is None:
            return False
        dims.remove(match)
        expected = expected * match[1]
    return True


def reuses_outputs(backend: Any, inner: Any) -> Callable[[torch.Tensor], bool] | None:
    """Which outputs of a compiled graph its next run may write over; ``None``: none.

    CUDA graphs replay into the same memory.  A backend of one's own says that it does
    so with an attribute ``reuses_outputs``.
    """
    if getattr(backend, "reuses_outputs", False):
        return lambda tensor: True
    graphs = backend == "cudagraphs"
    if isinstance(inner, torch._TorchCompileInductorWrapper):
        from torch._inductor import config

        graphs = inner.config.get("triton.cudagraphs", config.triton.cudagraphs)
    return (lambda tensor: tensor.is_cuda) if graphs else None


def without_disable(call: Callable[..., Any]) -> Callable[..., Any]:
    """What ``torch.compiler.disable`` wrapped; others as they are.

    Backends wrap what they return, and Dynamo again, which first takes that away; so
    do we who stand between the two.
    """
    while getattr(call, "_torchdynamo_disable", False):
        call = call._torchdynamo_orig_callable  # type: ignore[attr-defined]
    return call


def copy_node_source(old: fx.Node, new: fx.Node) -> None:
    """Carry over where Dynamo says that a placeholder comes from.

    AOTAutograd reads the attribute and insists on it; copying a graph leaves it behind.
    """
    if hasattr(old, "_dynamo_source"):
        new._dynamo_source = old._dynamo_source  # type: ignore[attr-defined]


def resolve_backend(
    backend: str | Callable[..., Any],
    mode: str | None,
    options: Mapping[str, Any] | None,
    dynamic: bool | None,
) -> Callable[..., Any]:
    """What ``torch.compile`` itself would call with a graph for these keywords.

    ``torch.compile`` binds ``mode`` and ``options`` to the backend in two private
    wrappers; a backend that calls another one has to do the same.
    """
    if backend == "inductor":
        if mode is None and options is None:
            mode = "default"
        return torch._TorchCompileInductorWrapper(mode, options, dynamic)  # type: ignore[no-any-return, no-untyped-call]
    return torch._TorchCompileWrapper(backend, mode, options, dynamic)  # type: ignore[no-any-return, no-untyped-call]


def no_tracing() -> contextlib.AbstractContextManager[Any]:
    """While it is held, no other thread traces anything; this one may."""
    module = sys.modules.get("torch._dynamo.convert_frame")
    return contextlib.nullcontext() if module is None else module.compile_lock


def graph_module_like(gm: fx.GraphModule, graph: fx.Graph) -> fx.GraphModule:
    """A graph module for another graph, which makes its code when ``gm`` does.

    A public ``GraphModule`` generates its code when it is made and after each edit,
    which takes longer than the edit; those that Dynamo makes, when somebody first needs
    it.  (torch 2.13.0 and 2.14.1)
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    cls = _LazyGraphModule if isinstance(gm, _LazyGraphModule) else fx.GraphModule
    return cls(gm, graph, class_name=type(gm).__name__)


def fake_mode_of(graph: fx.Graph) -> Any:
    """The fake tensor mode that a Dynamo graph's placeholders were traced under."""
    values = [n.meta.get("example_value") for n in graph.nodes if n.op == "placeholder"]
    return torch._guards.detect_fake_mode([v for v in values if v is not None])


@contextlib.contextmanager
def late_compilation(fake_mode: Any) -> Iterator[None]:
    """A context in which a kept Dynamo graph can be compiled outside of Dynamo.

    Compilers trace with fx, which torch tells by a flag of the process.  Without the
    flag that says it is part of a compilation, compiled calls of other threads would be
    refused as being traced themselves.
    """
    context = torch._guards.TracingContext(fake_mode)
    with torch.compiler._compile_session_context(), torch._guards.tracing(context):
        yield


def __getattr__(name: str) -> Any:
    # Dynamo's exceptions, looked up on first use: importing fxcapture must not import
    # Dynamo.
    names = {
        "BackendCompilerFailed": "BackendCompilerFailed",
        "DynamoError": "TorchDynamoException",
        "RecompileLimitHit": "FailOnRecompileLimitHit",
        "Unsupported": "Unsupported",
        "UserError": "UserError",
        "TensorifyRestart": "TensorifyScalarRestartAnalysis",
    }
    if name in names:
        from torch._dynamo import exc

        return getattr(exc, names[name])
    if name == "DataDependentError":
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        return GuardOnDataDependentSymNode
    raise AttributeError(name)


def while_recomputing(
    key: Any,
    prepare: Callable[[], Callable[[], contextlib.AbstractContextManager[Any]]],
) -> None:
    """Hold a context while the checkpoint that this runs in computes anew.

    An activation checkpoint runs its function again in backward, and insists that as
    many tensors are saved as before.  What stood on the modules has gone by then.
    There is no public way to learn of it: of a non-reentrant checkpoint, the hooks for
    saved tensors refer to a record of it, which refers to the function.  A reentrant
    one compares nothing.  (torch 2.13.0 and 2.14.1)

    Args:
        key: The context is held once for each key.
        prepare: Called now, if this is inside such a checkpoint; what it returns makes
            the context.
    """
    if not torch.is_grad_enabled():
        return
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    pack: Any = hooks[0] if hooks else None
    names = getattr(getattr(pack, "__code__", None), "co_freevars", ())
    if "frame" not in names:
        return
    frame = pack.__closure__[names.index("frame")].cell_contents
    function = getattr(frame, "recompute_fn", None)
    if function is None:
        return
    held = frame.__dict__.setdefault("fxcapture_held", set())
    if key in held:
        return
    held.add(key)
    context = prepare()

    def recompute(*args: Any) -> Any:
        with context():
            return function(*args)

    frame.recompute_fn = recompute


def indexing_by_tensors() -> contextlib.AbstractContextManager[Any]:
    """A time in which ``t[i]`` works with a scalar tensor that vmap has batched.

    What ``flex_attention`` itself holds around the functions that it is given.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


# --------------------------------------------------------------------------------------
# torch.export
# --------------------------------------------------------------------------------------


def rename_node(node: fx.Node, name: str) -> bool:
    """Give a node exactly this name, at the expense of another node that has it.

    Public torch offers no way: a graph appends a number to a name that is taken, but an
    exported program's output names have to be the ones in the manifest.

    Returns:
        Whether it worked; a placeholder's name is part of a signature and stays.
    """
    for other in node.graph.nodes:
        if other is not node and other.name == name:
            if other.op == "placeholder":
                return False
            other._rename(f"{name}_inner")
    node.name = name
    # Registers the name, so that a node made later does not get it again.
    node.graph._graph_namespace.create_name(name, None)
    return True


def output_spec_with(own: Any, names: Sequence[str]) -> Any:
    """The pytree spec of ``(own, {name: leaf, ...})``, or of the dict if no ``own``.

    torch.export describes outputs with torch.utils._pytree, which is private.
    """
    from torch.utils import _pytree

    extra = _pytree.tree_structure(dict.fromkeys(names, 0))
    return extra if own is None else _pytree.treespec_tuple((own, extra))


def output_paths(spec: Any) -> list[str]:
    """Where each leaf of a program's output stands, such as ``"logits"`` or ``"1_0"``.

    ``spec`` describes ``(own, added)``; the paths of ``own`` leave the first step out.
    """
    from torch.utils import _pytree

    filled = _pytree.tree_unflatten([0] * spec.num_leaves, spec)
    found = _pytree.tree_flatten_with_path(filled)[0]
    return ["_".join(map(_key_text, path[1:])) for path, _ in found]


def _key_text(key: Any) -> str:
    return str(next(getattr(key, a) for a in ("key", "name", "idx") if hasattr(key, a)))


def plain_spec(spec: Any) -> Any:
    """A pytree spec without classes that only the model's code registers.

    A dictionary class becomes ``dict``, any other class (named tuples too) ``tuple``.
    """
    from torch.utils import _pytree

    children = [plain_spec(c) for c in spec.children()]
    if spec.is_leaf():
        return spec
    if spec.type in (tuple, list, dict):
        kind, context = spec.type, spec.context
    elif _is_key_list(spec.context, len(children)):
        kind, context = dict, list(spec.context)
    else:
        kind, context = tuple, None
    return _pytree.TreeSpec(kind, context, children)


def _is_key_list(context: Any, length: int) -> bool:
    return (
        isinstance(context, (list, tuple))
        and len(context) == length
        and all(isinstance(key, str) for key in context)
    )


def aoti_package(
    program: Any, path: str, configs: dict[str, Any], metadata: dict[str, str]
) -> str:
    """Compile an exported program ahead of time; ``metadata`` travels with it.

    AOTInductor has no public module; ``torch._inductor`` is where its documentation
    points.
    """
    from torch._inductor import aoti_compile_and_package

    known = dict(configs.get("aot_inductor.metadata", {}))
    configs = {**configs, "aot_inductor.metadata": {**known, **metadata}}
    return str(
        aoti_compile_and_package(program, package_path=path, inductor_configs=configs)
    )


def aoti_load(path: str) -> tuple[Any, dict[str, str]]:
    """A compiled package as a callable, and the metadata that travelled with it."""
    from torch._inductor import aoti_load_package

    loaded = aoti_load_package(path)
    return loaded, dict(loaded.loader.get_metadata())


# --------------------------------------------------------------------------------------
# Graphs made elsewhere
# --------------------------------------------------------------------------------------


def unflatten(values: list[Any], spec: Any) -> Any:
    """A container of ``values``; torch.export describes containers by private specs."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(values, spec)


def map_nodes(function: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``function`` applied to its leaves, containers kept."""
    from torch.utils import _pytree

    return _pytree.tree_map(function, value)


def trace_on_fake(
    function: Callable[..., Any], *values: torch.Tensor
) -> fx.GraphModule:
    """The ATen graph of ``function`` on fake tensors."""
    from torch.fx.experimental.proxy_tensor import make_fx

    fake_mode = torch._guards.detect_fake_mode(list(values))
    with fake_mode or contextlib.nullcontext():
        return make_fx(function, pre_dispatch=True)(*values)


def has_pytree_output(graph: fx.Graph) -> bool:
    """Whether a graph's code packs its flat outputs into containers."""
    from torch.fx.graph import _PyTreeCodeGen

    return isinstance(graph._codegen, _PyTreeCodeGen) and (
        graph._codegen.pytree_info.out_spec is not None
    )


def own_pytree_output(graph: fx.Graph, flat: list[Any]) -> Any:
    """What such a graph returns, as containers of its flat outputs."""
    return unflatten(flat, graph._codegen.pytree_info.out_spec)  # type: ignore[attr-defined]


def extend_pytree_output(
    graph: fx.Graph, names: Sequence[str], keep_output: bool
) -> None:
    """Make such a graph return ``(own, {name: value})``."""
    info = graph._codegen.pytree_info  # type: ignore[attr-defined]
    own = info.out_spec if keep_output else None
    graph._codegen.pytree_info = info._replace(  # type: ignore[attr-defined]
        out_spec=output_spec_with(own, names)
    )


# --------------------------------------------------------------------------------------
# Estimates
# --------------------------------------------------------------------------------------


def fake_mode() -> Any:
    """A mode in which tensors have no data.

    There is no public way to make tensors that know a device but hold nothing.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def no_data_errors() -> tuple[type[Exception], ...]:
    """What a read of a fake tensor's value raises."""
    from torch._subclasses import fake_tensor
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        GuardOnDataDependentSymNode,
    )


def make_aten_graph(
    function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> fx.GraphModule:
    """``function``, traced on fake tensors below autograd into ATen operators."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # "real": the inputs are fake already, and one fake mode is enough.
    return make_fx(function, tracing_mode="real")(*inputs)


def flatten_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], Callable[[Sequence[torch.Tensor]], Any]]:
    """The tensors of a call, and how to get ``(args, kwargs)`` back with others."""
    from torch.utils import _pytree

    leaves, spec = _pytree.tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def rebuild(tensors: Sequence[torch.Tensor]) -> Any:
        made = list(leaves)
        for place, tensor in zip(places, tensors, strict=True):
            made[place] = tensor
        return _pytree.tree_unflatten(made, spec)

    return [leaves[i] for i in places], rebuild


def flop_formula(target: Any) -> Callable[..., Any] | None:
    """How to count the operations of an ATen operator; ``None`` if it has few.

    torch counts them in ``torch.utils.flop_counter``; the CPU's attention kernel is
    missing from its table.
    """
    from torch.utils.flop_counter import flop_registry, sdpa_flop_count

    packet = getattr(target, "overloadpacket", None)
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        return lambda q, k, v, *_, **__: sdpa_flop_count(q.shape, k.shape, v.shape)  # type: ignore[no-untyped-call]
    return flop_registry.get(packet)


# --------------------------------------------------------------------------------------
# Function transforms
# --------------------------------------------------------------------------------------


def register_pytree(
    cls: type,
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Any, Any], Any],
) -> None:
    """Make a class a pytree, so that transforms can return it.

    ``torch.utils._pytree`` is what torch.func, vmap and make_fx flatten with; torch has
    no public registry.
    """
    from torch.utils import _pytree

    if cls not in _pytree.SUPPORTED_NODES:
        name = f"fxcapture.{cls.__name__}"
        _pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=name)


_F = TypeVar("_F", bound=Callable[..., Any])
