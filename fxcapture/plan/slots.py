"""What a record takes from one site.

Terms
    entry: what a call received, which a record may hold as its position 0.
    element: of a call's result, the part that one entry of the record holds.
"""

from __future__ import annotations

from collections.abc import Iterator

from fxcapture.errors import (
    ElementError,
    FxCaptureError,
    UnsupportedOutputError,
)
from fxcapture.plan.match import Match, entry_name, takes_entry
from fxcapture.plan.plan import Leaf, Slot
from fxcapture.plan.sites import Site
from fxcapture.spec.capture_spec import CaptureSpec
from fxcapture.spec.tap import Tap
from fxcapture.trace.mark import ENTRY, RESULT, received, reduced, weights
from fxcapture.trace.signature import NoArgument
from fxcapture.trace.structure import Structure
from fxcapture.trace.structure_text import parse

__all__ = [
    "elements_of",
    "is_attention",
    "is_none",
    "leaves_of",
    "named_leaves_of",
    "recorded_entry",
    "slot_of",
]


class RecordedElementError(ElementError, IndexError):
    """A recorder's index that the module's output does not have."""


Element = int | str | None


def elements_of(tap: Tap, path: str) -> tuple[Element, ...]:
    """The elements that one call of a module gives a record entries of."""
    return (tap.output,) if tap.recorded is None else tap.recorded.of(path)


def slot_of(
    index: int,
    site: Site,
    name: str,
    tap: Tap,
    bound: Match,
    *,
    entry: bool,
    output: Element,
) -> Slot:
    """The value that ``tap`` takes from ``site``: its result, or what it received."""
    kind = RESULT
    if tap.recorded is not None and not entry:
        kind, structure = _recorded(site, name, tap, output)
        what = f"the output of {site.describe()}, {site.result.describe()}"
    elif tap.attention is not None:
        kind = weights(name)
        structure = _weights(site, name, tap.attention.noun, bound)
        what = f"the attention {tap.attention.noun} of {site.describe()}"
    elif entry:
        kind = received(name) if tap.reduce is not None else ENTRY
        which = bound.entries[site.path].index(entry_name(tap))  # type: ignore[arg-type]
        structure = site.arguments.children[which]
        what = f"the input of {site.describe()}"
    else:
        kind = reduced(name) if tap.reduce is not None else RESULT
        what = f"the output of {site.describe()}, {site.result.describe()}"
        structure = site.result.element(output, what)
    _check_storable(structure, site, name, tap, what)
    if tap.reduce is not None and tap.attention is None:
        structure = _reduction(structure, site, name, tap, kind)
    leaves = tuple(
        (
            i,
            Leaf(
                kind=kind,
                index=i,
                detach=tap.detach,
                dtype=tap.dtype,
                device=tap.device,
            ),
        )
        for i in structure.leaves("tensor")
    )
    sizes = tuple(structure.leaves("int"))
    return Slot(site=index, kind=kind, structure=structure, leaves=leaves, sizes=sizes)


def _recorded(
    site: Site, name: str, tap: Tap, output: Element
) -> tuple[str, Structure]:
    """What a declaration takes of a result, as a kind of mark and a structure.

    Raises:
        RecordedElementError: the result is a tuple without such an element.
    """
    found = site.result
    if found.kind == "sequence" and issubclass(found.cls or tuple, tuple):
        length = len(found.children)
        if not isinstance(output, int) or not -length <= output < length:
            raise RecordedElementError(
                f"index={output} of the recorder of {name!r} does not exist",
                why=f"the module returned a tuple of {length} elements",
                remedy="declare OutputRecorder(..., index=) with an element that it "
                "returns",
            )
        found = found.children[output]
    if tap.attention is not None and is_none(found):
        computed = site.value(weights(name))
        children = () if computed is None else parse(computed.structure).children
        if len(children) == 1:
            return weights(name), children[0]
    return RESULT, found


def is_none(structure: Structure) -> bool:
    """Whether a value is ``None``."""
    return structure.kind == "const" and structure.value is None


def _check_storable(
    structure: Structure, site: Site, name: str, tap: Tap, what: str
) -> None:
    found = structure.opaque()
    if found is None:
        return
    where, cls = found
    if cls is NoArgument:
        raise ElementError(
            f"record {name!r}: {site.describe()} was called without the argument "
            f"{entry_name(tap)!r}, as far as can be told",
            why="its forward names no parameters, or has none at this position",
            remedy="name the parameter by the keyword that the caller uses",
        )
    raise UnsupportedOutputError(
        f"record {name!r}: {what} holds a {cls.__name__}"
        + (f" at {where}" if where else ""),
        why="a graph returns tensors, integers and constants only",
        remedy="name a tensor element of the output with output=",
    )


def _reduction(
    element: Structure, site: Site, name: str, tap: Tap, kind: str
) -> Structure:
    """The structure of what a reduction made of an element.

    Raises:
        UnsupportedOutputError: it made nothing that a record can hold.
    """
    value = site.value(kind)
    made = None if value is None else parse(value.structure)
    if not _holds_tensor(element):
        return element if made is None else made  # there was nothing to reduce
    if made is None or made.opaque() or not _holds_tensor(made):
        shown = "nothing" if made is None else made.describe()
        raise UnsupportedOutputError(
            f"record {name!r}: reduce={tap.reduce!r} made {shown} of the value of "
            f"{site.describe()}, which is {element.describe()}",
            why="a reduction has to return a tensor, or a container of tensors",
            remedy="return a tensor from it, or drop reduce=",
        )
    return made


def _holds_tensor(structure: Structure) -> bool:
    return next(structure.leaves("tensor"), None) is not None


def _weights(site: Site, name: str, noun: str, bound: Match) -> Structure:
    """The attention weights, or scores, of the one fused call that a site made.

    Raises:
        UnsupportedOutputError: it made none, or several.
    """
    value = site.value(weights(name))
    number = site.fused_calls
    if value is not None:
        children = parse(value.structure).children
        if len(children) == 1:
            return children[0]
        number = len(children)
    if number == 1:
        return parse("T")
    if number is None:
        why = "the graph was made without watching it"
        remedy = "capture with fxcapture.compile or fxcapture.export"
    elif not number:
        why = (
            "it called neither torch.nn.functional.scaled_dot_product_attention nor "
            "flex_attention nor multi_head_attention_forward: its attention is eager "
            "or a kernel of its own, or runs in another module"
        )
        remedy = "target the attention module itself; where it returns weights, use "
        remedy += "Tap(target, output=1)"
        if site.path in bound.of_transformers:
            remedy = f'load the model with attn_implementation="sdpa" and {remedy}'
    else:
        why = f"it made {number} fused calls"
        remedy = "target the attention modules below it, one call each"
    raise UnsupportedOutputError(
        f"record {name!r}: {site.describe()} has no attention {noun} of its own",
        why=why,
        remedy=remedy,
    )


def leaves_of(spec: CaptureSpec, bound: Match, site: Site) -> tuple[Leaf, ...]:
    """Every leaf that any record may want of a site, selection left aside."""
    return tuple(dict.fromkeys(leaf for _, leaf in named_leaves_of(spec, bound, site)))


def named_leaves_of(
    spec: CaptureSpec, bound: Match, site: Site
) -> Iterator[tuple[str, Leaf]]:
    """Every leaf that any record may want of a site, with the name of that record.

    Needed where one graph is not the whole run, so that positions are not known yet.
    The two parts of a call with forward hooks are two sites here.

    Args:
        spec: The spec.
        bound: The same spec bound to the model's modules.
        site: The site.
    """
    for name in dict.fromkeys(bound.records_of(site.path)):
        tap = spec[name]
        for entry in (False, True):
            if entry and (not takes_entry(tap) or site.hooked):
                continue  # behind hooks stands the result alone
            if entry and not (is_attention(tap) or site.arguments.children):
                continue  # not copied: it cannot be selected any more
            if not entry and (tap.point == "input" or is_attention(tap)):
                continue
            for output in (None,) if entry else elements_of(tap, site.path):
                try:
                    slot = slot_of(
                        0, site, name, tap, bound, entry=entry, output=output
                    )
                except FxCaptureError:
                    # Raised with its text when the run ends, and only if selected.
                    continue
                for _, leaf in slot.leaves:
                    yield name, leaf


def is_attention(tap: Tap) -> bool:
    """Whether a tap takes attention weights and nothing else."""
    return tap.attention is not None and tap.recorded is None


def recorded_entry(site: Site, name: str, tap: Tap, output: Element) -> Structure:
    """What a declaration takes; a tensor where that is an error if it is selected."""
    try:
        return _recorded(site, name, tap, output)[1]
    except RecordedElementError:
        return parse("T")
