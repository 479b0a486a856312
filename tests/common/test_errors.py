from headtohead.common.errors import first_line, suggestion, unknown


def test_the_error_for_an_unknown_name_gives_the_allowed_names_and_the_closest() -> None:
    message = str(unknown("mechanism", "cupled", ["coupled", "standard"]))
    assert message == "unknown mechanism 'cupled'; did you mean 'coupled'? (allowed: coupled, standard)"


def test_no_close_match_gives_no_suggestion() -> None:
    assert suggestion("zzz", ["coupled"]) == ""


def test_first_line_of_an_error() -> None:
    assert first_line(ValueError("\n  this one \nnot this")) == "this one"
    assert first_line(ValueError()) == "ValueError"
