"""Imports without searches for garbage, and searches as before afterwards."""

from __future__ import annotations

import gc

import pytest

from serve.quick_loading import quick_loading


@pytest.fixture(params=[True, False], ids=["searching", "not searching"])
def searching(request):
    before = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if before else gc.disable)()


def test_nothing_is_searched_inside_and_all_is_as_before_afterwards(searching):
    with quick_loading():
        assert not gc.isenabled()
        with quick_loading():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled() is searching


def test_an_import_that_fails_leaves_all_as_before(searching):
    with pytest.raises(ImportError), quick_loading():
        import of_nobody  # noqa: F401
    assert gc.isenabled() is searching
