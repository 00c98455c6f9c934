"""The package's metadata is what an index accepts, and it agrees with itself."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from setuptools.config.pyprojecttoml import read_configuration

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> Any:
    return read_configuration(ROOT / "pyproject.toml", expand=False)["project"]


def test_the_metadata_has_the_form_of_the_standard(project: Any) -> None:
    assert {"Homepage", "Repository", "Documentation", "Changelog", "Issues"} <= set(
        project["urls"]
    )
    assert all(url.startswith("https://") for url in project["urls"].values())
    assert project["authors"]
    assert project["keywords"] == sorted(project["keywords"])
    extras = project["optional-dependencies"].values()
    for line in (*project["dependencies"], *(line for extra in extras for line in extra)):
        own = Requirement(line).name == project["name"]
        assert own or Requirement(line).specifier, f"{line}: has no version"


def test_the_page_on_an_index_links_to_what_is_there(project: Any) -> None:
    text = (ROOT / project["readme"]).read_text()
    inline = re.findall(r"\]\(([^)]+)\)", text)
    defined = dict(re.findall(r"^\[([^]]+)\]: (\S+)$", text, re.MULTILINE))
    assert set(re.findall(r"\]\[([^]]+)\]", text)) == defined.keys()
    links = [*inline, *defined.values()]
    # An index does not resolve relative links.
    assert all(link.startswith("https://") for link in links)
    home = project["urls"]["Homepage"]
    ours = [re.sub(r"/(blob|tree)/main/", "", link[len(home) :]) for link in links if home in link]
    assert ours
    assert [link for link in ours if not (ROOT / link.partition("#")[0]).exists()] == []


def test_the_classifiers_agree_with_the_rest(project: Any) -> None:
    classifiers = project["classifiers"]
    assert classifiers == sorted(classifiers)
    # The license is an SPDX expression; an index refuses a classifier beside it.
    assert not any(classifier.startswith("License ::") for classifier in classifiers)
    assert (ROOT / "producer/omlx_producer/py.typed").exists()
    versions = [line.rpartition(" ")[2] for line in classifiers if ":: 3." in line]
    assert project["requires-python"] == f">={versions[0]}"
    assert all(SpecifierSet(project["requires-python"]).contains(each) for each in versions)
