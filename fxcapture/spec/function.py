"""Which function calls inside of a module a target means.

Written behind the module's target: ``"layers.*.mlp::silu"``, ``"layers.*::add[0]"``.

Terms
    function's name: the last part of what the code calls: of a function
        (``F.softmax``), a method (``x.softmax``) or an operator (``x + y``: ``add``).
        In-place forms (``x.add_(y)``, ``x += y``) have the same name, and so have the
        reflected ones (``1 - x``: ``sub``).
    index: which such call of one call of the module, negative from the end.

Invariants
    Frozen and hashable.  A name is kept in one spelling, see :func:`canonical_name`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, final

from fxcapture.errors import SpecError, SpecTypeError
from fxcapture.spec.globs import masked

__all__ = [
    "Function",
    "at_module",
    "canonical_name",
    "is_reflected",
    "module_of",
    "numbered",
    "site_path",
    "split_numbered",
    "split_target",
]

_WRITTEN = re.compile(r"([A-Za-z_]\w*)(?:\[(-?\d{1,9})\])?")
_NUMBERED = re.compile(r"(.*::\w+)\[(\d+)\]", re.DOTALL)

_IN_PLACE = frozenset({
    "iadd", "isub", "imul", "imatmul", "itruediv", "ifloordiv", "imod", "ipow", "iand",
    "ior", "ixor", "ilshift", "irshift",
})  # fmt: skip
_REFLECTED = frozenset({
    "radd", "rsub", "rmul", "rmatmul", "rdiv", "rtruediv", "rfloordiv", "rmod", "rpow",
    "rand", "ror", "rxor", "rlshift", "rrshift",
})  # fmt: skip
#: What Python and torch call by two names.
_SYNONYMS = {
    "absolute": "abs",
    "and": "bitwise_and",
    "divide": "div",
    "floordiv": "floor_divide",
    "invert": "bitwise_not",
    "lshift": "bitwise_left_shift",
    "mod": "remainder",
    "multiply": "mul",
    "negative": "neg",
    "or": "bitwise_or",
    "rshift": "bitwise_right_shift",
    "subtract": "sub",
    "true_divide": "div",
    "truediv": "div",
    "xor": "bitwise_xor",
}


def canonical_name(name: str) -> str:
    """The one spelling of a function's name: ``__rsub__`` and ``sub_`` are ``sub``."""
    if name.startswith("__") and name.endswith("__") and len(name) > 4:
        name = name[2:-2]
        if name in _REFLECTED or name in _IN_PLACE:
            name = name[1:]
    elif name in _IN_PLACE:  # of the module ``operator``
        name = name[1:]
    # What ``F.max_pool2d`` is, to torch, where it returns the indices too.
    name = name.removesuffix("_with_indices").rstrip("_") or name
    return _SYNONYMS.get(name, name)


def is_reflected(name: str) -> bool:
    """Whether a method takes its operator's operands in reverse (``__rsub__``)."""
    return name.strip("_") in _REFLECTED and name.startswith("__")


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """Which function calls inside of a module.

    Attributes:
        name: The function's name, in its one spelling.
        index: Which of the calls of one call of the module; ``None`` for all.
    """

    name: str
    index: int | None = None

    @staticmethod
    def of(written: Any) -> Function:
        """What a user wrote: ``"silu"`` or ``"add[-1]"``.

        Raises:
            SpecTypeError: it is no string.
            SpecError: it is malformed.
        """
        if isinstance(written, Function):
            return written
        if not isinstance(written, str):
            raise SpecTypeError(
                f"function={written!r} is of type {type(written).__name__}",
                remedy='write the name of a function, such as "softmax" or "add[0]"',
            )
        found = _WRITTEN.fullmatch(written)
        if found is None:
            raise SpecError(
                f"function {written!r} is not the name of a function call",
                why="a name is the last part of what the code calls, and may have an "
                "index in brackets behind it",
                remedy="write a name such as 'softmax', or 'add[0]' for the first call",
            )
        index = None if found[2] is None else int(found[2])
        return Function(canonical_name(found[1]), index)

    @property
    def counts_from_end(self) -> bool:
        """Whether a call of it is known only when the module's call has ended."""
        return self.index is not None and self.index < 0

    def __str__(self) -> str:
        return self.name if self.index is None else f"{self.name}[{self.index}]"

    def __repr__(self) -> str:
        return repr(str(self))


def split_target(target: Any) -> tuple[Any, Function | None]:
    """A target as written, apart from the function calls that it names.

    Raises:
        SpecError: the parts of a list name different functions.
    """
    if isinstance(target, str):
        at = masked(target).rfind("::")
        if at < 0:
            return target, None
        return target[:at], Function.of(target[at + 2 :])
    if not isinstance(target, (list, tuple)):
        return target, None
    parts = [split_target(part) for part in target]
    functions = dict.fromkeys(function for _, function in parts)
    if len(functions) > 1:
        shown = ", ".join("none" if f is None else f"'{f}'" for f in functions)
        raise SpecError(
            f"the parts of target {target!r} name different functions: {shown}",
            why="the entries of a record are values of one kind",
            remedy="write one record for each function",
        )
    return [part for part, _ in parts], next(iter(functions), None)


def site_path(module: str, name: str) -> str:
    """The path of a function's calls inside of the module at a path."""
    return f"{module}::{name}"


def module_of(path: str) -> str:
    """The path of the module that a call belongs to; of a module's call, its own."""
    return path.rpartition("::")[0] if "::" in path else path


def at_module(path: str, module: str) -> str:
    """The path of the same call of another module."""
    return module + path[path.rindex("::") :] if "::" in path else module


def numbered(path: str, index: int) -> str:
    """The path that a call's marks bear: with its number among those of the module."""
    return f"{path}[{index}]"


def split_numbered(path: str) -> tuple[str, int | None]:
    """The path of a call, and its number if it is a function's."""
    found = _NUMBERED.fullmatch(path)
    return (path, None) if found is None else (found[1], int(found[2]))
