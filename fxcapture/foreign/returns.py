"""Does a module class return one tensor?  Read from its source, never run.

A graph shows which values leave an inlined module's region, not whether ``forward``
returned one of them alone, in a tuple, or beside something that nobody used.  The
class's own text can settle that.

Terms
    one tensor: every ``return`` of ``forward`` gives a value that is no container and
        is made by the call, not an argument handed back.

Invariants
    The answer is *yes* or *not known*.  *Yes* needs the declared return type, or an
    expression that no container supports; anything else is not known.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch import nn

__all__ = ["returns_one_tensor"]

#: Child path below the module, such as ``"proj"``, to whether it returns one tensor.
ChildAnswer = Callable[[str], bool]

# Of torch.nn: classes that return tuples, hand their argument back, or return what
# another module makes.
_NOT_KNOWN = (
    nn.MultiheadAttention,
    nn.RNNBase,
    nn.LSTMCell,
    nn.AdaptiveLogSoftmaxWithLoss,
    nn.Identity,
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.ParameterList,
    nn.ParameterDict,
    nn.DataParallel,
)
# Functions and methods of torch that return several tensors, or no tensor.
_SEVERAL = frozenset(
    {
        "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
        "align_tensors", "aminmax", "atleast_1d", "atleast_2d", "atleast_3d",
        "broadcast_tensors", "chunk", "cummax", "cummin", "data_ptr", "dim",
        "dsplit", "eig", "eigh", "element_size", "fractional_max_pool2d",
        "fractional_max_pool3d", "frexp", "geqrf", "get_device", "gru",
        "histogram", "histogramdd", "hsplit", "is_contiguous", "item",
        "kthvalue", "linalg", "lstm", "lstsq", "lu", "max", "max_pool1d",
        "max_pool2d", "max_pool3d", "median", "meshgrid", "min", "mode",
        "multi_head_attention_forward", "names", "nanmedian", "ndimension",
        "nelement", "nonzero", "numel", "numpy", "qr", "rnn_relu", "rnn_tanh",
        "size", "slogdet", "sort", "split", "split_with_sizes", "std_mean",
        "stride", "svd", "tensor_split", "tolist", "topk", "triangular_solve",
        "unbind", "unique", "unique_consecutive", "unravel_index",
        "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes", "var_mean",
        "vsplit", "where",
    }
)  # fmt: skip
_BUILTIN = frozenset(
    name for cls in (tuple, list, dict, set, str, object) for name in dir(cls)
)
_METHODS = frozenset(dir(torch.Tensor)) - _SEVERAL - _BUILTIN


def returns_one_tensor(cls: type, child: ChildAnswer) -> bool:
    """Whether ``cls.forward`` surely returns one tensor that the call made.

    Args:
        cls: A module class.
        child: Asked about submodules whose result is returned.
    """
    if cls.__module__.startswith("torch.nn.modules."):
        return not issubclass(cls, _NOT_KNOWN)
    # Through the class dictionaries: a scripted class's forward is a descriptor.
    owner = next(c for c in cls.__mro__ if "forward" in c.__dict__)
    forward = owner.__dict__["forward"]
    function = _parse(forward)
    if function is None or _stores_on_self(function) or not _ends_in_return(function):
        return False
    body = _Body(function, forward, child)
    if _declares_tensor(forward):
        return all(body.is_made(value) for value in body.returned())
    return all(body.is_single(value) for value in body.returned())


@functools.lru_cache(maxsize=1024)
def _parse(forward: Any) -> ast.FunctionDef | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(forward))))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    found = tree.body[0] if tree.body else None
    # A decorator may return anything.
    if not isinstance(found, ast.FunctionDef) or found.decorator_list:
        return None
    return found


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below a node, functions defined inside left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        yield child
        yield from _statements(child)


def _stores_on_self(function: ast.FunctionDef) -> bool:
    """Whether the call leaves values in the module, by which they could leave it."""
    for node in _statements(function):
        if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(
            node.ctx, ast.Store
        ):
            return True
        if isinstance(node, (ast.Global, ast.Nonlocal, ast.Yield, ast.YieldFrom)):
            return True
    return False


def _ends_in_return(function: ast.FunctionDef) -> bool:
    last: ast.stmt = function.body[-1]
    while isinstance(last, ast.With):
        last = last.body[-1]
    return isinstance(last, ast.Return) and last.value is not None


def _declares_tensor(forward: Any) -> bool:
    declared = getattr(inspect.unwrap(forward), "__annotations__", {}).get("return")
    return declared is torch.Tensor or declared in ("torch.Tensor", "Tensor")


@final
class _Body:
    """What the expressions of one ``forward`` can be."""

    def __init__(
        self, function: ast.FunctionDef, forward: Any, child: ChildAnswer
    ) -> None:
        self._function = function
        self._globals = getattr(inspect.unwrap(forward), "__globals__", {})
        self._child = child
        arguments = function.args
        named = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        self._self = named[0].arg if named else ""
        self._parameters = {a.arg for a in named} | {
            a.arg for a in (arguments.vararg, arguments.kwarg) if a is not None
        }
        self._values: dict[str, list[ast.expr | None]] = {}
        self._sure: set[str] = set()
        for node in _statements(function):
            self._collect(node)
        for statement in function.body:
            for target in getattr(statement, "targets", ()):
                if isinstance(target, ast.Name):
                    self._sure.add(target.id)
        self._asked: set[str] = set()

    def returned(self) -> Iterator[ast.expr | None]:
        """The returned expressions."""
        for node in _statements(self._function):
            if isinstance(node, ast.Return):
                yield node.value

    def _collect(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)):
            self._assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            left = ast.Constant(None)
            self._assign(node.target, ast.BinOp(left, node.op, node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._assign(node.target, None)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._assign(node.optional_vars, None)

    def _assign(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Name):
            self._values.setdefault(target.id, []).append(value)
            return
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                self._values.setdefault(node.id, []).append(None)

    def is_made(self, value: ast.expr | None) -> bool:
        """Whether a returned value cannot be an argument handed back unchanged."""
        if not isinstance(value, ast.Name):
            return value is not None
        return value.id not in self._parameters or value.id in self._sure

    def is_single(self, value: ast.expr | None) -> bool:
        """Whether an expression is surely no container."""
        if isinstance(value, ast.BinOp):
            if isinstance(value.op, (ast.Sub, ast.Div, ast.MatMult, ast.Pow)):
                return True
            if isinstance(value.op, (ast.Add, ast.Mult)):
                return self._is_operand(value.left) or self._is_operand(value.right)
            return False
        if isinstance(value, ast.UnaryOp):
            return not isinstance(value.op, ast.Not)
        if isinstance(value, ast.IfExp):
            return self.is_single(value.body) and self.is_single(value.orelse)
        if isinstance(value, ast.Subscript):
            # Containers take no such index; a mapping might, but not with slices.
            return any(isinstance(n, ast.Slice) for n in ast.walk(value.slice)) and (
                isinstance(value.slice, ast.Tuple)
            )
        if isinstance(value, ast.Call):
            return self._is_single_call(value.func)
        if isinstance(value, ast.Name):
            return self._is_single_name(value.id)
        return False

    def _is_operand(self, value: ast.expr) -> bool:
        if isinstance(value, ast.Constant):
            return isinstance(value.value, float)
        return self.is_single(value)

    def _is_single_name(self, name: str) -> bool:
        if name in self._asked:
            return True  # a value made of itself is what its other sources are
        values = self._values.get(name, [])
        if not values or (name in self._parameters and name not in self._sure):
            return False
        self._asked.add(name)
        try:
            return all(self.is_single(v) for v in values)
        finally:
            self._asked.discard(name)

    def _is_single_call(self, function: ast.expr) -> bool:
        if not isinstance(function, ast.Attribute):
            return False
        chain = _dotted(function)
        if chain and chain[0] == self._self:
            below = ".".join(chain[1:])
            if self._child(below):
                return True
            return len(chain) > 2 and chain[-1] in _METHODS
        local = chain and (chain[0] in self._values or chain[0] in self._parameters)
        if chain and not local and chain[0] in self._globals:
            return self._is_torch_function(chain)
        return function.attr in _METHODS

    def _is_torch_function(self, chain: list[str]) -> bool:
        found = self._globals[chain[0]]
        if not inspect.ismodule(found) or not found.__name__.startswith("torch"):
            return False
        for name in chain[1:]:
            found = getattr(found, name, None)
        if isinstance(found, type) or not callable(found):
            return False
        return chain[-1] not in _SEVERAL


def _dotted(node: ast.expr) -> list[str]:
    """``a.b.c`` as a list of names; empty for any other expression."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if isinstance(node, ast.Name) else []
