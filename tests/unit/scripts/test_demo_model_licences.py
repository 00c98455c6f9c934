"""The licences of the demo model's excerpts ship with them, and the metadata names them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from setuptools.config.pyprojecttoml import read_configuration

from scripts.demo_model.corpus import PACKAGES, STDLIB

ROOT = Path(__file__).parents[3]
NOTICES = "worker/omlx_worker/demo_model/heldout-licences.txt"
ENTRY = re.compile(r"^(\S+) (\d\S*): (.+)\n(?:    .*\n)*?    Text: (.+)$", re.MULTILINE)


def entries() -> list[tuple[str, str, str, str]]:
    """(package, version, licence, names of its texts) of each entry."""
    return ENTRY.findall((ROOT / NOTICES).read_text("utf-8"))


def test_every_package_of_the_excerpts_has_its_notice() -> None:
    excerpts = (ROOT / NOTICES).with_name("heldout.jsonl").read_text("utf-8").splitlines()
    packages = {json.loads(line)["source"].partition("/")[0] for line in excerpts}
    assert [package for package, *_ in entries()] == sorted(packages)


def test_the_notices_are_of_the_versions_that_the_excerpts_are_from() -> None:
    versions = {package: version for package, version, *_ in entries() if package != STDLIB}
    assert versions == {package: PACKAGES[package][0] for package in versions}


def test_every_licence_that_a_notice_names_has_its_text() -> None:
    texts = set(re.findall(r"^=== (.+) ===$", (ROOT / NOTICES).read_text("utf-8"), re.MULTILINE))
    named = {
        re.sub(r"^for \S+ (also )?", "", text)
        for *_, line in entries()
        for text in line.split("; ")
    }
    assert named == texts


def test_the_metadata_names_the_licences_and_their_file() -> None:
    project = read_configuration(ROOT / "pyproject.toml", expand=False)["project"]
    licences = {licence for _, _, line, _ in entries() for licence in line.split(" AND ")}
    assert set(project["license"].split(" AND ")) == licences
    assert project["license-files"] == ["LICENSE", NOTICES]
