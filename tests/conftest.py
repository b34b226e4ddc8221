"""What all tests share: their helper modules by name, and the flag that rewrites golden files."""

from __future__ import annotations

import sys
from pathlib import Path

import hypothesis
import pytest

# Under pytest's importlib mode a test does not see the modules beside it.
sys.path.insert(0, str(Path(__file__).parent))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate", action="store_true", help="write the golden files anew")
    parser.addoption("--slow", action="store_true", help="also run what takes minutes or gigabytes")
    parser.addoption("--explore", action="store_true", help="property tests draw other examples each time")


def pytest_configure(config: pytest.Config) -> None:
    """The same examples in each run, so that what fails was changed; new ones are looked for on request."""
    hypothesis.settings.register_profile("same", derandomize=True, database=None)
    hypothesis.settings.register_profile("explore", derandomize=False)
    hypothesis.settings.load_profile("explore" if config.getoption("--explore") else "same")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="runs with --slow only"))
