"""The dialect of exported programs.

Terms
    kept signature: what ``preserve_module_call_signature`` leaves of a module: the
        nodes of its arguments and results, and their containers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    SymIntArgument,
    TensorArgument,
)

from fxcapture import _torch
from fxcapture.errors import ElementError, nearest
from fxcapture.foreign.classes import shell
from fxcapture.foreign.dialect import Dialect
from fxcapture.foreign.reader import Call, example
from fxcapture.foreign.results import all_of_torch, returned, span_of
from fxcapture.passes.analyses.function_calls import FunctionCall, aten_calls
from fxcapture.passes.base import walk
from fxcapture.plan.match import Match
from fxcapture.reductions import Reduction
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.function import canonical_name
from fxcapture.trace.signature import describe_forward

__all__ = ["Exported"]

#: Calls that leave no operation where there is nothing to do.
_MAY_VANISH = frozenset(
    {"to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda",
     "contiguous", "detach", "named"}
)  # fmt: skip


@final
class Exported(Dialect):
    """An exported program: values are ATen nodes, known by their fake tensors.

    Args:
        program: The program; not changed.
        spec: What to capture.
        assume_tensors: The user vouches that inlined targets return one tensor.
    """

    def __init__(
        self, program: ExportedProgram, spec: CaptureSpec, *, assume_tensors: bool
    ) -> None:
        inputs = program.graph_signature.input_specs
        super().__init__(
            program.graph_module,
            spec,
            assume_tensors=assume_tensors,
            shown=[
                entry.fqn
                for entry in program.module_call_graph
                if entry.fqn and "@" not in entry.fqn
            ],
            state={
                entry.arg.name: entry.target
                for entry in inputs
                if entry.kind in (InputKind.PARAMETER, InputKind.BUFFER)
                and entry.target
            },
        )
        self._program = program
        self._nodes = {node.name: node for node in self.gm.graph.nodes}
        self._signatures: dict[str, list[Any]] = {}
        for entry in program.module_call_graph:
            if entry.fqn and entry.signature is not None:
                path = entry.fqn.partition("@")[0]
                self._signatures.setdefault(path, []).append(entry.signature)
        self._root = next(e.signature for e in program.module_call_graph if not e.fqn)

    def function_calls(self, gm: fx.GraphModule) -> dict[fx.Node, FunctionCall]:
        """Parts of one call bear its name.

        A call that left no operation is missed, and shifts the numbers of later ones;
        torch numbers the calls of each name, so that a gap shows.
        """
        if gm is self.gm:
            self._check_numbers()
        return aten_calls(gm)

    def _check_numbers(self) -> None:
        """Refuse where a call of a tapped name has left no operation."""
        numbers: dict[str, set[int]] = {}
        for _, node, _ in walk(self.gm):
            if "torch_fn" in node.meta:
                name, _, number = str(node.meta["torch_fn"][0]).rpartition("_")
                numbers.setdefault(canonical_name(name), set()).add(int(number))
        for tap in self.spec.values():
            name = "" if tap.function is None else tap.function.name
            seen = numbers.get(name, set())
            if name and (name in _MAY_VANISH or len(seen) < max(seen, default=0)):
                raise self.graph.ambiguous(
                    tap.written,
                    f"a call of {name!r} may have left no operation in the graph, "
                    "which would shift the numbers of the others",
                )

    def check(self, bound: Match) -> None:
        """Refuse a module that may be called through another name as well.

        A shared module is one module, whichever of its names it is called through, and
        most exports keep no more of it than the names.
        """
        state = self._program.state_dict
        owners: dict[int, set[str]] = {}
        for name, value in state.items():
            owners.setdefault(_storage(value), set()).add(name)
        for path in filter(None, bound.entries):
            own = [name for name in state if name.startswith(f"{path}.")]
            others = {
                other.rpartition(".")[0]
                for name in own
                for other in owners[_storage(state[name])]
                if not other.startswith(f"{path}.")
            }
            if not own and not self.graph.has_object_keys:
                others = {other for other in self.graph.names if other != path}
            for other in others:
                self._check_shared(bound, path, other)

    def _check_shared(self, bound: Match, path: str, other: str) -> None:
        graph = self.graph
        if graph.names.get(other) != graph.names.get(path) or other not in graph.calls:
            return
        for found in bound.paths.values():
            if path in found and other not in found:
                raise graph.ambiguous(
                    path,
                    f"{path!r} and {other!r} may be one module under two names, which "
                    "has the calls of both",
                )

    def result(self, path: str, call: Call | None) -> Any:
        """By the kept signature, the program's own, or the operations it left."""
        if call is None:
            outputs: Any = self.gm.graph.output_node().args[0]
            specs = self._program.graph_signature.output_specs
            own = [
                value
                for value, spec in zip(outputs, specs, strict=True)
                if spec.kind.name == "USER_OUTPUT"
            ]
            return _torch.unflatten(own, self._root.out_spec)
        signature = self._signature(call)
        if signature is not None:
            return self._fill(path, signature.outputs, signature.out_spec)
        decomposed = self._program.dialect != "TRAINING"
        if decomposed and not all_of_torch(self.graph, call.path):
            raise self.graph.ambiguous(
                call.path,
                "the program was decomposed, which moves and drops operations",
            )
        return returned(self.graph, call, assume_tensor=self.assume_tensors)

    def argument(self, path: str, call: Call | None, which: int | str) -> Any:
        """By the kept signature, or the program's own."""
        signature = None if call is None else self._signature(call)
        if call is None:
            arguments = self._own_arguments()
        elif signature is None:
            raise self.graph.ambiguous(
                path,
                "it was inlined, and the graph does not say which values were its "
                "arguments",
            )
        else:
            args, kwargs = self._fill(path, signature.inputs, signature.in_spec)
            names = signature.forward_arg_names or self._parameter_names(call.path)
            arguments = _by_position_and_name(args, kwargs, names)
        if which not in arguments:
            raise self.graph.ambiguous(
                path, f"the graph does not say that it received an input {which!r}"
            )
        return arguments[which]

    def _signature(self, call: Call) -> Any:
        """A call's kept signature, if there is one."""
        signatures = self._signatures.get(call.path)
        if signatures is None:
            return None
        calls = self.graph.calls[call.path]
        if len(signatures) != len(calls):
            raise self.graph.ambiguous(
                call.path,
                f"{len(signatures)} signatures were kept of it, but {len(calls)} of "
                "its calls left operations",
            )
        span_of(self.graph, call)
        return signatures[calls.index(call)]

    def _parameter_names(self, path: str) -> tuple[str, ...]:
        cls = self.graph.classes.get(path)
        return describe_forward(shell(cls, ""))[0] if cls is not None else ()

    def _own_arguments(self) -> dict[Any, Any]:
        inputs: list[Any] = []
        for spec in self._program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                if isinstance(spec.arg, ConstantArgument):
                    inputs.append(spec.arg.value)
                else:
                    inputs.append(self._nodes[spec.arg.name])
        args, kwargs = _torch.unflatten(inputs, self._root.in_spec)
        return _by_position_and_name(args, kwargs, self._root.forward_arg_names or ())

    def _fill(self, path: str, arguments: list[Any], spec: Any) -> Any:
        values: list[Any] = []
        for argument in arguments:
            if isinstance(argument, ConstantArgument):
                values.append(argument.value)
            elif (
                isinstance(argument, (TensorArgument, SymIntArgument))
                and argument.name in self._nodes
            ):
                values.append(self._nodes[argument.name])
            else:
                raise self.graph.ambiguous(
                    path, f"its signature names {argument}, which is no node"
                )
        return _torch.unflatten(values, spec)

    def reduce(
        self, record: str, value: Any, what: str, output: int | str | None
    ) -> Any:
        """Add a reduction, also one that takes an input of the program."""
        reduce = self.spec[record].reduce
        if not isinstance(reduce, Reduction) or reduce.source is None:
            return super().reduce(record, value, what, output)
        source = reduce.source
        arguments = self._own_arguments()
        if source not in arguments:
            known = [name for name in arguments if isinstance(name, str)]
            raise ElementError(
                f"record {record!r}: reduce={reduce!r} needs the input {source!r}, "
                "which the program does not have",
                why="it takes " + (", ".join(known) or "no named arguments"),
                nearest=nearest(source, known),
                remedy="name one of these, or export the model with fxcapture.export",
            )
        given = arguments[source]
        reduce.check_input(example(given) if isinstance(given, fx.Node) else given)
        return self.inline(reduce.apply, value, given)


def _storage(value: torch.Tensor) -> int:
    return id(value) if value.is_meta else value.untyped_storage().data_ptr()


def _by_position_and_name(
    args: Sequence[Any], kwargs: Mapping[str, Any], names: Sequence[str]
) -> dict[Any, Any]:
    """The arguments of a call under their positions and under their names."""
    found: dict[Any, Any] = dict(enumerate(args)) | dict(kwargs)
    for i, name in enumerate(names):
        if i < len(args):
            found[name] = args[i]
        elif name in kwargs:
            found[i] = kwargs[name]
    return found
