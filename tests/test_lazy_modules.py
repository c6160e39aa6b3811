"""Modules that learn their shapes from the first call."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import fxcapture as fxc


@pytest.mark.parametrize("target", ["0", "1", "*"])
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_lazy_module_is_initialised_by_the_first_captured_call(
    target: str, fullgraph: bool
) -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    counter = CompileCounter()
    captured = fxc.compile(
        model, {"h": fxc.Tap(target)}, backend=counter, fullgraph=fullgraph
    )
    x = torch.randn(2, 3)
    for _ in range(3):
        output, records = captured(x)
        hidden = model[0](x)
        want = {"0": hidden, "1": torch.relu(hidden)}.get(target, hidden)
        assert torch.equal(records["h"][0], want)
        assert torch.equal(output, torch.relu(hidden))
    assert counter.frame_count == 1
    assert all("forward" not in module.__dict__ for module in model.modules())
