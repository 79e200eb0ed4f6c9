"""What a download says of the model that is there."""

from pathlib import Path

from kvern_engine.fetching.report import shape_of
from kvern_engine.loading.resolve import ModelFiles, resolve_model

TINY = Path(__file__).parents[1] / "models_data" / "tiny-kjv"


def test_the_shape_of_a_model_that_is_there():
    shape = shape_of(resolve_model(str(TINY)))
    assert shape is not None and list(shape) == ["layers", "heads", "kvHeads", "headDim", "maxModelLen"]
    assert all(type(n) is int and n > 0 for n in shape.values()) and shape["heads"] % shape["kvHeads"] == 0


def test_what_this_engine_cannot_read_has_none(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "unheard-of"}')
    assert shape_of(ModelFiles("odd", "folder", tmp_path)) is None
    assert shape_of(ModelFiles("gone", "folder", tmp_path / "gone")) is None
