"""Lint for retired words, on small samples."""

import subprocess
from pathlib import Path

import pytest
from lint.retired_words import WORDS, Finder, code_of, load, main, matches

WORD_LIST = """
exempt = ["CHANGELOG.md", "docs/decisions/**"]
sources = ["server/**"]

[[words]]
identifier = "old_verb"
use = "restore_from"

[[words]]
identifier = "Gate"
use = "CommitGate"
whole = true
code = true
in = ["server/**"]
out = ["server/tests/*.py"]

[[words]]
phrase = "what comes of"
use = "the outcome of"
"""


def hits(text: str, path: str = "server/shard.py") -> list[str]:
    return [str(hit) for hit in Finder(load(WORD_LIST)).hits(path, text)]


@pytest.mark.parametrize(
    "text", ["old_verb", "_old_verb(x)", "oldVerb", "job.OldVerbRecord", "SHOAL_OLD_VERB", "--old-verb"]
)
def test_an_identifier_is_found_in_any_style_and_as_a_part(text: str) -> None:
    assert hits(f"\n{text}\n") == ["server/shard.py:2: old_verb -> restore_from"]


@pytest.mark.parametrize("text", ["bold_verb", "old_verbs", "old verb", "oldVerbs", "threshold_verb"])
def test_an_identifier_is_not_found_within_a_word(text: str) -> None:
    assert hits(text) == []


def test_a_whole_identifier_is_found_in_code_alone_and_in_its_scope() -> None:
    text = '"""Gate."""\ngate = Gate("Gate")  # Gate\nOldGate = 1\n'
    assert hits(text) == ["server/shard.py:2: Gate -> CommitGate"]
    assert hits("class _Gate: ...") == ["server/shard.py:1: Gate -> CommitGate"]
    assert hits(text, "client/shard.py") == hits(text, "server/tests/shard.py") == []


def test_an_identifier_of_code_without_a_scope_is_looked_for_in_the_sources() -> None:
    (word,) = load('sources = ["server/**"]\n[[words]]\nidentifier = "gate"\nuse = "commit_gate"\ncode = true\n').words
    assert word.applies_to("server/shard.py")
    assert not word.applies_to("tests/test_shard.py")


def test_a_phrase_is_found_in_any_case_and_over_the_end_of_a_line() -> None:
    text = "x = 1\n# What\n#   comes of it\nwhat comes often\n"
    assert hits(text) == ["server/shard.py:2: what comes of -> the outcome of"]


def test_names_of_files_and_phrases_in_snake_case_are_read() -> None:
    assert hits("", "server/old_verb/shard.py") == ["server/old_verb/shard.py:0: old_verb -> restore_from"]
    assert hits("", "server/what_comes_of.py") == ["server/what_comes_of.py:0: what comes of -> the outcome of"]
    assert hits("def test_what_comes_of_it(): ...\n") == ["server/shard.py:1: what comes of -> the outcome of"]


def test_code_of_a_file_keeps_its_lines() -> None:
    assert code_of("a.md", "Gate `Gate`\nGate\n").splitlines() == [" `Gate`", " "]
    assert code_of("a.js", "gate; // Gate\n/* Gate\n*/ gate\n").split("\n") == ["gate;  ", " ", "  gate", ""]
    assert code_of("a.yml", "gate: 1  # Gate\n").split() == ["gate:", "1"]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('"http://a/gate"; const gate=1', "; const gate=1"),
        ("'it\\'s // gate'; gate // 'gate'", "; gate"),
        ("html`<b>gate<//>`; gate", "html ; gate"),
        ("html`gate ${a.gate({b: `gate ${c} `})} \\` gate`; d // `", "html a.gate({b: c}) ; d"),
        ("{ gate } } // gate", "{ gate } }"),
    ],
)
def test_code_of_a_script_has_no_strings_and_no_text_of_templates(text: str, code: str) -> None:
    assert "".join(code_of("a.js", text).split()) == "".join(code.split())


def test_globs_know_folders() -> None:
    assert matches("docs/decisions/0001-x.md", ["docs/decisions/**"])
    assert matches("a/b/c.py", ["a/**/*.py"])
    assert matches("a/c.py", ["a/**/*.py"])
    assert not matches("a/b/c.py", ["a/*.py"])


@pytest.mark.parametrize(
    "entry",
    ['use = "x"', 'identifier = "x"', 'identifier = "x"\nphrase = "y"\nuse = "z"', 'phrase = "x"\nuse = "y"\nat = 1'],
)
def test_an_entry_that_makes_no_sense_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="no entry"):
        load(f"[[words]]\n{entry}\n")


def test_the_command_looks_at_tracked_files_that_are_not_exempt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words_file = tmp_path / "words.toml"
    words_file.write_text(WORD_LIST)
    repository = tmp_path / "repository"
    for name in ("a.py", "CHANGELOG.md", "docs/decisions/1.md", "untracked.py"):
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("old_verb\n")
    subprocess.run(["git", "init", "-q"], cwd=repository, check=True)
    subprocess.run(["git", "add", "a.py", "CHANGELOG.md", "docs"], cwd=repository, check=True)
    assert main([], repository, words_file) == 1
    assert capsys.readouterr().out == "a.py:1: old_verb -> restore_from\n"
    assert main(["--count"], repository, words_file) == 0
    assert main(["docs"], repository, words_file) == 0


def test_the_list_of_the_project_is_sound_and_says_each_word_once() -> None:
    words = load(WORDS.read_text()).words
    keys = [(word.text, word.inside) for word in words]
    assert words
    assert len(keys) == len(set(keys))
    assert all(word.pattern.search(word.text) for word in words)
