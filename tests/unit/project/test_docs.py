"""Documentation: the generated reference is complete, code of tutorials runs, links of top-level pages have targets.

`make lint` builds the site, which finds broken links within `docs/`.
"""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

import griffe
import numpy as np
import pytest
from lint.long_lines import LONGEST, long_lines

import shoal
from shoal._display import records
from shoal_coordinator.cluster.dead_members import DEAD_KEPT_S, MAX_DEAD

ROOT = Path(__file__).parents[3]
TOOLS = ROOT / "tools" / "docs"
sys.path.append(str(TOOLS))

import api_pages  # noqa: E402 - the generator is no package
import cli_pages  # noqa: E402
import error_pages  # noqa: E402
import generate  # noqa: E402
import markdown_text  # noqa: E402
import project_pages  # noqa: E402
import proto_pages  # noqa: E402

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FRAMEWORKS = ROOT / "docs" / "how-to" / "frameworks.md"
STABILITY = ROOT / "docs" / "explanation" / "stability.md"
TOP_LEVEL = ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")


WRITTEN = sorted(
    page
    for page in (*(ROOT / name for name in (*TOP_LEVEL, "CHANGELOG.md")), *(ROOT / "docs").rglob("*.md"))
    if "project" not in page.parts
)


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


class TestReference:
    def test_has_every_public_name(self) -> None:
        page = api_pages.pages()["reference/python/shoal.md"]
        modules = {name for name in shoal.__all__ if f"shoal.{name}" in api_pages.MODULES}
        names = {name for name in shoal.__all__ if not name.startswith("__")} - modules
        assert names == set(re.findall(r"^::: shoal\.(\w+)$", page, re.MULTILINE))
        assert modules >= {"callbacks", "consistency", "data", "errors", "events", "optim", "status"}

    @pytest.mark.parametrize("module", sorted({*api_pages.MODULES} - api_pages.ADAPTERS))
    def test_has_every_name_and_submodule_of_a_module(self, module: str) -> None:
        page = api_pages.pages()[f"reference/python/{module.replace('.', '-').replace('_', '-')}.md"]
        found = importlib.import_module(module)
        exported = {f"{module}.{name}" for name in found.__all__ if not name.startswith("__")}
        submodules = {name for name in exported if inspect.ismodule(getattr(found, name.rpartition(".")[2]))}
        assert submodules <= set(api_pages.MODULES)
        assert exported - submodules <= set(re.findall(r"^::: (\S+)$", page, re.MULTILINE))
        assert f"reference/python/{module.replace('.', '-').replace('_', '-')}.md" in (ROOT / "mkdocs.yml").read_text()

    @pytest.mark.parametrize("module", sorted(api_pages.ADAPTERS))
    def test_has_every_name_of_an_adapter_though_its_framework_is_not_installed(self, module: str) -> None:
        page = api_pages.pages()[f"reference/python/{module.replace('.', '-')}.md"]
        others = {"shoal.ray": "RayCluster", "shoal.transformers": "distribute"}
        name = others.get(module, "DistributedOptimizer")
        assert f"::: {module}.{name}" in page.splitlines()

    def test_shows_the_parameters_that_a_class_has(self) -> None:
        """The site takes them from the sources, where it cannot see all that `dataclass` does."""
        loader = griffe.GriffeLoader(
            search_paths=[ROOT / "client", ROOT / "worker"], extensions=griffe.load_extensions("dataclasses")
        )
        for package in ("shoal", "shoal_nn", "shoal_distribute"):
            loader.load(package)
        loader.resolve_aliases(external=False)
        modules = [module for module in api_pages.MODULES if module not in api_pages.ADAPTERS]
        names = [name for module in modules for name in api_pages.public_names(module)]
        found: dict[str, Any] = {name: pkgutil.resolve_name(name) for name in names}
        classes = [name for name, each in found.items() if dataclasses.is_dataclass(each)]
        assert len(classes) > 50
        for name in classes:
            real = [(it.name, it.kind.description) for it in inspect.signature(found[name]).parameters.values()]
            read = loader.modules_collection[name].parameters
            assert [(it.name, it.kind.value) for it in read if it.name != "self"] == real, name

    def test_lists_the_modules_that_have_a_level_of_stability(self) -> None:
        rows = re.findall(r"^\| (stable|provisional|internal) \| (.*?) \|", STABILITY.read_text(), re.MULTILINE)
        (stable,) = [row for level, row in rows if "public modules of `shoal`" in row]
        (internal,) = [row for level, row in rows if "other modules of `shoal`" in row]
        (provisional,) = [row for level, row in rows if row.startswith("`shoal_nn`")]
        documented = {name for name in api_pages.MODULES if name != "shoal"}
        listed = {f"shoal.{name}" for name in re.findall(r"`([a-z_.]+)`", stable.partition(":")[2])}
        assert listed | set(re.findall(r"`(shoal[_.][a-z0-9_.]*)`", provisional)) == documented
        files = {f"shoal.{file.stem}" for file in (ROOT / "client" / "shoal").glob("[a-z]*.py")}
        rest = {f"shoal.{name}" for name in re.findall(r"`([a-z_]+)`", internal.partition(":")[2].partition(";")[0])}
        assert rest == files - documented

    def test_has_every_command_with_every_option(self) -> None:
        page = cli_pages.pages()["reference/cli/index.md"]
        assert "| `JOB` |" in page, "arguments have no types"
        found = list(cli_pages.commands())
        assert {"shoal up", "shoal submit", "shoal server", "shoal checkpoints verify"} <= {name for name, *_ in found}
        for name, command, _ in found:
            _, heading, section = page.partition(f"{{ #{name.replace(' ', '-')} }}\n")
            assert heading, name
            section = re.split(r"^##", section, maxsplit=1, flags=re.MULTILINE)[0]
            for option in (
                option
                for it in command.params
                if not getattr(it, "hidden", False)
                for option in it.opts
                if option[0] == "-"
            ):
                assert re.search(rf"\b{re.escape(option.lstrip('-'))}\b", section, re.IGNORECASE), (name, option)

    def test_has_defaults_and_variables_of_options(self) -> None:
        page = cli_pages.pages()["reference/cli/index.md"]
        assert (
            "| `-c, --coordinator TEXT` | host:port of the coordinator. | `127.0.0.1:7070` | `SHOAL_COORDINATOR` |"
            in page
        )
        assert re.search(
            r"^\| `SHOAL_RPC_THREADS` \| `--rpc-threads` \| `16` \(`shoal server`\) \|$", page, re.MULTILINE
        )

    def test_a_flag_has_no_value_and_a_default_in_the_text_is_in_its_column(self) -> None:
        page = cli_pages.pages()["reference/cli/index.md"]
        assert "| `--json` | Prints one JSON object" in page
        assert "| `-f, --follow` | " in page
        assert "| `--timeout NUMBER` | Time limit in seconds. `x>=0` | `none` |" in page
        assert re.search(r"^\| `--keep-last INTEGER` \| [^|]* \| `3` \|", page, re.MULTILINE)
        assert not re.search(r"`[^`]*<(bool|str|int|float|path|list\[\w+\])( range)?>", page)
        assert "Default:" not in page

    def test_has_every_error_with_its_codes(self) -> None:
        page = error_pages.pages()["reference/errors/index.md"]
        for error in shoal.ShoalError.catalogue.values():
            assert f"`shoal.errors.{error.__name__}` | `{error.code}` | `{error.status}` | " in page
        assert "`UNKNOWN_JOB` | `NOT_FOUND` | 4 |" in page

    def test_has_every_message_and_rpc_with_its_comment(self) -> None:
        pages = "\n".join(proto_pages.pages().values())
        for proto in (ROOT / "protos").rglob("*.proto"):
            for kind, name in re.findall(r"^\s*(message|service|enum|rpc) (\w+)", proto.read_text(), re.MULTILINE):
                assert re.search(rf"^#+ {kind} `(\w+\.)*{name}`", pages, re.MULTILINE), name
        assert "The reply has a ShardHeader for each shard" in " ".join(pages.split())

    @pytest.mark.parametrize("package", ["client/shoal", "worker/shoal_nn"])
    def test_shows_no_limit_as_a_quotation(self, package: str) -> None:
        """In Markdown, a text that begins with > loses this sign: write "above 0" or "0 or more"."""
        quotations = [
            f"{path.relative_to(ROOT)}: {line.strip()}"
            for path in sorted((ROOT / package).rglob("*.py"))
            for line in re.findall(r"^ +\w+: >.*$", path.read_text(), re.MULTILINE)
        ]
        assert quotations == []

    def test_is_written_where_git_ignores_it(self) -> None:
        ignored = (ROOT / ".gitignore").read_text().splitlines()
        assert {f"/docs/{folder}/" for folder in generate.FOLDERS} <= set(ignored)
        assert {f"/docs/{file}" for file in generate.FILES} <= set(ignored)

    def test_loses_pages_that_are_no_more_and_leaves_others(self, tmp_path: Path) -> None:
        mine, old = tmp_path / "index.md", tmp_path / "reference" / "cli" / "old.md"
        old.parent.mkdir(parents=True)
        mine.write_text("mine")
        old.write_text("old")
        generate.write({"reference/cli/index.md": "new\n"}, tmp_path)
        assert {str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*.md")} == {
            "index.md",
            "reference/cli/index.md",
        }
        with pytest.raises(ValueError, match=r"how-to/mine\.md"):
            generate.write({"how-to/mine.md": ""}, tmp_path)


class TestTables:
    def test_code_with_a_vertical_bar_is_html(self) -> None:
        assert markdown_text.code("--x <a|b>") == "<code>--x &lt;a&#124;b&gt;</code>"
        assert markdown_text.text("a|b or `c|d`") == r"a\|b or <code>c&#124;d</code>"

    def test_no_code_on_a_page_shows_an_escaped_vertical_bar(self) -> None:
        """In code, the site shows the backslash too."""
        written = [page for page in (ROOT / "docs").rglob("*.md") if "project" not in page.parts]
        found = [
            (page.name, code)
            for page in written
            for code in re.findall(r"`[^`\n]*`", page.read_text())
            if r"\|" in code
        ]
        assert len(written) > 40
        assert found == []


def test_the_command_line_page_has_the_syntax_of_optimizers() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    section = page.partition("\n## Optimizers\n")[2].partition("\n## ")[0]
    names = {*shoal.optim.Optimizer.registry, *shoal.optim.Schedule.registry}
    assert [name for name in sorted(names) if f"`{name}`" not in section] == []
    assert "group=PATTERN|SETTING|SETTING" in section


class TestStatesOfMembers:
    HEADING = "### States of members"

    def test_the_page_explains_each_and_says_how_long_ended_ones_are_listed(self) -> None:
        section = (ROOT / "docs" / "how-to" / "page.md").read_text().partition(self.HEADING)[2].partition("\n## ")[0]
        words = set(re.findall(r"`(\w+)`[;,]", inspect.getdoc(records.member_state) or ""))
        assert {"alive", "late", "lost"} <= words
        assert words <= set(re.findall(r"^\| (\w+) \|", section, re.MULTILINE))
        assert (DEAD_KEPT_S, MAX_DEAD) == (600, 256)
        assert "stay listed for ten minutes" in section
        assert "the 256 that" in section

    @pytest.mark.parametrize("page", ["reference/command-line.md", "explanation/glossary.md"])
    def test_other_pages_link_to_it(self, page: str) -> None:
        assert "../how-to/page.md#states-of-members)" in (ROOT / "docs" / page).read_text()


class TestInstallation:
    PAGES = (*(ROOT / name for name in TOP_LEVEL), *sorted((ROOT / "docs").rglob("*.md")))

    def test_a_page_that_installs_the_checkout_keeps_it_editable(self) -> None:
        """A plain installation would replace that of `make` with a copy, and make would not notice."""
        found = [
            (page.name, line)
            for page in self.PAGES
            if not {"decisions", "project"} & set(page.parts)
            for line in re.findall(r"^.*pip install .*$", page.read_text(), re.MULTILINE)
            if re.search(r"pip install '?\.", line)
        ]
        assert found == []
        assert "pip install --editable '.[demo]'" in (ROOT / "docs" / "index.md").read_text()


class TestTutorials:
    def test_there_are_three_and_the_index_lists_them(self) -> None:
        index = (ROOT / "docs" / "tutorials" / "index.md").read_text()
        names = {page.name for page in TUTORIALS} - {"index.md"}
        assert len(names) >= 3
        assert names == set(re.findall(r"\]\(([\w-]+\.md)\)", index))

    @pytest.mark.parametrize("page", [*TUTORIALS, FRAMEWORKS], ids=lambda page: page.stem)
    def test_code_is_python_and_names_what_there_is(self, page: Path) -> None:
        for block in python_blocks(page):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "shoal":
                    assert f"shoal.{node.attr}" in api_pages.ADAPTERS or hasattr(shoal, node.attr), node.attr

    def test_the_program_has_the_gradients_that_its_check_prints(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        page = ROOT / "docs" / "tutorials" / "write-a-program.md"
        program, check, _ = python_blocks(page)
        (tmp_path / "rings.py").write_text(program)
        monkeypatch.syspath_prepend(tmp_path)
        exec(compile(check, "check_rings.py", "exec"), {})  # the page's own code
        monkeypatch.delitem(sys.modules, "rings")
        printed = capsys.readouterr().out
        found = np.array(re.findall(r"difference (\S+), gradient (\S+)", printed), float)
        assert found.shape == (4, 2)
        np.testing.assert_allclose(found[:, 0], found[:, 1], atol=2e-4)
        assert printed in page.read_text()


def test_no_page_has_a_heading_twice_in_the_same_section() -> None:
    for page in WRITTEN:
        seen, section = set(), [""] * 7
        prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for marks, title in re.findall(r"^(#+) (.*)$", prose, re.MULTILINE):
            section[len(marks) :] = [title] + [""] * (6 - len(marks))
            assert tuple(section) not in seen, (page.name, title)
            seen.add(tuple(section))


def test_code_of_pages_imports_public_modules_alone() -> None:
    """Pages for maintainers may import others."""
    public = {*api_pages.MODULES}
    for page in WRITTEN:
        if page != STABILITY and "decisions" not in page.parts:
            for block in python_blocks(page):
                assert {*re.findall(r"^ *(?:from|import) (shoal[\w.]*)", block, re.MULTILINE)} <= public, page.name


def test_only_lines_of_prose_are_too_long() -> None:
    long = "x" * (LONGEST + 1)
    lines = [long[1:], f"```\n{long}\n```", f"| {long} |", f"    {long}", f"<!-- rows -->\n{long}\n<!-- /rows -->"]
    assert list(long_lines("\n".join([*lines, long, f"- {long}"]))) == [(10, LONGEST + 1), (11, LONGEST + 3)]


@pytest.mark.parametrize("name", TOP_LEVEL)
def test_a_top_level_page_links_to_what_there_is(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
        if not re.match(r"https?:|#", target):
            path, _, anchor = target.partition("#")
            assert (ROOT / path).exists(), target
            if anchor:
                headings = re.findall(r"^#+ (.*)$", (ROOT / path).read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}, target


class TestTopLevelPages:
    def test_the_readme_is_short_and_its_program_runs_in_any_folder(self) -> None:
        readme = (ROOT / "README.md").read_text()
        saved = re.search(r"save this as `([^`]+)` in a folder of your own", readme)
        assert saved
        assert "/" not in saved[1]
        prose = re.sub(r"^```.*?^```", "", readme, flags=re.MULTILINE | re.DOTALL)
        assert len(prose.split()) < 400

    def test_numbers_of_the_readme_are_those_of_the_last_benchmarks(self) -> None:
        rows = re.findall(
            r"^\| .* \| ([\d.,]+ \S+) \| ([\d.,]+ \S+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
        )
        measured = (ROOT / "docs" / "explanation" / "performance.md").read_text()
        assert len(rows) == 3
        for ours, theirs in rows:
            assert re.search(rf"\| {re.escape(ours)} \| [^|]* \| {re.escape(theirs)} \|", measured), (ours, theirs)

    def test_links_become_links_of_the_site(self) -> None:
        text = "[a](docs/how-to/page.md#x) [b](ARCHITECTURE.md) [c](docs/decisions) [d](https://e.f) [g](a.py)"
        assert project_pages.relocated(text, "project/contributing.md") == (
            "[a](../how-to/page.md#x) [b](architecture.md) [c](../decisions/index.md) [d](https://e.f) g (`a.py`)"
        )

    def test_decisions_have_their_number_and_a_known_status(self) -> None:
        found = project_pages.decisions()
        assert [int(number) for number, *_ in found] == list(range(1, len(found) + 1))
        for _, title, status, _, _ in found:
            changed = r"(?:accepted, amended|superseded) by \[(\d{4})\]\(\1-[a-z0-9-]+\.md\)"
            assert status == "accepted" or re.fullmatch(changed, status), title


class _RecordingSession:
    """A session of one batch that records its pushes."""

    def __init__(self, numbers: np.ndarray, values: dict[str, np.ndarray]) -> None:
        self.pushes: list[tuple[dict[str, np.ndarray], int, float]] = []
        self._numbers, self._values = numbers, values

    def batches(self, n_samples: int) -> list[np.ndarray]:
        assert n_samples > self._numbers.max()
        return [self._numbers]

    def pull(self) -> dict[str, np.ndarray]:
        return self._values

    def push(self, gradients: dict[str, np.ndarray], *, weight: int, metrics: dict[str, float]) -> None:
        self.pushes.append((gradients, weight, metrics["loss"]))


def test_the_recipe_of_accumulation_pushes_the_gradient_of_the_whole_batch_once() -> None:
    (recipe,) = [it for it in python_blocks(ROOT / "docs" / "how-to" / "sessions.md") if "micro_batch" in it]
    page: dict[str, Any] = {}
    exec(compile(recipe, "sessions.md", "exec"), page)  # the page's own code
    rng = np.random.default_rng(1)
    images, labels, values = rng.normal(size=(100, 3)), rng.normal(size=100), {"w": rng.normal(size=3)}

    def loss_and_gradients(
        params: dict[str, np.ndarray], x: np.ndarray, y: np.ndarray
    ) -> tuple[float, dict[str, np.ndarray]]:
        error = x @ params["w"] - y
        return float((error**2).mean()), {"w": 2 * x.T @ error / len(y)}

    numbers = rng.permutation(100)[:70]
    session = _RecordingSession(numbers, values)
    page["train"](session, images, labels, loss_and_gradients)
    ((gradients, weight, loss),) = session.pushes
    whole_loss, whole = loss_and_gradients(values, images[numbers], labels[numbers])
    assert weight == 70
    np.testing.assert_allclose(gradients["w"], whole["w"], rtol=1e-12)
    np.testing.assert_allclose(loss, whole_loss, rtol=1e-12)
