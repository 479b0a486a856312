from headtohead.common.errors import first_line, suggestion, unknown


def test_an_unknown_name_says_what_was_given_what_is_allowed_and_the_nearest() -> None:
    words = str(unknown("mechanism", "cupled", ["coupled", "standard"]))
    assert words == "unknown mechanism 'cupled'; did you mean 'coupled'? (allowed: coupled, standard)"


def test_nothing_near_gives_no_suggestion() -> None:
    assert suggestion("zzz", ["coupled"]) == ""


def test_an_error_in_a_line() -> None:
    assert first_line(ValueError("\n  this one \nnot this")) == "this one"
    assert first_line(ValueError()) == "ValueError"
