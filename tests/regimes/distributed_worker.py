"""One of two processes of test_children: DDP and FSDP2 over gloo on the loopback."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxcapture as fxc
from tests.regimes.blocks import Stack


def main(rank: int, port: int, kind: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2
    )
    torch.manual_seed(0)
    model, reference = Stack(), Stack()
    reference.load_state_dict(model.state_dict())
    if kind == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    spec = {"l": fxc.Tap("layers.*", initial=True), "b": "Block"}
    captured = fxc.compile(model, spec, backend="aot_eager")
    for step in range(2):
        x = torch.randn(2, 8, generator=torch.Generator().manual_seed(rank + 2 * step))
        output, records = captured(x)
        states = reference.hidden_states(x)
        torch.testing.assert_close(records["l"][0], x)
        for got, state in zip(records["l"][1:], states, strict=True):
            torch.testing.assert_close(got, state)
        assert len(records["b"]) == 3
    (output.sum() + records["l"][2].sum()).backward()
    assert all(p.grad is not None for p in model.parameters())
    dist.barrier()
    dist.destroy_process_group()
    print("worker done", rank, kind)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
