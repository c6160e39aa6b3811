"""What a user asks for: taps under record names.

Invariants
    A spec holds no module, tensor or graph node.  It is checked and normalised when it
    is made, and never again; it is frozen and hashable, so compiled programs can be
    cached by it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, final

from fxcapture.errors import RecordNameError, SpecError, SpecTypeError
from fxcapture.spec.documents import read_document, shorten
from fxcapture.spec.stored import Trust, trusting
from fxcapture.spec.tap import Tap

__all__ = ["CaptureSpec"]

_FORMAT = 1
_REMEDY = "write it with CaptureSpec.to_json"


@final
class CaptureSpec(Mapping[str, Tap]):
    """Taps under record names; frozen, hashable, and to and from JSON.

    Example::

        CaptureSpec({
            "hidden_states": Tap("layers.*", output=0, select=[0, -2], initial=True),
            "attentions": AttentionWeights(LlamaAttention),
        })

    Args:
        taps: A mapping, or pairs, of record name to :class:`Tap`.  A target alone (a
            path, glob or class) stands for ``Tap(target)``.

    Raises:
        RecordNameError: two names are equal, or differ only in characters that an
            exported program's output names cannot have.
        SpecTypeError: a name is not a string, or a value is not a tap.
    """

    __slots__ = ("_hash", "_taps")

    def __init__(
        self, taps: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()
    ) -> None:
        if isinstance(taps, (str, Tap)) or callable(taps):
            raise _not_named(taps)
        pairs = taps.items() if isinstance(taps, Mapping) else _pairs(taps)
        made: dict[str, Tap] = {}
        plain: dict[str, str] = {}
        for name, tap in pairs:
            if not isinstance(name, str) or not name.strip():
                raise SpecTypeError(
                    f"record name {name!r} is not a name",
                    remedy="use a non-empty string",
                )
            key = re.sub(r"\W", "_", name)
            if key in plain:
                raise RecordNameError(
                    f"record names {plain[key]!r} and {name!r} collide",
                    why="they are equal"
                    if plain[key] == name
                    else f"an exported program would call both {key!r}",
                    remedy="give one of them another name",
                )
            plain[key] = name
            made[name] = tap if isinstance(tap, Tap) else Tap(tap)
        self._taps = made
        self._hash = hash(tuple(made.items()))

    def __getitem__(self, name: str) -> Tap:
        return self._taps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._taps)

    def __len__(self) -> int:
        return len(self._taps)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CaptureSpec):
            return NotImplemented
        return list(self._taps.items()) == list(other._taps.items())

    def __repr__(self) -> str:
        inner = ", ".join(f"{n!r}: {t!r}" for n, t in self._taps.items())
        return f"CaptureSpec({{{inner}}})"

    def __reduce__(self) -> tuple[Any, ...]:
        return CaptureSpec, (tuple(self._taps.items()),)

    def to_json(self) -> str:
        """The spec as a JSON document.

        Raises:
            SpecError: a class, predicate or reduction cannot be imported by name.
        """
        taps = {name: tap.to_json() for name, tap in self._taps.items()}
        return json.dumps({"format": _FORMAT, "taps": taps}, indent=2)

    @staticmethod
    def from_json(text: str, trust: Iterable[str] | Trust = ()) -> CaptureSpec:
        """The spec that :meth:`to_json` wrote; nothing is imported unless trusted.

        A class that is not trusted is known by its name, and found among the classes
        of a model's own modules.  A reduction that is an object needs trust.

        Args:
            text: The document.
            trust: Modules whose objects the document may name, such as
                ``["mypackage"]``: a name stands for the module and all below it.

        Raises:
            SpecError: the text is not such a document, or it names an object that has
                to be imported and is not trusted.
        """
        reader = read_document(
            text, "the text is not a stored spec", SpecError, _REMEDY
        )
        if "format" not in reader.data:
            reader.get("format", int)
        found = reader.data["format"]
        if type(found) is not int or found != _FORMAT:
            raise SpecError(
                f"spec format {shorten(found)} is not known",
                remedy=f"this version reads format {_FORMAT}",
            )
        reader.only("format", "taps")
        trusted = trusting(trust)
        pairs = []
        for name, stored in reader.get("taps", dict).items():
            try:
                pairs.append((name, Tap.from_json(stored, trusted)))
            except SpecError as error:
                raise type(error)(
                    f"record {shorten(name)}: {error.what}",
                    why=error.why,
                    nearest=error.nearest,
                    remedy=error.remedy,
                ) from error
        return CaptureSpec(pairs)


def _not_named(taps: Any) -> SpecTypeError:
    return SpecTypeError(
        f"a spec cannot be made of {taps!r}",
        remedy='name the record: CaptureSpec({"hidden_states": Tap(...)})',
    )


def _pairs(taps: Any) -> list[tuple[Any, Any]]:
    """Pairs of name and tap; a list of targets is what people pass in their place."""
    try:
        pairs = list(taps)
    except TypeError:
        raise _not_named(taps) from None
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise _not_named(taps)
    return pairs
