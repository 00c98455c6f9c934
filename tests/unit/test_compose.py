"""docker-compose.yml says what README.md promises, with pinned versions."""

from __future__ import annotations

import re

from tests.helpers.compose import README, dashboard_command, pinned_packages, services


def test_every_image_is_pinned() -> None:
    for name, service in services().items():
        assert re.search(r":\d+\.\d+", service["image"]), name


def test_the_dashboard_reads_our_jobs_with_pinned_packages() -> None:
    assert "--json" in dashboard_command()
    packages = pinned_packages()
    assert {"rq-dashboard", "rq", "six"} <= {package.partition("==")[0] for package in packages}
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", package) for package in packages)


def test_what_readme_starts_exists() -> None:
    text = README.read_text()
    profiles = {name for service in services().values() for name in service.get("profiles", ())}
    assert set(re.findall(r"--profile (\w+)", text)) <= profiles
    for words in re.findall(r"docker compose [^`\n]*?up\b([^`\n]*)", text):
        assert {word for word in words.split() if word[0] not in "-#"} <= services().keys()
