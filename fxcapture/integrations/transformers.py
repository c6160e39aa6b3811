"""transformers' own models over this package's capture.

Example::

    from fxcapture.integrations import transformers as capture

    capture.install()
    model(**inputs, output_hidden_states=[0, -2])  # an unmodified model

Terms
    stand-in: what takes the place of a name of transformers.
    baked: a decorator of transformers that a class body has applied already.

Invariants
    ``uninstall`` leaves transformers as it was, classes that were defined in between
    included.  A name that somebody else has replaced in between is left alone.
    Model instances are not touched at all.

Tested with transformers 5.23.0.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FunctionType, TracebackType
from typing import Any, final

from fxcapture.errors import install_extra
from fxcapture.modeling import decorators as modeling
from fxcapture.modeling import patching
from fxcapture.modeling.positions import layer_count
from fxcapture.spec.declaration import CAPTURES
from fxcapture.spec.flags import request

__all__ = ["Installation", "install", "is_installed", "uninstall"]

_MARK = "__fxcapture_stands_in__"
_TESTED = "5.23."
_lock = threading.RLock()
_undo: list[Callable[[], None]] = []
_holders = 0


@final
class Installation:
    """What ``install`` returns; as a context manager it uninstalls at the end."""

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        uninstall()


def install() -> Installation:
    """Put this package under transformers' models, existing ones included.

    May be called several times; as many calls of ``uninstall`` undo it.  Code that
    Dynamo compiled before belongs to the other implementation; it is recompiled where
    its guards notice, so install before compiling.

    It stands in for a private module, so a release of transformers that it was not
    tested on is warned of (``RuntimeWarning``).

    Raises:
        ImportError: transformers is not installed.
    """
    global _holders
    _check_version()
    with _lock:
        if not _holders:
            try:
                _replace_names()
                _convert_classes(_to_ours)
            except BaseException:
                _take_back()
                raise
        _holders += 1
    return Installation()


def _check_version() -> None:
    try:
        import transformers
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ModuleNotFoundError(
            "the integration needs transformers, which is not installed\n"
            f"  what to do: {install_extra('transformers')}",
            name=error.name,
        ) from error

    if not transformers.__version__.startswith(_TESTED):
        warnings.warn(
            f"transformers {transformers.__version__} was not tested with fxcapture's "
            f"drop-in, which knows {_TESTED}x; some models may not record",
            RuntimeWarning,
            stacklevel=3,
        )


def uninstall() -> None:
    """Undo one ``install``; without one it does nothing."""
    global _holders
    with _lock:
        if _holders == 1:
            _take_back()
        _holders = max(0, _holders - 1)


def is_installed() -> bool:
    """Whether transformers' models run over this package."""
    return _holders > 0


def _take_back() -> None:
    while _undo:
        _undo.pop()()
    _convert_classes(_to_theirs)
    _undo.clear()


# ------------------------------------------------------------------ the names


def _output_capturing() -> Any:
    return importlib.import_module("transformers.utils.output_capturing")


def _generic() -> Any:
    return importlib.import_module("transformers.utils.generic")


@functools.cache
def _theirs() -> dict[str, Any]:
    """The decorators of transformers, by name."""
    capturing, generic = _output_capturing(), _generic()
    return {
        "capture_outputs": capturing.capture_outputs,
        "select_hidden_states": capturing.select_hidden_states,
        "can_return_tuple": generic.can_return_tuple,
    }


def _replace_names() -> None:
    capturing = _output_capturing()
    theirs = _theirs()
    stand_ins: dict[int, Any] = {
        id(theirs["capture_outputs"]): _capture_outputs,
        id(theirs["select_hidden_states"]): _select_hidden_states,
        id(theirs["can_return_tuple"]): _can_return_tuple,
        id(capturing.selected_hidden_states): _selected_hidden_states,
        id(capturing.resolve_hidden_states_indices): _resolve_hidden_states_indices,
        id(capturing.maybe_install_capturing_hooks): _install_nothing,
        id(capturing.install_all_output_capturing_hooks): _install_nothing,
        # Hooks of an earlier run may still stand on a model; they find no collector,
        # and unlike a context variable Dynamo can trace this one.
        id(capturing._active_collector): _NoCollector(),
    }
    monkey = importlib.import_module("transformers.monkey_patching")
    for name in patching.__all__:
        stand_ins[id(getattr(monkey, name))] = getattr(patching, name)
    for module in list(sys.modules.values()):
        name = getattr(module, "__name__", "")
        if name.partition(".")[0] != "transformers":
            continue
        for attribute, value in list(vars(module).items()):
            stand_in = stand_ins.get(id(value))
            if stand_in is not None:
                _set(module, attribute, stand_in)


def _set(owner: Any, name: str, value: Any) -> None:
    before = vars(owner)[name]
    setattr(owner, name, value)

    def undo() -> None:
        if vars(owner).get(name) is value:
            setattr(owner, name, before)

    _undo.append(undo)


def _capture_outputs(func: Any = None, *, tie_last_hidden_states: bool = True) -> Any:
    def decorate(function: Any) -> Any:
        made = modeling.capture_outputs(
            function, tie_last_hidden_states=tie_last_hidden_states
        )
        setattr(made, _MARK, "capture_outputs")
        return made

    return decorate if func is None else decorate(func)


def _can_return_tuple(func: Any) -> Any:
    made = modeling.convert_outputs(func)
    setattr(made, _MARK, "can_return_tuple")
    return made


def _select_hidden_states(selection: Any) -> Any:
    decorate = modeling.select_hidden_states(selection)

    def decorate_and_mark(function: Any) -> Any:
        made = decorate(function)
        setattr(made, _MARK, ("select_hidden_states", selection))
        return made

    return decorate_and_mark


def _selected_hidden_states(output_hidden_states: Any) -> list[int] | None:
    """Positions, or ``None`` where everything or nothing is asked for."""
    asked = request("output_hidden_states", output_hidden_states)
    return None if isinstance(asked, bool) else sorted(asked)


def _resolve_hidden_states_indices(
    model: Any, selected: list[int], num_hidden_states: int | None = None
) -> set[int]:
    """Non-negative positions; those out of range are dropped."""
    n = num_hidden_states
    if n is None:
        if all(i >= 0 for i in selected):
            return set(selected)
        n = layer_count(model, "hidden_states", selected)
    return {i % n for i in selected if -n <= i < n}


def _install_nothing(model: Any, prefix: str | None = None) -> None:
    """Stands in for the functions that put hooks on a model."""


@final
class _NoCollector:
    def get(self) -> None:
        return None


# --------------------------------------------------------- decorators in classes


def _convert_classes(convert: Callable[[Any], Any]) -> None:
    """Replace decorators in every model class that is loaded."""
    for cls in _classes():
        for name, value in list(vars(cls).items()):
            if isinstance(value, FunctionType):
                changed = _convert(value, convert)
                if changed is not value:
                    _set(cls, name, changed)


def _classes() -> Iterator[type]:
    base = importlib.import_module("transformers.modeling_utils").PreTrainedModel
    seen: set[type] = set()
    pending = [base]
    while pending:
        cls = pending.pop()
        for part in cls.__mro__:
            if part not in seen and part is not object:
                seen.add(part)
                yield part
        pending += [c for c in cls.__subclasses__() if c not in seen]


def _convert(function: Any, convert: Callable[[Any], Any]) -> Any:
    """``function`` with the decorators in it converted; outer ones are kept."""
    inner = getattr(function, "__wrapped__", None)
    if inner is None:
        return function
    changed = _convert(inner, convert)
    if changed is not inner:
        for cell in function.__closure__ or ():
            if cell.cell_contents is inner:
                _set_cell(cell, changed)
        _set(function, "__wrapped__", changed)
    return convert(function) or function


def _set_cell(cell: Any, value: Any) -> None:
    before = cell.cell_contents
    cell.cell_contents = value

    def undo() -> None:
        if cell.cell_contents is value:
            cell.cell_contents = before

    _undo.append(undo)


@functools.cache
def _codes() -> dict[Any, str]:
    """Code object of each wrapper that transformers' decorators make, to its name."""

    def sample(self: Any, argument: Any = None, **kwargs: Any) -> None: ...

    theirs = _theirs()
    made = {
        "capture_outputs": theirs["capture_outputs"](sample),
        "select_hidden_states": theirs["select_hidden_states"]("argument")(sample),
        "can_return_tuple": theirs["can_return_tuple"](sample),
    }
    return {function.__code__: name for name, function in made.items()}


def _to_ours(function: Any) -> Any:
    kind = _codes().get(function.__code__)
    if kind is None or CAPTURES in vars(function):
        return None
    cells = dict(
        zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )
    inner = function.__wrapped__
    if kind == "capture_outputs":
        tie = cells["tie_last_hidden_states"].cell_contents
        return _capture_outputs(inner, tie_last_hidden_states=tie)
    if kind == "select_hidden_states":
        return _select_hidden_states(cells["selection"].cell_contents)(inner)
    return _can_return_tuple(inner)


def _to_theirs(function: Any) -> Any:
    """Only for classes that were defined while this was installed."""
    mark = vars(function).get(_MARK)
    inner = getattr(function, "__wrapped__", None)
    if mark is None:
        return None
    if mark == "capture_outputs":
        tie = vars(function)[CAPTURES].tie
        return _theirs()["capture_outputs"](inner, tie_last_hidden_states=tie)
    if mark == "can_return_tuple":
        return _theirs()["can_return_tuple"](inner)
    return _theirs()["select_hidden_states"](mark[1])(inner)
