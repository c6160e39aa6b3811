"""Models with children of other kinds, and models that libraries have wrapped."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fxcapture as fxc
from tests.regimes.blocks import Stack

HIDDEN = fxc.Tap("**.layers.*", initial=True, select=[0, -2])


@pytest.fixture
def llama():
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=50,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def check(model, spec, *args, **settings):
    captured = fxc.compile(model, spec, backend="aot_eager", **settings)
    for _ in range(2):
        with torch.no_grad():
            checked = fxc.verify(captured, *args, use_cache=False)
        assert set(checked.differences.values()) == {0.0}
        assert checked.output_difference == 0.0
    return captured


IDS = torch.tensor([[1, 2, 3, 4]])


# peft 0.21 asks transformers 5.23 under a name that is deprecated there.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_lora_adapters_are_part_of_what_the_caller_receives(llama):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], r=2, init_lora_weights=False)
    model = get_peft_model(llama, config).eval()
    spec = {"h": HIDDEN, "q": "**.q_proj", "lora": "**.lora_B.default"}
    captured = check(model, spec, IDS, fullgraph=True)

    records = captured(IDS, use_cache=False).records
    assert len(records["q"]) == len(records["lora"]) == 3
    assert records["q"][0].shape != records["lora"][0].shape or not torch.equal(
        records["q"][0], records["lora"][0]
    )


def test_hooks_of_accelerate_stay_and_are_respected(llama):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    for layer in llama.model.layers:
        hook = AlignDevicesHook(io_same_device=True, execution_device="cpu")
        add_hook_to_module(layer, hook)
    own = [layer.__dict__["forward"] for layer in llama.model.layers]
    check(llama, {"h": HIDDEN}, IDS)

    assert [layer.__dict__["forward"] for layer in llama.model.layers] == own


def test_offloaded_weights_are_loaded_for_the_call(llama):
    from accelerate import cpu_offload

    cpu_offload(llama, execution_device="cpu")
    check(llama, {"h": HIDDEN}, IDS)


def test_data_parallel_paths_have_no_prefix(llama):
    captured = check(nn.DataParallel(llama), {"h": HIDDEN}, IDS)
    records = captured(IDS, use_cache=False).records
    assert records.paths("h")[-1] == "model.layers.2"


def test_gradient_checkpointing_of_transformers_trains(llama):
    llama.train().activation_checkpointing_enable()
    spec = {"h": HIDDEN, "mlp": "**.mlp"}
    captured = fxc.compile(llama, spec, backend="aot_eager", fullgraph=True)
    output, records = captured(IDS, use_cache=False)
    (output.logits.sum() + records["h"][2].sum() + records["mlp"][1].sum()).backward()

    assert len(records["mlp"]) == 3
    assert all(p.grad is not None for p in llama.parameters())


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)
        self.gru = nn.GRU(8, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x, **_):
        return self.head(self.gru(self.lstm(x)[0])[0])


def test_recurrent_layers_keep_their_nested_output():
    spec = {
        "all": "lstm",
        "y": fxc.Tap("lstm", output=0),
        "h": fxc.Tap("gru", output=1),
    }
    captured = check(Recurrent().eval(), spec, torch.randn(2, 5, 4))
    y, (hidden, cell) = captured(torch.randn(2, 5, 4)).records["all"][0]
    assert y.shape == (2, 5, 8)
    assert hidden.shape == cell.shape == (1, 2, 8)


def wrapped(child):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.child = nn.Linear(8, 8), child
            self.last = nn.Linear(8, 8)

        def forward(self, x, **_):
            return self.last(self.child(self.first(x)))

    return Model().eval()


def scripted():
    return torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval())


def traced():
    return torch.jit.trace(nn.Linear(8, 8), torch.randn(2, 8))


def quantised():
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    return torch.ao.quantization.quantize_dynamic(module, {nn.Linear})


def parametrised():
    return torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))


@pytest.mark.parametrize("make", [scripted, traced, quantised, parametrised])
def test_children_that_dynamo_cannot_or_need_not_trace(make):
    model = wrapped(make())
    spec = {"child": "child", "rest": ["first", "last"]}
    captured = fxc.compile(model, spec, backend="eager")
    for _ in range(2):
        with torch.no_grad():
            checked = fxc.verify(captured, torch.randn(2, 8))
        assert checked.differences == {"child": 0.0, "rest": 0.0}


def test_a_module_inside_a_scripted_child_is_not_missed_silently():
    captured = fxc.compile(wrapped(scripted()), {"inner": "child.0"}, backend="eager")
    with pytest.raises(fxc.errors.NeverCalledError, match=r"'child\.0'"):
        captured(torch.randn(2, 8))


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_processes(kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = Path(__file__).parents[2]
    worker = Path(__file__).with_name("distributed_worker.py")
    env = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(worker), str(rank), str(port), kind],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
        )
        for rank in range(2)
    ]
    for process in processes:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output
        assert "worker done" in output


def test_a_stack_without_anything_around_it_is_one_graph():
    # What the children above are compared with.
    captured = fxc.compile(Stack(), {"l": "layers.*"}, backend="eager", fullgraph=True)
    captured(torch.randn(2, 8))
    assert len(captured.graphs) == 1
