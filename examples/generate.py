"""A decoder's states while it generates: one vector per layer and new token.

A small Llama with random weights writes tokens greedily; the state of the last position
leaves the graph at each layer, everything else is freed.  With ``dynamic=True`` the
growing sequence costs no compilation per length.
"""

from __future__ import annotations

import torch

import fxcapture as fxc


def make_decoder() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=172, num_hidden_layers=4,
        num_attention_heads=4, vocab_size=256, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def main(backend: str = "inductor", tokens: int = 12) -> torch.Tensor:
    """The states, of shape (new tokens, layers + 1, width)."""
    model = make_decoder()
    last = fxc.Tap("model.layers.*", output=0, initial=True, reduce="last")
    captured = fxc.compile(model, {"h": last}, dynamic=True, backend=backend)
    ids = torch.tensor([[72, 101, 108, 108, 111]])
    states = []
    with torch.no_grad():
        for _ in range(tokens):
            output, records = captured(ids)
            states.append(torch.cat(records["h"]))
            ids = torch.cat([ids, output.logits[:, -1:].argmax(-1)], dim=1)
    found = torch.stack(states)
    print(f"wrote {ids[0, 5:].tolist()}")
    print(f"states of {found.shape[0]} tokens, {found.shape[1]} layers each")
    change = (found[1:, -1] - found[:-1, -1]).norm(dim=-1)
    print("the last layer moves by", " ".join(f"{c:.1f}" for c in change))
    return found


if __name__ == "__main__":
    main()
