import pytest

from headtohead.common.errors import UserError
from headtohead.model.decoder import Decoder
from headtohead.model.layout import parse_layout
from headtohead.model.sizes import SIZES, Size, find_size

COUNTS = {
    "30k": 30_368,
    "nano": 117_056,
    "nano-deep": 123_312,
    "300k": 307_920,
    "1m": 1_022_336,
    "1m-deep": 1_021_728,
    "1m-wide": 1_022_400,
    "5m": 4_996_352,
    "10m": 10_489_088,
    "60m": 59_294_720,
    "150m": 151_862_784,
    "350m": 359_794_688,
    "454m": 454_166_528,
    "sharing-xs": 1_750_272,
    "sharing-s": 52_024_320,
    "sharing-300m": 305_534_976,
    "sharing-1.2b": 1_215_102_976,
    "faster-1l": 320_448,
    "faster-6l": 9_038_400,
    "faster-6l-256": 6_901_760,
    "faster-12l": 2_445_056,
    "deconstructed-xxs": 279_872,
    "deconstructed-xs": 2_135_168,
    "deconstructed-xs24": 6_339_712,
    "deconstructed-s": 59_331_072,
    "deconstructed-70m": 50_937_344,
    "deconstructed-160m": 151_926_528,
    "deconstructed-500m": 436_037_504,
    "deconstructed-1.7b": 1_629_865_984,
}


@pytest.mark.parametrize("name", SIZES)
def test_every_size_has_its_exact_count(name: str) -> None:
    size = SIZES[name]
    assert (
        Decoder.on_meta(size, parse_layout("standard").layers(size.layers)).parameter_count() == COUNTS[name]
    )


def test_the_published_1_7b_model_norms_queries_and_keys() -> None:
    size = SIZES["deconstructed-1.7b"]
    layers = parse_layout("standard:qk_norm=true").layers(size.layers)
    assert Decoder.on_meta(size, layers).parameter_count() == 1_629_873_152


@pytest.mark.parametrize(
    ("name", "count"), [("deconstructed-70m", 76_692_992), ("deconstructed-1.7b", 1_732_895_744)]
)
def test_untied_heads_are_counted(name: str, count: int) -> None:
    size = SIZES[name].with_settings(tied=False)
    arm = "standard:qk_norm=true" if "1.7b" in name else "standard"
    assert Decoder.on_meta(size, parse_layout(arm).layers(size.layers)).parameter_count() == count


def test_a_built_model_has_the_parameter_count_of_its_meta_model() -> None:
    size = SIZES["nano"]
    assert Decoder(size, parse_layout("standard").layers(2), seed=0).parameter_count() == COUNTS["nano"]


def test_unknown_names_and_impossible_shapes_are_rejected() -> None:
    with pytest.raises(UserError, match="unknown size 'nanno'; did you mean 'nano'"):
        find_size("nanno")
    with pytest.raises(UserError, match="not divisible"):
        Size("odd", 10, 2, 4, 8, 256, 128)
    with pytest.raises(UserError, match="unknown value for positions 'rop'; did you mean 'rope'"):
        SIZES["nano"].with_settings(positions="rop")
    with pytest.raises(UserError, match="unknown model setting 'positon'"):
        SIZES["nano"].with_settings(positon="rope")
    with pytest.raises(UserError, match="dropout"):
        SIZES["nano"].with_settings(dropout=1.0)
