"""Halos as literal tables, and what must hold of every one: each needed position comes from one place, once."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from hpcbench.strategies.spatial.halo import (
    Box,
    Halo,
    HaloLayer,
    HaloMessage,
    SlidingWindow,
    box_difference,
    box_intersection,
    box_volume,
    compute_halo,
    owned_box,
)

THREE = SlidingWindow(3, padding=1)


@pytest.mark.parametrize(
    ("layer", "grid", "place", "expected"),
    [
        (  # the rank at an edge has padding on one side
            HaloLayer((8,), (THREE,)), (2,), 0,
            Halo((range(4),), (range(-1, 5),), (range(4),), (range(1, 3),),
                 (HaloMessage(1, (range(3, 4),)),), (HaloMessage(1, (range(4, 5),)),)),
        ),
        (  # 7x7 stem, stride 2: three rows from above, two from below
            HaloLayer((24,), (SlidingWindow(7, 2, 3),)), (3,), 1,
            Halo((range(8, 16),), (range(5, 18),), (range(4, 8),), (range(6, 7),),
                 (HaloMessage(0, (range(8, 10),)), HaloMessage(2, (range(13, 16),))),
                 (HaloMessage(0, (range(5, 8),)), HaloMessage(2, (range(16, 18),)))),
        ),
        (  # 1x1, stride 2, uneven: nothing is sent, and a row is left over
            HaloLayer((7,), (SlidingWindow(1, 2),)), (2,), 0,
            Halo((range(4),), (range(3),), (range(2),), (range(2),), (), ()),
        ),
        (  # a pool whose windows the cut does not meet
            HaloLayer((8,), (SlidingWindow(2, 2),)), (2,), 1,
            Halo((range(4, 8),), (range(4, 8),), (range(2, 4),), (range(2, 4),), (), ()),
        ),
        (  # a pool whose window lies across an uneven cut
            HaloLayer((10,), (SlidingWindow(2, 2),)), (3,), 1,
            Halo((range(4, 7),), (range(4, 8),), (range(2, 4),), (range(2, 3),),
                 (), (HaloMessage(2, (range(7, 8),)),)),
        ),
        (  # a halo that is wider than the shares comes from two ranks on a side
            HaloLayer((4,), (SlidingWindow(5, padding=2),)), (4,), 1,
            Halo((range(1, 2),), (range(-1, 4),), (range(1, 2),), (range(3, 3),),
                 (HaloMessage(0, (range(1, 2),)), HaloMessage(2, (range(1, 2),)), HaloMessage(3, (range(1, 2),))),
                 (HaloMessage(0, (range(1),)), HaloMessage(2, (range(2, 3),)), HaloMessage(3, (range(3, 4),)))),
        ),
        (  # two dims: the corner has a neighbour across
            HaloLayer((4, 4), (THREE, THREE)), (2, 2), 3,
            Halo((range(2, 4), range(2, 4)), (range(1, 5), range(1, 5)), (range(2, 4), range(2, 4)),
                 (range(3, 3), range(3, 3)),
                 (HaloMessage(0, (range(2, 3), range(2, 3))), HaloMessage(1, (range(2, 3), range(2, 4))),
                  HaloMessage(2, (range(2, 4), range(2, 3)))),
                 (HaloMessage(0, (range(1, 2), range(1, 2))), HaloMessage(1, (range(1, 2), range(2, 4))),
                  HaloMessage(2, (range(2, 4), range(1, 2))))),
        ),
        (  # a dim that is not cut is left to the layer's own padding
            HaloLayer((6, 5), (THREE, THREE), pads_itself=True), (2, 1), 0,
            Halo((range(3), range(5)), (range(-1, 4), range(5)), (range(3), range(5)), (range(1, 2), range(5)),
                 (HaloMessage(1, (range(2, 3), range(5))),), (HaloMessage(1, (range(3, 4), range(5))),)),
        ),
    ],
)  # fmt: skip
def test_the_halo_of_a_layer_is_that_of_the_table(
    layer: HaloLayer, grid: tuple[int, ...], place: int, expected: Halo
) -> None:
    assert compute_halo(layer, grid, place) == expected


def positions(box: Box) -> set[tuple[int, ...]]:
    return set(product(*box))


dims = st.tuples(
    st.integers(1, 14),
    st.integers(1, 4),
    st.builds(SlidingWindow, st.integers(1, 5), st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.booleans()),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(dims, min_size=1, max_size=2), st.booleans())
def test_every_needed_position_comes_from_its_owner_once(
    chosen: list[tuple[int, int, SlidingWindow]], pads_itself: bool
) -> None:
    extents, grid, windows = (tuple(column) for column in zip(*chosen, strict=True))
    assume(all(2 * one.padding <= one.kernel for one in windows))
    assume(all(e + 2 * w.padding >= w.span for e, w in zip(extents, windows, strict=True)))
    assume(all(min(e, w.output_extent(e)) >= p for e, p, w in chosen))
    layer, places = HaloLayer(extents, windows, pads_itself), range(len(list(product(*map(range, grid)))))
    halos = [compute_halo(layer, grid, place) for place in places]
    image = tuple(range(extent) for extent in extents)
    assert Counter(at for one in halos for at in positions(one.own)) == Counter(positions(image))
    outputs = tuple(range(w.output_extent(e)) for e, _, w in chosen)
    assert Counter(at for one in halos for at in positions(one.outputs)) == Counter(positions(outputs))
    for place, one in enumerate(halos):
        assert one.own == owned_box(extents, grid, place)
        got = Counter(positions(box_intersection(one.own, one.needed)))
        for message in one.receives:
            got.update(positions(message.box))
            assert HaloMessage(place, message.box) in halos[message.rank].sends
            assert message.rank != place
        assert got == Counter(positions(box_intersection(one.needed, image)))
        assert sum(len(other.sends) for other in halos) == sum(len(other.receives) for other in halos)
        if box_volume(one.interior):
            rest = [one.interior, *box_difference(one.outputs, one.interior)]
            assert Counter(at for box in rest for at in positions(box)) == Counter(positions(one.outputs))


@pytest.mark.parametrize("ceil_mode", [False, True])
@pytest.mark.parametrize("window", [(3, 2, 1), (2, 2, 0), (3, 3, 1), (2, 3, 0), (3, 2, 0), (1, 2, 0)])
def test_output_extent_is_torchs(window: tuple[int, int, int], ceil_mode: bool) -> None:
    for extent in range(3, 12):
        pool = nn.MaxPool1d(*window, ceil_mode=ceil_mode)
        assert (
            SlidingWindow(*window, ceil_mode=ceil_mode).output_extent(extent)
            == pool(torch.zeros(1, 1, extent)).shape[-1]
        )
