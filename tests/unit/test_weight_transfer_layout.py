"""Where each tensor lies on its way, and checksums that notice what happens to it there."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from serve.snapshot_header import SnapshotError
from serve.weight_layout import FEW_TENSORS, Checksums, WeightImage, WeightLayout, checksum
from serve.weight_transfer import pack_named, pack_weights, snapshot_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)
MODELS = st.dictionaries(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), SHAPES),
    min_size=1,
    max_size=6,
)
CPU = torch.device("cpu")


def tensors_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-100, 100, shape, generator=generator).to(dtype) for name, (dtype, shape) in model.items()
    }


def reference_checksum(tensor):
    """The definition, in Python's own whole numbers."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(data + bytes(-len(data) % 8), dtype=np.uint64).tolist()
    return f"{sum(word * (2 * i + 1) for i, word in enumerate(words)) % 2**64:016x}"


@given(MODELS)
def test_an_image_becomes_a_file_that_the_formats_own_reader_takes(model):
    tensors = tensors_of(model)
    layout = WeightLayout((name, t.dtype, tuple(t.shape)) for name, t in tensors.items())
    image = WeightImage(layout, CPU)
    image.fill(tensors.items())
    snapshot = snapshot_of(image, image.checksums("all"))
    read = load(snapshot.tobytes())
    assert read.keys() == tensors.keys()
    assert all(read[name].dtype == t.dtype and torch.equal(read[name], t) for name, t in tensors.items())
    assert np.array_equal(snapshot, pack_weights(tensors, "all"))
    assert np.array_equal(snapshot, pack_named(layout, iter(tensors.items()), "all"))


@given(MODELS, st.integers(1, 200))
def test_chunks_are_whole_tensors_in_order_and_together_everything(model, limit):
    tensors = tensors_of(model)
    layout = WeightLayout.from_wire(json.loads(json.dumps(WeightLayout((n, *m) for n, m in model.items()).to_wire())))
    image = WeightImage(layout, CPU)
    image.fill(tensors.items())
    chunks, arrived = layout.chunks(limit), {}
    assert [start for start, _ in chunks] == [0, *(end for _, end in chunks)][: len(chunks)]
    for start, end in chunks:
        inside = dict(layout.views(image.data[start:end].clone(), first=start))
        assert end - start <= limit or sum(t.nbytes > 0 for t in inside.values()) == 1
        arrived |= inside
    with_bytes = {name for name, t in tensors.items() if t.nbytes}
    assert with_bytes <= arrived.keys()
    assert all(torch.equal(t, tensors[name]) for name, t in arrived.items())


@given(st.binary(max_size=200), st.integers(0, 3))
def test_a_checksum_is_what_its_definition_says_wherever_the_tensor_lies(data, offset):
    tensor = torch.frombuffer(bytearray(bytes(offset) + data or b"\0"), dtype=torch.uint8)[offset:]
    assert checksum(tensor) == reference_checksum(tensor)


@settings(max_examples=50)
@given(st.integers(1, 4000), st.data())
def test_a_change_of_one_element_is_noticed(size, data):
    tensor = torch.randn(size).to(torch.bfloat16)
    at = data.draw(st.integers(0, size - 1))
    changed = tensor.clone()
    changed.view(torch.int16)[at] ^= 1 << data.draw(st.integers(0, 14))
    assert checksum(changed) != checksum(tensor)


def test_blocks_do_not_change_a_checksum(monkeypatch):
    tensor = torch.randn(999)
    whole = checksum(tensor)
    monkeypatch.setattr("serve.weight_layout.CHECKSUM_BLOCK", 7)
    assert checksum(tensor) == whole == reference_checksum(tensor)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 50), st.integers(0, 3), st.data())
def test_many_tensors_at_once_have_the_checksums_each_has_alone(words, block, skipped, data):
    layout = WeightLayout((f"{i:02}", torch.float64, (size,)) for i, size in enumerate(words))
    run = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8)
    first = layout.entries[f"{min(skipped, len(words) - 1):02}"].start  # a run may begin later than the first tensor
    names = data.draw(st.sets(st.sampled_from([*layout.shapes])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(FEW_TENSORS, "cpu", 0)
        patch.setattr("serve.weight_layout.CHECKSUM_BLOCK", block)
        sums = Checksums()
        sums.add_run(layout, run[first:].clone(), names, first)
        found = sums.values()
    assert found == {name: reference_checksum(t) for name, t in layout.views(run[first:], first) if name in names}


def test_swapped_words_are_noticed():
    tensor = torch.arange(64, dtype=torch.float32)
    swapped = tensor.view(8, 8).roll(1, 0).contiguous()
    assert checksum(swapped) != checksum(tensor)


@pytest.mark.parametrize(
    ("given_tensors", "reason"),
    [
        ({"a": torch.zeros(2)}, "1 of the model's tensors were not given: b"),
        ({"a": torch.zeros(2), "b": torch.zeros(3), "c": torch.zeros(1)}, r"tensor c of shape \[1\] is not in"),
        ({"a": torch.zeros(3), "b": torch.zeros(3)}, r"tensor a of shape \[3\] is not in"),
    ],
)
def test_what_does_not_fit_the_layout_is_named(given_tensors, reason):
    image = WeightImage(WeightLayout([("a", torch.float32, (2,)), ("b", torch.float32, (3,))]), CPU)
    with pytest.raises(SnapshotError, match=reason):
        image.fill(given_tensors.items())


def test_a_dtype_that_does_not_travel_is_named():
    with pytest.raises(SnapshotError, match=r"tensor a has dtype torch\.complex64"):
        WeightLayout([("a", torch.complex64, (1,))])


def test_a_sample_is_small_tensors_spread_over_the_model():
    metadata = [(f"layer.{i:03}", torch.bfloat16, (4, 4)) for i in range(100)]
    layout = WeightLayout([*metadata, ("embedding", torch.bfloat16, (1 << 15, 1 << 11))])
    sampled = layout.sampled("sample")
    assert 4 <= len(sampled) <= 8 and "embedding" not in sampled
    assert {int(name[6:]) // 25 for name in sampled} == {0, 1, 2, 3}
    assert set(layout.sampled("all")) == {*layout.shapes}
