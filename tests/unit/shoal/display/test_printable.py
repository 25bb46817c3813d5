"""Text of programs in output: it is shown, but the terminal executes no control characters from it."""

import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from shoal._cli.output import Output
from shoal._display import ProgressBar
from shoal._system.terminal import printable
from shoal.events import LogLine

HOSTILE = "a\x1b[2J\x1b]0;title\x07b\rc\x9b31m\x7f\u202ed\te\nf"
SHOWN = "a[2J]0;titlebc31md\te\nf"


def test_control_characters_are_left_out_and_tab_and_newline_stay() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("größe 3 µs 損失 🙂") == "größe 3 µs 損失 🙂"


@given(st.text())
def test_nothing_else_is_left_out(text: str) -> None:
    kept = [it for it in text if it in "\t\n" or (ord(it) >= 0x20 and not 0x7F <= ord(it) < 0xA0)]
    kept = [it for it in kept if not (0x202A <= ord(it) <= 0x202E or 0x2066 <= ord(it) <= 0x2069)]
    assert printable(text) == "".join(kept)


def test_messages_titles_cells_notes_and_errors(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(as_json=False, width=200)
    out.message(HOSTILE, {})
    out.rows(HOSTILE, ["reason"], [([HOSTILE], {})], notes=[HOSTILE])
    out.error("CODE", HOSTILE, {})
    shown = "".join(capsys.readouterr())
    assert shown.count("]0;title") == 5
    assert not set(shown) & {"\x1b", "\x07", "\r", "\x9b", "\x7f", "\u202e"}


def test_json_stays_exact(capsys: pytest.CaptureFixture[str]) -> None:
    out = Output(as_json=True)
    out.message("", {"text": HOSTILE})
    out.error("CODE", HOSTILE, {})
    printed, failed = capsys.readouterr()
    assert json.loads(printed)["text"] == HOSTILE
    assert json.loads(failed)["error"]["message"] == HOSTILE


@pytest.mark.parametrize("terminal", [True, False])
def test_the_lines_above_a_progress_bar(terminal: bool) -> None:
    screen = io.StringIO()
    with ProgressBar(console=Console(file=screen, force_terminal=terminal, no_color=True, width=200)) as bar:
        bar(LogLine(1, 0.0, "w0", "x\x1b]0;title\x07y"))
    assert "x]0;titley" in screen.getvalue()
