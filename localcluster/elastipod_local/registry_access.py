"""What build steps need to reach package registries as this machine does. It never enters an image.

Variables go into the step's environment only, files (certificates, configuration) are mounted for the step's duration.
"""

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elastipod_local.buildstep import BUILD_FILES
from elastipod_local.host import find_program, run

PREFIXES = ("PIP_", "UV_")
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "all_proxy", "ftp_proxy")
NAMES = {*PROXIES, *map(str.upper, PROXIES), "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC"}
# Folders of this machine mean nothing inside a step, and a step installs where its Dockerfile says.
EXCLUDED = frozenset(
    {
        *("PIP_FIND_LINKS", "PIP_CACHE_DIR", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"),
        *("UV_CACHE_DIR", "UV_PYTHON", "UV_PYTHON_INSTALL_DIR", "UV_SYSTEM_PYTHON", "UV_PROJECT_ENVIRONMENT"),
    }
)
CONFIGURATION = {
    "PIP_CONFIG_FILE": ("~/.config/pip/pip.conf", "~/.pip/pip.conf", "/etc/pip.conf"),
    "UV_CONFIG_FILE": ("~/.config/uv/uv.toml", "/etc/uv/uv.toml"),
    "NETRC": ("~/.netrc",),
}
# pip's setting -> uv's. uv does not read pip's settings; where it has none of its own, pip's hold for both.
UV_FROM_PIP = {"PIP_INDEX_URL": "UV_DEFAULT_INDEX", "PIP_EXTRA_INDEX_URL": "UV_INDEX", "PIP_CERT": "SSL_CERT_FILE"}


@dataclass(frozen=True, slots=True)
class RegistryAccess:
    """Environment of a step, and the files it names: name in BUILD_FILES -> path on this machine."""

    env: dict[str, str]
    files: dict[str, str]


def settings(environ: Mapping[str, str], home: Path) -> dict[str, str]:
    """Give this machine's registry settings as environment variables, those of pip's configuration files included."""
    found = {name: value for name, value in environ.items() if name.startswith(PREFIXES) or name in NAMES}
    for name, places in CONFIGURATION.items():
        paths = [Path(place.replace("~", str(home))) for place in places]
        existing = [path for path in paths if path.is_file()]
        if name not in found and existing:
            found[name] = str(existing[0])
    found = {**_pip_configuration(Path(found.get("PIP_CONFIG_FILE", "/dev/null"))), **found}
    for pip, uv in UV_FROM_PIP.items():
        if pip in found:
            found.setdefault(uv, found[pip])
    return {name: value for name, value in found.items() if name not in EXCLUDED and value}


def _pip_configuration(path: Path) -> dict[str, str]:
    """Give the registry settings of a pip.conf under the names of their environment variables."""
    parser = configparser.RawConfigParser()
    parser.read(path)
    names = {"index-url": "PIP_INDEX_URL", "extra-index-url": "PIP_EXTRA_INDEX_URL", "cert": "PIP_CERT"}
    return {
        variable: " ".join(parser.get("global", option).split())
        for option, variable in names.items()
        if parser.has_option("global", option)
    }


def registry_access(scratch: Path) -> RegistryAccess:
    """Give what this machine's settings are inside a step. scratch: a folder for apt's settings as one file."""
    access = shown_in_step(settings(os.environ, Path.home()))
    if apt := _apt_settings():
        written = scratch / "apt.conf"
        written.write_text(apt)
        access.env["APT_CONFIG"] = f"{BUILD_FILES}/apt.conf"
        access.files["apt.conf"] = str(written)
    return access


def shown_in_step(found: Mapping[str, str]) -> RegistryAccess:
    """Put the places where a step sees them for the files that settings name; those that do not exist are left out."""
    access = RegistryAccess({}, {})
    for name, value in found.items():
        path = Path(value)
        if not path.is_absolute():
            access.env[name] = value
        elif path.is_file():
            inside = name.lower() + path.suffix
            access.env[name] = f"{BUILD_FILES}/{inside}"
            access.files[inside] = str(path)
    return access


def _apt_settings() -> str:
    """Give this machine's apt settings about fetching (proxies, dates), '' where there is no apt."""
    if find_program("apt-config") is None:
        return ""
    return run(["apt-config", "dump", "Acquire"]).stdout
