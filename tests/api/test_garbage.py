"""Garbage collections leave out what is there to stay, and nothing else."""

from __future__ import annotations

import gc
import weakref

import pytest

from glm_multiuser.config import EngineConfig
from glm_multiuser.garbage import collecting_new_objects_only, leave_out_imports
from glm_multiuser.server.loading import open_llm as open_in_server
from glm_multiuser.server.settings import ModelSettings
from tests.engine.native_llm import open_llm
from tests.server.in_process import FOLDER

pytestmark = pytest.mark.usefixtures("nothing_collected")


class Garbage:
    """A cycle that only a collection ends."""

    def __init__(self) -> None:
        self.own = self


def garbage() -> weakref.ref[Garbage]:
    return weakref.ref(Garbage())


def test_older_garbage_is_collected_afterwards() -> None:
    older = garbage()
    with collecting_new_objects_only():
        newer = garbage()
        gc.collect()
        assert older() is not None
        assert newer() is None
    gc.collect()
    assert older() is None
    assert gc.get_freeze_count() == 0


def test_an_error_inside_leaves_nothing_out() -> None:
    with pytest.raises(ZeroDivisionError), collecting_new_objects_only():
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_what_a_service_froze_stays_frozen() -> None:
    gc.freeze()
    with collecting_new_objects_only():
        assert gc.get_freeze_count()
    assert gc.get_freeze_count()


@pytest.mark.slow
def test_graphs_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out, collect = list[int](), gc.collect

    def watched(generation: int = 2) -> int:
        left_out.append(gc.get_freeze_count())
        return collect(generation)

    monkeypatch.setattr(gc, "collect", watched)
    with open_llm(2):
        seen = list(left_out)
    assert seen
    assert all(seen)
    assert gc.get_freeze_count() == 0


def test_imports_are_left_out_once() -> None:
    leave_out_imports()
    made_afterwards = garbage()
    leave_out_imports()
    gc.collect()
    assert made_afterwards() is None


@pytest.mark.slow
def test_a_server_collects_the_models_that_it_closes() -> None:
    engine = EngineConfig(users=2, seq_length=64, kernels="native")
    llm = open_in_server(ModelSettings("tiny", FOLDER, engine))
    assert gc.get_freeze_count()
    model = weakref.ref(llm._runner.model)
    llm.close()
    del llm
    gc.collect()
    assert model() is None
