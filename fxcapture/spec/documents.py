"""Stored documents, read as what they are: text from anywhere.

Terms
    document: JSON that this package wrote, or that somebody made look so.
    place: where in it a value stands, such as ``taps.hidden.select``.

Invariants
    Reading looks at every field's type before it is used.  A document is bounded in
    size and depth, and nothing that it says is imported or called.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, final, overload

from fxcapture.errors import FxCaptureError, nearest

__all__ = ["MAX_CHARACTERS", "MAX_DEPTH", "Reader", "read_document", "shorten"]

#: The manifest of 1,000 sites has half a million characters.
MAX_CHARACTERS = 64 * 2**20
#: Containers inside each other; a recorded structure is at most 24 deep.
MAX_DEPTH = 64


def read_document(
    text: str | bytes, what: str, error: type[FxCaptureError], remedy: str
) -> Reader:
    """The object that a JSON document holds.

    Args:
        text: The document; bytes in UTF-8, UTF-16 or UTF-32.
        what: What fails where it is none, as a sentence: "the text is not a spec".
        error: The class of that error.
        remedy: What to do about it.

    Raises:
        FxCaptureError: of class ``error``: the text is no JSON object, is too long,
            too deep, or gives one name twice.
    """
    reader = Reader({}, "", what, error, remedy)
    if not isinstance(text, (str, bytes, bytearray)):
        reader.fail(f"it is of type {type(text).__name__}; expected text")
    if len(text) > MAX_CHARACTERS:
        reader.fail(f"it has {len(text):,} characters; at most {MAX_CHARACTERS:,}")
    try:
        data = json.loads(text, object_pairs_hook=lambda p: _once(p, reader))
    except RecursionError as cause:
        reader.fail(f"its values are nested more than {MAX_DEPTH} deep", cause)
    except ValueError as cause:  # JSON, encoding, an integer of too many digits
        if isinstance(cause, FxCaptureError):
            raise
        reader.fail(f"{type(cause).__name__}: {cause}", cause)
    _check_depth(data, reader)
    if not isinstance(data, dict):
        reader.fail(f"it holds a value of type {type(data).__name__}, not an object")
    return Reader(data, "", what, error, remedy)


def _once(pairs: Sequence[tuple[str, Any]], reader: Reader) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(n for n in names if names.count(n) > 1)
        reader.fail(f"an object has the field {shorten(twice)} twice")
    return made


def _check_depth(data: Any, reader: Reader) -> None:
    level = [data]
    for _ in range(MAX_DEPTH):
        level = [
            part
            for value in level
            if isinstance(value, (dict, list))
            for part in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    reader.fail(f"its values are nested more than {MAX_DEPTH} deep")


def shorten(value: Any) -> str:
    """A value for an error's text, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@final
class Reader:
    """An object of a document, read field by field.

    Args:
        data: The object.
        place: Where it stands in the document; empty for the document itself.
        what: As for :func:`read_document`.
        error: As for :func:`read_document`.
        remedy: As for :func:`read_document`.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        place: str,
        what: str,
        error: type[FxCaptureError],
        remedy: str,
    ) -> None:
        self.data = data
        self.place = place
        self._about = what, error, remedy

    def fail(self, why: str, cause: BaseException | None = None) -> NoReturn:
        """Raise the document's error."""
        what, error, remedy = self._about
        raise error(what, why=why, remedy=remedy) from cause

    def at(self, name: object) -> str:
        """The place of a field, or of an element."""
        return f"{self.place}.{name}" if self.place else str(name)

    def wrong(self, name: object, value: Any, expected: str) -> NoReturn:
        """Raise for a field that holds something else than was expected."""
        self.fail(f"field {self.at(name)!r} is {shorten(value)}; expected {expected}")

    def only(self, *names: str) -> None:
        """Raise where there is a field of another name."""
        for name in self.data:
            if name not in names:
                near = nearest(name, names)
                self.fail(
                    f"unknown field {shorten(self.at(name))}"
                    + (f"; did you mean {near[0]!r}?" if near else "")
                )

    @overload
    def get(self, name: str, kind: type[str]) -> str: ...
    @overload
    def get(self, name: str, kind: type[bool]) -> bool: ...
    @overload
    def get(self, name: str, kind: type[int]) -> int: ...
    @overload
    def get(self, name: str, kind: type[list[Any]]) -> list[Any]: ...
    @overload
    def get(self, name: str, kind: type[dict[str, Any]]) -> dict[str, Any]: ...
    def get(self, name: str, kind: Any) -> Any:
        """The value of a field that must be there, of this type exactly."""
        if name not in self.data:
            self.fail(f"field {self.at(name)!r} is missing; expected {_KINDS[kind]}")
        return self.check(name, self.data[name], kind)

    def check(self, name: object, value: Any, kind: Any) -> Any:
        """``value``, which stands at ``name``, if it is of this type exactly."""
        if type(value) is not kind:  # a bool is an int to isinstance
            self.wrong(name, value, _KINDS[kind])
        return value

    def each(self, name: str) -> Iterator[Reader]:
        """The objects of a field that holds a list of them."""
        for i, value in enumerate(self.get(name, list)):
            yield self.inside(f"{name}[{i}]", value)

    def inside(self, name: object, value: Any) -> Reader:
        """The object that stands at ``name``."""
        return Reader(self.check(name, value, dict), self.at(name), *self._about)


_KINDS = {
    str: "a string",
    bool: "true or false",
    int: "an integer",
    list: "a list",
    dict: "an object",
}
