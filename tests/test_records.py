"""Records go anywhere: to another device or dtype, into a copy, to disk and back."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import pickle
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fxcapture as fxc
from fxcapture import Tap
from fxcapture.errors import CaptureError
from fxcapture.plan.tensor_file import read_tensors, write_tensors
from tests.models import encoder, ids

SPEC = {
    "hidden": Tap("layers.*", initial=True, select=[0, -1]),
    "same": Tap("layers.1"),
    "half": Tap("layers.*", dtype=torch.bfloat16),
}


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor | None


@dataclasses.dataclass
class Table:
    part: torch.Tensor
    count: int


class Containers(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        pair = Pair(x * 2, None)
        return {"pair": pair, "table": Table(x + 1, x.shape[0]), "deep": [(x * 3,)]}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Containers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)["pair"].left


def recorded(spec: Any = SPEC, *, pieces: bool = False, grad: bool = False) -> Any:
    made = fxc.compile(encoder(2), spec, backend="eager")
    if pieces:
        made._fxc_parts()[2].break_reason = "asked for by the test"
    with torch.set_grad_enabled(grad):
        return made(ids()).records


def assert_same(left: Any, right: Any) -> None:
    assert list(left) == list(right)
    for name in left:
        assert left.paths(name) == right.paths(name)
        assert len(left[name]) == len(right[name])
        for a, b in zip(left[name], right[name], strict=True):
            assert (a is None) == (b is None)
            assert a is None or (a.dtype == b.dtype and torch.equal(a, b))


@pytest.mark.parametrize("pieces", [False, True])
def test_two_records_of_one_value_share_no_memory_when_handed_out(pieces: bool) -> None:
    records = recorded(pieces=pieces)

    assert torch.equal(records["hidden"][-1], records["same"][0])
    places = [t.untyped_storage().data_ptr() for t in records.as_dict().values()]
    assert len(set(places)) == len(places) == 5
    assert records["same"][0] is records["same"][0]


def test_the_second_is_copied_only_when_somebody_looks() -> None:
    records = recorded()

    assert records._values["same"][0] is records._values["hidden"][-1]


def test_what_requires_grad_stays_the_tensor_that_the_model_used() -> None:
    records = recorded(grad=True, pieces=True)

    assert records["same"][0] is records["hidden"][-1]


def test_a_plain_writer_of_safetensors_takes_them(tmp_path: Path) -> None:
    records = recorded()
    save_file(records.as_dict(), tmp_path / "a.safetensors")
    back = load_file(tmp_path / "a.safetensors")

    assert back.keys() == {"hidden/0", "hidden/2", "same/0", "half/0", "half/1"}
    assert torch.equal(back["same/0"], records["hidden"][2])


@pytest.mark.parametrize("grad", [False, True])
def test_torch_saves_and_safely_loads_them(grad: bool, tmp_path: Path) -> None:
    records = recorded(grad=grad)
    torch.save({"r": records}, tmp_path / "r.pt")

    assert_same(torch.load(tmp_path / "r.pt")["r"], records)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
def test_copies_are_equal(copied: Any, grad: bool) -> None:
    records = recorded(grad=grad)

    assert_same(copied(records), records)


def test_a_deep_copy_shares_nothing_and_knows_what_was_selected() -> None:
    records = recorded(grad=True)
    made = copy.deepcopy(records)
    with torch.no_grad():
        made["hidden"][0].zero_()

    assert made["hidden"][0].is_leaf
    assert records["hidden"][0].any()
    assert repr(made) == repr(records)


def test_they_move_and_are_cast() -> None:
    records = fxc.Records({"a": (torch.ones(2), torch.tensor([1]), None)}, {"a": ()})
    moved = records.to(torch.float64)

    assert [t.dtype for t in moved["a"][:2]] == [torch.float64, torch.int64]
    assert records.to("meta", torch.float16)["a"][1].device.type == "meta"
    assert moved["a"][2] is None
    assert records.cpu()["a"][0] is records["a"][0]


def test_they_become_arrays() -> None:
    records = recorded(grad=True)
    arrays = records.to(torch.float32).numpy()

    assert arrays["hidden"][1] is None
    assert arrays["hidden"][0].shape == (2, 5, 8)
    with pytest.raises(CaptureError, match=r"(?s)bfloat16.*to\(torch.float32\)"):
        records.numpy()


def test_containers_keep_their_structure_everywhere() -> None:
    made = fxc.compile(Holder(), {"c": "inner"}, backend="eager")
    records = made(torch.ones(2, 3)).records

    assert records.as_dict().keys() == {"c/0/0", "c/0/1", "c/0/2"}
    assert records.to(torch.float64)["c"][0]["pair"].left.dtype == torch.float64
    assert records.numpy()["c"][0]["table"].count == 2
    assert copy.deepcopy(records)["c"][0]["deep"][0][0].sum() == 18


# -- the file --------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("grad", [False, True])
def test_a_file_gives_back_what_was_saved(
    pieces: bool, grad: bool, tmp_path: Path
) -> None:
    records = recorded(pieces=pieces, grad=grad)
    records.save(tmp_path / "r.safetensors")
    back = fxc.load_records(tmp_path / "r.safetensors")

    assert_same(back, records)
    assert repr(back) == repr(records)
    assert [p.name for p in tmp_path.iterdir()] == ["r.safetensors"]
    places = [t.untyped_storage().data_ptr() for t in back.as_dict().values()]
    assert len(set(places)) == len(places)


def test_two_records_of_one_tensor_are_written_once(tmp_path: Path) -> None:
    records = recorded()
    records.save(tmp_path / "r.safetensors")

    assert "same/0" not in load_file(tmp_path / "r.safetensors")
    records["same"]
    assert len(load_file(tmp_path / "r.safetensors")) == 4


def test_a_file_keeps_structures(tmp_path: Path) -> None:
    made = fxc.compile(Holder(), {"c": "inner"}, backend="eager")
    made(torch.ones(2, 3)).records.save(tmp_path / "r")
    [value] = fxc.load_records(tmp_path / "r")["c"]

    assert type(value["pair"]).__name__ == "Pair"
    assert value["pair"].right is None
    assert value["table"].count == 2
    assert torch.equal(value["deep"][0][0], torch.full((2, 3), 3.0))


def test_records_made_by_hand_can_be_saved(tmp_path: Path) -> None:
    hand = fxc.Records({"a": (torch.ones(2)[1:], None, torch.empty(0, 3))}, {"a": ()})
    hand.save(tmp_path / "r")

    assert_same(fxc.load_records(tmp_path / "r"), hand)


def test_views_are_written_as_what_they_show(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    views = (base, base.T, base[1:], torch.tensor(1 + 2j).conj(), base.expand(2, 2, 3))
    fxc.Records({"a": views}, {"a": ()}).save(tmp_path / "r")

    assert_same(fxc.load_records(tmp_path / "r"), fxc.Records({"a": views}, {"a": ()}))


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.complex64, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
]  # fmt: skip


def test_safetensors_and_this_package_read_each_others_files(tmp_path: Path) -> None:
    tensors = {str(d): torch.ones(3, 2).to(d) for d in DTYPES}
    tensors |= {"none": torch.empty(0, 7), "one": torch.tensor(2.0)}
    write_tensors(tmp_path / "ours", tensors, {"k": "v"})
    save_file(tensors, tmp_path / "theirs", {"k": "v"})

    with safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"k": "v"}
    found, metadata = read_tensors(tmp_path / "theirs")
    assert metadata == {"k": "v"}
    for made in (load_file(tmp_path / "ours"), found):
        assert made.keys() == tensors.keys()
        for name, value in tensors.items():
            assert (made[name].dtype, made[name].shape) == (value.dtype, value.shape)
            assert torch.equal(
                made[name].to(torch.complex64), value.to(torch.complex64)
            )


@pytest.mark.parametrize(
    ("tensor", "text"),
    [
        (torch.eye(2).to_sparse(), "this layout"),
        (torch.ones(2, dtype=torch.complex128), "complex128"),
    ],
)
def test_what_the_format_lacks_is_said(
    tensor: torch.Tensor, text: str, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=f"(?s)'a/0' cannot be stored.*{text}"):
        fxc.Records({"a": (tensor,)}, {"a": ()}).save(tmp_path / "r")

    assert list(tmp_path.iterdir()) == []


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    one = torch.ones(1)
    records = fxc.Records({"a": ((one, one + 1),), "a/0": (None, one)}, {})

    with pytest.raises(CaptureError, match="two tensors would have the name 'a/0/1'"):
        records.as_dict()
    with pytest.raises(CaptureError, match="'a/0/1'"):
        records.save(tmp_path / "r")


def test_a_file_of_other_tensors_holds_no_records(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "w")

    with pytest.raises(CaptureError, match=r"(?s)holds no records.*safetensors"):
        fxc.load_records(tmp_path / "w")


def with_header(path: Path, header: Any, data: bytes = b"\0" * 8) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: str = "F32") -> Any:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "text"),
    [
        ([], "not an object"),
        ({"a": 1}, "field 'a' is 1"),
        ({"a": entry(dtype="F3")}, "'a.dtype'"),
        ({"a": entry(shape=[-2])}, "'a.shape'"),
        ({"a": entry(shape=[True])}, "'a.shape'"),
        ({"a": entry(shape=[2**62, 2**62, 0], offsets=[0, 0])}, "'a.shape'"),
        ({"a": entry(offsets=[0, 4])}, "'a.data_offsets'"),
        ({"a": entry(offsets=[-8, 0])}, "'a.data_offsets'"),
        ({"a": entry(offsets=[8, 16])}, "starts at byte 8"),
        ({"a": entry(), "b": entry()}, "starts at byte 0"),
        ({"a": entry(shape=[1], offsets=[0, 4])}, "8 bytes of data, not 4"),
        ({"a": entry(shape=[2**40], offsets=[0, 2**42])}, "8 bytes of data, not"),
        ({"a": entry(), "__metadata__": {"k": 1}}, "expected a string"),
        ({"a": entry(), "__metadata__": {"fxcapture.records": "{}"}}, "'format'"),
    ],
)
def test_a_damaged_header_is_one_error_of_ours(
    header: Any, text: str, tmp_path: Path
) -> None:
    with pytest.raises(CaptureError, match=text):
        fxc.load_records(with_header(tmp_path / "r", header))


def change_document(path: Path, change: Any) -> None:
    tensors, metadata = read_tensors(path)
    document = json.loads(metadata["fxcapture.records"])
    change(document["records"][0])
    write_tensors(path, tensors, {"fxcapture.records": json.dumps(document)})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda r: r.update(name=3), "'records.0..name'"),
        (lambda r: r.update(more=3), "unknown field"),
        (lambda r: r.update(paths=["a"]), "one path for each position"),
        (lambda r: r["positions"][0].update(tensors=["no"]), "no tensor 'no'"),
        (lambda r: r["positions"][0].update(tensors=[]), "more leaves than given"),
        (lambda r: r["positions"][0].update(structure={"kind": "opaque"}), "no such"),
        (lambda r: r["positions"][0].update(input=1), "true or false"),
    ],
)
def test_a_damaged_document_is_one_error_of_ours(
    change: Any, text: str, tmp_path: Path
) -> None:
    recorded().save(tmp_path / "r")
    change_document(tmp_path / "r", change)

    with pytest.raises(CaptureError, match=text):
        fxc.load_records(tmp_path / "r")


def test_bytes_that_changed_at_random_are_an_error_of_ours_or_other_values(
    tmp_path: Path,
) -> None:
    recorded().save(tmp_path / "r")
    whole, chance = (tmp_path / "r").read_bytes(), random.Random(0)
    imported = set(sys.modules)
    for _ in range(200):
        data = bytearray(whole[: chance.choice([len(whole), chance.randrange(3000)])])
        for _ in range(chance.randrange(4)):
            if data:
                data[chance.randrange(min(len(data), 2500))] = chance.randrange(256)
        (tmp_path / "d").write_bytes(data)
        try:
            fxc.load_records(tmp_path / "d")
        except CaptureError:
            continue

    assert set(sys.modules) == imported


def test_a_class_that_is_not_loaded_is_not_imported(tmp_path: Path) -> None:
    made = fxc.compile(Holder(), {"c": "inner"}, backend="eager")
    made(torch.ones(2, 3)).records.save(tmp_path / "r")
    change_document(
        tmp_path / "r",
        lambda r: r["positions"][0]["structure"]["children"][0].update(
            {"class": "antigravity:Pair"}
        ),
    )
    [value] = fxc.load_records(tmp_path / "r")["c"]

    assert "antigravity" not in sys.modules
    assert value["pair"].left.shape == (2, 3)


def test_a_safe_load_makes_no_other_object_of_ours() -> None:
    buffer = io.BytesIO()
    torch.save(fxc.CaptureSpec({"a": "b"}), buffer)
    buffer.seek(0)

    with pytest.raises(pickle.UnpicklingError, match="CaptureSpec"):
        torch.load(buffer)
