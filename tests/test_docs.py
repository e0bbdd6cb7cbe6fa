"""What the documents say is what the code does."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_the_documentation_builds_without_warnings(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-q", "-W", str(ROOT / "docs"), str(tmp_path)]
    subprocess.run(command, check=True, timeout=200)
    assert (tmp_path / "evolved-attention.html").exists()
