"""KV groups of layers, and the blocks that a request holds of each group."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from quintet.wire.kv_spec import Kind, KvGroup, KvSpec, LayerKv, full_layers, group_layers


def mix(*layers: tuple[int, Kind, int], token_bytes: int = 64, block_size: int = 16) -> KvSpec:
    """Group ``count`` layers of each kind and window."""
    kinds = [(kind, window) for count, kind, window in layers for _ in range(count)]
    return group_layers(
        [LayerKv(index, kind, window, token_bytes) for index, (kind, window) in enumerate(kinds)], block_size
    )


def test_equal_layers_are_one_group() -> None:
    spec = full_layers(28, 8, 128, 2, 16)
    assert spec.groups == [KvGroup("full", list(range(28)))]
    assert spec.bytes_per_token == 28 * 2 * 8 * 128 * 2
    assert spec.bytes_per_block == 16 * spec.bytes_per_token
    assert spec.most_blocks(100, 2048) == 7
    assert spec.longest(6, 1000, 2048) == 96
    assert [spec.place(layer) for layer in (0, 27)] == [(0, 0), (0, 27)]


def test_blocks_outside_kv_memory_are_without_the_draft_models_part() -> None:
    plain = full_layers(28, 8, 128, 2, 16)
    spec = msgspec.structs.replace(plain, draft_bytes=1000)
    assert spec.bytes_per_block == plain.bytes_per_block + 1000
    assert spec.offloaded_bytes_per_block == plain.offloaded_bytes_per_block == plain.bytes_per_block
    assert spec.num_offloaded_blocks(3 * plain.bytes_per_block) == 3


@pytest.mark.parametrize(
    ("layers", "width", "sizes"),
    [
        (((22, "sliding", 512), (4, "full", 0)), 4, [4, 4, 4, 4, 3, 3, 4]),  # Gemma 3, 1B
        (((13, "sliding", 4096), (13, "full", 0)), 13, [13, 13]),  # Gemma 2, 2B
        (((36, "chunked", 8192), (12, "full", 0)), 12, [12, 12, 12, 12]),  # Llama 4
        (((28, "state", 0), (4, "full", 0)), 4, [4] * 8),  # Jamba
        (((1, "sliding", 8), (1, "full", 0)), 1, [1, 1]),
    ],
)
def test_few_group_slots_are_unused(
    layers: tuple[tuple[int, Kind, int], ...], width: int, sizes: list[int]
) -> None:
    spec = mix(*layers)
    assert spec.layers_per_block == width
    assert [len(group.layers) for group in spec.groups] == sizes
    members = [layer for group in spec.groups for layer in group.layers]
    assert sorted(members) == list(range(len(members)))
    for index, group in enumerate(spec.groups):
        for place, layer in enumerate(group.layers):
            assert spec.place(layer, state=group.is_state) == (index, place)


@pytest.mark.parametrize(
    ("num_layers", "every", "kind", "num_stages", "most"),
    [
        (62, 6, "sliding", 2, 1.1),
        (62, 6, "sliding", 4, 1.3),
        (48, 4, "state", 4, 1.0),
        (36, 2, "sliding", 4, 1.2),
    ],
)  # Gemma 3, 27B; Qwen3-Next; gpt-oss
def test_pipeline_stages_add_little_block_memory(
    num_layers: int, every: int, kind: Kind, num_stages: int, most: float
) -> None:
    layers = [
        LayerKv(i, "full", 0, 64) if i % every == every - 1 else LayerKv(i, kind, 512, 64)
        for i in range(num_layers)
    ]
    edges = [num_layers * i // num_stages for i in range(num_stages + 1)]
    stages = list(pairwise(edges))
    whole, cut = group_layers(layers, 16), group_layers(layers, 16, stages)
    assert cut.groups == whole.groups
    assert cut.bytes_per_block <= most * whole.bytes_per_block
    owned = [cut.places_of(range(*stage).__contains__) for stage in stages]
    assert cut.bytes_per_block == sum(map(len, owned)) * cut.layer_bytes


def test_layer_with_attention_and_state() -> None:
    """Attention and a state in one layer: the block has the larger of both sizes."""
    needs = [LayerKv(0, "full", 0, 100), LayerKv(0, "state", state_bytes=5000)]
    spec = group_layers(needs, 16)
    assert (spec.place(0), spec.place(0, state=True)) == ((0, 0), (1, 0))
    assert spec.layer_bytes == 5056  # 79 lines of 64 bytes
    with pytest.raises(KeyError, match="layer 1 has no state"):
        spec.place(1, state=True)


def test_visible_positions() -> None:
    sliding, chunked = KvGroup("sliding", [0], 8), KvGroup("chunked", [0], 8)
    assert [sliding.first_seen(position) for position in (0, 7, 8, 20)] == [0, 0, 1, 13]
    assert [chunked.first_seen(position) for position in (0, 7, 8, 20)] == [0, 0, 8, 16]
    assert sliding.used(20, 23, 4) == range(3, 6)
    assert KvGroup("state", [0]).used(20, 23, 4) == range(2)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("kind", ["sliding", "chunked"])
def test_window_holds_at_most_its_stated_blocks(kind: Kind, window: int, block_size: int) -> None:
    """The maximum is reached at some position and step."""
    group, step = KvGroup(kind, [0], window), 7
    held = [
        len(group.used(start, start + count, block_size))
        for start in range(200)
        for count in range(1, step + 1)
    ]
    most = group.most_blocks(10_000, block_size, step)
    assert max(held) <= most
    if kind == "sliding":
        assert max(held) == most
