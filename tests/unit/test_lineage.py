import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.lineage import Lineage


def test_lag_counts_updates():
    line = Lineage()
    for version in (1, 2, 3):
        line.advance(version)
    assert [line.lag(version) for version in range(4)] == [3, 2, 1, 0]


def test_weights_that_got_a_new_number_have_not_aged():
    line = Lineage()
    line.advance(1)
    line.advance(2)
    line.rename(7)  # 3 to 6 were published after the checkpoint, and are lost
    assert (line.lag(2), line.lag(7), line.lag(1)) == (0, 0, 1)
    line.advance(8)
    assert (line.lag(2), line.lag(7), line.lag(1)) == (1, 1, 2)
    for lost in (3, 6, 9):
        with pytest.raises(ValueError, match=f"version {lost} is not among those that lead to 8"):
            line.lag(lost)


def test_versions_only_grow():
    line = Lineage([(0, 4, 0)])
    for version in (4, 3):
        with pytest.raises(ValueError, match="not newer than 4"):
            line.advance(version)
        with pytest.raises(ValueError, match="not newer than 4"):
            line.rename(version)


@given(st.lists(st.tuples(st.sampled_from(["advance", "rename"]), st.integers(1, 3)), max_size=30))
def test_lag_equals_the_count_of_updates_and_survives_being_saved(moves):
    line, updates = Lineage(), {0: 0}
    for move, by in moves:
        version = line.newest + by
        if move == "advance":
            updates |= {line.newest + n: updates[line.newest] + n for n in range(1, by + 1)}
        else:
            updates[version] = updates[line.newest]
        getattr(line, move)(version)
        line = Lineage(line.stretches)
    for version in range(line.newest + 1):
        if version in updates:
            assert line.lag(version) == updates[line.newest] - updates[version]
        else:
            with pytest.raises(ValueError, match="is not among"):
                line.lag(version)
