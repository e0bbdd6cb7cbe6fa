"""What the documents say is what the code does."""

import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from splitstep.recipe import recipe
from splitstep.reports import drawing, page
from splitstep.reports.read import results_of

ROOT = Path(__file__).parent.parent


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tables = load("tables")


@pytest.mark.parametrize("page", tables.PAGES)
def test_tables_are_up_to_date(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "<!-- table:" in text
    assert tables.filled(text) == text, "run `make tables`"


def test_the_python_of_the_readme_runs_and_prints_what_its_comments_say(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    promised = [match[1].split(":")[0].strip() for match in re.finditer(r"print\(.*\)\s+# (.*)", code)]
    assert capsys.readouterr().out.splitlines() == promised


@pytest.mark.parametrize("page", ["mathematics", "models"])
def test_the_python_of_the_documents_runs(page, tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks
    # Another process: one may add to the tables of schemes.
    ended = subprocess.run([sys.executable, "-c", "\n".join(blocks)], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.stem)
def test_the_recipes_of_the_documents_are_recipes(page):
    for text in re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL):
        recipe(tomllib.loads(text))


def test_the_results_are_what_the_report_makes_of_the_runs_beside_them():
    folder = ROOT / "docs" / "results"
    folders = [folder / entry["folder"] for entry in json.loads((folder / "results.json").read_text())["comparisons"]]
    assert page.markdown(folders) == (folder / "report.md").read_text(encoding="utf-8")
    compared = {folder.name: results_of(folder) for folder in folders}
    assert drawing.differences(compared) == (folder / "summary.svg").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_documentation_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(ROOT / "docs"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=200)
    assert (tmp_path / "evolved-attention.html").exists()
