"""The page of options has what is declared."""

from tests.shared.option_lists import PAGE, page


def test_the_page_of_options_is_that_of_the_declarations():
    assert PAGE.read_text() == page(), "make lists writes it"
