"""Lint for words that the project no longer uses, listed in `retired_words.toml`.

    python tools/lint/retired_words.py              # fails if there are hits; one line for each
    python tools/lint/retired_words.py --count      # prints the number of hits of each word instead
    python tools/lint/retired_words.py docs server  # looks at these paths alone

Each entry of the file has the field `identifier` or `phrase`, and the field `use`, which says what to write instead:

- An identifier is one or several words, such as `pond` or `old_pond`. It is found in any case and style of identifiers:
  `pond`, `_pond`, `old_pond`, `PondList` and `SHOAL_POND` are hits, `respond` is not.
- An identifier with `whole = true` is found only as an identifier of its own, in exactly this case; `_` may
  precede it.
- An identifier with `code = true` is found in code alone, not in comments, strings and prose. It is for words that are
  good English but bad names, such as `gate`. In Markdown, code is the text between backticks.
- A phrase is found in any case, with any white space or an underscore between its words, line breaks included.

The names of files and folders are read as code; a hit there has line 0.

The fields `in` and `out` are lists of globs over paths: `**` stands for any folders. An entry without `in` applies to
all paths. If it has `code = true`, it applies only to the paths in `sources`, a list at the top of the file. `exempt`
lists the paths to which no entry applies.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
WORDS = Path(__file__).with_name("retired_words.toml")
_FIELDS = {"identifier", "phrase", "use", "whole", "code", "in", "out"}
# What is no code, by the ending of the file.
_NOT_CODE = {
    ".py": r"""\"\"\".*?\"\"\"|'''.*?'''|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*""",
    ".proto": r'"(?:\\.|[^"\\\n])*"|//[^\n]*',
    ".css": r"/\*.*?\*/",
}
_HASH_COMMENT = r"#[^\n]*"
# A string, a comment, or a mark that begins or ends a template or an expression in one.
_JAVASCRIPT = re.compile(
    r"""\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|//[^\n]*|/\*.*?\*/|[`{}]""",
    re.DOTALL,
)
_TEMPLATE_TEXT = re.compile(r"(?:\\.?|\$(?!\{)|[^\\`$])*(?:`|\$\{|\Z)", re.DOTALL)  # up to the next expression
_TOKEN = re.compile(r"\w+(?:-\w+)*")
_MARKDOWN_CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Word:
    """One retired word.

    Attributes:
        text: the identifier or the phrase.
        use: what to write instead.
        pattern: finds it.
        first: its first word in small letters, which a text without the word need not have.
        is_phrase: it is found over several words and lines; an identifier is found in one token.
        code: look for it in code alone.
        inside: the globs of the paths where it is retired; empty: everywhere.
        outside: the globs of the paths where it is not.
    """

    text: str
    use: str
    pattern: re.Pattern[str]
    first: str
    is_phrase: bool = False
    code: bool = False
    inside: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()

    def applies_to(self, path: str) -> bool:
        """Returns whether the word is retired in a file."""
        return (not self.inside or matches(path, self.inside)) and not matches(path, self.outside)


@dataclass(frozen=True, slots=True)
class Hit:
    """A retired word in a file."""

    path: str
    line: int
    word: Word

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.word.text} -> {self.word.use}"


def matches(path: str, globs: Iterable[str]) -> bool:
    """Returns whether a path, relative to the root and with slashes, matches one of some globs."""
    return any(_glob(glob).fullmatch(path) for glob in globs)


def identifier_pattern(text: str, whole: bool = False) -> re.Pattern[str]:
    """Returns the pattern that finds an identifier.

    Args:
        text: words in snake_case or CamelCase.
        whole: find it only as an identifier of its own, public or private, in this case. False: also as a part of a
            longer one.
    """
    if whole:
        return re.compile(rf"(?<!\w)_?{re.escape(text)}(?!\w)")
    words = _words(text)
    snake, upper = "_".join(words), "_".join(words).upper()
    first, *rest = words
    camel = first + "".join(word.capitalize() for word in rest)
    pascal = "".join(word.capitalize() for word in words)
    kebab = rf"|(?<![A-Za-z0-9]){re.escape('-'.join(words))}(?![A-Za-z0-9])" if rest else ""
    return re.compile(
        rf"(?<![A-Za-z0-9]){snake}(?![a-z0-9])|(?<![A-Za-z0-9]){upper}(?![A-Za-z0-9])"
        rf"|(?<![A-Za-z0-9]){camel}(?![a-z0-9])|(?<![A-Z]){pascal}(?![a-z0-9]){kebab}"
    )


def phrase_pattern(text: str) -> re.Pattern[str]:
    """Returns the pattern that finds a phrase, in any case, also in snake_case and over a line break."""
    gap = r"(?:_|[ \t]+|[ \t]*\n[ \t]*(?:#|//|\*|>)?[ \t]*)"
    words = gap.join(re.escape(word) for word in text.split())
    return re.compile(rf"(?<![A-Za-z0-9]){words}(?![A-Za-z0-9])", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class WordList:
    """A list of retired words.

    Attributes:
        words: the entries.
        exempt: globs of the paths where none of them is retired.
    """

    words: tuple[Word, ...]
    exempt: tuple[str, ...] = ()


def load(text: str) -> WordList:
    """Reads a list of retired words.

    Args:
        text: the list, as TOML.

    Raises:
        ValueError: an entry has an unknown field, no `use`, or not exactly one of `identifier` and `phrase`.
    """
    record = tomllib.loads(text)
    words = []
    for entry in record.get("words", []):
        if entry.keys() - _FIELDS or "use" not in entry or ("identifier" in entry) == ("phrase" in entry):
            raise ValueError(f"no entry of retired words: {entry}")
        if "identifier" in entry:
            found = entry["identifier"]
            pattern, first = identifier_pattern(found, entry.get("whole", False)), _words(found)[0]
        else:
            found = entry["phrase"]
            pattern, first = phrase_pattern(found), found.split()[0].lower()
        code = entry.get("code", False)
        everywhere = record.get("sources", ()) if code else ()
        scope = tuple(entry.get("in", everywhere)), tuple(entry.get("out", ()))
        words.append(Word(found, entry["use"], pattern, first, "phrase" in entry, code, *scope))
    return WordList(tuple(words), tuple(record.get("exempt", ())))


class Finder:
    """Finds retired words in files.

    Args:
        retired: the list.
    """

    def __init__(self, retired: WordList) -> None:
        self._phrases = [word for word in retired.words if word.is_phrase]
        self._identifiers = [word for word in retired.words if not word.is_phrase]
        self._by_token: dict[str, list[Word]] = {}  # what was found in each token so far: most occur again and again

    def hits(self, path: str, text: str) -> Iterator[Hit]:
        """Yields the retired words of a file.

        Args:
            path: of the file, relative to the root and with slashes.
            text: what is in it.
        """
        for token in _TOKEN.findall(path):
            yield from (Hit(path, 0, word) for word in self._words_of(token) if word.applies_to(path))
        for searched, first in ((path, 0), (text, 1)):
            small = searched.lower()
            for word in self._phrases:
                if word.first in small and word.applies_to(path):
                    for match in word.pattern.finditer(searched):
                        yield Hit(path, searched.count("\n", 0, match.start()) + first, word)
        for in_code, searched in ((False, text), (True, code_of(path, text))):
            for number, line in enumerate(searched.splitlines(), 1):
                for token in _TOKEN.findall(line):
                    for word in self._words_of(token):
                        if word.code is in_code and word.applies_to(path):
                            yield Hit(path, number, word)

    def _words_of(self, token: str) -> list[Word]:
        """Returns the retired identifiers in a token, once for each time that they are in it."""
        found = self._by_token.get(token)
        if found is None:
            small = token.lower()
            near = [word for word in self._identifiers if word.first in small]
            found = self._by_token[token] = [word for word in near for _ in word.pattern.findall(token)]
        return found


def code_of(path: str, text: str) -> str:
    """Returns the code in a file, on the lines where it stands: what remains without comments, strings and prose.

    Args:
        path: of the file; its ending says what is code.
        text: what is in it.
    """
    ending = Path(path).suffix
    if ending == ".md":
        kept = iter(_MARKDOWN_CODE.findall(text))
        return "".join(_blank(prose) + next(kept, "") for prose in _MARKDOWN_CODE.split(text))
    if ending == ".js":
        return "".join(_javascript_code(text))
    pattern = _NOT_CODE.get(ending, _HASH_COMMENT)
    return re.sub(pattern, lambda found: _blank(found[0]), text, flags=re.DOTALL)


def _javascript_code(text: str) -> Iterator[str]:
    """Yields the parts of a script, with blanks for comments, strings and the text of templates.

    What `${...}` encloses in a template is code, and can contain templates.
    """
    place = 0
    braces = [0]  # the open braces of the script, then those of each open expression
    while found := _JAVASCRIPT.search(text, place):
        yield text[place : found.start()]
        place, token = found.end(), found[0]
        braces[-1] += (token == "{") - (token == "}")
        expression_ends = braces[-1] < 0 and len(braces) > 1
        if expression_ends:
            braces.pop()
        if token == "`" or expression_ends:
            template = _TEMPLATE_TEXT.match(text, place)
            assert template  # it matches any text
            place = template.end()
            yield _blank(token + template[0])
            if template[0].endswith("${"):
                braces.append(0)
        else:
            yield token if token in "{}" else _blank(token)
    yield text[place:]


def files(root: Path, paths: Sequence[str] = ()) -> list[str]:
    """Returns the tracked files below some paths, or all, relative to the root."""
    command = ["git", "ls-files", "-z", "--", *paths]
    found = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout
    return [name for name in found.split("\0") if name]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT, words_file: Path = WORDS) -> int:
    """Runs the lint and returns its exit status.

    Args:
        arguments: the command line without the program's name. Default: this process's.
        root: the repository to look at.
        words_file: the list of retired words.
    """
    parser = argparse.ArgumentParser(description="Reports words that are no longer used.")
    parser.add_argument("paths", nargs="*", help="look at these files and folders (default: all tracked files)")
    parser.add_argument("--count", action="store_true", help="print the number of hits of each word, and succeed")
    options = parser.parse_args(arguments)
    retired = load(words_file.read_text())
    found: list[Hit] = []
    finder = Finder(retired)
    for name in files(root, options.paths):
        path = root / name
        if matches(name, retired.exempt) or not path.is_file() or path.is_symlink():
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        found += finder.hits(name, text)
    if options.count:
        for (word, use), count in Counter((hit.word.text, hit.word.use) for hit in found).most_common():
            print(f"{count:5} {word} -> {use}")
        return 0
    for hit in sorted(found, key=lambda hit: (hit.path, hit.line)):
        print(hit)
    return 1 if found else 0


def _blank(text: str) -> str:
    """Returns the line breaks of a text, a space in place of all between them."""
    return re.sub(r"[^\n]+", " ", text)


def _words(identifier: str) -> list[str]:
    """Returns the words of an identifier in snake_case or CamelCase, in small letters."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", identifier)]


@cache
def _glob(glob: str) -> re.Pattern[str]:
    """Returns the pattern of a glob: `**` stands for any folders, `*` for what has no slash."""
    parts = []
    for part in re.split(r"(\*\*/?|\*)", glob):
        match part:
            case "**/":
                parts.append("(?:.*/)?")
            case "**":
                parts.append(".*")
            case "*":
                parts.append("[^/]*")
            case _:
                parts.append(re.escape(part))
    return re.compile("".join(parts))


if __name__ == "__main__":
    sys.exit(main())
