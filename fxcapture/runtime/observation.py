"""One module call of a broken run, and the values it gave."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import final

import torch

from fxcapture import _torch
from fxcapture.plan.plan import Leaf
from fxcapture.plan.sites import Site
from fxcapture.trace.mark import RESULT

__all__ = ["Observation"]


@final
@dataclasses.dataclass(slots=True)
class Observation:
    """One module call of a broken run.

    Attributes:
        site: The site; its integer leaves, and the shapes of one that ran outside of
            graphs, stand here.
        tensors: What it gave; emptied when no record can select it any more.
        sizes: Integer leaves, by the kind of their mark.
        types: Shapes and dtypes of the result's tensors; ``None``: as the site says.
        claims: Number of records that may still select it.
        own: The module's own tensors that may stand for the copies, each with the
            version it had.
    """

    site: Site
    tensors: Mapping[Leaf, torch.Tensor]
    sizes: Mapping[str, Sequence[int]]
    types: Sequence[tuple[torch.Size, torch.dtype]] | None = None
    claims: int = 0
    own: dict[Leaf, tuple[torch.Tensor, int]] = dataclasses.field(default_factory=dict)

    def value(self, leaf: Leaf) -> torch.Tensor:
        """A tensor of it: the module's own, if nothing has written to it.

        Gradients with respect to a record can then be taken, as with a forward hook.
        """
        if leaf in self.own:
            tensor, version = self.own[leaf]
            if _torch.version_of(tensor) == version:
                return tensor
        return self.tensors[leaf]

    def size(self, kind: str, index: int) -> int:
        """An integer leaf."""
        return self.sizes[kind][index]

    def release(self) -> None:
        """Give up one claim, and the values with the last."""
        self.claims -= 1
        if self.claims <= 0:
            self.drop()

    def drop(self) -> None:
        """Give up the values."""
        self.tensors, self.own = {}, {}

    def described(self) -> Site:
        """The site with this call's sizes and shapes."""
        if self.types is None:
            return self.site
        return dataclasses.replace(
            self.site,
            sizes=tuple(self.sizes.get(RESULT, ())),
            shapes=tuple(tuple(shape) for shape, _ in self.types),
            dtypes=tuple(str(d).removeprefix("torch.") for _, d in self.types),
        )
