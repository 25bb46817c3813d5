"""Programs that tests need: a missing one skips the test, or fails it where the program is required."""

import pytest

from support.deployment.needed_programs import need

SOURCE = "Debian has it in the package nonesuch"


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SHOAL_E2E", "CI"):
        monkeypatch.delenv(name, raising=False)


def test_the_first_of_its_names_that_is_here() -> None:
    assert need("nonesuch", "sh", source=SOURCE).endswith("/sh")


def test_it_is_skipped_with_a_word() -> None:
    with pytest.raises(pytest.skip.Exception, match="there is no nonesuch nor neither here: Debian has it in"):
        need("nonesuch", "neither", source=SOURCE)


@pytest.mark.parametrize(("variable", "failing"), [("SHOAL_E2E", ("SHOAL_E2E",)), ("CI", ("SHOAL_E2E", "CI"))])
def test_it_fails_where_it_has_to_be(monkeypatch: pytest.MonkeyPatch, variable: str, failing: tuple[str, ...]) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.raises(pytest.fail.Exception, match="nonesuch"):
        need("nonesuch", source=SOURCE, failing=failing)
