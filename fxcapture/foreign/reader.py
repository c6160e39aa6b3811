"""The fx front end: a graph made elsewhere, without marks, to its calls.

Terms
    call: one call of one module that a graph shows: by a ``call_module`` node or by a
        region.
    region: the nodes that a call of an inlined module left, known by the module stack
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import torch
from torch import fx, nn

from fxcapture.errors import AmbiguousSiteError
from fxcapture.foreign.classes import loaded_classes, module_classes, shell
from fxcapture.foreign.returns import returns_one_tensor
from fxcapture.passes.base import bodies

__all__ = ["REMEDY", "Call", "ForeignGraph"]

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
        key: The module stack's key of the region, if there is one.
        order: Where it stands among the calls: by its last node, inner ones first.
    """

    path: str
    first: fx.Node
    last: fx.Node
    node: fx.Node | None
    key: str
    order: tuple[int, int]


@final
class ForeignGraph:
    """What a graph without marks shows of the modules it was made of.

    Args:
        gm: The graph module; not changed.
        shown: Further paths that are known to exist.
        root: The root's class or its dotted name, if the graph tells it.
        class_name: The root's class name, if nothing more is known.  If no loaded class
            has it, the root counts as a match of no class.
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
        root: Any = None,
        class_name: str = "",
        state: Mapping[str, str] | None = None,
    ) -> None:
        self.gm = gm
        self.has_object_keys = False
        self.nodes = list(gm.graph.nodes)
        self._index = {node: i for i, node in enumerate(self.nodes)}
        # As they are now: whoever reads the graph may add marks to it meanwhile.
        self._users = {node: tuple(node.users) for node in self.nodes}
        self.calls: dict[str, list[Call]] = {}
        self.classes: dict[str, type] = {}
        self.names: dict[str, str] = {}
        self.candidates: dict[str, tuple[type, ...]] = {}
        self._leaves = {
            str(n.target): gm.get_submodule(str(n.target))
            for n in self.nodes
            if n.op == "call_module"
        }
        self._regions: dict[tuple[str, str], list[fx.Node]] = {}
        self._ids: dict[str, str] = {}
        self._collect_regions()
        self._inner: set[str] = set()
        self._untold = ""
        self._look_into_bodies()
        self._collect_calls()
        self._state = {
            node: str(node.target) for node in self.nodes if node.op == "get_attr"
        }
        for node in self.nodes:
            if node.name in (state or {}):
                self._state[node] = (state or {})[node.name]
        if root:
            self._note_class("", root)
        elif class_name:
            self._note_root(class_name)
        self.shown = dict.fromkeys([*shown, *self.names, *self._named_modules()])
        self.tree = self._build_tree(class_name)

    def holds_module(self, path: str) -> bool:
        """Whether the real module is at hand, so that its class is known."""
        return any(path.startswith(f"{leaf}.") for leaf in self._leaves)

    # -- what the graph shows ----------------------------------------------------------

    def _collect_regions(self) -> None:
        for node in self.nodes:
            if node.op in ("placeholder", "output", "get_attr"):
                continue
            for key, path, cls in self.stack(node):
                self._regions.setdefault((key, path), []).append(node)
                self._note_class(path, cls)

    def stack(self, node: fx.Node) -> Iterator[tuple[str, str, Any]]:
        """(key, path, class or its name) of each module around a node, outermost first.

        Modules that one object stands for under several names have one path, where the
        key tells (Dynamo's keys are object numbers).
        """
        for key, (path, cls) in node.meta.get("nn_module_stack", {}).items():
            path = _clean(path)
            if not path or path.startswith("_empty_nn_module_stack"):
                continue  # the root, or torch.export's word for "no module"
            number = str(key).partition("@")[0]
            if number.isdigit():
                self.has_object_keys = True
                path = self._ids.setdefault(number, path)
            yield str(key), path, cls

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
        """What the name that a traced graph module has tells of the root's class."""
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

    def _named_modules(self) -> Iterator[str]:
        for path, module in self.gm.named_modules():
            if path and not isinstance(module, fx.GraphModule):
                yield path

    def _look_into_bodies(self) -> None:
        """Which modules ran in sub-graphs, and whether some of these do not say it."""
        for node in self.nodes:
            for name, body in bodies(self.gm, node):
                inner = ForeignGraph(body)
                self._inner |= inner._inner | {path for _, path in inner._regions}
                # In a graph of Dynamo, what stands in no module has no stack.
                tells = _tells(body) and not inner._untold
                if not tells and not self.has_object_keys:
                    self._untold = name

    def _collect_calls(self) -> None:
        found: list[Call] = []
        for (key, path), nodes in self._regions.items():
            if path in self._leaves:
                continue
            found.append(
                Call(
                    path=path,
                    first=nodes[0],
                    last=nodes[-1],
                    node=None,
                    key=key,
                    order=(self._index[nodes[-1]], -path.count(".")),
                )
            )
        for node in self.nodes:
            if node.op == "call_module":
                path = str(node.target)
                self._note_class(path, type(self._leaves[path]))
                found.append(
                    Call(
                        path=path,
                        first=node,
                        last=node,
                        node=node,
                        key="",
                        order=(self._index[node], -path.count(".") - 1),
                    )
                )
        for call in sorted(found, key=lambda c: c.order):
            self.calls.setdefault(call.path, []).append(call)

    def _build_tree(self, class_name: str) -> nn.Module:
        root = shell(self.classes.get(""), self.names.get("", class_name))
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
        if path in self._leaves:
            return self._leaves[path]
        for leaf, module in self._leaves.items():
            if path.startswith(f"{leaf}."):
                return module.get_submodule(path[len(leaf) + 1 :])
        return shell(self.classes.get(path), self.names.get(path, ""))

    # -- what a call returned ----------------------------------------------------------

    def region(self, call: Call) -> list[fx.Node]:
        """The nodes of an inlined call.

        Raises:
            AmbiguousSiteError: they do not stand together, or some of them stand in a
                sub-graph.
        """
        nodes = self._regions[call.key, call.path]
        if call.path in self._inner:
            raise self.ambiguous(call.path, "part of it stands in a sub-graph")
        inside = set(nodes)
        between = self.nodes[self._index[nodes[0]] : self._index[nodes[-1]]]
        for node in between:
            if node not in inside and node.op not in ("get_attr", "placeholder"):
                raise self.ambiguous(
                    call.path,
                    f"its operations are interrupted by {node.name!r}, so that the "
                    "graph does not show where one call ends",
                )
        return nodes

    def result(self, call: Call, *, assume_tensor: bool) -> fx.Node:
        """The node that holds what an inlined call returned, which is one tensor.

        Args:
            call: A call without a ``call_module`` node.
            assume_tensor: The user vouches that the module returns one tensor.

        Raises:
            AmbiguousSiteError: the graph does not determine it.
        """
        nodes = self.region(call)
        self._check_state(call.path)
        if not assume_tensor and not self.returns_one_tensor(call.path):
            name = self.names.get(call.path, "its class")
            raise self.ambiguous(
                call.path,
                f"it was inlined, and whether {name} returns one tensor or a container "
                "cannot be read from the graph",
                "declare the return type of its forward as torch.Tensor, or pass "
                "assume_tensors=True if that is what it returns; otherwise " + REMEDY,
            )
        inside = set(nodes)
        users = self._users
        leaving = [n for n in nodes if any(u not in inside for u in users[n])]
        unused = [n for n in nodes if not users[n] and not _acts(n)]
        if len(nodes) == 1 and not leaving:
            leaving, unused = unused, []
        if len(leaving) != 1 or unused:
            names = ", ".join(repr(n.name) for n in [*leaving, *unused][:5])
            raise self.ambiguous(
                call.path,
                f"{len(leaving)} of its values are used outside of it and "
                f"{len(unused)} nowhere ({names or 'none'}), so that the graph does "
                "not say which one it returned",
            )
        return leaving[0]

    def returns_one_tensor(self, path: str) -> bool:
        """Whether the class of an inlined module surely returns one tensor."""
        cls = self.classes.get(path)
        if cls is None:
            return False
        if cls is nn.Sequential:
            children = self._numbered_children(path)
            return bool(children) and self.returns_one_tensor(children[-1])
        return returns_one_tensor(
            cls, lambda name: self.returns_one_tensor(f"{path}.{name}")
        )

    def _numbered_children(self, path: str) -> list[str]:
        """Children 0, 1, ... of a container; empty if one of them is not shown."""
        found = {
            int(name): p
            for p in self.calls
            for parent, _, name in [p.rpartition(".")]
            if parent == path and name.isdigit()
        }
        if sorted(found) != list(range(len(found))):
            return []
        return [found[i] for i in range(len(found))]

    def _check_state(self, path: str) -> None:
        """Refuse where there may be calls that the graph does not show.

        Those of a module with parameters would read them.
        """
        found = {n: t for n, t in self._state.items() if t.startswith(f"{path}.")}
        if self._untold and not found:
            raise self.ambiguous(
                path,
                f"the operations of {self._untold!r} do not say which module they are "
                "of, so that there may be a call more",
            )
        for node, target in found.items():
            for user in self._users[node]:
                if all(p != path for _, p, _ in self.stack(user)):
                    raise self.ambiguous(
                        path,
                        f"{target!r} is read outside of the calls that the graph "
                        "shows, so that there may be a call more",
                    )

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
        for leaf in self._leaves:
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
        """Paths right below a path."""
        start = f"{path}." if path else ""
        return [p for p in self.shown if p.startswith(start) and p != path]


def _tells(body: fx.GraphModule) -> bool:
    """Whether every operation has a module stack; non-strict export leaves them out."""
    return all(
        node.meta.get("nn_module_stack")
        for node in body.graph.nodes
        if node.op not in ("placeholder", "output", "get_attr")
    )


def _acts(node: fx.Node) -> bool:
    """Whether an unused node is there for what it does and not for its value."""
    if node.is_impure():
        return True
    name = node.target if isinstance(node.target, str) else ""
    if node.op == "call_method" and name.endswith("_") and not name.endswith("__"):
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return not target._schema.returns or target._schema.is_mutable
    value = node.meta.get("val", node.meta.get("example_value"))
    return value is not None and not isinstance(value, torch.Tensor)


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
