"""How build steps reach registries: what is handed on, what is not, and where files appear."""

from __future__ import annotations

from pathlib import Path

from elastipod_local.buildstep import BUILD_FILES
from elastipod_local.registry_access import settings, shown_in_step


def test_settings_of_registries_are_handed_on_and_others_are_not(tmp_path: Path) -> None:
    environ = {"PIP_INDEX_URL": "https://mirror/simple", "https_proxy": "http://proxy", "AWS_SECRET": "s", "HOME": "/h"}
    found = settings({**environ, "PIP_CACHE_DIR": "/x"}, tmp_path)
    assert found["PIP_INDEX_URL"] == found["UV_DEFAULT_INDEX"] == "https://mirror/simple"
    assert found["https_proxy"] == "http://proxy"
    assert not {"AWS_SECRET", "HOME", "PIP_CACHE_DIR"} & set(found)


def test_pips_configuration_file_counts_and_the_environment_wins(tmp_path: Path) -> None:
    file = tmp_path / ".config" / "pip" / "pip.conf"
    file.parent.mkdir(parents=True)
    file.write_text("[global]\nindex-url = https://file/simple\ncert = /etc/own.pem\n")
    found = settings({}, tmp_path)
    assert (found["PIP_INDEX_URL"], found["SSL_CERT_FILE"]) == ("https://file/simple", "/etc/own.pem")
    assert settings({"PIP_INDEX_URL": "https://env/simple"}, tmp_path)["UV_DEFAULT_INDEX"] == "https://env/simple"


def test_files_are_shown_in_the_step_under_names_of_their_own(tmp_path: Path) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_text("certificates")
    access = shown_in_step({"PIP_CERT": str(bundle), "PIP_INDEX_URL": "https://m", "SSL_CERT_FILE": "/not/there.pem"})
    assert access.env == {"PIP_CERT": f"{BUILD_FILES}/pip_cert.pem", "PIP_INDEX_URL": "https://m"}
    assert access.files == {"pip_cert.pem": str(bundle)}
