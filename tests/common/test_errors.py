from headtohead.common.errors import suggestion, unknown


def test_an_unknown_name_says_what_was_given_what_is_allowed_and_the_nearest() -> None:
    words = str(unknown("mechanism", "cupled", ["coupled", "standard"]))
    assert words == "unknown mechanism 'cupled'; did you mean 'coupled'? (allowed: coupled, standard)"


def test_nothing_near_gives_no_suggestion() -> None:
    assert suggestion("zzz", ["coupled"]) == ""
