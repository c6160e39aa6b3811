"""What a model class declares that it can record, bound to the live module tree.

Terms
    declaration: ``_can_record_outputs`` of a model: record name to recorders.
    recorder: which modules a record comes from, and which element of their output.
    task: one recorder's share in one module: (record name, element, initial state?).
    scope: the modules that one declaration speaks for.  A sub-model with a declaration
        of its own opens a scope of its own; the outer declaration ends there.

Invariants
    Nothing is cached per model: each capture reads the module tree as it is, so that
    appended, swapped, wrapped and re-classed modules are found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

from torch import nn

from fxcapture import _torch
from fxcapture.errors import SpecTypeError

__all__ = [
    "Found",
    "OutputRecorder",
    "Task",
    "declaration",
    "declaring",
    "find",
    "holds_weights",
    "is_decorated",
    "kernels_of",
    "recorders",
]

#: Attribute of a function that ``capture_outputs`` made.
CAPTURES = "__fxcapture_captures__"
_DECLARED = "_can_record_outputs"
# Names that wrappers put into a path.  ``module`` is one below a wrapper class only,
# since a model may well have an attribute of that name.
_WRAPPER_NAMES = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


@final
@dataclasses.dataclass(frozen=True)
class OutputRecorder:
    """Which modules a record comes from, and which element of their output.

    Example::

        OutputRecorder(MyAttention, index=1, layer_name="crossattention")

    Attributes:
        target_class: Module class; instances of subclasses match too.  A tuple of
            classes means any of them.
        index: Element of an output that is a tuple; any other output is taken whole.
        layer_name: Only modules below a path with these whole components, such as
            ``"crossattention"`` or ``"layers.0"``.
        class_name: Name of the class or of a base of it.  If no module of the model has
            such a class, whole trailing components of a path.  Beside ``target_class``
            it is an alternative.
        capture_initial_hidden_state: For ``hidden_states``: the first call's input
            stands before the outputs.
        num_hidden_layers_key: The config attribute that says how many layers there are,
            from which negative positions are counted.
        function: A function call that these modules make themselves, such as
            ``"softmax"`` or ``"add[0]"``: its result is recorded in place of the
            module's output.
    """

    target_class: Any = None
    index: int = 0
    layer_name: str | None = None
    class_name: str | None = None
    capture_initial_hidden_state: bool = True
    num_hidden_layers_key: str = "num_hidden_layers"
    function: str | None = None


class Task(NamedTuple):
    """One recorder's share in one module; constants only."""

    record: str
    element: int
    initial: bool
    function: str | None = None


class Found(NamedTuple):
    """One module that a record is taken from.

    Attributes:
        path: Dotted path the user sees, wrappers left out.
        tasks: What to record of it.
        nested: It stands in a sub-model that captures for itself.
        enclosed: It stands inside a module that was compiled by itself.
        fused: Its attention runs in a kernel that returns no weights.
        eager: Its attention is written out, so that it returns its weights itself.
    """

    path: str
    tasks: tuple[Task, ...]
    nested: bool
    enclosed: bool
    fused: bool
    eager: bool


class _Member(NamedTuple):
    """A module of a scope; the fields that :class:`Found` has mean the same."""

    module: nn.Module
    path: str
    nested: bool
    enclosed: bool


class _Scope(NamedTuple):
    owner: nn.Module
    way: tuple[str, ...]
    declared: Mapping[str, Any]
    members: list[_Member]


def declaration(module: nn.Module) -> Mapping[str, Any]:
    """What the module, or its class, declares; empty if it declares nothing."""
    return getattr(module, _DECLARED, None) or {}


def _declares(module: nn.Module) -> bool:
    # Not hasattr(module, ...): nn.Module builds an error text for each miss.
    return hasattr(type(module), _DECLARED) or _DECLARED in module.__dict__


def is_decorated(function: Any) -> bool:
    """Whether ``capture_outputs`` is among the decorators of ``function``."""
    while function is not None:
        if CAPTURES in getattr(function, "__dict__", ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def recorders(record: str, declared: Any) -> list[OutputRecorder]:
    """The value of one entry of a declaration as recorders.

    Raises:
        SpecTypeError: it is of no kind that a declaration may hold.
    """
    if declared is None:
        return []
    if isinstance(declared, (list, tuple)):
        return [r for part in declared for r in recorders(record, part)]
    index = 0 if "hidden_states" in record else 1
    if isinstance(declared, OutputRecorder):
        return [declared]
    if isinstance(declared, str):
        return [OutputRecorder(class_name=declared, index=index)]
    if isinstance(declared, type):
        return [OutputRecorder(declared, index=index)]
    if hasattr(declared, "target_class") and hasattr(declared, "index"):
        # transformers' own recorder, or one of the same fields.
        fields: dict[str, Any] = {
            f.name: getattr(declared, f.name, f.default)
            for f in dataclasses.fields(OutputRecorder)
        }
        return [OutputRecorder(**fields)]
    raise SpecTypeError(
        f"_can_record_outputs[{record!r}] holds {declared!r}",
        why=f"it is of type {type(declared).__name__}",
        remedy="declare a module class, a class name, an OutputRecorder, or a list of "
        "these",
    )


def find(model: nn.Module, records: Sequence[str]) -> list[Found]:
    """The modules from which ``records`` of ``model`` are taken, in module order."""
    found = []
    for scope in _scopes(model):
        matchers = [
            (record, recorder, _matcher(recorder, scope.members))
            for record in records
            for recorder in recorders(record, scope.declared.get(record))
        ]
        for member in scope.members if matchers else ():
            tasks = tuple(
                Task(
                    record,
                    recorder.index,
                    record == "hidden_states"
                    and recorder.capture_initial_hidden_state
                    and recorder.function is None,
                    recorder.function,
                )
                for record, recorder, matches in matchers
                if matches(member)
            )
            if tasks:
                weights = any(holds_weights(task.record) for task in tasks)
                chosen = kernels_of(member.module).chosen if weights else frozenset()
                fused = not chosen.isdisjoint(("sdpa", "flex_attention"))
                eager = chosen == {"eager"}
                _, path, nested, enclosed = member
                found.append(Found(path, tasks, nested, enclosed, fused, eager))
    return found


def declaring(model: nn.Module) -> dict[tuple[str, ...], nn.Module]:
    """The model and its declaring sub-models, by the names that lead there."""
    return {scope.way: scope.owner for scope in _scopes(model)}


def _scopes(model: nn.Module) -> list[_Scope]:
    """Every scope of the tree, the model's own first; the root is a member of none."""
    scopes = [_Scope(model, (), declaration(model), [])]
    seen = {id(model)}

    def walk(parent: _Member, steps: tuple[str, ...], scope: _Scope) -> None:
        for name, child in parent.module._modules.items():
            if child is None or id(child) in seen:
                continue
            seen.add(id(child))
            below = (*steps, name)
            path = parent.path
            if not _is_wrapper(parent.module, name):
                path = f"{path}.{name}" if path else name
            member = parent._replace(module=child, path=path)
            inner = scope
            if _declares(child):
                inner = _Scope(child, below, declaration(child), [])
                scopes.append(inner)
            inner.members.append(member)
            own = _declares(child) and is_decorated(type(child).forward)
            member = member._replace(
                nested=member.nested or own,
                enclosed=member.enclosed or _is_compiled(child),
            )
            walk(member, below, inner)

    walk(_Member(model, "", False, False), (), scopes[0])
    return scopes


def _is_wrapper(parent: nn.Module, name: str) -> bool:
    return name in _WRAPPER_NAMES or (
        name == "module"
        and isinstance(parent, (nn.DataParallel, nn.parallel.DistributedDataParallel))
    )


def _is_compiled(module: nn.Module) -> bool:
    return _torch.is_compiled_in_place(module) or "_orig_mod" in module._modules


def _matcher(
    recorder: OutputRecorder, members: Sequence[_Member]
) -> Callable[[_Member], bool]:
    """Whether a member of the scope is one that ``recorder`` speaks of."""
    name = recorder.class_name
    is_class = name is not None and any(
        name == base.__name__ for m in members for base in type(m.module).__mro__
    )
    layer = recorder.layer_name
    below = None if layer is None else f".{layer.strip('.')}."

    def matches(member: _Member) -> bool:
        matched = recorder.target_class is not None and isinstance(
            member.module, recorder.target_class
        )
        if not matched and is_class:
            matched = any(name == b.__name__ for b in type(member.module).__mro__)
        elif not matched and name:
            matched = f".{member.path}".endswith(f".{name.strip('.')}")
        return matched and (below is None or below in f".{member.path}.")

    return matches


def holds_weights(record: str) -> bool:
    """Whether a record is one of attention weights, by its name."""
    return record.endswith("attentions")


class Kernels(NamedTuple):
    """Attention kernels that modules in transformers' way have chosen.

    Attributes:
        configs: The modules' configs, each once.
        chosen: What they name.
    """

    configs: list[Any]
    chosen: frozenset[Any]

    def are_same(self) -> bool:
        """Whether the configs name what they named."""
        return self.chosen == _chosen(self.configs)


def kernels_of(model: nn.Module) -> Kernels:
    """The kernels that the configs of a model's modules name."""
    # From the instances: nn.Module builds an error text for each name that it lacks.
    configs = {id(c): c for m in model.modules() if (c := vars(m).get("config"))}
    found = list(configs.values())
    return Kernels(found, _chosen(found))


def _chosen(configs: Sequence[Any]) -> frozenset[Any]:
    return frozenset(getattr(c, "_attn_implementation", None) for c in configs)


def sub_models(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Path and module of everything below (and at) ``model`` that captures for itself.

    A model that declares records without being decorated counts if nothing in it is.
    """
    found = [
        (member.path, member.module)
        for scope in _scopes(model)
        for member in scope.members
        if _declares(member.module) and is_decorated(type(member.module).forward)
    ]
    if declaration(model) and (is_decorated(type(model).forward) or not found):
        found.insert(0, ("", model))
    return found
