"""Files by which others run and publish Outcore: what they start is a command line of ours."""

from __future__ import annotations

import plistlib
import re
import shlex
import tomllib
from pathlib import Path

import yaml

from outcore.cli.commands import parser_of

ROOT = Path(__file__).parents[1]


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_services_and_containers_start_a_command_that_there_is() -> None:
    plist = plistlib.loads((ROOT / "packaging" / "org.outcore.serve.plist").read_bytes())
    unit = re.search(r"^ExecStart=(.*)$", read("packaging/outcore.service"), re.MULTILINE)
    image = re.search(r"^CMD (\[.*\])$", read("Dockerfile"), re.MULTILINE)
    compose = yaml.safe_load(read("compose.yaml"))["services"]
    assert unit and image
    started = [
        plist["ProgramArguments"], shlex.split(unit[1]), ["outcore", *yaml.safe_load(image[1])],
        ["outcore", *compose["outcore"]["command"]],
    ]  # fmt: skip
    for program, command, *words in started:
        assert program.endswith("outcore") and parser_of(command).parse_args(words)
    # The name by which Open WebUI asks is one that the server answers.
    assert compose["open-webui"]["environment"]["OPENAI_API_BASE_URL"] == f"http://{started[3][-1]}:8080/v1"


def test_extras_of_the_image_and_files_of_a_release_are_there() -> None:
    project = tomllib.loads(read("pyproject.toml"))["project"]
    named = {*re.findall(r"\b(?:cpu|cuda\d+|json)\b", read("Dockerfile").partition("FROM")[0] + "cpu json")}
    assert {"cpu", "cuda12", "cuda13", "json"} == named <= project["optional-dependencies"].keys()
    jobs = yaml.safe_load(read(".github/workflows/release.yml"))["jobs"]
    assert jobs["publish"]["permissions"] == {"id-token": "write"} and jobs["publish"]["needs"] == "build"
    # uvx runs the program that has the package's name.
    assert project["name"] in project["scripts"]
    assert f'__version__ = "{project["version"]}"' in read("src/outcore/version.py")
    assert project["version"] in re.findall(r"^## .*?([\d.]+\d)", read("CHANGELOG.md"), re.MULTILINE)
