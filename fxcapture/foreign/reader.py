"""The one reader of graphs that were made elsewhere: which calls they show.

What a call returned and received differs between kinds of graphs, see
:mod:`fxcapture.foreign.dialect`.

Terms
    call: one call of one module that a graph shows: by a ``call_module`` node or by a
        span.
    span: the nodes that a call of an inlined module left, known by the module stack
        in their metadata.
    shown module: a module that the graph names at all, called or not.

Invariants
    Nothing is guessed.  Where the graph leaves open which value a call returned, or
    whether there was a call, the answer is an ``AmbiguousSiteError`` that says why.
    Nothing is imported: the class of an inlined module counts as known only if its
    module is loaded.
"""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

from torch import fx, nn

from fxcapture.errors import AmbiguousSiteError
from fxcapture.foreign.classes import loaded_classes, module_classes, shell
from fxcapture.passes.base import bodies

__all__ = ["REMEDY", "Call", "ForeignGraph", "example"]

REMEDY = (
    "export the model with fxcapture.export, which marks every call; or, for a plain "
    "export, pass the module's path in preserve_module_call_signature"
)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call that a graph shows.

    Attributes:
        path: The module's path in the graph.
        first: The first node of the call.
        last: The last node: behind it the caller has the result.
        node: The ``call_module`` node, if there is one.
        key: The module stack's key of the span, if there is one.
        order: Where it stands among the calls: by its last node, inner ones first.
    """

    path: str
    first: fx.Node
    last: fx.Node
    node: fx.Node | None
    key: str
    order: tuple[int, bool, int]


@final
class ForeignGraph:
    """What a graph without marks shows of the modules it was made of.

    Args:
        gm: The graph module; not changed.
        shown: Further paths that are known to exist.
        state: Placeholder to the parameter or buffer that it stands for.

    Attributes:
        calls: Path to calls, in call order.
        classes: Path to class, where it is known and loaded.
        names: Path to class name, where it is known.
        candidates: Path to the loaded classes of that name, if not just one.
        shown: Every path that the graph names.
        tree: A module tree with the same paths and classes, without parameters.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        *,
        shown: Sequence[str] = (),
        state: Mapping[str, str] = types.MappingProxyType({}),
    ) -> None:
        self.gm = gm
        self.has_object_keys = False
        self.nodes = list(gm.graph.nodes)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        # As they are now: whoever reads the graph may add marks to it meanwhile.
        self.users = {node: tuple(node.users) for node in self.nodes}
        self.calls: dict[str, list[Call]] = {}
        self.classes: dict[str, type] = {}
        self.names: dict[str, str] = {}
        self.candidates: dict[str, tuple[type, ...]] = {}
        self.leaves = {
            str(n.target): gm.get_submodule(str(n.target))
            for n in self.nodes
            if n.op == "call_module"
        }
        self.spans: dict[tuple[str, str], list[fx.Node]] = {}
        self._ids: dict[str, str] = {}
        self._collect_spans()
        self.inner: set[str] = set()
        self.untold = ""
        self._look_into_bodies()
        self._collect_calls()
        self.state = {
            node: str(node.target) for node in self.nodes if node.op == "get_attr"
        }
        for node in self.nodes:
            if node.name in state:
                self.state[node] = state[node.name]
        if "" not in self.names:
            self._note_root(type(gm).__name__)
        self.shown = dict.fromkeys([*shown, *self.names])
        self.tree = self._build_tree()

    def holds_module(self, path: str) -> bool:
        """Whether the real module is at hand, so that its class is known."""
        return any(path.startswith(f"{leaf}.") for leaf in self.leaves)

    # -- what the graph shows ----------------------------------------------------------

    def _collect_spans(self) -> None:
        for node in self.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            for key, path, cls in self.stack(node):
                self.spans.setdefault((key, path), []).append(node)
                self._note_class(path, cls)

    def stack(self, node: fx.Node) -> Iterator[tuple[str, str, Any]]:
        """(key, path, class or its name) of each module around a node, outermost first.

        Modules that one object stands for under several names have one path, where the
        key tells (Dynamo's keys are object numbers).
        """
        for key, (path, cls) in node.meta.get("nn_module_stack", {}).items():
            if not path and cls:
                self._note_class("", cls)  # torch.export tells the root's class
            path = _clean(path)
            if not path or path.startswith("_empty_nn_module_stack"):
                continue  # the root, or torch.export's word for "no module"
            number = str(key).partition("@")[0]
            if number.isdigit():
                self.has_object_keys = True
                path = self._ids.setdefault(number, path)
            yield str(key), path, cls

    def keys(self, node: fx.Node) -> list[str]:
        """Where a node stands in the tree of modules, the root left out."""
        return [key for key, _, _ in self.stack(node)]

    def _note_class(self, path: str, cls: Any) -> None:
        if isinstance(cls, type):
            self.classes[path] = cls
            self.names[path] = cls.__name__
            return
        self.names[path] = str(cls).rpartition(".")[2]
        found = loaded_classes(str(cls))
        if len(found) == 1:
            self.classes[path] = found[0]
        else:
            # Classes defined inside functions may share one name.
            self.candidates[path] = found

    def _note_root(self, class_name: str) -> None:
        """What the name that a traced graph module has tells of the root's class.

        If no loaded class has it, the root counts as a match of no class.
        """
        found = tuple(
            cls
            for cls in module_classes()
            if cls.__name__ == class_name and not issubclass(cls, fx.GraphModule)
        )
        if len(found) == 1:
            self.classes[""] = found[0]
        elif found:
            self.candidates[""] = found
        if found:
            self.names[""] = class_name

    def _look_into_bodies(self) -> None:
        """Which modules ran in sub-graphs, and whether some of these do not say it."""
        for node in self.nodes:
            for name, body in bodies(self.gm, node):
                inner = ForeignGraph(body)
                self.inner |= inner.inner | {path for _, path in inner.spans}
                # In a graph of Dynamo, what stands in no module has no stack.
                tells = _tells(body) and not inner.untold
                if not tells and not self.has_object_keys:
                    self.untold = name

    def _collect_calls(self) -> None:
        for node in self.nodes:
            if node.op == "call_module":
                self._note_class(str(node.target), type(self.leaves[str(node.target)]))
        spans = [
            (path, None, key, nodes)
            for (key, path), nodes in self.spans.items()
            if path not in self.leaves
        ]
        leaves = [
            (str(node.target), node, "", [node])
            for node in self.nodes
            if node.op == "call_module"
        ]
        found = [
            Call(
                path=path,
                first=nodes[0],
                last=nodes[-1],
                node=node,
                key=key,
                order=(self.index[nodes[-1]], node is None, -path.count(".")),
            )
            for path, node, key, nodes in leaves + spans
        ]
        for call in sorted(found, key=lambda c: c.order):
            self.calls.setdefault(call.path, []).append(call)

    def _build_tree(self) -> nn.Module:
        root = shell(self.classes.get(""), self.names.get("", type(self.gm).__name__))
        for path in sorted(self.shown):
            parent = root
            names = path.split(".")
            for i, name in enumerate(names):
                here = ".".join(names[: i + 1])
                if name not in parent._modules:
                    parent._modules[name] = self._node_of_tree(here)
                parent = parent._modules[name]  # type: ignore[assignment]
        return root

    def _node_of_tree(self, path: str) -> nn.Module:
        if path in self.leaves:
            return self.leaves[path]
        for leaf, module in self.leaves.items():
            if path.startswith(f"{leaf}."):
                return module.get_submodule(path[len(leaf) + 1 :])
        return shell(self.classes.get(path), self.names.get(path, ""))

    def hidden_calls(self, path: str) -> str:
        """Why calls of a module may be missing from the graph; empty if none are."""
        for node in self.nodes:
            if node.op != "get_attr":
                continue
            target = str(node.target)
            module = _attribute(self.gm, target)
            if not isinstance(module, nn.Module) or isinstance(module, fx.GraphModule):
                continue
            if path == target or path.startswith(f"{target}."):
                return f"{target!r} is passed as an object to {_users(node)}"
        for leaf in self.leaves:
            if path.startswith(f"{leaf}."):
                return f"{leaf!r} is one node of the graph, which hides what it calls"
        return ""

    def ambiguous(
        self, path: str, why: str, remedy: str = REMEDY
    ) -> AmbiguousSiteError:
        """The error for a module whose result or calls the graph does not determine."""
        name = self.names.get(path)
        return AmbiguousSiteError(
            f"the graph does not determine the calls of {path or 'the model'!r}"
            + (f" ({name})" if name else ""),
            why=why,
            remedy=remedy,
        )

    def children(self, path: str) -> list[str]:
        """Paths below a path."""
        start = f"{path}." if path else ""
        return [p for p in self.shown if p.startswith(start) and p != path]


def example(node: fx.Node) -> Any:
    """What a tracer noted as a node's value; ``None`` if it noted nothing."""
    return node.meta.get("val", node.meta.get("example_value"))


def _tells(body: fx.GraphModule) -> bool:
    """Whether every operation has a module stack; non-strict export leaves them out."""
    return all(
        node.meta.get("nn_module_stack")
        for node in body.graph.nodes
        if node.op not in ("placeholder", "output", "get_attr")
    )


def _users(node: fx.Node) -> str:
    return ", ".join(repr(u.name) for u in node.users) or "nothing"


def _attribute(gm: nn.Module, target: str) -> Any:
    found: Any = gm
    for name in target.split("."):
        found = getattr(found, name, None)
    return found


# Strict export calls the model _export_root where it stands in a sub-graph.
_SOURCE = re.compile(r"^L\['\w+'\]\.?|^L__self__\.?|^self\.|^_export_root(\.|$)")
_ITEM = re.compile(r"\._modules\['(\w+)'\]|\[['\"]?(\w+)['\"]?\]")


def _clean(path: str) -> str:
    """A path in the user's spelling, of what a tracer wrote."""
    path = _ITEM.sub(lambda m: f".{m[1] or m[2]}", _SOURCE.sub("", path))
    return path.strip(".")
