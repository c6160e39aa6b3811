"""Every error fxcapture raises on purpose, in one tree.

::

    FxCaptureError
    |-- SpecError (ValueError)               a spec, tap or selector that is malformed
    |   |-- SpecTypeError (also TypeError)   a field of the wrong type
    |   `-- RecordNameError                  two record names that collide
    |-- TargetError (LookupError)            a spec that does not fit the model
    |   |-- TargetNotFoundError              a target that matches no module
    |   |-- AmbiguousTargetError             a class name that names several classes
    |   |-- NeverCalledError                 a matched module that no call reached
    |   |-- SelectionError (also IndexError) a position that does not exist
    |   `-- ElementError                     an element the output does not have
    |-- CaptureError (RuntimeError)          a capture that cannot be carried out
    |   |-- TraceError                       the model cannot be traced as one graph
    |   |-- UnreachableValueError            a value that cannot leave its sub-graph
    |   |-- AmbiguousSiteError               a graph that does not determine the value
    |   |-- UnsupportedOutputError           an output that holds a non-tensor object
    |   |-- EagerSiteError                   a site outside every graph, refused
    |   `-- VerificationError                records that differ from the reference
    `-- GraphError (RuntimeError)            a pass broke a graph invariant: our bug

Every message has the same parts, each on its own line: what failed, with the selector
quoted; why; the nearest matches (at most five); what to do.  Classes take the parts and
build the text, so that it reads the same wherever the error is raised.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = [
    "AmbiguousSiteError",
    "AmbiguousTargetError",
    "CaptureError",
    "EagerSiteError",
    "ElementError",
    "FxCaptureError",
    "GraphError",
    "NeverCalledError",
    "RecordNameError",
    "SelectionError",
    "SpecError",
    "SpecTypeError",
    "TargetError",
    "TargetNotFoundError",
    "TraceError",
    "UnreachableValueError",
    "UnsupportedOutputError",
    "VerificationError",
    "install_extra",
    "nearest",
]

_MAX_NEAREST = 5
_CLOSE = 0.4  # of difflib's ratio, which is 1 for equal texts


class FxCaptureError(Exception):
    """Base of every error of this package.

    Args:
        what: What failed, with the offending value quoted.
        why: The reason, if it is not obvious from ``what``.
        nearest: Candidates close to the offending value; at most five are shown.
        remedy: What the user can do about it.
    """

    def __init__(
        self,
        what: str,
        *,
        why: str = "",
        nearest: Sequence[str] = (),
        remedy: str = "",
    ) -> None:
        self.what = what
        self.why = why
        self.nearest = tuple(nearest)[:_MAX_NEAREST]
        self.remedy = remedy
        lines = [what]
        if why:
            lines.append(f"  why: {why}")
        if self.nearest:
            lines.append("  nearest matches: " + ", ".join(self.nearest))
        if remedy:
            lines.append(f"  what to do: {remedy}")
        self._text = "\n".join(lines)
        super().__init__(self._text)

    def __str__(self) -> str:
        # Not from ``args``: Dynamo appends advice of its own to those.
        return self._text

    def __reduce__(self) -> tuple[Any, ...]:
        # The text is built from keyword arguments, which the default protocol drops.
        return _rebuild, (type(self), self.what, self.why, self.nearest, self.remedy)


def _rebuild(
    cls: type[FxCaptureError],
    what: str,
    why: str,
    nearest: tuple[str, ...],
    remedy: str,
) -> FxCaptureError:
    return cls(what, why=why, nearest=nearest, remedy=remedy)


class SpecError(FxCaptureError, ValueError):
    """A spec, tap or selector is malformed."""


class SpecTypeError(SpecError, TypeError):
    """A field of a spec or tap has the wrong type."""


class RecordNameError(SpecError):
    """Two record names of one spec collide."""


class TargetError(FxCaptureError, LookupError):
    """A spec does not fit the model it is applied to."""


class TargetNotFoundError(TargetError):
    """A target matches no module of the model."""


class AmbiguousTargetError(TargetError):
    """A class-name string names several unrelated classes of the model."""


class NeverCalledError(TargetError):
    """A matched module was not called by the run."""


class SelectionError(TargetError, IndexError):
    """A selected position does not exist."""


class ElementError(TargetError):
    """An output (or input) does not have the requested element."""


class CaptureError(FxCaptureError, RuntimeError):
    """A capture cannot be carried out as asked."""


class TraceError(CaptureError):
    """The model cannot be traced as one graph."""


class UnreachableValueError(CaptureError):
    """A value is computed inside a sub-graph that it cannot leave."""


class AmbiguousSiteError(CaptureError):
    """A graph made elsewhere does not determine which value a module returned."""


class UnsupportedOutputError(CaptureError):
    """A captured output holds an object that a graph cannot return."""


class EagerSiteError(CaptureError):
    """A site ran outside every graph and ``on_eager="error"`` was given."""


class VerificationError(CaptureError):
    """Records differ from the eager reference."""


class GraphError(FxCaptureError, RuntimeError):
    """A pass broke an invariant of the graph; please report it as a bug."""


#: What the extras of pyproject.toml add, for who has the package from elsewhere than an
#: index that could resolve them.
_EXTRAS = {
    "transformers": "'transformers>=5.23,<5.24'",
    "cli": "'typer>=0.16' 'rich>=14' 'pyyaml>=6'",
    "onnx": "'onnx>=1.17' 'onnxscript>=0.5' 'onnxruntime>=1.22'",
}


def install_extra(name: str) -> str:
    """The command that installs what an extra adds, and the extra's name."""
    return f"pip install {_EXTRAS[name]} (what pip install 'fxcapture[{name}]' adds)"


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """The candidates closest to ``name``, best first, at most five.

    Equally close ones stand in natural order (``layers.2`` before ``layers.10``).
    """
    pool = list(dict.fromkeys(candidates))
    matcher = difflib.SequenceMatcher()
    matcher.set_seq2(name)
    close = []
    for candidate in pool:
        matcher.set_seq1(candidate)
        # Upper bounds first: they are cheap, and most candidates end there.
        if matcher.real_quick_ratio() >= _CLOSE and matcher.quick_ratio() >= _CLOSE:
            close.append((-matcher.ratio(), _natural(candidate), candidate))
    found = [c for score, _, c in sorted(close) if -score >= _CLOSE][:_MAX_NEAREST]
    lowered = name.lower()
    found += [c for c in pool if lowered and lowered in c.lower() and c not in found]
    return found[:_MAX_NEAREST]


def _natural(text: str) -> list[tuple[int, int, str]]:
    """A sort key by which numbers in a text count as numbers."""
    parts = re.split(r"(\d+)", text)
    return [(1, int(p), "") if p.isdigit() else (0, 0, p) for p in parts]
