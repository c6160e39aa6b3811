"""New lengths, growing caches, decode loops: as many graphs as without capture."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import fxcapture as fxc
from tests.regimes.blocks import Stack

TAP = fxc.Tap("layers.*", select=[0, -1], initial=True)


def num_graphs(call, inputs):
    torch._dynamo.reset()
    counters.clear()
    for x in inputs:
        call(x)
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("regional", [False, True])
def test_new_lengths_cost_as_many_graphs_as_without_capture(dynamic, regional):
    lengths = [3, 5, 9, 4, 7]
    inputs = [torch.randn(2, n, 8) for n in lengths]
    plain = Stack().eval()
    if regional:
        for layer in plain.layers:
            layer.compile(backend="eager", dynamic=dynamic)
        call = plain
    else:
        call = torch.compile(plain, backend="eager", dynamic=dynamic)
    with torch.no_grad():
        expected = num_graphs(call, inputs)
    model = Stack().eval()
    captured = fxc.compile(
        model,
        {"l": TAP},
        backend="eager",
        dynamic=dynamic,
        regions="layers.*" if regional else None,
    )

    def check(x):
        records = captured(x).records
        assert torch.equal(records["l"][0], x)
        assert torch.equal(records["l"][3], model.hidden_states(x)[2])

    with torch.no_grad():
        assert num_graphs(check, inputs) == expected


def test_a_marked_dimension_is_dynamic_from_the_first_call():
    model = Stack().eval()
    captured = fxc.compile(model, {"l": TAP}, backend="aot_eager", fullgraph=True)
    for n in (3, 6, 11):
        x = torch.randn(2, n, 8)
        torch._dynamo.mark_dynamic(x, 1)
        assert captured(x).records["l"][3].shape == (2, n, 8)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_new_selection_of_a_dynamic_graph_needs_no_new_trace(backend):
    model = Stack(depth=4).eval()
    captured = fxc.compile(
        model, {"l": "layers.*"}, backend=backend, fullgraph=True, dynamic=True
    )
    with torch.no_grad():
        captured(torch.randn(2, 3, 8))
        for i, select in enumerate([0, [1, 2], -1, slice(None, 2), 0, [3]]):
            x = torch.randn(2, 4 + i, 8)
            records = captured(x, select={"l": select}).records
            states = model.hidden_states(x)
            for got, state in zip(records["l"], states, strict=True):
                assert got is None or torch.allclose(got, state, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1


def tiny_llama():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


SPEC = {"h": fxc.Tap("model.layers.*", select=[0, -1], initial=True)}


def test_a_growing_cache_costs_as_many_graphs_as_without_capture():
    model = tiny_llama()

    def decode(call):
        torch._dynamo.reset()
        counters.clear()
        cache, states = None, []
        for step in range(6):
            ids = torch.full((1, 5 if step == 0 else 1), step)
            output, state = call(ids, cache)
            cache = output.past_key_values
            states.append(state)
        return counters["stats"]["unique_graphs"], states

    plain = torch.compile(model, backend="eager")
    captured = fxc.compile(model, SPEC, backend="eager")

    def with_capture(ids, cache):
        output, records = captured(ids, past_key_values=cache, use_cache=True)
        return output, records["h"][2]

    def without(ids, cache):
        return plain(ids, past_key_values=cache, use_cache=True), None

    def reference(ids, cache):
        output = model(
            ids, past_key_values=cache, use_cache=True, output_hidden_states=True
        )
        return output, None

    with torch.no_grad():
        expected, _ = decode(without)
        got, states = decode(with_capture)
        layer = model.model.layers[-1]
        seen = []
        handle = layer.register_forward_hook(lambda m, a, o: seen.append(o.clone()))
        decode(reference)
        handle.remove()
    assert got == expected
    for state, eager in zip(states, seen, strict=True):
        torch.testing.assert_close(state, eager)


def test_fifty_steps_with_a_static_cache_are_one_decode_graph():
    model = tiny_llama()
    cache = StaticCache(config=model.config, max_cache_len=64)
    captured = fxc.compile(model, SPEC, backend="eager", fullgraph=True)
    with torch.no_grad():
        captured(torch.arange(5)[None], past_key_values=cache)
        after_prefill = counters["stats"]["unique_graphs"]
        for step in range(50):
            ids = torch.tensor([[step % 50]])
            records = captured(ids, past_key_values=cache).records
            assert records["h"][2].shape == (1, 1, 32)
    assert counters["stats"]["unique_graphs"] - after_prefill <= 2
